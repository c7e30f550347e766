"""Where a replay leaves eager: both run from the same state, and the first operator whose written bytes differ is named."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from compressor.errors import UserInputError
from compressor.training.batch import Batch
from compressor.training.digests import content_digest
from compressor.training.operators import IDLE, Record
from compressor.training.plan import Plan
from compressor.training.recorder import Recorder
from compressor.training.snapshot import Snapshot
from compressor.training.tape import Tape
from compressor.training.whereabouts import Whereabouts


@dataclass(frozen=True)
class Difference:
    """The first operator of a replay that does not give what eager gave.

    Attributes:
        index: its position on the tape.
        place: position, phase, module and operator in words.
        eager: its line as eager ran it.
        replay: its line on the tape.
        num_differing: number of operators that differ from there on.
        num_ops: number of operators.
    """

    index: int
    place: str
    eager: str
    replay: str
    num_differing: int
    num_ops: int

    def __str__(self) -> str:
        """Spell it on three lines."""
        return (
            f"{self.place} is the first that differs, and {self.num_differing} of {self.num_ops} do\n"
            f"  eager:  {self.eager}\n  replay: {self.replay}"
        )


def locate(plan: Plan, batch: Batch) -> Difference | None:
    """Find the first operator whose result differs between eager and replay.

    Args:
        plan: a plan on a tape; state and random generators are as before the call.
        batch: fits the plan.

    Returns:
        The operator, or None where all agree.

    Raises:
        UserInputError: the plan is no tape; a CUDA graph cannot be watched operator by operator.
    """
    tape = plan.captured
    if not isinstance(tape, Tape):
        raise UserInputError(f"locate: the plan is a {type(tape).__name__}, which cannot be watched; capture the step on the CPU")
    start = Snapshot.take(plan.step, tape.generators)
    try:
        plan.buffers.bind(batch)
        eager = _eager_digests(plan)
        start.put_back(plan.step, tape.generators)
        plan.buffers.bind(batch)
        replayed: list[tuple[str, ...]] = []
        _watch(tape, replayed)
    finally:
        start.put_back(plan.step, tape.generators)
    return _first(tape, eager, replayed)


def _eager_digests(plan: Plan) -> list[tuple[str, tuple[str, ...]]]:
    step, seen = plan.step, []
    whereabouts = Whereabouts(step.model)
    roles: dict[str, Tensor] = {
        **{f"in:{path}": tensor for path, tensor in plan.buffers.tensors.items()},
        **step.tensors(),
        **step.ranks.buckets,
    }

    def see(op: Record, written: list[Tensor]) -> None:
        seen.append((op.line, _digests(op, written)))

    recorder = Recorder(roles, step.device, whereabouts, see, step.ranks.groups)

    def mark(phase: str) -> None:
        recorder.phase = phase

    with whereabouts.watching(), step.marking(mark), recorder:
        step(plan.buffers.batch)
    return seen


def _digests(op: Record, written: list[Tensor]) -> tuple[str, ...]:
    if op.kind in IDLE:  # what an allocation holds, and what a view shows of it, is nobody's result yet
        return ()
    if op.func._schema.name == "aten::mkldnn_rnn_layer":
        written = written[:3]  # the rest is a workspace with gaps
    return tuple(content_digest(tensor) for tensor in written)


def _watch(tape: Tape, replayed: list[tuple[str, ...]]) -> None:
    """Replay until the end, or until an operator fails: what made it fail lies before it, or is the operator itself."""
    try:
        tape.replay_watched(lambda op: replayed.append(_digests(op, op.written())))
    except (RuntimeError, IndexError, ValueError):
        replayed += [("failed",)] * (len(tape.ops) - len(replayed))


def _first(tape: Tape, eager: list[tuple[str, tuple[str, ...]]], replayed: list[tuple[str, ...]]) -> Difference | None:
    pairs = list(zip(eager, replayed, strict=False))
    differing = [index for index, ((line, digest), other) in enumerate(pairs) if digest != other or line != tape.ops[index].line]
    if not differing and len(eager) != len(replayed):
        differing = [min(len(pairs), len(tape.ops) - 1)]
    if not differing:
        return None
    index = differing[0]
    op = tape.ops[index]
    line = eager[index][0] if index < len(eager) else "(absent)"
    return Difference(index, op.place, line, op.line, len(differing), len(tape.ops))
