"""A planted bug is a small patch of the real code: one piece of a function's text replaced, or one table changed, for a while.

Where others have imported a function by name already, its code is exchanged instead.
"""

from __future__ import annotations

import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Protocol

from compressor.object_reference import resolve
from harness.errors import HarnessError


class Patch(Protocol):
    """Something that can be put in the place of right code."""

    @property
    def where(self) -> str:
        """`package.module:Class.function`."""

    def make(self, current: Any) -> Any:
        """Return the wrong variant of what stands there now."""


@dataclass(frozen=True)
class Edit:
    """A function with a piece of its text replaced.

    Attributes:
        where: `package.module:Class.function`.
        old: the piece; it must be there exactly once.
        new: what stands in its place.
    """

    where: str
    old: str
    new: str

    def make(self, current: Any) -> Any:
        """Compile the function with the replaced text.

        Args:
            current: the function.

        Returns:
            The wrong one.

        Raises:
            HarnessError: the piece is not in the text exactly once: the code has changed, and the planted bug must follow; or what comes
                out is no Python.
        """
        getter: Any = current.fget if isinstance(current, property) else current
        function = inspect.unwrap(getter)
        source = textwrap.dedent(inspect.getsource(function))
        if source.count(self.old) != 1:
            raise HarnessError(f"{self.where}: {self.old!r} stands there {source.count(self.old)} times; adapt the planted bug to the code")
        names: dict[str, Any] = {}
        text = "from __future__ import annotations\n" + source.replace(self.old, self.new)
        file = f"<mutant {hash(text)} of {self.where}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # so that a second edit finds the text
        try:
            code = compile(text, file, "exec")
        except SyntaxError as error:
            raise HarnessError(f"{self.where}: with {self.new!r} it is no Python ({error.msg}); adapt the planted bug") from error
        exec(code, function.__globals__, names)
        return names[function.__name__]


@dataclass(frozen=True)
class Table:
    """A table with another content.

    Attributes:
        where: `package.module:TABLE`.
        change: makes the wrong table from the right one.
    """

    where: str
    change: Callable[[Any], Any]

    def make(self, current: Any) -> Any:
        """Return the changed table."""
        return self.change(current)


@dataclass(frozen=True)
class Mutant:
    """A planted bug.

    Attributes:
        name: short.
        kind: the part of the core that is wrong.
        wrong: what is wrong, in a line.
        patches: what is replaced.
        killer: the first check or machine in the family's order that sees it.
        raises: the error by which it is seen: its class, or how what is said of it begins. Any other error of a killer sees nothing.
    """

    name: str
    kind: str
    wrong: str
    patches: tuple[Patch, ...]
    killer: str
    raises: str = field(default="", kw_only=True)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Plant the bug for a while. Changes the core, of this process and in every thread.

        Yields:
            Nothing.

        Raises:
            HarnessError: the code has changed, so that the patch does not fit.
        """
        with ExitStack() as stack:
            for patch in self.patches:
                stack.enter_context(self._plant(patch))
            yield

    def _plant(self, patch: Patch) -> AbstractContextManager[None]:
        return _in_place(patch)


@contextmanager
def _in_place(patch: Patch) -> Iterator[None]:
    place = resolve(patch.where, "function or table", error=HarnessError)
    current = place.stored
    setattr(place.owner, place.name, patch.make(current))
    try:
        yield
    finally:
        setattr(place.owner, place.name, current)


# Planted bugs that everybody sees: the code of a function is exchanged, so that those who imported it by name run the wrong one too.


@dataclass(frozen=True)
class CodeMutant(Mutant):
    """A planted bug in functions that other modules import by name."""

    def _plant(self, patch: Patch) -> AbstractContextManager[None]:
        return _exchanged(patch) if isinstance(patch, Edit) else _in_place(patch)


@contextmanager
def _exchanged(patch: Edit) -> Iterator[None]:
    place = resolve(patch.where, "function or table", error=HarnessError)
    current = place.stored
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
