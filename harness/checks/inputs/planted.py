"""Values planted where codes are decided: in the middle between two codes, beside it, and under scales that are powers of two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from harness.checks.protocols import Quantized, Quantizer
from harness.checks.strategies import hurtful

POWERS = (-3, 0)
"""Of the scales under which ties are planted."""


def middles_of(grid: Tensor) -> Tensor:
    """Return the middles between all neighbours of a grid."""
    return (grid[1:] + grid[:-1]) / 2


def power_scales(
    subject: Quantizer, columns: int, scale: float, *, rows: int = 2, dtype: torch.dtype | None = None, above: int = 0
) -> tuple[Quantized, float]:
    """Return scales of one power of two, and zero points at the lowest code or a little above it, to encode values with.

    Args:
        subject: a quantizer.
        columns: of the tensor.
        scale: the power.
        rows: of the tensor.
        dtype: of the weight whose scales they replace; by default float32, or the first one that the subject takes.
        above: codes between the lowest one and the zero point.

    Returns:
        Codes of no meaning under these scales, and the zero point of each value, 0 where there is none.
    """
    if dtype is None:
        dtype = torch.float32 if torch.float32 in subject.dtypes else subject.dtypes[0]
    like = subject.quantize(hurtful("bell", (rows, columns), dtype))
    wide = torch.full_like(like.scale if like.scale.dtype.itemsize > 1 else like.scale.to(torch.float32), scale)
    # An even one: whether codes are rounded before or after it is added must not decide which neighbour is even.
    lowest = float(subject.code_values[0]) + above
    zero_point = None if like.zero_point is None else torch.full_like(like.zero_point, lowest)
    global_scale = None if like.global_scale is None else torch.ones_like(like.global_scale)
    return replace(like, scale=wide, zero_point=zero_point, global_scale=global_scale), 0.0 if zero_point is None else lowest


def tied(grid: Tensor, rows: int, columns: int) -> Tensor:
    """Return the middles between all neighbours of a grid, one after the other, as often as they fit, [R, C]."""
    middles = middles_of(grid)
    return middles[torch.arange(rows * columns) % len(middles)].reshape(rows, columns)


def tied_weights(grid: Tensor, rows: int, columns: int, group: int) -> Iterator[Tensor]:
    """Yield ties of the whole grid in groups whose ends ask for a power of two under one of the rules that scales follow.

    Args:
        grid: code values.
        rows: of the weight.
        columns: of the weight.
        group: columns that share a scale.

    Yields:
        float64 [R, C].
    """
    half = (grid[-1] - grid[0]) / 2
    for low, high, offset in ((-half, half, 0.0), (-grid[-1], grid[-1], 0.0), (grid[0], grid[-1], 0.0), (0.0, 2 * half, float(-grid[0]))):
        weight = (tied(grid, rows, columns) + offset).clamp(float(low), float(high))
        weight[:, ::group], weight[:, 1::group] = low, high
        for power in POWERS:
            yield weight * 2.0**power


def is_exact(scale: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Say where nothing is rounded on the way to a position: the scale is a power of two, and the dtype holds the position."""
    return (torch.frexp(scale)[0] == 0.5) & (positions.to(dtype).to(torch.float64) == positions)
