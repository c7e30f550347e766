"""Sabotages operators of a captured step one at a time, and sees whether `locate` names the very one.

A check that nothing ever fails proves nothing. So each operator of the tape is left out, or one bit of what it writes is flipped, or it is
run twice where it writes in place; `locate` must name it. Only where no bit of the step's result depends on it there is nothing to name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from compressor.errors import UserInputError
from compressor.training import Plan, Snapshot, locate
from compressor.training.operators import Kind, Op
from compressor.training.tape import Tape
from harness.replay.kernel_exchange import swapped
from harness.replay.spans import first_byte

Run = Callable[[], object]


def _left_out(op: Op, seed: int) -> Run | None:
    del op, seed
    return lambda: None


def _one_bit(op: Op, seed: int) -> Run | None:
    """Flip the lowest bit of one element of one tensor that the operator writes."""
    run, written = op.run, [tensor for tensor in op.written() if tensor.numel()]
    if run is None or not written:
        return None
    tensor = written[seed % len(written)]

    def flipped() -> None:
        run()
        first_byte(tensor).bitwise_xor_(1)

    return flipped


def _twice(op: Op, seed: int) -> Run | None:
    del seed
    run = op.run
    if run is None or op.kind is not Kind.MUTATE:
        return None

    def doubled() -> None:
        run()
        run()

    return doubled


WAYS: dict[str, Callable[[Op, int], Run | None]] = {"left out": _left_out, "one bit": _one_bit, "twice": _twice}


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
    def outcome(self) -> str:
        """`named`, `another named`, `missed`, or `no effect`: nothing that the step leaves depends on it."""
        if self.named is not None:
            return "named" if self.named == self.index else "another named"
        return "missed" if self.has_effect else "no effect"

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return asdict(self) | {"outcome": self.outcome}


def one_of_each(ops: Iterable[Op]) -> list[Op]:
    """Choose the first operator of each overload, phase and way of repetition; of those that do something."""
    found: dict[tuple[str, str, str], Op] = {}
    for op in ops:
        if op.run is not None:
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
            run = WAYS[way](op, op.index)
            if run is not None and op.run is not None:
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
    counts = dict.fromkeys(("named", "another named", "missed", "no effect"), 0)
    for trial in trials:
        counts[trial.outcome] += 1
    return counts
