"""Everything of torch that is patched while a forward is recorded or replayed, and its undoing.

Python looks a call up on the class, so `nn.Module.__call__` and its setters are replaced for the process; in other threads, and outside
of the recording, the replacements do nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from compressor.errors import TracingError
from compressor.tracing.graph.active import listening_recorder, set_recorder
from compressor.tracing.graph.leaves import LeafFunction, as_leaves
from compressor.tracing.graph.nodes import call_mapped, call_script
from compressor.tracing.graph.recorder import Recorder
from compressor.tracing.isolation import ModuleValues, noting_cached_properties

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
    values: ModuleValues, modules: Collection[nn.Module] | None = None, is_active: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Note what is set on modules, so that each sample finds its own values again.

    Args:
        values: take the notes.
        modules: notes are taken of these only; None takes them of all. What calibration hooks keep on modules is not a sample's.
        is_active: says whether code of a forward runs.

    Yields:
        Nothing.
    """
    thread, noted = threading.get_ident(), None if modules is None else WeakSet(modules)
    plain_set, plain_buffer = nn.Module.__setattr__, nn.Module.register_buffer

    def belongs(module: nn.Module) -> bool:
        return threading.get_ident() == thread and is_active() and (noted is None or module in noted)

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        if belongs(module) and not isinstance(value, nn.Module | nn.Parameter):
            values.note(module, name)
        plain_set(module, name, value)

    def register_buffer(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
        if belongs(module):
            values.note(module, name)
        plain_buffer(module, name, *args, **kwargs)

    def note_property(module: nn.Module, name: str) -> None:
        if belongs(module):
            values.note(module, name)

    with exclusive_patches(), noting_cached_properties(note_property):
        try:
            nn.Module.__setattr__, nn.Module.register_buffer = set_attribute, register_buffer  # type: ignore[method-assign, assignment]
            yield
        finally:
            nn.Module.__setattr__, nn.Module.register_buffer = plain_set, plain_buffer  # type: ignore[method-assign]


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
        return threading.get_ident() == thread and not recorder.inside and id(module) in recorder.names and is_data

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
