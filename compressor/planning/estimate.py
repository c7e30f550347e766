"""What a run would cost, stage by stage: memory at the worst moment and what it consists of, disk, and time.

A stage has three phases. While it is calibrated, statistics and the temporaries of one forward lie beside weights and activations; while it
is compressed, the solver's working memory takes the place of the temporaries; while data is propagated, compressed layers hold their float
weight. The worst phase counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

import torch

from compressor.algorithms.gptq import quantize_gptq
from compressor.numerics import preset_scheme
from compressor.numerics.precision import widened_products

Phase = Literal["load", "calibrate", "compress", "propagate", "train", "save"]
Held = Literal["everything", "weights", "layer", "nothing"]


@dataclass(frozen=True)
class StageEstimate:
    """One stage at its worst moment.

    Attributes:
        name: dotted name of the target, or what else happens: `load`, `head`, `save`.
        phase: the worst one.
        weights_bytes: of the whole model as it is then: float, compressed, and float again while data is propagated.
        statistics_bytes: Hessians and the like.
        activations_bytes: what is live for all samples between two stages, and the batches, in memory.
        temporaries_bytes: of one forward, or of the solver.
        away_bytes: of the weights, those that need not be at hand where layers come one by one.
        flops: of all phases, in matrix products.
        seconds: of all phases.
    """

    name: str
    phase: Phase
    weights_bytes: int
    statistics_bytes: int
    activations_bytes: int
    temporaries_bytes: int
    away_bytes: int = 0
    flops: float = 0.0
    seconds: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """All of them together."""
        return self.weights_bytes + self.statistics_bytes + self.activations_bytes + self.temporaries_bytes


@dataclass(frozen=True)
class Estimate:
    """What a run would cost.

    Attributes:
        checkpoint_bytes: size of the weights on disk; exact.
        journal_bytes: finished stages that a run keeps on disk until it ends.
        offload_bytes: activations on disk, where memory was granted for a part of them only.
        model_bytes: size of the weights in memory before compression; exact.
        process_bytes: what a process takes that has loaded the libraries and no model; as measured in this one.
        stages: in the order of the run.
        seconds: wall time of calibration and compression.
        flops_per_second: of matrix products, as timed on this machine.
        column_seconds: for one column of one weight in a solver, as timed on this machine.
        rounding_seconds: for one element of a column, as timed on this machine.
        basis: what the memory of forwards was estimated from.
    """

    checkpoint_bytes: int
    journal_bytes: int
    offload_bytes: int
    model_bytes: int
    process_bytes: int
    stages: list[StageEstimate]
    seconds: float
    flops_per_second: float
    column_seconds: float
    rounding_seconds: float
    basis: str

    @property
    def worst(self) -> StageEstimate:
        """The stage with the highest peak."""
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most memory that the run takes for tensors."""
        return self.worst.peak_bytes

    @property
    def peak_by_layers_bytes(self) -> int:
        """The same where layers come one by one: on a CPU of a model in files, on a GPU of one in main memory."""
        return max(stage.peak_bytes - stage.away_bytes for stage in self.stages)

    @property
    def peak_extra_bytes(self) -> int:
        """The same beyond the model itself."""
        return self.peak_bytes - self.model_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        stages = [{**asdict(stage), "peak_bytes": stage.peak_bytes} for stage in self.stages]
        totals = {"peak_bytes": self.peak_bytes, "peak_extra_bytes": self.peak_extra_bytes, "peak_stage": self.worst.name}
        totals |= {"peak_by_layers_bytes": self.peak_by_layers_bytes}
        return {**asdict(self), "stages": stages, **totals}


# What need not be on a GPU: activations wait in main memory, and so do weights where layers come one by one.
_WAITING: dict[Held, tuple[str, ...]] = {"everything": (), "weights": ("activations_bytes",), "layer": ("activations_bytes", "away_bytes")}


@dataclass(frozen=True)
class Fit:
    """What of a run fits into the memory of a GPU.

    Attributes:
        device_bytes: memory of the GPU.
        holds: `everything`; `weights`, while activations wait in main memory; `layer`, while weights wait there, too; or `nothing`.
        stage: the one that needs most of it so.
        needed_bytes: of the GPU, by that stage.
        waiting_bytes: of activations and weights beside it, at most.
        waiting_weights_bytes: of weights alone, in that stage.
    """

    device_bytes: int
    holds: Held
    stage: StageEstimate
    needed_bytes: int
    waiting_bytes: int
    waiting_weights_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self) | {"stage": self.stage.name, "phase": self.stage.phase}


def fit_into(device_bytes: int, estimate: Estimate) -> Fit:
    """Find the way that leaves most on a GPU.

    Args:
        device_bytes: memory of the GPU.
        estimate: of the run on one.

    Returns:
        What fits; where nothing does, what the way with one layer at a time would need.
    """
    for holds, parts in _WAITING.items():
        waiting = [sum(getattr(stage, part) for part in parts) for stage in estimate.stages]
        needed = [stage.peak_bytes - away for stage, away in zip(estimate.stages, waiting, strict=True)]
        worst = needed.index(max(needed))
        most = estimate.stages[waiting.index(max(waiting))]
        weights = most.away_bytes if holds == "layer" else 0
        fit = Fit(device_bytes, holds, estimate.stages[worst], needed[worst], max(waiting), weights)
        if fit.needed_bytes <= device_bytes:
            return fit
    return replace(fit, holds="nothing")


# How fast this machine is at what a run consists of: matrix products, and rounding one column after the other. Timed in half a second.

_PRODUCT_SIZE = 768
_TIMING_SECONDS = 0.2  # for one piece of work, where it is slow: products of bfloat16 are, on a CPU without instructions for them
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


@cache  # plans of one process are of one machine, and a slow one takes seconds
@widened_products()  # as in the run
def measure_speed(device: torch.device, dtype: torch.dtype) -> Speed:
    """Time small pieces of work, once in a process; the best of two to five, since the first one warms up.

    Args:
        device: that would compute.
        dtype: of the model.

    Returns:
        The speeds.
    """
    flops = {kind: 2.0 * _PRODUCT_SIZE**3 / best_seconds(_product(device, kind)) for kind in dict.fromkeys((torch.float32, dtype))}
    few, many = (best_seconds(_solve(device, rows)) for rows in (_FEW_ROWS, _MANY_ROWS))
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


def best_seconds(work: Callable[[], object]) -> float:
    """Time a small piece of work.

    Args:
        work: ends when it is done, on whatever device.

    Returns:
        Wall time of the best of two to five.
    """
    taken: list[float] = []
    while len(taken) < 2 or (len(taken) < 5 and sum(taken) < _TIMING_SECONDS):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)
