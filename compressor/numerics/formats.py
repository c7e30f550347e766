"""The number formats: which codes exist, how a real number becomes one, and what happens past the ends.

Three formats: two's-complement integers of 2 to 8 bits, kept in int8; fp8 e4m3 (`torch.float8_e4m3fn`: largest value 448, no infinity, two
NaN bytes); and fp4 e2m1 (sixteen values up to 6), kept in fp8, which holds them all. Each rounds half to even and saturates. Saturating
first keeps fp8 clear of its NaN bytes: a plain cast of 500 writes one.

The functions whose name ends in an underscore overwrite their argument, as torch's own do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from compressor.errors import NumericsError, SchemeError

NumberType = Literal["int", "float"]

FP8_MAX = 448.0
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_MAX = FP4_VALUES[-1]

# Of floats by their bits: the exponents of the smallest normal and of the largest code, and the bits of the significand behind the point.
FLOAT_LAYOUTS = {4: (0, 2, 1), 8: (-6, 8, 3)}


def code_range(number_type: NumberType, num_bits: int) -> tuple[float, float]:
    """Give the smallest and the largest code of a format.

    Args:
        number_type: "int" or "float".
        num_bits: width of a code: 2 to 8 for integers, 4 (e2m1) or 8 (e4m3) for floats.

    Returns:
        (lowest, highest), for instance (-8.0, 7.0) for int4 and (-448.0, 448.0) for fp8.
    """
    if number_type == "float":
        return (-FP4_MAX, FP4_MAX) if num_bits == 4 else (-FP8_MAX, FP8_MAX)
    half = float(1 << (num_bits - 1))
    return -half, half - 1.0


def last_step(number_type: NumberType, num_bits: int) -> float:
    """Give the distance between the largest code of a format and the one below it.

    Args:
        number_type: "int" or "float".
        num_bits: width of a code: 2 to 8 for integers, 4 (e2m1) or 8 (e4m3) for floats.

    Returns:
        1 for integers, 32 for fp8, 2 for fp4.
    """
    if number_type == "int":
        return 1.0
    _, largest, num_fraction_bits = FLOAT_LAYOUTS[num_bits]
    return 2.0 ** (largest - num_fraction_bits)


def local_steps(values: Tensor, number_type: NumberType, num_bits: int) -> Tensor | float:
    """Give the distance between the two codes that a value lies between; a multiple of it is a code, up to the largest.

    Args:
        values: already divided by the scale, float32 or float64; not modified.
        number_type: "int" or "float".
        num_bits: width of a code: 2 to 8 for integers, 4 (e2m1) or 8 (e4m3) for floats.

    Returns:
        1 for integers; else powers of two, shaped like `values`.
    """
    if number_type == "int":
        return 1.0
    smallest, largest, num_fraction_bits = FLOAT_LAYOUTS[num_bits]
    exponent = torch.frexp(values).exponent - 1  # of a significand from one to two
    return torch.ldexp(torch.ones_like(values), exponent.clamp_(smallest, largest) - num_fraction_bits)


def storage_dtype(number_type: NumberType) -> torch.dtype:
    """Give the torch dtype that holds the codes of a format.

    Args:
        number_type: "int" or "float" (fp8, and fp4 by its values).

    Returns:
        torch.int8 or torch.float8_e4m3fn.
    """
    return torch.float8_e4m3fn if number_type == "float" else torch.int8


class Rounding(NamedTuple):
    """How a format snaps a value: it saturates, then it goes to the nearest code.

    Attributes:
        low: the smallest code.
        high: the largest code.
        to_nearest: rounds saturated values to codes, in their own dtype; may overwrite them.
    """

    low: float
    high: float
    to_nearest: Callable[[Tensor], Tensor]


def rounding(number_type: NumberType, num_bits: int) -> Rounding:
    """Look up how a format snaps values, for loops that snap many small tensors: `to_nearest(values.clamp_(low, high))`.

    Args:
        number_type: "int" or "float".
        num_bits: width of a code: 2 to 8 for integers, 4 (e2m1) or 8 (e4m3) for floats.

    Returns:
        Bounds and rounding.
    """
    low, high = code_range(number_type, num_bits)
    if number_type == "int":
        return Rounding(low, high, Tensor.round_)
    return Rounding(low, high, _round_to_fp4 if num_bits == 4 else _round_to_fp8)


def snap_(values: Tensor, number_type: NumberType, num_bits: int) -> Tensor:
    """Move every value to the nearest code of the format, keeping the floating dtype.

    Args:
        values: already divided by the scale and shifted by the zero point; overwritten. NaN stays NaN.
        number_type: "int" or "float".
        num_bits: width of a code: 2 to 8 for integers, 4 (e2m1) or 8 (e4m3) for floats.

    Returns:
        The snapped values in the dtype of `values`.
    """
    low, high, to_nearest = rounding(number_type, num_bits)
    return to_nearest(values.clamp_(low, high))


def encode_(values: Tensor, number_type: NumberType, num_bits: int) -> Tensor:
    """Turn every value into the nearest code of the format, in its storage dtype.

    Args:
        values: already divided by the scale and shifted by the zero point, without NaN; overwritten.
        number_type: "int" or "float".
        num_bits: width of a code: 2 to 8 for integers, 4 (e2m1) or 8 (e4m3) for floats.

    Returns:
        The codes, int8 or float8_e4m3fn.
    """
    if number_type == "float" and num_bits == 8:
        return values.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return snap_(values, number_type, num_bits).to(storage_dtype(number_type))


def _round_to_fp8(values: Tensor) -> Tensor:
    return values.to(torch.float8_e4m3fn).to(values.dtype)


def _round_to_fp4(values: Tensor) -> Tensor:
    """Round to e2m1: steps of 0.5 up to 2, of 1 up to 4, of 2 up to 6. A negative value that becomes zero becomes minus zero."""
    magnitude = values.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0)).to(values.dtype)
    return (magnitude / step).round_().mul_(step).mul_(values.sign())


# The scales of the MX formats: powers of two, stored as their exponents plus 127 in one byte (E8M0).
#
# A group's scale is the power of two under which its largest value lands just inside the element format: the exponent of the largest value,
# less that of the largest code (6 = 1.5 * 2^2 for fp4, 448 = 1.75 * 2^8 for fp8). A largest value of 1.75 * 2^e or more counts as 2^(e+1),
# since it would round past the last code. Bit-equal to compressed-tensors 0.20. Source: OCP Microscaling Formats (MX) v1.0.

_BIAS = 127
# Integer view, bits of the significand and bits of the exponent of each dtype that a weight may have.
_FLOAT_LAYOUT = {
    torch.bfloat16: (torch.int16, 7, 8),
    torch.float16: (torch.int16, 10, 5),
    torch.float32: (torch.int32, 23, 8),
    torch.float64: (torch.int64, 52, 11),
}


def mx_scale(max_abs: Tensor, num_bits: int) -> Tensor:
    """Choose the scales of groups.

    Args:
        max_abs: largest absolute value of each group; floating point, not negative.
        num_bits: of the element: 4 or 8.

    Returns:
        Powers of two in the dtype of `max_abs`; infinite where a value is. An exponent below that of 2^-127 is raised to it, and what is
        no number of the dtype then (float16 ends at 2^-24) is zero.

    Raises:
        SchemeError: a dtype or a width that has no MX scale.
    """
    if max_abs.dtype not in _FLOAT_LAYOUT or num_bits not in FLOAT_LAYOUTS:
        raise SchemeError(f"MX scales: {max_abs.dtype} with num_bits={num_bits} has none; give floats, and 4 or 8 bits")
    exponent = torch.floor(torch.log2(_round_to_power_of_two(max_abs))) + _BIAS - FLOAT_LAYOUTS[num_bits][1]
    return (2.0 ** (exponent.clamp(0, 255).float() - _BIAS)).to(max_abs.dtype)


def encode_mx_scale(scale: Tensor) -> Tensor:
    """Turn powers of two into the bytes that are stored.

    Args:
        scale: powers of two, floating point.

    Returns:
        uint8, the exponents plus 127.

    Raises:
        NumericsError: a scale is no power of two between 2^-127 and 2^127.
    """
    exponent = torch.log2(scale.float()) + _BIAS
    if not bool(((exponent == exponent.round()) & (exponent >= 0) & (exponent < 255)).all()):
        raise NumericsError("MX scales: a scale is no power of two from 2^-127 to 2^127; compute it with calculate_qparams")
    return exponent.to(torch.uint8)


def decode_mx_scale(stored: Tensor) -> Tensor:
    """Turn stored bytes into powers of two.

    Args:
        stored: uint8, exponents plus 127.

    Returns:
        bfloat16, in which each of them is exact; 255 stands for no number and gives infinity.
    """
    return 2.0 ** (stored.to(torch.int32) - _BIAS).to(torch.bfloat16)


def _round_to_power_of_two(values: Tensor) -> Tensor:
    """Down to the power of two below, but up from 1.75 times it: an eighth of the significand is added and the rest cut off."""
    integer, significand_bits, exponent_bits = _FLOAT_LAYOUT[values.dtype]
    bits = values.contiguous().view(integer)
    mask = ((1 << exponent_bits) - 1) << significand_bits
    return ((bits + (1 << (significand_bits - 2))) & mask).view(values.dtype)
