"""What judges quantizers: codes, ties and scales by their definitions, in float64, without a line of what is judged.

A grid is the list of all values that codes stand for, in rising order. Rounding takes the nearest value, and half way between two values
the one whose place, counted from zero, is even: for integers that is the even integer, for floats the one with an even significand. Where
zero is no code, places are counted from the first value above it.

Formats: two's complement; fp8 e4m3fn and fp4 e2m1 (OCP 8-bit Floating Point and Microscaling Formats, v1.0).
Shapes: R rows, C columns; a unit is the rectangle of values that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor


def int_grid(num_bits: int) -> Tensor:
    """Return the integers of two's complement.

    Args:
        num_bits: of a code.

    Returns:
        float64 [2^bits].
    """
    half = 1 << (num_bits - 1)
    return torch.arange(-half, half, dtype=torch.float64)


def float_grid(exponent_bits: int, mantissa_bits: int, bias: int, largest: float) -> Tensor:
    """Return the values of a small float format, without infinities and NaN, zero once.

    Args:
        exponent_bits: of the exponent.
        mantissa_bits: of the significand behind the point.
        bias: of the exponent.
        largest: value; encodings above it are something else.

    Returns:
        float64, in rising order.
    """
    positive = []
    for exponent in range(1 << exponent_bits):
        for mantissa in range(1 << mantissa_bits):
            fraction = mantissa / (1 << mantissa_bits)
            value = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
            positive.append(value)
    kept = torch.tensor([value for value in positive if 0 < value <= largest], dtype=torch.float64)
    return torch.cat((-kept.flip(0), torch.zeros(1, dtype=torch.float64), kept))


def e4m3_grid() -> Tensor:
    """Return the values of fp8 e4m3fn, float64 [253]."""
    return float_grid(4, 3, 7, 448.0)


def e2m1_grid() -> Tensor:
    """Return the values of fp4 e2m1, float64 [15]."""
    return float_grid(2, 1, 1, 6.0)


def nearest(positions: Tensor, grid: Tensor) -> Tensor:
    """Round to the nearest value of a grid, half way to the even one, and to the ends beyond them.

    Args:
        positions: float64, any shape.
        grid: float64 [K], rising.

    Returns:
        float64 values of the grid.
    """
    inside = positions.clamp(grid[0], grid[-1]).contiguous()
    above = torch.searchsorted(grid, inside).clamp(1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    zero = int(torch.searchsorted(grid, 0.0))
    low_is_even = (above - 1 - zero) % 2 == 0
    down, up = inside - low, high - inside
    return torch.where((down < up) | ((down == up) & low_is_even), low, high)


def at_tie(positions: Tensor, grid: Tensor, eps: float, reach: Tensor | None = None) -> Tensor:
    """Say which positions lie so close to the middle of two values that rounding errors may decide.

    Args:
        positions: float64, any shape.
        grid: float64 [K], rising.
        eps: of the dtype in which positions may have been computed.
        reach: the largest magnitude on the way to a position; w / s where a zero point is added to it. By default the position's own.

    Returns:
        bool.
    """
    middles = (grid[1:] + grid[:-1]) / 2
    above = torch.searchsorted(middles, positions.contiguous()).clamp(0, len(middles) - 1)
    distance = torch.minimum((positions - middles[above]).abs(), (positions - middles[(above - 1).clamp(min=0)]).abs())
    return distance <= 4 * eps * (positions if reach is None else reach).abs()


def spread(part: Tensor, shape: tuple[int, int], unit: tuple[int, int]) -> Tensor:
    """Repeat one number per unit over rows and columns.

    Args:
        part: as many numbers as there are units, in any shape that keeps their order.
        shape: (R, C).
        unit: rows and columns that share a number.

    Returns:
        float64 [R, C].

    Raises:
        ValueError: another count of numbers than units.
    """
    counts = -(-shape[0] // unit[0]), -(-shape[1] // unit[1])
    if part.numel() != counts[0] * counts[1]:
        raise ValueError(f"{part.numel()} numbers in {tuple(part.shape)} for {counts[0]} x {counts[1]} units")
    wide = part.to(torch.float64).reshape(counts)
    return wide.repeat_interleave(unit[0], 0)[: shape[0]].repeat_interleave(unit[1], 1)[:, : shape[1]]


def units(weight: Tensor, unit: tuple[int, int]) -> Tensor:
    """View a weight as its units.

    Args:
        weight: [R, C].
        unit: rows and columns of one; the last ones may be cut short.

    Returns:
        float64 [number of units, values of a unit]; NaN stands where a unit sticks out.
    """
    wide = weight.to(torch.float64)
    pads = (0, -weight.shape[1] % unit[1], 0, -weight.shape[0] % unit[0])
    padded = torch.nn.functional.pad(wide, pads, value=torch.nan)
    rows, columns = padded.shape[0] // unit[0], padded.shape[1] // unit[1]
    return padded.reshape(rows, unit[0], columns, unit[1]).transpose(1, 2).reshape(rows * columns, -1)


Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


def _half_range(groups: Tensor, grid: Tensor) -> tuple[Tensor, Tensor | None]:
    return _largest(groups) / ((grid[-1] - grid[0]) / 2), None


def _max_code(groups: Tensor, grid: Tensor) -> tuple[Tensor, Tensor | None]:
    return _largest(groups) / grid[-1], None


def _range(groups: Tensor, grid: Tensor) -> tuple[Tensor, Tensor | None]:
    low = groups.nan_to_num(nan=0.0).amin(1).clamp(max=0)
    high = groups.nan_to_num(nan=0.0).amax(1).clamp(min=0)
    scale = (high - low) / (grid[-1] - grid[0])
    return scale, grid[0] - low / scale


def _mx(groups: Tensor, grid: Tensor) -> tuple[Tensor, Tensor | None]:
    """The power of two below the largest value (the one above from 1.75 times it on), less that of the largest code."""
    largest = _largest(groups)
    mantissa, exponent = torch.frexp(largest)
    up = (mantissa >= 0.875).to(torch.float64)
    largest_code = torch.floor(torch.log2(grid[-1]))
    # 2^-127 is the least exponent that a byte holds.
    scale = 2.0 ** (exponent.to(torch.float64) - 1 + up - largest_code).clamp(min=-127)
    return torch.where(largest > 0, scale, 0.0), None


def _nvfp4(groups: Tensor, grid: Tensor) -> tuple[Tensor, Tensor | None]:
    """Group maximum over 6 in units of the tensor's largest, so that the largest group has the largest fp8 scale; before its rounding."""
    largest = _largest(groups)
    return largest / largest.amax().clamp(min=torch.finfo(torch.float64).tiny) * 448.0, None


