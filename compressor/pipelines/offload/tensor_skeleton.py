"""Any nested value as a skeleton and the tensors that were in it, so that the tensors can be kept elsewhere.

Containers and objects are copied by the protocol that `copy.deepcopy` uses, so dataclasses, outputs and caches of transformers come back
with their class and with every object in each of its places. What has no content that could be copied (functions, modules, marker
objects, generators, locks) is kept by reference.
"""

from __future__ import annotations

import copyreg
import enum
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compressor.errors import CalibrationError

_AS_IT_IS = (
    *(type(None), bool, int, float, complex, str, bytes, type, enum.Enum, range, slice),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.GeneratorType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator, nn.Module),
)
_NOT_COPYABLE = (TypeError, ValueError, AttributeError, NotImplementedError)  # what objects raise that cannot be pickled


class Slot:
    """Stands in a skeleton where a tensor was."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        """Remember the number of the tensor."""
        self.index = index


class _Reference:
    """Stands in a skeleton where an object is that is kept as it is."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Parts(NamedTuple):
    """A value taken apart; `skeleton` holds slots for `tensors`, each tensor object once."""

    skeleton: Any
    tensors: list[Tensor]


def take_apart(value: Any, by_reference: Callable[[Any], bool] = lambda value: False) -> Parts:
    """Separate a value from the tensors in it.

    Args:
        value: any object; not modified.
        by_reference: says which further objects are to be kept as they are.

    Returns:
        The skeleton, which shares nothing that could change with the value but what is kept by reference, and the tensors.
    """
    tensors: list[Tensor] = []

    def slot(leaf: Any) -> Slot:
        tensors.append(leaf)
        return Slot(len(tensors) - 1)

    return Parts(_Copier(Tensor, slot, _Reference, by_reference).copy(value), tensors)


def put_together(skeleton: Any, tensors: list[Tensor]) -> Any:
    """Build the value again; the opposite of `take_apart`.

    Args:
        skeleton: of `take_apart`; not modified, so that it can be used again.
        tensors: what goes into its slots.

    Returns:
        A new value.

    Raises:
        CalibrationError: an object takes slots, but not tensors.
    """

    def fill(leaf: Any) -> Any:
        return leaf.value if isinstance(leaf, _Reference) else tensors[leaf.index]

    return _Copier((Slot, _Reference), fill, _refuse, lambda value: False).copy(skeleton)


def _refuse(value: Any) -> Any:
    raise CalibrationError(f"{type(value).__name__}: it can be copied without its tensors, but not with them; keep it by reference")


class _Copier:
    """Copies one graph of objects: `leaf` says what becomes of the kinds in `leaves`, `refer` what of an object that is not copied."""

    def __init__(
        self,
        leaves: type | tuple[type, ...],
        leaf: Callable[[Any], Any],
        refer: Callable[[Any], Any],
        by_reference: Callable[[Any], bool],
    ) -> None:
        self._leaves, self._leaf, self._refer, self._by_reference = leaves, leaf, refer, by_reference
        self._known: dict[int, tuple[Any, Any]] = {}  # by id: the original, which keeps its id alive, and its copy

    def copy(self, value: Any) -> Any:
        if isinstance(value, _AS_IT_IS):
            return value
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        if isinstance(value, self._leaves):
            return self._keep(value, self._leaf(value))
        build = _BUILDERS.get(type(value))
        if build is not None:
            return build(self, value)
        return self._keep(value, self._refer(value)) if self._by_reference(value) else self._copy_object(value)

    def _keep(self, value: Any, copied: Any) -> Any:
        self._known[id(value)] = (value, copied)
        return copied

    def _copy_list(self, value: list[Any]) -> list[Any]:
        copied: list[Any] = self._keep(value, [])
        copied.extend(self.copy(item) for item in value)
        return copied

    def _copy_dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        copied: dict[Any, Any] = self._keep(value, {})
        for key, item in value.items():
            copied[self.copy(key)] = self.copy(item)
        return copied

    def _copy_set(self, value: set[Any]) -> set[Any]:
        copied: set[Any] = self._keep(value, set())
        copied.update(self.copy(item) for item in value)
        return copied

    def _copy_tuple(self, value: tuple[Any, ...]) -> Any:
        items = tuple(self.copy(item) for item in value)
        known = self._known.get(id(value))  # a list inside may hold this tuple, and have copied it by now
        return known[1] if known is not None else self._keep(value, items)

    def _copy_frozenset(self, value: frozenset[Any]) -> frozenset[Any]:
        return self._keep(value, frozenset(self.copy(item) for item in value))

    def _copy_method(self, value: types.MethodType) -> Any:
        return self._keep(value, types.MethodType(value.__func__, self.copy(value.__self__)))

    def _copy_object(self, value: Any) -> Any:
        try:
            reduced = value.__reduce_ex__(4)
            if isinstance(reduced, str) or not _has_content(reduced):
                return self._keep(value, self._refer(value))
            return self._rebuild(value, *reduced)
        except _NOT_COPYABLE:
            return self._keep(value, self._refer(value))

    def _rebuild(self, value: Any, make: Callable[..., Any], args: Any, state: Any = None, items: Any = None, pairs: Any = None) -> Any:
        made = make(*(self.copy(arg) for arg in args))
        self._keep(value, made)
        if state is not None:
            _set_state(made, self.copy(state))
        for item in items or ():
            made.append(self.copy(item))
        for key, item in pairs or ():
            made[self.copy(key)] = self.copy(item)
        return made


def _has_content(reduced: tuple[Any, ...]) -> bool:
    """False for an object that is nothing but itself, such as `object()` as a marker: only its identity means anything."""
    make, args, *rest = reduced
    return any(part is not None for part in rest) or make is not copyreg.__newobj__ or len(args) > 1  # type: ignore[attr-defined]


def _set_state(made: Any, state: Any) -> None:
    """As the protocol of pickling says: attributes as a dict, or as a pair of a dict and the slots."""
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if attributes:
        made.__dict__.update(attributes)
    for name, item in (slots or {}).items():
        object.__setattr__(made, name, item)


_BUILDERS: dict[type, Callable[[_Copier, Any], Any]] = {
    list: _Copier._copy_list,
    dict: _Copier._copy_dict,
    set: _Copier._copy_set,
    tuple: _Copier._copy_tuple,
    frozenset: _Copier._copy_frozenset,
    types.MethodType: _Copier._copy_method,
}
