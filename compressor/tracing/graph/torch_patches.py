"""Everything of torch that is patched while a forward is recorded or replayed, and its undoing.

Python looks a call up on the class, so `nn.Module.__call__` and its setters are replaced for the process; in other threads, and outside
of the recording, the replacements do nothing.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, Protocol, TypeGuard, TypeVar
from weakref import WeakSet

import torch
from torch import nn

from compressor.errors import TracingError
from compressor.object_reference import resolve
from compressor.settings.kinds import FUNCTION
from compressor.settings.options import check_kind
from compressor.tracing.graph.nodes import Frame, call_mapped, call_script
from compressor.tracing.graph.recorder import Recorder
from compressor.tracing.targets.sample_state import ModuleValues, noting_cached_properties

# Which recorder, if any, listens to the code that runs: a context variable, so that paused forwards and other threads have their own.


class LeafRecorder(Protocol):
    """What a leaf needs of a recorder."""

    @property
    def inside(self) -> int:
        """Above 0 while code runs that is not recorded."""

    def call_leaf(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        """Record a call as one node."""


_RECORDER: ContextVar[LeafRecorder | None] = ContextVar("recorder", default=None)


def set_recorder(recorder: LeafRecorder | None) -> None:
    """Say who listens from now on.

    Args:
        recorder: None for nobody.
    """
    _RECORDER.set(recorder)


def listening_recorder() -> LeafRecorder | None:
    """Return the recorder that listens to this very code.

    Returns:
        None outside of recordings and inside of what is recorded as one node.
    """
    recorder = _RECORDER.get()
    return None if recorder is None or recorder.inside else recorder


# Functions that are recorded as one node: wrapped by their author, named by the user, or chosen because a guard inside them failed.

GIVEN = "given by the user"  # why such a function is a leaf
_NEVER_LEAVES = ("forward", "__call__", "__init__")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def leaf(function: _Function) -> _Function:
    """Wrap a function so that a recorded forward holds its call as one node, whatever it does inside. Usable as a decorator.

    Args:
        function: calls no sequential target; depends on its arguments and on the model only.

    Returns:
        A function that does the same.

    Raises:
        UserInputError: it is no function.
    """
    check_kind("function", function, FUNCTION)

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
    if not all(path.partition(":")):
        raise TracingError(f"leaves: {path!r} is no package.module:function; write it so, with a colon before the function")
    place = resolve(path, "function", where=f"leaves: {path!r} names no function", error=TracingError)
    holder = vars(place.owner) if isinstance(place.owner, ModuleType) else place.owner
    scope = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    if place.name not in scope:
        raise TracingError(f"leaves: {path!r} names no function of that place itself; give the module or class that defines it")
    function = scope[place.name]
    if not isinstance(function, FunctionType):
        raise TracingError(f"leaves: {path!r} is a {type(function).__name__}; give a Python function, or wrap it with compressor.leaf")
    return LeafFunction(holder, place.name, function, GIVEN)


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
    # The outermost, so that one leaf hides as many decisions as it can.
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
    # What runs is the code inside of decorators; what stands there is the outermost of them.
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
    # Whoever has imported the function by name has a reference of its own. A copy, for others may import meanwhile.
    for module in list(sys.modules.values()):
        scope = getattr(module, "__dict__", None)
        if isinstance(scope, dict) and scope.get(one.name) is one.function:
            scopes[id(scope)] = scope
    return list(scopes.values())


_PATCHED = threading.Lock()  # the patches are process-wide, so only one recording or run can be open
_VMAP = torch.vmap
_SCRIPT = torch.jit.ScriptFunction


class MappedFunction:
    """What torch.vmap gives while a forward is recorded: the whole mapped call becomes one node, with what the function closes over."""

    def __init__(self, function: Callable[..., Any], options: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Keep the arguments of vmap."""
        self._function, self._options, self._named = function, options, named

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Map, or record the mapping."""
        recorder = listening_recorder()
        if recorder is None:
            return _VMAP(self._function, *self._options, **self._named)(*args, **kwargs)
        given = (self._function, self._options, self._named, args, kwargs)
        return recorder.call_leaf(call_mapped, given, {}, call_mapped)


@contextmanager
def exclusive_patches() -> Iterator[None]:
    """Hold the right to patch nn.Module.

    Yields:
        Nothing.

    Raises:
        TracingError: another run is open in this process.
    """
    if not _PATCHED.acquire(blocking=False):
        raise TracingError("trace: another graph run or recording is open in this process; end it before starting one")
    try:
        yield
    finally:
        _PATCHED.release()


@contextmanager
def noting_values(
    values: ModuleValues,
    modules: Collection[nn.Module] | None = None,
    is_active: Callable[[], bool] = lambda: True,
    besides: Container[tuple[nn.Module, str]] = (),
) -> Iterator[None]:
    """Note what is set on modules, so that each sample finds its own values again.

    Args:
        values: take the notes.
        modules: notes are taken of these only; None takes them of all but those that are made meanwhile, whose values are what they are.
            What calibration hooks keep on modules is not a sample's.
        is_active: says whether code of a forward runs.
        besides: notes are taken of these, too: modules and names.

    Yields:
        Nothing.
    """
    thread, noted = threading.get_ident(), None if modules is None else WeakSet(modules)
    plain_set, plain_buffer, plain_delete = nn.Module.__setattr__, nn.Module.register_buffer, nn.Module.__delattr__
    plain_init, made = nn.Module.__init__, set[int]()  # by identity: what a class hashes by is not there yet

    def note(module: nn.Module, name: str) -> None:
        is_known = id(module) not in made if noted is None else module in noted or (module, name) in besides
        if is_known and threading.get_ident() == thread and is_active():
            values.note(module, name)

    def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        made.add(id(module))
        plain_init(module, *args, **kwargs)

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        if not isinstance(value, nn.Module | nn.Parameter):
            note(module, name)
        plain_set(module, name, value)

    def register_buffer(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
        note(module, name)
        plain_buffer(module, name, *args, **kwargs)

    def delete(module: nn.Module, name: str) -> None:
        note(module, name)
        plain_delete(module, name)

    with exclusive_patches(), noting_cached_properties(note):
        try:
            nn.Module.__setattr__, nn.Module.register_buffer = set_attribute, register_buffer  # type: ignore[method-assign, assignment]
            nn.Module.__delattr__, nn.Module.__init__ = delete, init  # type: ignore[method-assign, assignment]
            yield
        finally:
            nn.Module.__setattr__, nn.Module.register_buffer = plain_set, plain_buffer  # type: ignore[method-assign]
            nn.Module.__delattr__, nn.Module.__init__ = plain_delete, plain_init  # type: ignore[method-assign]


@contextmanager
def recording(recorder: Recorder, leaves: Sequence[LeafFunction], values: ModuleValues) -> Iterator[None]:
    """Let a recorder listen, for the duration.

    Args:
        recorder: a fresh one.
        leaves: functions to record as one node.
        values: what is set on modules is noted here, and taken back at the end.

    Yields:
        Nothing.
    """
    plain = {name: getattr(nn.Module, name) for name in ("__call__", "__setattr__", "register_buffer")}
    script = _SCRIPT.__call__
    mapped = {id(scope): scope for scope in (torch, torch.func)}
    with noting_values(values), as_leaves(leaves):
        noting = {name: getattr(nn.Module, name) for name in plain}
        try:
            _patch_modules(recorder, plain["__call__"], noting)
            _SCRIPT.__call__ = _scripted(script)  # type: ignore[method-assign]
            for scope in mapped.values():
                scope.vmap = lambda function, *args, **kwargs: MappedFunction(function, args, kwargs)  # type: ignore[attr-defined]
            set_recorder(recorder)
            with recorder, torch.no_grad():
                yield
        finally:
            set_recorder(None)
            for scope in mapped.values():
                scope.vmap = _VMAP  # type: ignore[attr-defined]
            _SCRIPT.__call__ = script  # type: ignore[method-assign]
            for name, function in noting.items():
                setattr(nn.Module, name, function)
            values.undo({})


def _scripted(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = listening_recorder()
        if recorder is None:
            return plain(function, *args, **kwargs)
        return recorder.call_leaf(call_script, (function, args, kwargs), {}, lambda f, a, k: plain(f, *a, **k))

    return call


def _patch_modules(recorder: Recorder, plain_call: Callable[..., Any], noting: dict[str, Any]) -> None:
    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return plain_call(module, *args, **kwargs)
        return recorder.call_module(plain_call, module, args, kwargs)

    def listens(module: nn.Module, value: Any) -> bool:
        is_data = not isinstance(value, nn.Module | nn.Parameter) and not callable(value)
        return threading.get_ident() == thread and not recorder.inside and id(module) in recorder.builder.names and is_data

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        if listens(module, value):
            recorder.note_attribute(module, name, value)
        noting["__setattr__"](module, name, value)

    def register_buffer(module: nn.Module, name: str, tensor: Any, persistent: bool = True) -> None:
        if listens(module, tensor):
            recorder.note_attribute(module, name, tensor, persistent)
        noting["register_buffer"](module, name, tensor, persistent)

    thread = threading.get_ident()
    for attribute, function in {"__call__": call, "__setattr__": set_attribute, "register_buffer": register_buffer}.items():
        setattr(nn.Module, attribute, function)
