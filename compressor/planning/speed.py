"""How fast this machine is at what a run consists of: matrix products, and rounding one column after the other. Timed in half a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from compressor.algorithms.gptq import quantize_gptq
from compressor.numerics import preset_scheme

_PRODUCT_SIZE = 768
_FEW_ROWS, _MANY_ROWS, _COLUMNS = 16, 1024, 128


class Speed(NamedTuple):
    """Speeds of one machine.

    Attributes:
        flops: in float32 matrix products, per second.
        model_flops: in matrix products of the model's dtype, per second.
        column_seconds: for one column of one weight, however short: what the calls alone take.
        rounding_seconds: for one element of a column.
    """

    flops: float
    model_flops: float
    column_seconds: float
    rounding_seconds: float


def measure_speed(device: torch.device, dtype: torch.dtype) -> Speed:
    """Time small pieces of work; the best of five, since the first one warms up.

    Args:
        device: that would compute.
        dtype: of the model.

    Returns:
        The speeds.
    """
    flops = {kind: 2.0 * _PRODUCT_SIZE**3 / _best_seconds(_product(device, kind)) for kind in dict.fromkeys((torch.float32, dtype))}
    few, many = (_best_seconds(_solve(device, rows)) for rows in (_FEW_ROWS, _MANY_ROWS))
    rounding = max(0.0, many - few) / ((_MANY_ROWS - _FEW_ROWS) * _COLUMNS)
    return Speed(flops[torch.float32], flops[dtype], few / _COLUMNS, rounding)


def _solve(device: torch.device, rows: int) -> Callable[[], float]:
    args = preset_scheme("W4A16", ["Linear"]).weights
    assert args is not None
    weight = torch.linspace(-1, 1, rows * _COLUMNS, dtype=torch.float32, device=device).view(rows, _COLUMNS)
    hessian = torch.eye(_COLUMNS, dtype=torch.float32, device=device)
    return lambda: float(quantize_gptq([weight], hessian, args, scale_search=False)[0][0].loss)


def _product(device: torch.device, dtype: torch.dtype) -> Callable[[], float]:
    matrix = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, device=device, dtype=dtype)
    return lambda: float((matrix @ matrix)[0, 0])  # reading one value waits for the device


def _best_seconds(work: Callable[[], float]) -> float:
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best
