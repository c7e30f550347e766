"""Where a replay leaves eager: both run from the same state, and the first operator whose written bytes differ is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.utils._pytree import tree_leaves

from compressor.errors import UserInputError
from compressor.settings.kinds import object_of
from compressor.settings.options import checked
from compressor.training.capture.module_scope import Whereabouts
from compressor.training.capture.operators import IDLE, Op, Record
from compressor.training.capture.recorder import Recorder
from compressor.training.engines.tape import Tape
from compressor.training.replay.plan import Plan
from compressor.training.step.batch import Batch
from compressor.training.step.digests import content_digest, rng_digest, same_bits
from compressor.training.step.snapshot import Snapshot

# Who wrote what is not its own: an operator may differ only because one before it changed its operands behind everybody's back.
#
# Between the last operator that is known to write a tensor and the one that reads it, its bytes stay. A replay that is watched shows after
# which operator they are others; likewise the random generator moves only where an operator draws.

FAILURES = (RuntimeError, IndexError, ValueError, TypeError)
"""What an operator raises that finds something else than it should."""


def operands_of(op: Op) -> list[Tensor]:
    """List the tensors that an operator is given, each once."""
    return list({id(leaf): leaf for leaf in tree_leaves((op.args, op.kwargs)) if isinstance(leaf, Tensor)}.values())


def find_trespasser(tape: Tape, operands: Sequence[Tensor], end: int, draws: bool, rewind: Callable[[], None]) -> int | None:
    """Find the operator that changed an operand, or moved the random generator, without being known to.

    Args:
        tape: the tape; it is replayed up to three times.
        operands: tensors on its memory or of the step.
        end: position of the operator that reads them; the number of operators for what the step leaves.
        draws: the reader draws random numbers, too.
        rewind: puts everything back that the step starts from.

    Returns:
        The first such operator, or None where nobody did.
    """
    lives = [(tensor, _last_writer(tape.ops, tensor, end)) for tensor in operands if tensor.numel()]
    changed = _changed(tape, lives, end, rewind)
    found = [] if not changed else [_first_change(tape, changed, end, rewind)]
    if draws:
        found.append(_first_draw(tape, end, rewind))
    return min((index for index in found if index is not None), default=None)


_Lives = Sequence[tuple[Tensor, int]]


def _last_writer(ops: Sequence[Op], tensor: Tensor, end: int) -> int:
    """Return the last operator before `end` that writes a tensor or allocates it; -1 for one that was there before."""
    for op in reversed(ops[:end]):
        made = op.written() if op.kind not in IDLE else [out for out, fresh in zip(op.outs, op.fresh, strict=True) if fresh]
        if any(_overlap(one, tensor) for one in made):
            return op.index
    return -1


def _changed(tape: Tape, lives: _Lives, end: int, rewind: Callable[[], None]) -> _Lives:
    """Keep the tensors that are not what they were when they were last written."""
    rewind()
    first = {number: content_digest(tensor) for number, (tensor, writer) in enumerate(lives) if writer < 0}
    last: dict[int, str] = {}

    def see(op: Op) -> None:
        for number, (tensor, writer) in enumerate(lives):
            if op.index == writer:
                first[number] = content_digest(tensor)
            if op.index == end - 1:
                last[number] = content_digest(tensor)

    _replay(tape, see)
    return [lives[number] for number, digest in last.items() if number in first and digest != first[number]]


def _first_change(tape: Tape, lives: _Lives, end: int, rewind: Callable[[], None]) -> int | None:
    rewind()
    now = {number: content_digest(tensor) for number, (tensor, writer) in enumerate(lives) if writer < 0}
    found: list[int] = []

    def see(op: Op) -> None:
        for number, (tensor, writer) in enumerate(lives):
            if op.index == writer:
                now[number] = content_digest(tensor)
            elif writer < op.index < end and not found and content_digest(tensor) != now[number]:
                found.append(op.index)

    _replay(tape, see)
    return found[0] if found else None


def _first_draw(tape: Tape, end: int, rewind: Callable[[], None]) -> int | None:
    """Find the first operator that moved the default generator although it is not known to draw."""
    rewind()
    now, found = [rng_digest()], []

    def see(op: Op) -> None:
        state = rng_digest()
        if state != now[0] and not op.seeded and op.index < end:
            found.append(op.index)
        now[0] = state

    _replay(tape, see)
    return found[0] if found else None


def _replay(tape: Tape, see: Callable[[Op], None]) -> None:
    """Replay until the end, or until an operator fails: whoever made it fail comes before it."""
    try:
        tape.replay_watched(see)
    except FAILURES:
        return


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors span an address in common; storages of a tape are cut from one memory."""
    if one.device != other.device:
        return False
    begin, other_begin = one.data_ptr(), other.data_ptr()
    return max(begin, other_begin) < min(begin + _span(one), other_begin + _span(other))


