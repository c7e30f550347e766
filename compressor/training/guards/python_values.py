"""Whole numbers that a step's Python computes on its way, compared from run to run: so a counter is met that no guard can look into.

A file, a database, an object behind a weak reference, memory of C: what counts there moves each time that the step's Python runs, and only
then. In a replay it stands still, and an audit, which moves it by one, agrees with itself. But the number that the code reads from it is
another one in every run, long before it changes an operator (`if count > 500`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

from compressor.errors import GuardDriftError
from compressor.training.guards.frozen_value import is_foreign

_MAX_NUMBER = 10**9  # above lie addresses and clocks, which differ in every run and count nothing
_MAX_ITEMS = 8
_RETURNED = "what it returns"


class PythonValues:
    """The whole numbers that functions of one's own bind to a name or return, in one run of a step; those of libraries are left out."""

    def __init__(self) -> None:
        self._calls: dict[CodeType, list[dict[str, object]]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take down the numbers of the block; those of a run before are forgotten. Under another `sys.setprofile` nothing is.

        Yields:
            Nothing.
        """
        self._calls = {}
        if sys.getprofile() is not None:
            yield
            return
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)

    def refuse_moved(self, now: PythonValues) -> None:
        """Hold a later run against this one.

        Args:
            now: the later one, from a state and a batch that lead to the same operators.

        Raises:
            GuardDriftError: a number is another one.
        """
        for code, calls in self._calls.items():
            later = now._calls.get(code, [])
            if len(later) != len(calls):  # a cache that was warm, a warning that is given once
                continue
            for before, after in zip(calls, later, strict=True):
                for name in before.keys() & after.keys():
                    if before[name] != after[name]:
                        raise GuardDriftError(_moved(code, name, before[name], after[name]))

    def _see(self, frame: FrameType, event: str, given: Any) -> None:
        if event != "return" or is_foreign(frame.f_globals.get("__name__")):
            return
        # Names of a module or a class body are variables that the guards know.
        held = {} if frame.f_locals is frame.f_globals else frame.f_locals
        numbers = {name: number for name, value in {**held, _RETURNED: given}.items() if (number := _number(value)) is not None}
        self._calls.setdefault(frame.f_code, []).append(numbers)


def _number(value: object) -> object:
    """Return what of a value can be a count: a whole number, one in digits, or a few of them; None for anything else."""
    kind = type(value)  # of a class of one's own the methods are not asked: they raise, and count, what they like
    for base in (tuple, list):
        if issubclass(kind, base):
            items = base.__getitem__(value, slice(_MAX_ITEMS + 1))  # type: ignore[call-overload]
            numbers = tuple(None if issubclass(type(item), tuple | list) else _number(item) for item in items)
            return numbers if 0 < len(numbers) <= _MAX_ITEMS and None not in numbers else None
    for text in (str, bytes):
        if issubclass(kind, text):
            digits = text.strip(value)  # type: ignore[arg-type]
            return digits if digits.isdigit() else None
    number: Any = float.__float__(value) if issubclass(kind, float) else value  # type: ignore[arg-type]
    if issubclass(kind, float | np.floating):
        number = int(number) if np.isfinite(number) and number == int(number) else None
    elif issubclass(kind, int | np.integer):
        number = int.__index__(number) if issubclass(kind, int) else int(number)
    else:
        return None
    return number if number is not None and abs(number) < _MAX_NUMBER else None


def _moved(code: CodeType, name: str, before: object, after: object) -> str:
    place = f"{code.co_name} at {Path(code.co_filename).name}:{code.co_firstlineno}"
    what = name if name == _RETURNED else repr(name)
    return (
        f"{place}: {what} was {before} when the step was captured and is {after} in a later run of it, so its Python counts "
        "where no guard looks (a file, an iterator, an object behind a weak reference, memory of C), and a replay, which "
        "runs no Python, would stand still; count in a buffer, in place, or give the number with the batch"
    )