def _largest(groups: Tensor) -> Tensor:
    return groups.abs().nan_to_num(nan=0.0).amax(1)


# How the scale of each unit follows from its values: [n, S] and grid -> scale [n] and, before rounding, zero point [n].
RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "half_range": _half_range,  # largest |w| / half the distance between the end codes: compressed-tensors
        "max_code": _max_code,  # largest |w| / largest code
        "range": _range,  # (max - min) / distance between the end codes, both sides of zero included; zero point
        "mx": _mx,
        "nvfp4": _nvfp4,
    }
)

# The slow oracle of second-order solvers: optimal brain surgery with a dense inverse, in float64, without a line of what it judges.
#
# After a column is rounded, all columns to come absorb its error in proportion to their row of the inverse Hessian, and the column is
# eliminated from the inverse by one step of Gauss. That is the textbook form: no Cholesky factor, no block, no batch of rows.
#
# Source: Hassibi and Stork 1992, Second order derivatives for network pruning; Frantar and Alistarh 2022, arXiv:2208.11580.
# Shapes: R rows, C columns.


def damped(hessian_CC: Tensor, damp_frac: float) -> Tensor:
    """Return H + lambda I, lambda a share of the mean diagonal of the columns that are not dead.

    Args:
        hessian_CC: [C, C].
        damp_frac: the share.

    Returns:
        float64.
    """
    H_CC = hessian_CC.to(torch.float64).clone()
    diagonal = H_CC.diagonal()
    diagonal += damp_frac * diagonal[diagonal != 0].mean()
    return H_CC


def quadratic_loss(error_RC: Tensor, H_CC: Tensor) -> float:
    """Return 1/2 tr(E H E^T).

    Args:
        error_RC: W - Q.
        H_CC: float64.

    Returns:
        The loss in float64.
    """
    wide = error_RC.to(torch.float64)
    return 0.5 * float(((wide @ H_CC) * wide).sum())