def _span(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.element_size()


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
        note: what else is known of it; "" where its own results differ.
    """

    index: int
    place: str
    eager: str
    replay: str
    num_differing: int
    num_ops: int
    note: str = ""

    def __str__(self) -> str:
        """Spell it on three lines."""
        note = f" ({self.note})" if self.note else ""
        return (
            f"{self.place} is the first that differs{note}, and {self.num_differing} of {self.num_ops} do\n"
            f"  eager:  {self.eager}\n  replay: {self.replay}"
        )


@checked(plan=object_of(Plan, words="a Plan, such as one of Trainer.plans"))
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

    def rewind() -> None:
        start.put_back(plan.step, tape.generators)
        plan.buffers.bind(batch)

    try:
        rewind()
        eager, loss = _eager_digests(plan)
        end = Snapshot.take(plan.step, tape.generators, loss)
        rewind()
        replayed: list[tuple[str, ...]] = []
        _watch(tape, replayed)
        differing = _differing(end, Snapshot.take(plan.step, tape.generators, tape.loss))
        found = _first(tape, eager, replayed)
        return _trespass(plan, tape, found, differing, rewind) or found
    finally:
        start.put_back(plan.step, tape.generators)


def _differing(eager: Snapshot, replay: Snapshot) -> list[str]:
    names = [name for name, tensor in eager.tensors.items() if not same_bits(tensor, replay.tensors[name])]
    return names + ["random generators"] * (not eager.rng.equals(replay.rng))


def _trespass(plan: Plan, tape: Tape, found: Difference | None, differing: list[str], rewind: Callable[[], None]) -> Difference | None:
    """Look for an operator that changed what it does not own, so that `found`, or what the step leaves, is not to blame."""
    if found is None and not differing:
        return None
    if found is not None:
        end, victim = found.index, found.place
        operands, draws, count = operands_of(tape.ops[end]), tape.ops[end].seeded, found.num_differing
    else:
        left = {**plan.step.tensors(), "loss": tape.loss}
        end, victim, draws, count = len(tape.ops), "what the step leaves", True, 0
        operands = [left[name] for name in differing if name in left]
    index = find_trespasser(tape, operands, end, draws, rewind)
    if index is None:
        return None
    op = tape.ops[index]
    note = f"it changes what it does not own, which {victim} gets"
    return Difference(index, op.place, op.line, op.line, count + 1, len(tape.ops), note)


def _eager_digests(plan: Plan) -> tuple[list[tuple[str, tuple[str, ...]]], Tensor]:
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
        loss = step.captured_part(plan.buffers.batch)
    return seen, loss


def _digests(op: Record, written: list[Tensor]) -> tuple[str, ...]:
    if op.kind in IDLE:  # what an allocation holds, and what a view shows of it, is nobody's result yet
        return ()
    if op.func._schema.name == "aten::mkldnn_rnn_layer":
        written = written[:3]  # the rest is a workspace with gaps
    drawn = (rng_digest().hex(),) if op.seeded else ()  # an operator that draws also moves the generator
    return (*(content_digest(tensor) for tensor in written), *drawn)


def _watch(tape: Tape, replayed: list[tuple[str, ...]]) -> None:
    """Replay until the end, or until an operator fails: what made it fail lies before it, or is the operator itself."""
    try:
        tape.replay_watched(lambda op: replayed.append(_digests(op, op.written())))
    except FAILURES:
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
