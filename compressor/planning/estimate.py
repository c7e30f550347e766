"""What a run would cost, stage by stage: memory at the worst moment and what it consists of, disk, and time.

A stage has three phases. While it is calibrated, statistics and the temporaries of one forward lie beside weights and activations; while it
is compressed, the solver's working memory takes the place of the temporaries; while data is propagated, compressed layers hold their float
weight. The worst phase counts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Phase = Literal["load", "calibrate", "compress", "propagate", "save"]


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
        flops: of all phases, in matrix products.
        seconds: of all phases.
    """

    name: str
    phase: Phase
    weights_bytes: int
    statistics_bytes: int
    activations_bytes: int
    temporaries_bytes: int
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
    def peak_extra_bytes(self) -> int:
        """The same beyond the model itself."""
        return self.peak_bytes - self.model_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        stages = [{**asdict(stage), "peak_bytes": stage.peak_bytes} for stage in self.stages]
        totals = {"peak_bytes": self.peak_bytes, "peak_extra_bytes": self.peak_extra_bytes, "peak_stage": self.worst.name}
        return {**asdict(self), "stages": stages, **totals}
