"""Values that flow through a forward, by what they say: a forward makes caches and functions anew each time it runs."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from harness.lifecycle.driving.snapshot import MAX_DEPTH, freeze


def flowing(value: object, depth: int = MAX_DEPTH, above: tuple[int, ...] = ()) -> object:
    """Return something that stays as it is and equals what another forward of the same values gives.

    Objects are compared by their type and attributes and functions by their code, where `freeze` compares both by identity: a KV cache
    is another object in every forward.

    Args:
        value: anything; not modified.
        depth: how far containers and objects are followed.
        above: objects around the value, so that a cycle ends.

    Returns:
        Plain data, copies of tensors, and identities of modules and types.
    """
    if isinstance(value, Tensor | nn.Module | type):
        return freeze(value)
    if depth == 0 or id(value) in above:
        return _type_of(value)
    below = (*above, id(value))
    if isinstance(value, Mapping):
        return {_key(key): flowing(item, depth - 1, below) for key, item in value.items()} | {"its type": _type_of(value)}
    if isinstance(value, list | tuple):
        return [_type_of(value), *(flowing(item, depth - 1, below) for item in value)]
    if isinstance(value, set | frozenset):
        return {_key(item) for item in value}
    if callable(value) or hasattr(value, "__dict__") or hasattr(value, "__slots__"):
        return [_type_of(value), *(flowing(part, depth - 1, below) for part in _parts(value))]
    frozen = freeze(value)
    return frozen if isinstance(frozen, type(value)) or isinstance(value, float) else _type_of(value)


def _parts(value: Any) -> tuple[object, ...]:
    """What an object or function is made of."""
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.FunctionType):
        cells = tuple(cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType())
        return value.__code__.co_filename, value.__code__.co_firstlineno, value.__defaults__, cells
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if hasattr(value, name)]
    return getattr(value, "__dict__", {}), {name: getattr(value, name) for name in slots if name != "__dict__"}


def _key(key: object) -> str:
    """A name for a key: objects without a text of their own show their address in it."""
    text = repr(key)
    return _type_of(key) if " at 0x" in text else text


def _type_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
