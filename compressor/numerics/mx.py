"""The scales of the MX formats: powers of two, stored as their exponents plus 127 in one byte (E8M0).

A group's scale is the power of two under which its largest value lands just inside the element format: the exponent of the largest value,
less that of the largest code (6 = 1.5 * 2^2 for fp4, 448 = 1.75 * 2^8 for fp8). A largest value of 1.75 * 2^e or more counts as 2^(e+1),
since it would round past the last code. Bit-equal to compressed-tensors 0.20. Source: OCP Microscaling Formats (MX) v1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.errors import NumericsError, SchemeError

_BIAS = 127
_MAX_EXPONENT = {4: 2, 8: 8}  # of the largest code, by bits of the element
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
    if max_abs.dtype not in _FLOAT_LAYOUT or num_bits not in _MAX_EXPONENT:
        raise SchemeError(f"MX scales: {max_abs.dtype} with num_bits={num_bits} has none; give floats, and 4 or 8 bits")
    exponent = torch.floor(torch.log2(_round_to_power_of_two(max_abs))) + _BIAS - _MAX_EXPONENT[num_bits]
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
