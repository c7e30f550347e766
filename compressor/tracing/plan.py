"""The way to trace a model: `trace` gives a Plan, and the plan runs batches stage by stage.

    plan = trace(model, batches, targets=None, leaves=(), engine="auto", max_variants=8, verify="first")
    plan.stages, plan.variants, plan.guards, plan.leaves, plan.engine, plan.why, plan.report()
    for stage in plan.run(batches, store):
        stage.calibrate()
        ...                    # compress what lies inside
        stage.propagate()

Randomness: every sample's forward starts from the state that the random generators have when the run starts, and keeps a state of its
own, so that a sample sees the same numbers whatever the other samples do, and in both passes of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, Self

import torch
from torch import nn

from compressor.data.collate import Batch, batch_to
from compressor.errors import TracingError
from compressor.tracing.early_stop import Watched
from compressor.tracing.observe import Kind, kind_of, observe_trail, stages_of
from compressor.tracing.order import Trail
from compressor.tracing.partition import Partition, partition
from compressor.tracing.records import ENGINES, VERIFY, Engine, Guard, Leaf, Stage, Verify
from compressor.tracing.store import ValueStore
from compressor.tracing.suspend import SuspendedRun

__all__ = ["Engine", "Guard", "Leaf", "Plan", "Run", "RunningStage", "Stage", "Verify", "check_tracing_options", "trace"]


class RunningStage(Protocol):
    """One stop of a run; both engines give it: `calibrate`, then compress what lies inside, then `propagate`."""

    index: int
    name: str
    num_samples: int

    @property
    def module(self) -> nn.Module:
        """The target as it is now."""

    @property
    def module_names(self) -> tuple[str, ...]:
        """Dotted names of the targets and of all modules inside them, as they are now."""

    def calibrate(self, stop_early: bool = True) -> None:
        """Call the targets for every sample without consequences."""

    def skip_calibration(self) -> None:
        """Take the statistics of the targets for complete, though nothing is called: an earlier run has compressed what lies inside."""

    def propagate(self, only_first: bool = False) -> None:
        """Let every sample run on to its next stage, or to its end."""


class Run(Protocol):
    """Batches on their way through the stages. A context manager; iterating over it without entering it enters it."""

    outputs: list[Any]

    @property
    def uncalled(self) -> tuple[str, ...]:
        """Targets that no sample has called so far."""

    def __enter__(self) -> Self:
        """Patch what must be patched."""

    def __exit__(self, *exc_info: object) -> None:
        """Undo every patch."""

    def __iter__(self) -> Iterator[RunningStage]:
        """Give one stage after another."""


def check_tracing_options(engine: str, verify: str, max_variants: int) -> None:
    """Refuse choices that do not exist.

    Args:
        engine: of ENGINES.
        verify: of VERIFY.
        max_variants: at least 1.

    Raises:
        TracingError: one of them breaks its rule.
    """
    for name, value, known in (("engine", engine, ENGINES), ("verify", verify, VERIFY)):
        if value not in known:
            raise TracingError(f"{name}: {value!r} does not exist; choose one of {', '.join(known)}")
    if max_variants < 1:
        raise TracingError(f"max_variants: {max_variants} leaves no room for the first graph; give at least 1")


class Plan:
    """How the batches of a model flow through its sequential targets.

    Attributes:
        model: the model.
        partition: its targets, and why these.
        engine: `graph` or `suspend`: what runs.
        why: why this engine, in one line.
        stages: in the order in which the first batch reaches them.
    """

    def __init__(
        self, model: nn.Module, cut: Partition, engine: Engine, why: str, stages: tuple[Stage, ...], trails: dict[Kind, Trail]
    ) -> None:
        """Made by `trace`; `trails` hold what it saw one forward of each kind do."""
        self.model = model
        self.partition = cut
        self.engine = engine
        self.why = why
        self.stages = stages
        self.variants: tuple[Any, ...] = ()
        self._trails = trails

    @property
    def guards(self) -> tuple[Guard, ...]:
        """What Python code looked at, of all variants; empty for the suspend engine, which looks again itself."""
        return ()

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Functions that are recorded as one node."""
        return ()

    def run(
        self,
        batches: Sequence[Batch],
        store: ValueStore | None = None,
        *,
        device: torch.device | None = None,
        watched: Callable[[], Watched] = dict,
        on_sample: Callable[[int], None] = lambda index: None,
        quiet: Callable[[], AbstractContextManager[None]] = nullcontext,
        keep_outputs: bool = False,
    ) -> Run:
        """Prepare to run batches stage by stage.

        Args:
            batches: one forward each; need not be those that were traced.
            store: where values wait between stages; None keeps them where they are. The suspend engine keeps them in paused frames.
            device: of the model; None leaves batches where they are.
            watched: says which modules carry calibration hooks now.
            on_sample: called with the number of a sample before it runs on.
            quiet: context in which hooks of calibrated targets sleep.
            keep_outputs: keep what the forwards return.

        Returns:
            The stages, one after another.
        """
        del store  # values wait in the frames of the paused forwards
        with quiet():
            self._observe(batches, device)
        return SuspendedRun(
            self.model,
            self.partition.targets,
            batches,
            device=device,
            watched=watched,
            on_sample=on_sample,
            quiet=quiet,
            keep_outputs=keep_outputs,
            trails=tuple(self._trails.values()),
        )

    def _observe(self, batches: Sequence[Batch], device: torch.device | None) -> None:
        """Run one plain forward of each kind of batch that has not been seen: which targets it calls, and in which order."""
        for batch in batches:
            kind = kind_of(batch)
            if kind not in self._trails:
                self._trails[kind] = observe_trail(self.model, self.partition, batch if device is None else batch_to(batch, device))

    def report(self) -> str:
        """Say in a few lines what was decided and why."""
        lines = [f"engine: {self.engine} ({self.why})", f"targets: {self.partition.reason}", f"stages: {len(self.stages)}"]
        return "\n".join(lines)


def trace(
    model: nn.Module,
    batches: Sequence[Batch],
    targets: Sequence[str] | None = None,
    leaves: Sequence[str | Callable[..., Any]] = (),
    engine: Engine = "auto",
    max_variants: int = 8,
    verify: Verify = "off",
    device: torch.device | None = None,
) -> Plan:
    """Find out how batches flow through the sequential targets of a model.

    Args:
        model: in eval mode, and without caches that grow; as it was afterwards.
        batches: what will be run, or a sample of it; at least one.
        targets: class names, dotted names or `re:` patterns; None infers them.
        leaves: functions, or `package.module:qualified.name`, that are recorded as one node.
        engine: `graph`, `suspend`, or `auto`: the graph engine where it can follow the model, else the suspend engine.
        max_variants: recorded graphs at most.
        verify: batches on which the plan is compared with the plain model, bit for bit.
        device: of the model; None leaves batches where they are.

    Returns:
        The plan.

    Raises:
        TracingError: a choice that does not exist, no batch, or a model that the engine cannot follow.
        TargetError: a pattern matches nothing, or a target lies inside another.
    """
    check_tracing_options(engine, verify, max_variants)
    if not batches:
        raise TracingError("trace: no batch was given, and a plan is made by running one; give at least one")
    cut = partition(model, targets)
    first = observe_trail(model, cut, batches[0] if device is None else batch_to(batches[0], device))
    why = "asked for" if engine == "suspend" else "the graph engine is not built yet"
    return Plan(model, cut, "suspend", why, stages_of(model, first), {kind_of(batches[0]): first})
