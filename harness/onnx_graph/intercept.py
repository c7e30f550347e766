"""Trampolines before the native entries of the optimizers: they add the forced skips, keep calls apart, and record them.

onnxsim keeps its pass list in one C++ global, and a second thread that simplifies at the same time makes both ignore their own list. So
native calls run one at a time while a policy is active, those of threads that no policy applies to as well. Trampolines are in place
from the first policy to the last, and what they replaced comes back then, wherever it was held.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from harness.onnx_graph.calls import OptimizerCall, calling_line
from harness.onnx_graph.entries import ENTRIES, MODULES, Entry
from harness.onnx_graph.rebinding import replace_everywhere
from harness.onnx_graph.session_graphs import SessionGraphs

Judge = Callable[[OptimizerCall, Any, Any], OptimizerCall]


def _nothing(call: OptimizerCall) -> None:
    """A policy without a contract has nothing to raise."""


@dataclass(eq=False)
class Policy:
    """One forced_skips context.

    Attributes:
        skips: names by backend.
        record: takes each finished call.
        judge: looks at (call, graph before, graph after) and returns the call, with `broken` filled in; None looks at nothing.
        raise_broken: called with a call whose `broken` is set, after it was recorded.
        thread: identifier of the only thread it applies to; None for all.
    """

    skips: Mapping[str, tuple[str, ...]]
    record: Callable[[OptimizerCall], None]
    judge: Judge | None = None
    raise_broken: Callable[[OptimizerCall], None] = field(default_factory=lambda: _nothing)
    thread: int | None = None

    def applies(self) -> bool:
        """Whether it applies to the running thread."""
        return self.thread in (None, threading.get_ident())


class Interceptor:
    """All policies of this process. One instance: the pass list that it guards is one per process as well."""

    def __init__(self) -> None:
        """Nothing is intercepted yet."""
        self._lock = threading.RLock()
        self._policies: list[Policy] = []
        self._natives: dict[str, Any] = {}  # kept for good: somebody may hold a trampoline for longer than we can see
        self._trampolines: dict[str, Callable[..., Any]] = {}
        self._finder = _ReinstallFinder(self._install_module)
        self._inside = threading.local()
        self._sessions = SessionGraphs()
        os.register_at_fork(after_in_child=self._after_fork)

    @contextlib.contextmanager
    def active(self, policy: Policy) -> Iterator[None]:
        """Apply a policy to every call of an optimizer.

        Args:
            policy: further contexts inside add theirs.

        Yields:
            Nothing.
        """
        self.add(policy)
        try:
            yield
        finally:
            with self._lock:
                self._policies.remove(policy)
                if not self._policies:
                    self._uninstall()

    def add(self, policy: Policy) -> None:
        """Apply a policy from now on: to the end of the process, unless `active` ends it.

        Args:
            policy: see `active`.
        """
        with self._lock:
            if not self._policies:
                self._install()
            self._policies.append(policy)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait until no other thread of ours is inside of an optimizer.

        Yields:
            Nothing.
        """
        with self._lock:
            yield

    def _install(self) -> None:
        sys.meta_path.insert(0, self._finder)
        for name in MODULES:
            if name in sys.modules:
                self._install_module(sys.modules[name])

    def _install_module(self, module: ModuleType) -> None:
        for entry in ENTRIES:
            if entry.module == module.__name__:
                self._install_entry(entry, module)
        if MODULES[module.__name__] == "ort":
            self._sessions.install(module.InferenceSession, self._wants_graphs)

    def _install_entry(self, entry: Entry, module: ModuleType) -> None:
        owner, name = _owner(module, entry.path)
        current = getattr(owner, name)
        if current is self._trampolines.get(entry.label):
            return
        self._natives[entry.label] = current
        trampoline = self._trampoline(entry, entry.position(current))
        trampoline.__name__, trampoline.__doc__ = name, current.__doc__
        self._trampolines[entry.label] = trampoline
        setattr(owner, name, trampoline)
        if owner is module:
            replace_everywhere(current, trampoline, keep=self._natives)

    def _uninstall(self) -> None:
        sys.meta_path.remove(self._finder)
        for entry in ENTRIES:
            trampoline = self._trampolines.pop(entry.label, None)
            if trampoline is None:
                continue
            owner, name = _owner(sys.modules[entry.module], entry.path)
            if getattr(owner, name) is trampoline:
                setattr(owner, name, self._natives[entry.label])
            if owner is sys.modules[entry.module]:
                replace_everywhere(trampoline, self._natives[entry.label], keep=self._trampolines)
        self._sessions.uninstall()

    def _trampoline(self, entry: Entry, position: int) -> Callable[..., Any]:
        natives, label = self._natives, entry.label  # not the function itself: a closure over it would be rebound as well

        def trampoline(*args: Any, **kwargs: Any) -> Any:
            return self._call(entry, natives[label], position, args, kwargs)

        return trampoline

    def _call(self, entry: Entry, original: Callable[..., Any], position: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with self._lock:  # also where no policy applies: the native pass list is one for all threads
            policies = [policy for policy in self._policies if policy.applies()]
            if not policies or getattr(self._inside, "judging", False):
                return original(*args, **kwargs)
            arguments, names = _with_skips(entry, position, args, kwargs, policies)
            return self._recorded(entry, original, arguments, names, policies)

    def _recorded(
        self, entry: Entry, original: Callable[..., Any], arguments: _Arguments, names: _Names, policies: Sequence[Policy]
    ) -> Any:
        caller, begin = calling_line(), time.perf_counter()

        def call(error: str = "") -> OptimizerCall:
            seconds, thread = time.perf_counter() - begin, threading.current_thread().name
            return OptimizerCall(entry.backend, entry.path, names.asked, names.used, caller, seconds, os.getpid(), thread, error)

        try:
            result = original(*arguments.args, **arguments.kwargs)
        except BaseException as error:
            failed = call(f"{type(error).__name__}: {error}")
            for policy in policies:
                policy.record(failed)
            raise
        done = call()
        for policy in policies:
            self._judge(policy, done, entry, arguments, result)
        return result

    def _judge(self, policy: Policy, call: OptimizerCall, entry: Entry, arguments: _Arguments, result: Any) -> None:
        if policy.judge is not None:
            before, after = entry.graphs(arguments.args, result) if entry.graphs else self._sessions.graphs(arguments.args[0])
            self._inside.judging = True  # a contract may run an optimizer of its own
            try:
                call = policy.judge(call, before, after)
            finally:
                self._inside.judging = False
        policy.record(call)
        if call.broken:
            policy.raise_broken(call)

    def _wants_graphs(self) -> bool:
        return any(policy.judge is not None and policy.applies() for policy in self._policies) and not getattr(
            self._inside, "judging", False
        )

    def _after_fork(self) -> None:
        """Another thread may have held the lock when this process was forked; it does not exist here."""
        self._lock = threading.RLock()
        self._inside = threading.local()


@dataclass(frozen=True)
class _Arguments:
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class _Names:
    asked: tuple[str, ...] | None
    used: tuple[str, ...] | None


def _with_skips(
    entry: Entry, position: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], policies: Sequence[Policy]
) -> tuple[_Arguments, _Names]:
    """Return the arguments with all skips in them, and what was asked and what is used."""
    by_position = len(args) > position
    given = args[position] if by_position else kwargs.get("skip_optimizers")
    if given is None:  # optimizing is off: there is nothing to skip
        return _Arguments(args, kwargs), _Names(None, None)
    asked = tuple(sorted(given)) if entry.container is set else tuple(given)
    used = asked
    for policy in policies:
        used = entry.force(used, policy.skips.get(entry.backend, ()))
    value = entry.container(used)
    if by_position:
        args = (*args[:position], value, *args[position + 1 :])
    else:
        kwargs = {**kwargs, "skip_optimizers": value}
    return _Arguments(args, kwargs), _Names(asked, used)


def _owner(module: ModuleType, path: str) -> tuple[Any, str]:
    *classes, name = path.split(".")
    return functools.reduce(getattr, classes, module), name


class _ReinstallFinder(importlib.abc.MetaPathFinder):
    """Puts trampolines into an extension module that is imported while a policy is active."""

    def __init__(self, install: Callable[[ModuleType], None]) -> None:
        self._install = install
        self._searching = threading.local()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in MODULES or getattr(self._searching, "on", False):
            return None
        self._searching.on = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.on = False
        if spec is not None and spec.loader is not None:
            spec.loader = _ReinstallLoader(spec.loader, self._install)
        return spec


class _ReinstallLoader(importlib.abc.Loader):
    """Loads as the module's own loader does, then installs."""

    def __init__(self, loader: Any, install: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._install = install

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._install(module)


INTERCEPTOR = Interceptor()
"""The one of this process."""


def judged(call: OptimizerCall, broken: str) -> OptimizerCall:
    """Add what a contract found.

    Args:
        call: as recorded.
        broken: the finding; empty if the contract holds.

    Returns:
        The call with it.
    """
    return replace(call, broken=broken)
