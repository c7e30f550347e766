"""Puts another implementation in the place of an operator of the tape, and calls it with every mistake of its author named.

The calling convention is one for the variant and for its control: compute, then copy into the storages that the tape has for the result.
An operator that writes into its arguments is exchanged by a function that does so, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_leaves

from compressor.errors import CompressorError, UserInputError
from compressor.spelling import did_you_mean
from compressor.training.capture.operators import Op, written_arguments
from compressor.training.engines.tape import Tape

# The bytes that tensors span in their storages: kept, compared and put back, whatever strides, dtypes and aliases there are.


def _length(tensor: Tensor) -> int:
    """Count the bytes from the first of a tensor to its last."""
    if tensor.numel() == 0:
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _bytes_of(tensor: Tensor) -> Tensor:
    begin = tensor.storage_offset() * tensor.element_size() if tensor.numel() else 0
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), begin, (_length(tensor),), (1,))


def first_byte(tensor: Tensor) -> Tensor:
    """Return the first byte of a tensor's first element, as a view; on a little-endian machine its lowest."""
    return _bytes_of(tensor)[:1]


def overlap(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors span a byte in common. Their addresses tell: storages of a tape are cut from one memory.

    Args:
        one: a dense tensor.
        other: another.

    Returns:
        True also where strides keep them apart within a common span.
    """
    if one.device != other.device:
        return False
    begin, other_begin = one.data_ptr(), other.data_ptr()
    return max(begin, other_begin) < min(begin + _length(one), other_begin + _length(other))


def overlaps_any(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    """Say whether a tensor overlaps one of many.

    Args:
        tensor: a dense tensor.
        others: those to look at.

    Returns:
        True where one does.
    """
    return any(overlap(tensor, other) for other in others)


@dataclass(frozen=True)
class Kept:
    """Copies of the bytes of some tensors.

    Attributes:
        tensors: the tensors.
        copies: their bytes, uint8.
    """

    tensors: Sequence[Tensor]
    copies: Sequence[Tensor]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Kept:
        """Copy the bytes.

        Args:
            tensors: dense tensors.

        Returns:
            The copies.
        """
        return cls(tensors, [_bytes_of(tensor).clone() for tensor in tensors])

    def put_back(self) -> None:
        """Write the bytes back. Changes the tensors."""
        for tensor, copy in zip(self.tensors, self.copies, strict=True):
            _bytes_of(tensor).copy_(copy)

    def changed(self) -> list[int]:
        """List the positions of the tensors whose bytes are others now."""
        pairs = zip(self.tensors, self.copies, strict=True)
        return [number for number, (tensor, copy) in enumerate(pairs) if not torch.equal(_bytes_of(tensor), copy)]


# Which operators of a tape are meant: by name, by overload, or by a predicate.

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
    known = [*names, *(str(op.func) for op in ops if op.run is not None)]
    return f"{did_you_mean(wanted, known, show=str)}the tape has {_listing(names)}"


def _listing(names: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in sorted(names.items()))


Variant = Callable[..., Any]
# Its workspace exists only where gradients are enabled, which the tape's own `run` sees to.
_ASKS_GRAD_MODE = frozenset({"aten::mkldnn_rnn_layer"})


def tensor_arguments(op: Op) -> list[Tensor]:
    """List the tensors that an operator is given, each once."""
    leaves = [leaf for leaf in tree_leaves((op.args, op.kwargs)) if isinstance(leaf, Tensor)]
    return list({id(leaf): leaf for leaf in leaves}.values())


def written(op: Op) -> list[Tensor]:
    """List the arguments that an operator writes."""
    return written_arguments(op.func, op.args, op.kwargs)


def targets(op: Op) -> list[tuple[int, Tensor]]:
    """List the results that are copied to the tape: their positions among the results, and where they belong."""
    return [(position, out) for position, (out, fresh) in enumerate(zip(op.outs, op.fresh, strict=True)) if fresh]


def results_of(value: object) -> list[Tensor]:
    """List the tensors among what an implementation returned."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def exchanged(op: Op, function: Variant) -> Callable[[], object]:
    """Return what the tape is to run instead: compute and copy, without a check.

    Args:
        op: the operator.
        function: takes its arguments, and gives its results or writes into the arguments that the operator writes.

    Returns:
        A function for `op.run`.
    """
    args, kwargs, into = op.args, op.kwargs, targets(op)
    if not into:
        return lambda: function(*args, **kwargs)
    if len(op.outs) == 1:
        only = op.outs[0]
        return lambda: only.copy_(function(*args, **kwargs))

    def run() -> None:
        results = results_of(function(*args, **kwargs))
        for position, out in into:
            out.copy_(results[position])

    return run


def wrapped_original(op: Op) -> Callable[[], object]:
    """Return the control: the operator's own implementation in the variant's calling convention."""
    if op.func._schema.name in _ASKS_GRAD_MODE:
        assert op.run is not None
        return op.run
    return exchanged(op, op.func._op)


@contextmanager
def swapped(tape: Tape, runs: Mapping[int, Callable[[], object]]) -> Iterator[None]:
    """Let a tape run other implementations for the time of a block. The tape is as before afterwards, also after an error.

    Args:
        tape: changed within the block.
        runs: by the operators' positions.

    Yields:
        Nothing.
    """
    kept = {index: tape.ops[index].run for index in runs}
    try:
        for index, run in runs.items():
            tape.ops[index].run = run
        tape.relink()
        yield
    finally:
        for index, original in kept.items():
            tape.ops[index].run = original
        tape.relink()


def checked_call(op: Op, variant: Variant, name: str) -> list[Tensor]:
    """Call a variant on an operator's arguments as they lie on the tape, and name what its author got wrong.

    Args:
        op: the operator.
        variant: the implementation.
        name: of the variant, for messages.

    Returns:
        Its results, as many as the operator has; of one that writes into its arguments possibly none.

    Raises:
        UserInputError: it raised, changed an argument, or gave something that cannot take the place of the operator's result.
    """
    where = f"{op.place}: variant {name}"
    given, writes = tensor_arguments(op), written(op)
    inputs = Kept.of([tensor for tensor in given if not overlaps_any(tensor, writes)])
    with _Naming(where):
        value = variant(*op.args, **op.kwargs)
    changed = inputs.changed()
    if changed:
        inputs.put_back()
        number = next(k for k, tensor in enumerate(given) if tensor is inputs.tensors[changed[0]])
        raise UserInputError(f"{where} changed its tensor argument {number} in place, which the op leaves alone; work on a clone")
    if not targets(op):
        _refuse_new_results(value, writes, where)
        return []
    return _fitting(op, value, given, where)


def _refuse_new_results(value: object, writes: list[Tensor], where: str) -> None:
    for result in results_of(value):
        if not overlaps_any(result, writes) and result.numel():
            raise UserInputError(
                f"{where} returned a new tensor, but the op gives its result in its argument; write there with copy_, and return nothing"
            )


def _fitting(op: Op, value: object, given: list[Tensor], where: str) -> list[Tensor]:
    results = results_of(value)
    if len(op.outs) == 1 and not isinstance(value, Tensor):
        raise UserInputError(f"{where} returned {_spell_value(value)}, and the op returns one tensor; return a tensor")
    if len(results) != len(op.outs):
        raise UserInputError(
            f"{where} returned {_spell_value(value)}, and the op returns {len(op.outs)}; return them all, in the op's order"
        )
    for position, out in targets(op):
        _refuse_misfit(results[position], out, f"{where}, result {position}" if len(results) > 1 else where)
        if any(_shares(results[position], tensor) for tensor in given):
            raise UserInputError(f"{where} returned a view of one of its arguments, which the op does not; return a tensor of its own")
    return results


def _shares(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata or overlap(one, other)


def _refuse_misfit(result: Tensor, out: Tensor, where: str) -> None:
    if result.layout is not out.layout:
        raise UserInputError(f"{where} returned a tensor of layout {result.layout} for one of {out.layout}; return a dense tensor")
    for what, got, wanted in (
        ("shape", list(result.shape), list(out.shape)),
        ("dtype", result.dtype, out.dtype),
        ("device", result.device, out.device),
    ):
        if got != wanted:
            raise UserInputError(f"{where} returned {what} {got}, and the op returns {wanted}; give what the op gives")


def _spell_value(value: object) -> str:
    if isinstance(value, Tensor):
        return "1 tensor"
    if isinstance(value, list | tuple):
        tensors = len(results_of(value))
        return f"a {type(value).__name__} of {tensors} tensor{'' if tensors == 1 else 's'}"
    return "nothing" if value is None else type(value).__name__


class _Naming:
    """Says of whatever a variant raises where it did so."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Turn an error of the variant into one that names it; what is no error, such as an interruption, passes."""
        if isinstance(error, Exception) and not isinstance(error, CompressorError):
            text = " ".join(str(error).split())
            raise UserInputError(
                f"{self._where} raised {type(error).__name__}: {text}; it is called with the arguments of the op, see its schema"
            ) from error


def device_of(op: Op) -> torch.device:
    """Return where an operator works."""
    tensors = [*op.outs, *tensor_arguments(op)]
    return tensors[0].device if tensors else torch.device("cpu")
