"""Functions that are recorded as one node: wrapped by their author, named by the user, or chosen because a guard inside them failed."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from types import FunctionType
from typing import Any, TypeGuard, TypeVar

from compressor.errors import TracingError
from compressor.tracing.graph.active import listening_recorder
from compressor.tracing.graph.refusal import Frame

_NEVER_LEAVES = ("forward", "__call__", "__init__")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def leaf(function: _Function) -> _Function:
    """Wrap a function so that a recorded forward holds its call as one node, whatever it does inside. Usable as a decorator.

    Args:
        function: calls no sequential target; depends on its arguments and on the model only.

    Returns:
        A function that does the same.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = listening_recorder()
        if recorder is None:
            return function(*args, **kwargs)
        return recorder.call_leaf(function, args, kwargs, function)

    return call  # type: ignore[return-value]


@dataclass(frozen=True)
class LeafFunction:
    """A function and where Python finds it.

    Attributes:
        holder: class that has it as an attribute, or the globals of its module.
        name: of the attribute or global.
        function: what stands there.
        reason: why it is a leaf.
    """

    holder: Any
    name: str
    function: Callable[..., Any]
    reason: str

    @property
    def label(self) -> str:
        """Qualified name, for messages."""
        return getattr(self.function, "__qualname__", self.name)


def resolve_leaf(given: str | Callable[..., Any]) -> LeafFunction:
    """Find a function that the user names.

    Args:
        given: the function itself, or `package.module:qualified.name`.

    Returns:
        The function and its place.

    Raises:
        TracingError: there is none, or it cannot be replaced where it stands.
    """
    path = given if isinstance(given, str) else f"{getattr(given, '__module__', '?')}:{getattr(given, '__qualname__', '?')}"
    module_name, colon, qualified = path.partition(":")
    if not (module_name and colon and qualified):
        raise TracingError(f"leaves: {path!r} is no package.module:function; write it so, with a colon before the function")
    outer, _, name = qualified.rpartition(".")
    try:
        module = importlib.import_module(module_name)
        holder = attrgetter(outer)(module) if outer else vars(module)
        function = (vars(holder) if outer else holder)[name]
    except (ImportError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise TracingError(
            f"leaves: {path!r} names no function ({type(error).__name__}: {error}); give package.module:function or "
            "package.module:Class.method"
        ) from error
    if not isinstance(function, FunctionType):
        raise TracingError(f"leaves: {path!r} is a {type(function).__name__}; give a Python function, or wrap it with compressor.leaf")
    return LeafFunction(holder, name, function, "given by the user")


def function_around(frames: Sequence[Frame], busy: set[Any], banned: set[str], reason: str) -> LeafFunction | None:
    """Find the function to make a leaf, so that a guard or an unknown value lies inside it.

    Args:
        frames: running functions, outermost first.
        busy: code of functions that call a target.
        banned: labels of functions that turned out to call one.
        reason: for the report.

    Returns:
        The outermost function that qualifies; None if there is none.
    """
    for frame in frames:
        if frame.code in busy or frame.code.co_name in _NEVER_LEAVES or frame.code.co_name.startswith("<"):
            continue
        found = _find_owner(frame, reason)
        if found is not None and found.label not in banned:
            return found
    return None


def _find_owner(frame: Frame, reason: str) -> LeafFunction | None:
    name = frame.code.co_name
    owner = frame.owner
    classes = () if owner is None else (owner if isinstance(owner, type) else type(owner)).__mro__
    for holder in classes:
        function = vars(holder).get(name)
        if _is_code_of(function, frame):
            if holder.__module__.partition(".")[0] in sys.stdlib_module_names:
                return None  # its objects may keep in C what no graph would see (random.Random)
            return LeafFunction(holder, name, function, reason)
    function = frame.module_globals.get(name)
    return LeafFunction(frame.module_globals, name, function, reason) if _is_code_of(function, frame) else None


def _is_code_of(function: Any, frame: Frame) -> TypeGuard[Callable[..., Any]]:
    return isinstance(function, FunctionType) and getattr(inspect.unwrap(function), "__code__", None) is frame.code


@contextmanager
def as_leaves(functions: Sequence[LeafFunction]) -> Iterator[None]:
    """Replace functions by their leaves, in their class or in every module that has imported them, for the duration.

    Args:
        functions: to wrap.

    Yields:
        Nothing.
    """
    with ExitStack() as undo:
        for one in functions:
            wrapped = leaf(one.function)
            if isinstance(one.holder, type):
                setattr(one.holder, one.name, wrapped)
                undo.callback(setattr, one.holder, one.name, one.function)
                continue
            for scope in _scopes(one):
                for name in [key for key, value in scope.items() if value is one.function]:
                    scope[name] = wrapped
                    undo.callback(scope.__setitem__, name, one.function)
        yield


def _scopes(one: LeafFunction) -> list[dict[str, Any]]:
    scopes = {id(one.holder): one.holder}
    for module in list(sys.modules.values()):
        scope = getattr(module, "__dict__", None)
        if isinstance(scope, dict) and scope.get(one.name) is one.function:
            scopes[id(scope)] = scope
    return list(scopes.values())
