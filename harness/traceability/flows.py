"""The one interface that the audit drives: a model traced on one batch, which runs others stage by stage. Tests plant errors behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from compressor.tracing import Plan, Watched, trace
from harness.traceability.batches import Batch, copies


class StagePasses(Protocol):
    """One stage of a run: both engines give it."""

    @property
    def name(self) -> str:
        """Dotted name of the target."""

    @property
    def module_names(self) -> tuple[str, ...]:
        """Dotted names of the target and all below it."""

    def calibrate(self) -> None:
        """Call the target for every sample, without consequences."""

    def propagate(self) -> None:
        """Call it for real."""


@dataclass
class FlowResult:
    """What a run gave: the result of each forward, and the stages in their order."""

    results: list[Any]
    stages: list[str] = field(default_factory=list)


class Flow(Protocol):
    """A model traced on one batch; may be run on others, and again."""

    @property
    def engine(self) -> str:
        """The engine that runs."""

    @property
    def targets(self) -> Sequence[str]:
        """Dotted names of the sequential targets."""

    def run(
        self,
        batches: Sequence[Batch],
        on_stage: Callable[[StagePasses], None],
        watched: Callable[[], Watched],
        quiet: Callable[[], AbstractContextManager[None]],
    ) -> FlowResult:
        """Run batches stage by stage; `on_stage` must propagate."""


class PlanFlow:
    """A plan of `compressor.tracing.trace`."""

    def __init__(self, plan: Plan) -> None:
        """Take the plan."""
        self.plan = plan
        self.targets: Sequence[str] = list(plan.partition.targets)

    @property
    def engine(self) -> str:
        """The engine that the plan has chosen; a batch that the graph engine cannot follow may change it."""
        return self.plan.engine

    def run(
        self,
        batches: Sequence[Batch],
        on_stage: Callable[[StagePasses], None],
        watched: Callable[[], Watched],
        quiet: Callable[[], AbstractContextManager[None]],
    ) -> FlowResult:
        """Run batches stage by stage.

        Args:
            batches: copied first.
            on_stage: called at every stage.
            watched: modules that carry calibration hooks.
            quiet: context in which hooks sleep.

        Returns:
            Results and stages.
        """
        stages = []
        with self.plan.run(copies(batches), watched=watched, quiet=quiet, keep_outputs=True) as run:
            for stage in run:
                stages.append(stage.name)
                on_stage(stage)
        return FlowResult(run.outputs, stages)


def make_flow(model: nn.Module, batch: Batch, patterns: Sequence[str] | None, engine: str) -> Flow:
    """Trace a model on one batch.

    Args:
        model: the model.
        batch: to trace on.
        patterns: of the targets; None infers them.
        engine: auto, graph or suspend.

    Returns:
        What can be run.
    """
    return PlanFlow(trace(model, copies([batch]), targets=patterns, engine=engine))  # type: ignore[arg-type]
