"""Replace a function everywhere it is held: in modules, closures, defaults, partials, static methods and containers.

A native function cannot be changed in place, and third-party code may have taken hold of it long ago (`from m import f`, a default
argument, `functools.partial`). The garbage collector knows every holder. Replacing back is the same call with its arguments swapped.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable
from typing import Any


def replace_everywhere(old: Callable[..., Any], new: Callable[..., Any], *, keep: dict[int, Any]) -> list[Any]:
    """Let everybody who holds one function hold another.

    Args:
        old: the function to be replaced.
        new: what takes its place.
        keep: a namespace that goes on holding `old`.

    Returns:
        The holders that go on holding `old`: a tuple, a set, a suspended generator.
    """
    left = []
    for holder in gc.get_referrers(old):  # no comprehension: its cell would hold `old`, and be changed with the others
        if holder is not keep and not _replace_in(holder, old, new):
            left.append(holder)
    return left


def _replace_in(holder: Any, old: Any, new: Any) -> int:
    if isinstance(holder, dict):
        return _replace_in_dict(holder, old, new)
    if isinstance(holder, list):
        places = [index for index, value in enumerate(holder) if value is old]
        for index in places:
            holder[index] = new
        return len(places)
    if isinstance(holder, types.CellType):
        holder.cell_contents = new
        return 1
    if isinstance(holder, functools.partial):
        holder.__setstate__((new, holder.args, holder.keywords, holder.__dict__))  # type: ignore[attr-defined]
        return 1
    if isinstance(holder, staticmethod | classmethod):
        holder.__init__(new)  # type: ignore[misc]  # takes another function, as `__setstate__` of a partial does
        return 1
    return _replace_in_defaults(holder, old, new) if isinstance(holder, tuple) else 0


def _replace_in_dict(holder: dict[Any, Any], old: Any, new: Any) -> int:
    keys = [key for key, value in list(holder.items()) if value is old]
    for key in keys:
        holder[key] = new
    return len(keys)


def _replace_in_defaults(holder: tuple[Any, ...], old: Any, new: Any) -> int:
    """Replace in a tuple of default arguments: tuples do not change, but the function that holds one takes another."""
    owners = [owner for owner in gc.get_referrers(holder) if isinstance(owner, types.FunctionType) and owner.__defaults__ is holder]
    for owner in owners:
        owner.__defaults__ = tuple(new if value is old else value for value in holder)
    return len(owners)
