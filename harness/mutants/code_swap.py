"""Planted bugs that everybody sees: the code of a function is exchanged, so that those who imported it by name run the wrong one too."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from compressor.object_reference import resolve
from harness.errors import HarnessError
from harness.mutants.patches import Edit, Mutant, Patch


@dataclass(frozen=True)
class CodeMutant(Mutant):
    """A planted bug in functions that other modules import by name."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Plant the bug for a while. Changes the functions themselves, of this process and in every thread.

        Yields:
            Nothing.

        Raises:
            HarnessError: the code has changed, so that the patch does not fit.
        """
        with ExitStack() as stack:
            for patch in self.patches:
                stack.enter_context(_exchanged(patch))
            yield


@contextmanager
def _exchanged(patch: Patch) -> Iterator[None]:
    place = resolve(patch.where, "function or table", error=HarnessError)
    current = place.stored
    if not isinstance(patch, Edit):
        setattr(place.owner, place.name, patch.make(current))
        try:
            yield
        finally:
            setattr(place.owner, place.name, current)
        return
    function = _function(current)
    right = function.__code__
    function.__code__ = _function(patch.make(current)).__code__
    try:
        yield
    finally:
        function.__code__ = right


def _function(found: Any) -> FunctionType:
    """What lies below properties, static methods and decorators."""
    getter: Any = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    function = inspect.unwrap(getter)
    if not isinstance(function, FunctionType):
        raise HarnessError(f"{found!r}: this is no Python function, and has no code to replace; plant the bug in one")
    return function


def bug(name: str, kind: str, wrong: str, killer: str, *patches: Patch, raises: str = "") -> CodeMutant:
    """Make a planted bug.

    Args:
        name: short.
        kind: the part of the code that is wrong.
        wrong: what is wrong, in a line.
        killer: the first check in the family's order that sees it.
        *patches: what is replaced.
        raises: the error by which it is seen, where it is; see Mutant.

    Returns:
        The bug.
    """
    return CodeMutant(name, kind, wrong, patches, killer, raises=raises)
