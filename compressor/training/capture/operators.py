"""Operators of a step: as they were recorded, with extents of storages for operands, and as a tape repeats them, with tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from compressor.training.step.collectives import COLLECTIVE_WRITES

# What stands in the arguments of an operator: in tuples, lists and dicts of exactly these types, of which no schema has others.
#
# `torch.utils._pytree` asks every leaf a dozen times what it is, which was a fifth of the time of a capture.


def operands(arguments: Any) -> list[Any]:
    """List what stands in arguments, however deep, in their order.

    Args:
        arguments: of an operator.

    Returns:
        Tensors, numbers, None and whatever else is no tuple, list or dict.
    """
    kind = type(arguments)
    if kind is tuple or kind is list:
        return [leaf for part in arguments for leaf in operands(part)]
    if kind is dict:
        return [leaf for part in arguments.values() for leaf in operands(part)]
    return [arguments]


def with_operands(arguments: Any, change: Callable[[Any], Any]) -> Any:
    """Make arguments of the same form with other operands.

    Args:
        arguments: of an operator; not changed.
        change: gives the operand in the place of one.

    Returns:
        New tuples, lists and dicts.
    """
    kind = type(arguments)
    if kind is tuple or kind is list:
        return kind([with_operands(part, change) for part in arguments])
    if kind is dict:
        return {key: with_operands(part, change) for key, part in arguments.items()}
    return change(arguments)


class Kind(StrEnum):
    """How an operator is repeated."""

    VIEW = "view"  # not at all: it only made an alias
    ALLOCATE = "allocate"  # not at all: the storage stays
    MUTATE = "mutate"  # called again
    OUT = "out"  # through its out= overload
    COPY = "copy"  # called again, then the result is copied
    CHECK = "check"  # called again; it returns nothing


IDLE = frozenset({Kind.VIEW, Kind.ALLOCATE})
ALLOCATIONS = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
)
# Batch norms change their running statistics without saying so in their schemas.
_STATISTICS = frozenset({"running_mean", "running_var"})
HIDDEN_WRITES = {
    f"aten::{name}": _STATISTICS for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
} | COLLECTIVE_WRITES


@dataclass(frozen=True, slots=True)
class Extent:
    """What a tensor shows of a storage that the step makes; the storage itself may be gone.

    Attributes:
        storage: its number.
        dtype: of the elements.
        offset: of the first element.
        size: the shape.
        stride: its strides.
        is_conj: the values are to be conjugated when they are read.
        is_neg: the values are to be negated when they are read.
    """

    storage: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor, storage: int) -> Extent:
        """Describe a tensor.

        Args:
            tensor: a dense tensor.
            storage: the number of its storage.

        Returns:
            What is needed to make it again.
        """
        offset, size, stride = int(tensor.storage_offset()), tensor.size(), tensor.stride()
        return cls(storage, tensor.dtype, offset, size, stride, tensor.is_conj(), tensor.is_neg())

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Make the tensor on a storage.

        Args:
            storage: at least as large as the recorded one.

        Returns:
            The tensor, without a graph.
        """
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if self.is_conj:
            torch._C._set_conj(tensor, True)
        if self.is_neg:
            torch._C._set_neg(tensor, True)
        return tensor


@dataclass(slots=True)
class Record:
    """One operator of a step as it was seen.

    Attributes:
        index: its position.
        func: the overload that was called.
        args: its arguments; tensors of the step as extents, those that stay as detached aliases.
        kwargs: its keyword arguments, likewise.
        outs: the tensors that it returned, likewise.
        fresh: for each of them, whether the operator made its storage.
        kind: how it is repeated.
        phase: the phase of the step.
        module: dotted name of the module that called it, or whose backward it is; "" where there is none.
        line: the operator as one line of the signature.
        seeded: it draws random numbers.
        grad_mode: whether gradients were enabled.
    """

    index: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[Any]
    fresh: list[bool]
    kind: Kind
    phase: str
    module: str
    line: str
    seeded: bool
    grad_mode: bool

    @property
    def place(self) -> str:
        """Where the operator stands, for messages."""
        return spell_place(self.index, self.phase, self.module, self.func)


@dataclass(slots=True)
class Op(Record):
    """One operator of a tape. Its operands are tensors on the tape's memory, which hold its values when it runs and may hold others later.

    Attributes:
        run: repeats it; None where nothing is to be done.
    """

    run: Callable[[], object] | None = None

    def written(self) -> list[Tensor]:
        """Return the outputs and the arguments that the operator writes."""
        return [*self.outs, *written_arguments(self.func, self.args, self.kwargs)]


def spell_place(index: int, phase: str, module: str, func: object) -> str:
    """Spell where an operator stands.

    Args:
        index: its position in the step.
        phase: the phase of the step.
        module: dotted name of its module, or "".
        func: the overload.

    Returns:
        For example `op 12 (forward, layers.0.mlp): aten.mm.default`.
    """
    return f"op {index} ({phase}{', ' + module if module else ''}): {func}"


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that an operator writes, whether its schema says so or not.

    Args:
        func: the overload.
        args: its arguments.
        kwargs: its keyword arguments.

    Returns:
        Tensors, in the order of the schema.
    """
    values = {argument.name: args[i] if i < len(args) else kwargs.get(argument.name) for i, argument in enumerate(func._schema.arguments)}
    # A layer in eval mode reads its statistics only, as a teacher's does.
    hidden = HIDDEN_WRITES.get(func._schema.name, frozenset()) if values.get("training", True) else frozenset()
    found: list[Tensor] = []
    for argument in func._schema.arguments:
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in hidden:
            found += [leaf for leaf in operands(values[argument.name]) if isinstance(leaf, Tensor)]
    return found
