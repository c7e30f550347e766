"""Which operators of a tape are meant: by name, by overload, or by a predicate."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from torch._ops import OpOverload, OpOverloadPacket

from compressor.errors import UserInputError
from compressor.training.operators import Op

Match = str | OpOverload | OpOverloadPacket | Callable[[Op], bool]


def spell_match(match: Match) -> str:
    """Spell what was asked for.

    Args:
        match: name, overload or predicate.

    Returns:
        A text for messages.
    """
    if isinstance(match, str):
        return match.replace("::", ".")
    if isinstance(match, OpOverload | OpOverloadPacket):
        return str(match)
    return f"predicate {getattr(match, '__qualname__', repr(match))}"


def find_ops(ops: Sequence[Op], match: Match) -> list[Op]:
    """Find the operators that are meant, and that do something when the tape runs.

    Args:
        ops: of a tape.
        match: `aten.silu` (every overload), `aten.silu.default`, an overload or a packet of torch.ops, or a predicate over operators.

    Returns:
        At least one operator.

    Raises:
        UserInputError: none matches, or only such as make aliases or allocate.
    """
    wanted = spell_match(match)
    if isinstance(match, str | OpOverload | OpOverloadPacket):
        found = [op for op in ops if wanted in (str(op.func), str(op.func.overloadpacket))]
    else:
        found = [op for op in ops if match(op)]
    running = [op for op in found if op.run is not None]
    if running:
        return running
    if found:
        names = ", ".join(sorted({str(op.func.overloadpacket) for op in found}))
        raise UserInputError(
            f"match {wanted}: its {len(found)} ops ({names}) only make aliases or allocate, and a replay leaves them out; "
            f"choose one that computes: {_listing(_running_names(ops))}"
        )
    raise UserInputError(f"match {wanted}: none of {len(ops)} ops of the tape is meant; {_advice(wanted, ops)}")


def _running_names(ops: Iterable[Op]) -> Counter[str]:
    return Counter(str(op.func.overloadpacket) for op in ops if op.run is not None)


def _advice(wanted: str, ops: Sequence[Op]) -> str:
    names = _running_names(ops)
    nearest = difflib.get_close_matches(wanted, [*names, *(str(op.func) for op in ops if op.run is not None)], n=1, cutoff=0.6)
    return (f"did you mean {nearest[0]}? " if nearest else "") + f"the tape has {_listing(names)}"


def _listing(names: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in sorted(names.items()))