def solve_dense(
    weight_RC: Tensor,
    H_CC: Tensor,
    scale_RC: Tensor,
    zero_RC: Tensor,
    grid: Tensor,
    order_C: Tensor,
    value_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Round one column after another, and let the columns to come absorb the error.

    Args:
        weight_RC: the weight.
        H_CC: float64, damped.
        scale_RC: scale of each value, float64.
        zero_RC: zero point of each value, float64.
        grid: code values, float64, rising.
        order_C: in which columns are rounded.
        value_dtype: in which a loader has the values.

    Returns:
        Codes and values, float64 [R, C].
    """
    codes_RC, values_RC = torch.zeros_like(weight_RC, dtype=torch.float64), torch.zeros_like(weight_RC, dtype=torch.float64)
    for column, moved_R in _columns_absorbing(weight_RC, H_CC, order_C, values_RC):
        code_R = nearest(moved_R / scale_RC[:, column] + zero_RC[:, column], grid)
        codes_RC[:, column] = code_R
        values_RC[:, column] = ((code_R - zero_RC[:, column]) * scale_RC[:, column]).to(value_dtype).to(torch.float64)
    return codes_RC, values_RC


def drop_dense(weight_RC: Tensor, H_CC: Tensor, gone_RC: Tensor, order_C: Tensor) -> Tensor:
    """Set one column after another to zero where it goes, and let the columns to come absorb the error.

    Args:
        weight_RC: the weight.
        H_CC: float64, positive definite.
        gone_RC: bool, what goes.
        order_C: of the columns.

    Returns:
        float64 [R, C].
    """
    values_RC = torch.zeros_like(weight_RC, dtype=torch.float64)
    for column, moved_R in _columns_absorbing(weight_RC, H_CC, order_C, values_RC):
        values_RC[:, column] = moved_R.masked_fill(gone_RC[:, column], 0.0)
    return values_RC


def _columns_absorbing(weight_RC: Tensor, H_CC: Tensor, order_C: Tensor, values_RC: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each column as those before it have moved it, float64 [R]; the caller writes to `values_RC` what it becomes."""
    W_RC = weight_RC.to(torch.float64).clone()
    inverse_CC = torch.linalg.inv(H_CC)
    left = torch.ones(W_RC.shape[1], dtype=torch.bool)
    for column in order_C.tolist():
        yield column, W_RC[:, column]
        pivot = inverse_CC[column, column].clone()
        error_R = (W_RC[:, column] - values_RC[:, column]) / pivot
        left[column] = False
        W_RC[:, left] -= error_R[:, None] * inverse_CC[column, left]
        inverse_CC = inverse_CC - inverse_CC[:, column, None] * inverse_CC[column] / pivot


# What judges packers: where each code lies in the words, bit by bit, without a line of what is judged.

# fp4 e2m1 by its three lower bits.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _bits_of(words: np.ndarray) -> np.ndarray:
    """The bits of each row, least significant bit of the first word first, [rows, bits]."""
    data = np.ascontiguousarray(words).view(np.uint8).reshape(words.shape[0], -1)
    return np.unpackbits(data, axis=1, bitorder="little")


def _numbers(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The first `count` fields of so many bits of each row, as unsigned numbers."""
    stream = _bits_of(words)[:, : bits * count].reshape(words.shape[0], count, bits)
    return (stream.astype(np.int64) << np.arange(bits)).sum(axis=2)


def _offset_stream(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Codes plus 2^(bits-1), one after another in a little-endian stream of bits: pack-quantized of compressed-tensors."""
    return _numbers(words, bits, count) - (1 << (bits - 1))


def _e2m1_nibbles(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Sign, exponent and significand of fp4 in a nibble, the first code of a pair in the lower one: fp4 of compressed-tensors."""
    nibbles = _numbers(words.astype(np.uint8), bits, count)
    return np.where(nibbles & 8, -1.0, 1.0) * np.array(_E2M1)[nibbles & 7]


def bits_behind(words: np.ndarray, bits: int, count: int) -> int:
    """Count the bits that are set behind the last code of each row.

    Args:
        words: [rows, words].
        bits: of a code.
        count: codes of a row.

    Returns:
        How many there are in all rows.
    """
    return int(_bits_of(words)[:, bits * count :].sum())


Decoder = Callable[[np.ndarray, int, int], np.ndarray]

# [rows, words], bits of a code and codes of a row -> codes [rows, count].
LAYOUTS: Mapping[str, Decoder] = MappingProxyType({"offset_stream": _offset_stream, "e2m1_nibbles": _e2m1_nibbles})
