"""Who wrote what is not its own: an operator may differ only because one before it changed its operands behind everybody's back.

Between the last operator that is known to write a tensor and the one that reads it, its bytes stay. A replay that is watched shows after
which operator they are others; likewise the random generator moves only where an operator draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.utils._pytree import tree_leaves

from compressor.training.digests import content_digest, rng_digest
from compressor.training.operators import IDLE, Op
from compressor.training.tape import Tape

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
