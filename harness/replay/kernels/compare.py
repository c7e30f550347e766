"""Change only the kernel: exchange the implementation of matching operators on a captured step, and report what that changes.

Everything else stays as it is: the tape, the storages, the batch, the state, the random generators. So a difference is the kernel's. The
exchange is made on the tape, since an override through `torch.library` is met by eager but not by the `out=` overloads that a tape calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from compressor.errors import UserInputError
from compressor.progress import Progress, SilentProgress
from compressor.random_state import foreign_random
from compressor.settings.kinds import FUNCTION, WHOLE
from compressor.settings.options import checked
from compressor.training import Plan, Snapshot
from compressor.training.capture.operators import Op
from compressor.training.engines.tape import Tape
from harness.errors import HarnessError
from harness.replay.equivalence.training_state import TrainingState, differing_names, state_of
from harness.replay.kernels.call_site import Site, examine
from harness.replay.kernels.error_growth import Grown, grown_between, run_steps
from harness.replay.kernels.exchange import Kept, Match, Variant, exchanged, find_ops, spell_match, swapped, wrapped_original
from harness.replay.kernels.report import KernelReport
from harness.replay.kernels.timing import CONTROL, ORIGINAL, TAPE, VARIANT, KernelTiming, interleave, repeats_for, timing_of

DEFAULT_ROUNDS = 15
_STEP_SECONDS = 5e-3


@dataclass(frozen=True)
class Swap:
    """One exchange.

    Attributes:
        match: which operators.
        variant: called with their arguments; gives their result, or writes into the arguments that they write.
        name: of the variant; by default that of the function.
    """

    match: Match
    variant: Variant
    name: str = ""

    @property
    def variant_name(self) -> str:
        """What reports call the variant."""
        return self.name or f"{getattr(self.variant, '__module__', '?')}:{getattr(self.variant, '__qualname__', repr(self.variant))}"

    def __str__(self) -> str:
        """Spell it as on the command line."""
        return f"{spell_match(self.match)}={self.variant_name}"


@checked(batch_at=FUNCTION, steps=WHOLE, rounds=WHOLE)
def compare_kernel(
    plan: Plan,
    batch: Any,
    match: Match,
    variant: Variant,
    *,
    name: str = "",
    steps: int = 1,
    rounds: int = DEFAULT_ROUNDS,
    batch_at: Callable[[int], Any] | None = None,
    progress: Progress | None = None,
) -> KernelReport:
    """Exchange the implementation of matching operators of a captured step, and report what that changes.

    Plan, model, optimizer, inputs and random generators are bit for bit as before the call afterwards, also after an error.

    Args:
        plan: a plan on a tape.
        batch: fits the plan.
        match: `aten.silu`, `aten.silu.default`, an overload or packet of torch.ops, or a predicate over operators.
        variant: takes the arguments of the operator and returns what it returns; for one that writes into its arguments (`aten.add_`,
            `aten._fused_adamw_`) it does so, too.
        name: of the variant in the report.
        steps: the state is compared after one step, and after that many.
        rounds: of interleaved timing; 0 for none.
        batch_at: batches of the steps by number, from 0; by default all take `batch`.
        progress: shows a bar.

    Returns:
        Local errors per operator, grown errors, and timings beside their control.

    Raises:
        UserInputError: nothing matches, the plan is no tape, or the variant cannot take the operator's place.
        HarnessError: the variant changed what is none of its business.
    """
    return compare_kernels(plan, batch, [Swap(match, variant, name)], steps=steps, rounds=rounds, batch_at=batch_at, progress=progress)


@checked(batch_at=FUNCTION, steps=WHOLE, rounds=WHOLE)
def compare_kernels(
    plan: Plan,
    batch: Any,
    swaps: Sequence[Swap],
    *,
    steps: int = 1,
    rounds: int = DEFAULT_ROUNDS,
    batch_at: Callable[[int], Any] | None = None,
    progress: Progress | None = None,
) -> KernelReport:
    """Do as `compare_kernel` with several exchanges at once. Local errors are those of each alone; what grows, grows from all together.

    Args:
        plan: a plan on a tape.
        batch: fits the plan.
        swaps: the exchanges; no operator may be meant by two of them.
        steps: the state is compared after one step, and after that many.
        rounds: of interleaved timing; 0 for none.
        batch_at: batches of the steps by number, from 0; by default all take `batch`.
        progress: shows a bar.

    Returns:
        The report.

    Raises:
        UserInputError: as `compare_kernel`, or a number is out of range.
        HarnessError: a variant changed what is none of its business.
    """
    for label, value, least in (("steps", steps, 1), ("rounds", rounds, 0)):
        if value < least:
            raise UserInputError(f"compare_kernel: {label}={value} is below {least}; give at least {least}")
    tape = plan.captured
    if not isinstance(tape, Tape):
        raise UserInputError(
            f"compare_kernel: the plan is a {type(tape).__name__}, whose kernels cannot be exchanged one by one; "
            "capture with Plan(step, batch, TapeEngine())"
        )
    chosen = _chosen(tape, swaps)
    plan.guard()
    bar = SilentProgress() if progress is None else progress
    with _undisturbed(plan, tape) as rewind, bar.task("kernels", len(chosen) + 2) as task:
        sites = _sites(plan, tape, batch, chosen, rounds, task.advance)
        rewind()
        grown, control_equal, repeatable = _grown(plan, tape, chosen, batch_at or (lambda number: batch), sorted({1, steps}), rewind)
        task.advance(1, "steps")
        timing = _time_steps(plan, tape, batch, chosen, rounds, rewind) if rounds else None
        task.advance(1, "timing")
    return KernelReport(tuple(map(str, swaps)), tuple(sites), grown, control_equal, repeatable, timing, len(tape.ops))


_Chosen = dict[int, tuple[Op, Swap]]


def _chosen(tape: Tape, swaps: Sequence[Swap]) -> _Chosen:
    chosen: _Chosen = {}
    for swap in swaps:
        for op in find_ops(tape.ops, swap.match):
            if op.index in chosen:
                raise UserInputError(f"{op.place} is meant by both {chosen[op.index][1]} and {swap}; let one swap mean it")
            chosen[op.index] = (op, swap)
    if not chosen:
        raise UserInputError("compare_kernel: no swap was given; name an operator and what takes its place")
    return chosen


@contextmanager
def _undisturbed(plan: Plan, tape: Tape) -> Iterator[Callable[[], None]]:
    """Give a function that goes back to the start, and see to it that everything is as before at the end."""
    step, generators = plan.step, tape.generators
    before = state_of(step, tape.loss, plan.buffers.batch).digests()
    runs = [op.run for op in tape.ops]
    start, rest = Snapshot.take(step, generators), Kept.of([*plan.buffers.tensors.values(), tape.loss])
    foreign = foreign_random()

    def rewind() -> None:
        start.put_back(step, generators)
        rest.put_back()
        foreign.restore()

    try:
        yield rewind
    finally:
        rewind()
    changed = differing_names(before, state_of(step, tape.loss, plan.buffers.batch).digests())
    if changed or any(op.run is not run for op, run in zip(tape.ops, runs, strict=True)):
        what = ", ".join(changed[:4]) or "the tape"
        raise HarnessError(
            f"compare_kernel: {what} cannot be brought back to what it was; the variant replaced it, write a function of its arguments"
        )


def _sites(plan: Plan, tape: Tape, batch: Any, chosen: _Chosen, rounds: int, advance: Callable[[int, str], None]) -> list[Site]:
    """Run the step once on the tape, and stop at every operator that is meant."""
    sites = []
    plan.buffers.bind(batch)
    with torch.inference_mode():
        for op in tape.ops:
            if op.index in chosen:
                swap = chosen[op.index][1]
                sites.append(examine(op, swap.variant, swap.variant_name, rounds, tape.generators))
                advance(1, op.place)
            elif op.run is not None:
                op.run()
    return sites


def _grown(
    plan: Plan, tape: Tape, chosen: _Chosen, batch_at: Callable[[int], Any], marks: Sequence[int], rewind: Callable[[], None]
) -> tuple[tuple[Grown, ...], bool, bool]:
    """Run all steps four times: as they are, with the control, with the variants, and with these again."""
    states = []
    for runs in ({}, _controls(chosen), _variants(chosen), _variants(chosen)):
        rewind()
        with swapped(tape, runs):
            states.append(run_steps(plan, batch_at, marks))
    original, control, variant, again = states
    differences = tuple(grown_between(*at) for at in zip(marks, original, variant, strict=True))
    return differences, _same(original, control), _same(variant, again)


def _same(states: Sequence[TrainingState], others: Sequence[TrainingState]) -> bool:
    return all(not differing_names(one.digests(), other.digests()) for one, other in zip(states, others, strict=True))


def _controls(chosen: _Chosen) -> dict[int, Callable[[], object]]:
    return {index: wrapped_original(op) for index, (op, _) in chosen.items()}


def _variants(chosen: _Chosen) -> dict[int, Callable[[], object]]:
    return {index: exchanged(op, swap.variant) for index, (op, swap) in chosen.items()}


def _time_steps(plan: Plan, tape: Tape, batch: Any, chosen: _Chosen, rounds: int, rewind: Callable[[], None]) -> KernelTiming:
    """Time the whole step with each program, always from the same state."""
    programs = {TAPE: {}, ORIGINAL: _controls(chosen), CONTROL: _controls(chosen), VARIANT: _variants(chosen)}
    runs = {index: op.run for index, (op, _) in chosen.items() if op.run is not None}

    def prepare(name: str) -> None:
        rewind()
        plan.buffers.bind(batch)
        for index, run in {**runs, **programs[name]}.items():
            tape.ops[index].run = run
        tape.relink()

    with swapped(tape, runs):
        repeats = repeats_for(tape.replay, plan.step.device, _STEP_SECONDS)
        return timing_of(interleave(dict.fromkeys(programs, tape.replay), rounds, repeats=repeats, before=prepare, device=plan.step.device))
