"""Sabotages operators of a captured step one at a time, and sees whether `locate` names the very one.

A check that nothing ever fails proves nothing. So each operator of the tape is left out, or a bit of what it writes is flipped, or it runs
twice where it writes in place; or it goes astray: a bit of a tensor that is not its own is flipped, a view is written through, a random
number is drawn. `locate` must name it. Only where no bit of what the step leaves depends on it there is nothing to name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from compressor.errors import UserInputError
from compressor.training import Plan, Snapshot, locate
from compressor.training.capture.operators import Kind, Op
from compressor.training.engines.tape import Tape
from harness.replay.kernels.exchange import first_byte, overlaps_any, swapped
from harness.reporting.verdict import Verdict

Run = Callable[[], object]


def _left_out(plan: Plan, op: Op) -> Run | None:
    del plan
    return None if op.run is None else lambda: None


def _one_bit(plan: Plan, op: Op) -> Run | None:
    """Flip the lowest bit of a number that the operator writes."""
    del plan
    written = [tensor for tensor in op.written() if tensor.numel()]
    return None if op.run is None or not written else _then(op.run, _flip(written[op.index % len(written)]))


def _twice(plan: Plan, op: Op) -> Run | None:
    del plan
    return _then(op.run, op.run) if op.run is not None and op.kind is Kind.MUTATE else None


def _elsewhere(plan: Plan, op: Op) -> Run | None:
    """Flip a bit of a parameter, gradient, buffer or state that the operator does not write."""
    own = [tensor for tensor in op.written() if tensor.numel()]
    others = [tensor for tensor in plan.step.tensors().values() if tensor.numel() and not overlaps_any(tensor, own)]
    return None if op.run is None or not others else _then(op.run, _flip(others[op.index % len(others)]))


def _on_a_view(plan: Plan, op: Op) -> Run | None:
    """Let an operator that only makes an alias write through it."""
    del plan
    return _flip(op.outs[0]) if op.kind is Kind.VIEW and op.outs[0].numel() else None


def _draws(plan: Plan, op: Op) -> Run | None:
    del plan
    return None if op.run is None else _then(op.run, lambda: torch.rand(1))


def _flip(tensor: Tensor) -> Run:
    return lambda: first_byte(tensor).bitwise_xor_(1)


def _then(one: Run, other: Run) -> Run:
    def both() -> None:
        one()
        other()

    return both


WAYS: dict[str, Callable[[Plan, Op], Run | None]] = {
    "left out": _left_out,
    "one bit": _one_bit,
    "twice": _twice,
    "elsewhere": _elsewhere,
    "on a view": _on_a_view,
    "draws": _draws,
}


class TrialOutcome(StrEnum):
    """What came of one sabotage."""

    NAMED = "named"
    ANOTHER = "another named"
    MISSED = "missed"
    NO_EFFECT = "no effect"

    @property
    def verdict(self) -> Verdict:
        """What that means for who asked: where nothing depends on what was done, there is nothing to name."""
        return Verdict.PASS if self in (TrialOutcome.NAMED, TrialOutcome.NO_EFFECT) else Verdict.REGRESSION


@dataclass(frozen=True)
class Trial:
    """One operator that was sabotaged.

    Attributes:
        index: its position.
        place: position, phase, module and operator in words.
        kind: how the tape repeats it.
        way: what was done to it.
        named: position of the operator that `locate` named; None where it named none.
        has_effect: a bit of the state after the step, or of the loss, is another one.
    """

    index: int
    place: str
    kind: str
    way: str
    named: int | None
    has_effect: bool

    @property
    def outcome(self) -> TrialOutcome:
        """Whether `locate` named the very operator."""
        if self.named is not None:
            return TrialOutcome.NAMED if self.named == self.index else TrialOutcome.ANOTHER
        return TrialOutcome.MISSED if self.has_effect else TrialOutcome.NO_EFFECT

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return asdict(self) | {"outcome": self.outcome.value}


def one_of_each(ops: Iterable[Op]) -> list[Op]:
    """Choose the first operator of each overload, phase and way of repetition."""
    found: dict[tuple[str, str, str], Op] = {}
    for op in ops:
        found.setdefault((str(op.func), op.phase, op.kind), op)
    return list(found.values())


def sabotage(
    plan: Plan, batch: Any, ops: Sequence[Op], ways: Iterable[str] = tuple(WAYS), each: Callable[[Trial], None] | None = None
) -> list[Trial]:
    """Sabotage operators one at a time. Plan, model and generators are as before the call.

    Args:
        plan: a plan on a tape that holds: `locate` names nothing.
        batch: fits the plan.
        ops: operators of the tape.
        ways: of WAYS.
        each: called with every trial.

    Returns:
        A trial for every operator and every way that applies to it.

    Raises:
        UserInputError: the plan is no tape, there is no such way, or the plan fails without any sabotage.
    """
    tape = plan.captured
    if not isinstance(tape, Tape):
        raise UserInputError(f"sabotage: the plan is a {type(tape).__name__}, not a tape; capture with plan_on_tape(step, batch_at)")
    chosen = list(ways)
    for way in chosen:
        if way not in WAYS:
            raise UserInputError(f"sabotage: way {way!r} does not exist; give some of {', '.join(WAYS)}")
    before = locate(plan, batch)
    if before is not None:
        raise UserInputError(f"sabotage: the plan fails as it is: {before.place}; capture it anew")
    sound = _after_step(plan, tape, batch)
    trials = []
    for op in ops:
        for way in chosen:
            run = WAYS[way](plan, op)
            if run is not None:
                trials.append(_try(plan, tape, batch, op, way, run, sound))
                if each is not None:
                    each(trials[-1])
    return trials


def _try(plan: Plan, tape: Tape, batch: Any, op: Op, way: str, run: Run, sound: Snapshot | None) -> Trial:
    with swapped(tape, {op.index: run}):
        found = locate(plan, batch)
        after = _after_step(plan, tape, batch) if found is None else None
    has_effect = found is not None or after is None or sound is None or bool(sound.differences(after))
    return Trial(op.index, op.place, str(op.kind), way, None if found is None else found.index, has_effect)


def _after_step(plan: Plan, tape: Tape, batch: Any) -> Snapshot | None:
    """Replay one step on spoiled memory, copy its state, and go back; None where it fails."""
    start = Snapshot.take(plan.step, tape.generators)
    try:
        plan.buffers.bind(batch)
        tape.replay_spoiled()
        return Snapshot.take(plan.step, tape.generators, tape.loss)
    except (RuntimeError, IndexError, ValueError):
        return None
    finally:
        start.put_back(plan.step, tape.generators)


def score(trials: Iterable[Trial]) -> dict[str, int]:
    """Count the outcomes.

    Args:
        trials: of a sabotage.

    Returns:
        Outcome to number; all four are there.
    """
    counts = {outcome.value: 0 for outcome in TrialOutcome}
    for trial in trials:
        counts[trial.outcome.value] += 1
    return counts
