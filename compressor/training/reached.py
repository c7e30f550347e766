"""The Python variables that a step's functions reach: what they close over, their defaults, and the globals they name.

A replay runs no Python. So a counter in a closure would stand still, and a flag that changes between steps would not be seen: the guards
compare these variables like any other fact. Functions are followed into the functions they reach, modules and classes are not.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MAX_ITEMS = 64
Getter = Callable[[], object]


class Same:
    """Equal to itself alone; holds the object, so that its identity is not given to another.

    Args:
        thing: the object.
    """

    __slots__ = ("_object",)

    def __init__(self, thing: object) -> None:
        self._object = thing

    def __eq__(self, other: object) -> bool:
        """Compare by identity."""
        return isinstance(other, Same) and self._object is other._object

    def __hash__(self) -> int:
        """Hash the identity."""
        return id(self._object)

    def __repr__(self) -> str:
        """Name what it is, without an address."""
        return str(getattr(self._object, "__qualname__", type(self._object).__name__))


def frozen(value: object) -> object:
    """Return what can be compared later: numbers and strings by value, small containers by their content, the rest by identity.

    Args:
        value: anything.

    Returns:
        A value that later changes of `value` do not reach.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple) and len(value) <= _MAX_ITEMS:
        return (type(value).__name__, *map(frozen, value))
    if isinstance(value, dict) and len(value) <= _MAX_ITEMS:
        return ("dict", *((frozen(key), frozen(item)) for key, item in value.items()))
    if isinstance(value, list | dict):
        return (type(value).__name__, len(value))
    return Same(value)


def variables(loss_fn: object, model: nn.Module) -> list[tuple[str, Getter]]:
    """List the variables that the loss function, and functions kept by modules, reach.

    Args:
        loss_fn: a function, a method, or an object with attributes.
        model: the model; its attributes that are functions count.

    Returns:
        Name for messages, and a function that gives the value of the moment.
    """
    roots: list[tuple[str, Any]] = [("loss_fn", loss_fn)]
    for name, module in model.named_modules():
        roots += [(f"attribute '{key}' of {name or 'the model'}", value) for key, value in module.__dict__.items() if _is_function(value)]
    found: list[tuple[str, Getter]] = []
    seen: set[int] = set()
    for name, root in roots:
        if not _is_function(root):
            values = getattr(root, "__dict__", {})
            found += [(f"attribute '{key}' of {name}", partial(values.get, key)) for key in values]
            root = type(root).__call__ if callable(root) else None
        found += _reach(root, name, seen)
    return found


def _is_function(value: object) -> bool:
    return isinstance(value, FunctionType | MethodType)


def _reach(function: object, name: str, seen: set[int]) -> Iterator[tuple[str, Getter]]:
    if isinstance(function, MethodType):
        function = function.__func__
    if not isinstance(function, FunctionType) or id(function) in seen or function.__module__.startswith("torch."):
        return
    seen.add(id(function))
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield from _found(f"variable '{variable}' that {name} closes over", partial(_content, cell), seen)
    for number, default in enumerate(function.__defaults__ or ()):
        yield from _found(f"default {number} of {name}", partial(_itself, default), seen)
    space = function.__globals__
    for variable in sorted(_global_names(function.__code__) & space.keys()):
        yield from _found(f"global '{variable}' that {name} reads", partial(space.get, variable), seen)


def _found(name: str, getter: Getter, seen: set[int]) -> Iterator[tuple[str, Getter]]:
    value = getter()
    if isinstance(value, ModuleType | type | nn.Module):
        return
    yield name, getter
    if _is_function(value):
        yield from _reach(value, str(getattr(value, "__qualname__", name)), seen)


def _global_names(code: CodeType) -> set[str]:
    names = {str(step.argval) for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(_global_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that was never set
        return None


def _itself(value: object) -> object:
    return value
