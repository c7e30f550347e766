"""What the classes of a modifier hold, and the files they stand in: what a run changes there, every other run sees."""

from __future__ import annotations

import copy
import sys
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
from torch import Tensor

from compressor.lifecycle import Modifier
from harness.lifecycle.driving.callback_recorder import recorded_class
from harness.lifecycle.driving.snapshot import Same, freeze

# Nobody's own: what these keep on a class is theirs to change.
_FOREIGN = frozenset({"builtins", "pydantic", "abc", "typing", "typing_extensions"})
_SLICED = list | UserList | bytearray | array  # a slice of them can be written
_FILLED = dict | UserDict | set | deque
_PLAIN = None | bool | int | float | str | bytes | tuple | frozenset | Tensor | numpy.ndarray | _SLICED | _FILLED
_MISSING = object()


def frozen_class_values(modifier: Modifier) -> dict[str, object]:
    """Freeze what the classes of a modifier hold, methods included, and the plain data in the files of those below Modifier.

    Args:
        modifier: not recorded.

    Returns:
        By class or file and name. What a callback sets on `type(self)` stands there, since a recorded modifier has a class of its own.
    """
    return {f"{label}.{name}": _frozen(value) for label, owner in _owners(modifier) for name, value in _values(owner).items()}


@contextmanager
def class_values_kept(modifier: Modifier) -> Iterator[None]:
    """Leave what `frozen_class_values` looks at as it was, but for the numbers in tensors.

    Args:
        modifier: not recorded.

    Yields:
        Nothing.
    """
    kept = [(owner, {name: (value, _contents(value)) for name, value in _values(owner).items()}) for _, owner in _owners(modifier)]
    try:
        yield
    finally:
        for owner, values in kept:
            for name in _values(owner).keys() - values.keys():
                delattr(owner, name)
            for name, (value, contents) in values.items():
                _put_back(owner, name, value, contents)


def _owners(modifier: Modifier) -> list[tuple[str, Any]]:
    recorded, *own = recorded_class(type(modifier)).__mro__
    classes = [cls for cls in own if cls.__module__.partition(".")[0] not in _FOREIGN]
    files = dict.fromkeys(cls.__module__ for cls in classes if issubclass(cls, Modifier) and cls is not Modifier)
    loaded = [(name, sys.modules[name]) for name in files if name in sys.modules]  # a file may be run without being put there
    return [("type(self)", recorded), *((cls.__qualname__, cls) for cls in classes), *loaded]


def _values(owner: Any) -> dict[str, object]:
    """What counts: not what Python and pydantic keep under names of their own, and of a file plain data only."""
    names = {name: value for name, value in vars(owner).items() if not name.startswith("__") and name != "_abc_impl"}
    if not isinstance(owner, type):
        return {name: value for name, value in names.items() if isinstance(value, _PLAIN)}
    return {**names, "__doc__": owner.__doc__}


def _frozen(value: object) -> object:
    return freeze(value) if isinstance(value, _PLAIN) else Same(value)


def _contents(value: object) -> Any:
    if isinstance(value, dict | UserDict):
        return dict(value)  # a copy may ask for more, or load lazily
    return copy.copy(value) if isinstance(value, _SLICED | set | deque | numpy.ndarray) else None


def _put_back(owner: Any, name: str, value: Any, contents: Any) -> None:
    if vars(owner).get(name, _MISSING) is not value:
        setattr(owner, name, value)
    if isinstance(value, numpy.ndarray):
        if value.flags.writeable:
            value[...] = contents
    elif isinstance(value, _SLICED):
        value[:] = contents
    elif isinstance(value, _FILLED):
        value.clear()
        (value.extend if isinstance(value, deque) else value.update)(contents)
