"""Numbers that remember where they came from: sizes and `.item()` values of a recorded forward.

They are subclasses of torch.SymInt and torch.SymFloat, never of int: C code would read an int's value without a word. Arithmetic stays
symbolic and becomes nodes; whatever needs the number itself (a comparison, an index, range, a dictionary, formatting) asks for it by a
method, and that is where a guard is recorded.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import fx


class NumberRecorder(Protocol):
    """What a symbolic number needs of the recorder that made it."""

    def compute(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Record a computation on numbers and return its symbolic result."""

    def decide(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Record a computation and a guard on its result; return the plain result."""

    def pin(self, node: fx.Node, value: Any) -> None:
        """Record a guard on a value that Python is about to use."""


class Symbolic:
    """A number with the node that computes it. Looks like an int or float to isinstance."""

    def __init__(self, value: Any, node: fx.Node, recorder: NumberRecorder) -> None:
        """Keep value, node and recorder; the base classes of torch are not initialized, nothing of theirs is used."""
        self.value = value
        self.source = node
        self.recorder = recorder

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The type of the plain number, for isinstance."""
        return type(self.value)

    def pinned(self) -> Any:
        """Return the plain number, under a guard."""
        self.recorder.pin(self.source, self.value)
        return self.value

    def __getattr__(self, name: str) -> Any:
        """Give what a plain number has (`real`, `bit_length`), under a guard."""
        if name in ("value", "source", "recorder", "node") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.pinned(), name)

    def __int__(self) -> int:
        """Return the plain number as an int, under a guard."""
        return int(self.pinned())

    def __float__(self) -> float:
        """Return the plain number as a float, under a guard."""
        return float(self.pinned())

    def __complex__(self) -> complex:
        """Return the plain number as a complex number, under a guard."""
        return complex(self.pinned())

    def __hash__(self) -> int:
        """Hash the plain number, under a guard: it is about to be a key."""
        return hash(self.pinned())

    def __bool__(self) -> bool:
        """Decide whether the number is not zero, under a guard on that."""
        return bool(self.recorder.decide(operator.truth, (self,)))

    def __repr__(self) -> str:
        """Show the plain number, under a guard: text steers programs, too."""
        return repr(self.pinned())

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        """Format the plain number, under a guard."""
        return format(self.pinned(), spec)

    def __divmod__(self, other: Any) -> Any:
        """Divide with a rest; both stay symbolic."""
        number: Any = self
        return number // other, number % other

    def __copy__(self) -> Symbolic:
        """Return itself: numbers do not change."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Symbolic:
        """Return itself: numbers do not change."""
        return self

    def __reduce__(self) -> Any:
        """Pickle as the plain number, under a guard."""
        return type(self.value), (self.pinned(),)


class SymbolicInt(Symbolic, torch.SymInt):
    """A whole number: a size, a count, the value of an integer tensor."""

    def __index__(self) -> int:
        """Return the plain number, under a guard: it becomes an index, a range, a length."""
        return int(self.pinned())

    def is_integer(self) -> bool:
        """Return True."""
        return True


class SymbolicFloat(Symbolic, torch.SymFloat):
    """A real number: a quotient of sizes, the value of a float tensor."""

    def is_integer(self) -> bool:
        """Decide whether the number is whole, under a guard on that."""
        return bool(self.recorder.decide(_is_integer, (self,)))


def _is_integer(value: float) -> bool:
    """Say whether a number is whole."""
    return float(value).is_integer()


def is_symbolic(value: Any) -> bool:
    """Say whether a value is a symbolic number.

    Args:
        value: anything; isinstance would see a plain number.

    Returns:
        True for SymbolicInt and SymbolicFloat.
    """
    return issubclass(type(value), Symbolic)


def plain(value: Any) -> Any:
    """Take the number out of a symbolic one, without a guard.

    Args:
        value: anything.

    Returns:
        The plain number, or the value as it is.
    """
    return value.value if is_symbolic(value) else value


_BINARY = {
    name: getattr(operator, f"{name}_" if name in ("and", "or") else name)
    for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
}
_UNARY: dict[str, Callable[..., Any]] = {
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": operator.abs,
    "invert": operator.invert,
    "ceil": math.ceil,
    "floor": math.floor,
    "trunc": math.trunc,
    "round": round,
}
_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Symbolic, other: Any) -> Any:
        if isinstance(other, int | float):
            return self.recorder.compute(function, (self, other))
        return function(self.pinned(), other) if isinstance(other, list | tuple | str | bytes) else NotImplemented

    return method


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Symbolic, other: Any) -> Any:
        if isinstance(other, int | float):
            return self.recorder.compute(function, (other, self))
        return function(other, self.pinned()) if isinstance(other, list | tuple | str | bytes) else NotImplemented

    return method


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: self.recorder.compute(function, (self, *args))


def _comparison(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Symbolic, other: Any) -> Any:
        return self.recorder.decide(function, (self, other)) if isinstance(other, int | float) else NotImplemented

    return method


for _class in (SymbolicInt, SymbolicFloat):
    for _name, _function in _BINARY.items():
        setattr(_class, f"__{_name}__", _forward(_function))
        setattr(_class, f"__r{_name}__", _reflected(_function))
    for _name, _function in _UNARY.items():
        setattr(_class, f"__{_name}__", _unary(_function))
    for _name, _function in _COMPARISONS.items():
        setattr(_class, f"__{_name}__", _comparison(_function))
