"""The number formats: which codes exist, how a real number becomes one, and what happens past the ends.

Two formats: two's-complement integers of 2 to 8 bits, kept in int8, and fp8 e4m3 (`torch.float8_e4m3fn`: largest value 448, no infinity,
two NaN bytes). Both round half to even and saturate. Saturating first keeps fp8 clear of its NaN bytes: a plain cast of 500 writes one.

The functions whose name ends in an underscore overwrite their argument, as torch's own do.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

NumberType = Literal["int", "float"]

FP8_MAX = 448.0


def code_range(number_type: NumberType, num_bits: int) -> tuple[float, float]:
    """Give the smallest and the largest code of a format.

    Args:
        number_type: "int" or "float" (fp8 e4m3).
        num_bits: width of a code; read for integers only.

    Returns:
        (lowest, highest), for instance (-8.0, 7.0) for int4 and (-448.0, 448.0) for fp8.
    """
    if number_type == "float":
        return -FP8_MAX, FP8_MAX
    half = float(1 << (num_bits - 1))
    return -half, half - 1.0


def storage_dtype(number_type: NumberType) -> torch.dtype:
    """Give the torch dtype that holds the codes of a format.

    Args:
        number_type: "int" or "float" (fp8 e4m3).

    Returns:
        torch.int8 or torch.float8_e4m3fn.
    """
    return torch.float8_e4m3fn if number_type == "float" else torch.int8


def snap_(values: Tensor, number_type: NumberType, num_bits: int) -> Tensor:
    """Move every value to the nearest code of the format, keeping the floating dtype.

    Args:
        values: already divided by the scale and shifted by the zero point; overwritten. NaN stays NaN.
        number_type: "int" or "float" (fp8 e4m3).
        num_bits: width of a code; read for integers only.

    Returns:
        The snapped values in the dtype of `values`.
    """
    low, high = code_range(number_type, num_bits)
    values.clamp_(low, high)
    if number_type == "float":
        return values.to(torch.float8_e4m3fn).to(values.dtype)
    return values.round_()


def encode_(values: Tensor, number_type: NumberType, num_bits: int) -> Tensor:
    """Turn every value into the nearest code of the format, in its storage dtype.

    Args:
        values: already divided by the scale and shifted by the zero point, without NaN; overwritten.
        number_type: "int" or "float" (fp8 e4m3).
        num_bits: width of a code; read for integers only.

    Returns:
        The codes, int8 or float8_e4m3fn.
    """
    low, high = code_range(number_type, num_bits)
    values.clamp_(low, high)
    if number_type == "int":
        values.round_()
    return values.to(storage_dtype(number_type))
