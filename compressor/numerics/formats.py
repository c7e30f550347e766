"""The number formats: which codes exist, how a real number becomes one, and what happens past the ends.

Three formats: two's-complement integers of 2 to 8 bits, kept in int8; fp8 e4m3 (`torch.float8_e4m3fn`: largest value 448, no infinity, two
NaN bytes); and fp4 e2m1 (sixteen values up to 6), kept in fp8, which holds them all. Each rounds half to even and saturates. Saturating
first keeps fp8 clear of its NaN bytes: a plain cast of 500 writes one.

The functions whose name ends in an underscore overwrite their argument, as torch's own do.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

NumberType = Literal["int", "float"]

FP8_MAX = 448.0
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_MAX = FP4_VALUES[-1]


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
    return FP4_VALUES[-1] - FP4_VALUES[-2] if num_bits == 4 else 32.0


def storage_dtype(number_type: NumberType) -> torch.dtype:
    """Give the torch dtype that holds the codes of a format.

    Args:
        number_type: "int" or "float" (fp8, and fp4 by its values).

    Returns:
        torch.int8 or torch.float8_e4m3fn.
    """
    return torch.float8_e4m3fn if number_type == "float" else torch.int8


def snap_(values: Tensor, number_type: NumberType, num_bits: int) -> Tensor:
    """Move every value to the nearest code of the format, keeping the floating dtype.

    Args:
        values: already divided by the scale and shifted by the zero point; overwritten. NaN stays NaN.
        number_type: "int" or "float".
        num_bits: width of a code: 2 to 8 for integers, 4 (e2m1) or 8 (e4m3) for floats.

    Returns:
        The snapped values in the dtype of `values`.
    """
    low, high = code_range(number_type, num_bits)
    values.clamp_(low, high)
    if number_type == "int":
        return values.round_()
    return _round_to_fp4(values) if num_bits == 4 else values.to(torch.float8_e4m3fn).to(values.dtype)


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


def _round_to_fp4(values: Tensor) -> Tensor:
    """Round to e2m1: steps of 0.5 up to 2, of 1 up to 4, of 2 up to 6. A negative value that becomes zero becomes minus zero."""
    magnitude = values.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0)).to(values.dtype)
    return (magnitude / step).round_().mul_(step).mul_(values.sign())
