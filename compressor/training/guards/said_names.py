"""What the code of functions says: which attributes, globals and methods it names."""

from __future__ import annotations

import dis
import inspect
from functools import cached_property, lru_cache, partialmethod
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from compressor.training.guards.frozen_value import is_foreign

ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM")
GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
_NEAR = 4  # calls from one function to the next
# Where code says one of these, the texts that it holds may be names.
_LOOKUPS = frozenset({"globals", "vars", "getattr", "__dict__", "attrgetter", "itemgetter", "import_module", "__import__", "modules"})
AROUND = (MethodType, classmethod, staticmethod, property, cached_property, partialmethod)


def methods(cls: type, name: str) -> list[FunctionType]:
    """Follow a method into the methods of the same class whose names it says.

    Args:
        cls: the class.
        name: the method's name.

    Returns:
        The functions, the method's own first; those of libraries are left out.
    """
    found: dict[str, FunctionType] = {}
    names, seen = [name], {name}
    while names:
        function = behind(getattr(cls, names.pop(), None))
        if isinstance(function, FunctionType) and not is_foreign(home(function)):
            found[function.__qualname__] = function
            new = said_by(function.__code__, ATTRIBUTES) - seen
            names += sorted(new, reverse=True)
            seen |= new
    return list(found.values())


def behind(value: object) -> Any:
    """Give the function behind a method, a property or a decorator.

    Args:
        value: what a class holds, or anything.

    Returns:
        The function; anything else is given back.
    """
    value = within(value)
    return inspect.unwrap(value) if callable(value) else value


def within(value: object) -> Any:
    """Give the function that a method, a property or their like stands around, with its own decorators on.

    Args:
        value: what a class holds, or anything.

    Returns:
        The function; anything else is given back.
    """
    for way in ("__func__", "fget", "func"):
        value = getattr(value, way, value) if isinstance(value, AROUND) else value
    return value


def home(function: FunctionType) -> str:
    """Name the module whose code a function runs; a decorator of torch takes over the name of what it wraps, but not its globals.

    Args:
        function: the function.

    Returns:
        The module's name.
    """
    return str(function.__globals__.get("__name__"))


def said_within(function: FunctionType) -> frozenset[str]:
    """List the attributes that a function names, and those named by functions near it: it may hand them what it holds.

    Args:
        function: the function.

    Returns:
        Names.
    """
    passed: dict[int, FunctionType] = {}
    level = [function]
    for _ in range(_NEAR):
        level = [one for one in level if id(one) not in passed and not is_foreign(home(one))]
        passed |= {id(one): one for one in level}
        named = [(one.__globals__, said_by(one.__code__, GLOBALS)) for one in level]
        held = [content for one in level for content in map(content_of, one.__closure__ or ())]
        held += [space.get(name) for space, names in named for name in names]
        level = [value for value in held if isinstance(value, FunctionType)]
    return frozenset().union(*(said_by(one.__code__, ATTRIBUTES) for one in passed.values()))


@lru_cache(maxsize=4096)
def said_by(code: CodeType, operations: tuple[str, ...]) -> frozenset[str]:
    """List the names that code, and the code within it, says in some operations.

    Args:
        code: the code.
        operations: names of operations.

    Returns:
        Names.
    """
    names = frozenset(str(step.argval) for step in dis.get_instructions(code) if step.opname in operations)
    if not _LOOKUPS.isdisjoint(code.co_names):
        names |= {constant for constant in code.co_consts if isinstance(constant, str)}
    return names.union(*(said_by(inner, operations) for inner in code.co_consts if isinstance(inner, CodeType)))


def content_of(cell: CellType) -> object:
    """Give what a variable of a closure holds.

    Args:
        cell: the variable.

    Returns:
        The value; None for one that was never set.
    """
    try:
        return cell.cell_contents
    except ValueError:
        return None
