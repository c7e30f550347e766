"""Trampolines before the native entries of the optimizers: they add the forced skips, keep calls apart, and record them.

onnxsim keeps its pass list in one C++ global, and a second thread that simplifies at the same time makes both ignore their own list. So
native calls run one at a time while a policy is active, those of threads that no policy applies to as well. Trampolines are in place
from the first policy to the last, and what they replaced comes back then, wherever it was held. An extension may be loaded more than
once, under any name in any package: each copy is known by the last part of its name, which is that of its initializer.
"""

from __future__ import annotations

import _imp
import contextlib
import functools
import gc
import os
import shutil
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.errors import HarnessError
from harness.onnx_graph.skips.call_records import OptimizerCall, called_by_an_optimizer, calling_line
from harness.onnx_graph.skips.native_entries import ENTRIES, EXTENSIONS, Entry

# Replace a function everywhere it is held: in modules, closures, defaults, partials, static methods and containers.
#
# A native function cannot be changed in place, and third-party code may have taken hold of it long ago (`from m import f`, a default
# argument, `functools.partial`). The garbage collector knows every holder. Replacing back is the same call with its arguments swapped.


def replace_everywhere(old: Mapping[int, Callable[..., Any]], new: Mapping[int, Callable[..., Any]]) -> list[Any]:
    """Let everybody who holds one of several functions hold another. One walk over the heap finds all holders.

    Args:
        old: functions by a key; this namespace goes on holding them.
        new: what takes the places of those that are to be replaced, by the same keys.

    Returns:
        The holders that go on holding one: a tuple, a set, a suspended generator.
    """
    places = {id(old[key]): function for key, function in new.items()}
    left = []
    for holder in gc.get_referrers(
        *map(old.__getitem__, new)
    ):  # no comprehension: its cell would hold them, and be changed with the others
        if holder is not old and holder is not new and not _replace_in(holder, places):
            left.append(holder)
    return left


def _replace_in(holder: Any, places: Mapping[int, Any]) -> bool:
    """Replace in one holder what has another place; False where it cannot be changed."""
    if isinstance(holder, dict):
        holder.update([(key, places[id(value)]) for key, value in list(holder.items()) if id(value) in places])
    elif isinstance(holder, list):
        holder[:] = [places.get(id(value), value) for value in holder]
    elif isinstance(holder, types.CellType):
        holder.cell_contents = places[id(holder.cell_contents)]
    elif isinstance(holder, functools.partial):
        holder.__setstate__((places[id(holder.func)], holder.args, holder.keywords, holder.__dict__))  # type: ignore[attr-defined]
    elif isinstance(holder, staticmethod | classmethod):
        holder.__init__(places[id(holder.__func__)])  # type: ignore[misc]  # takes another function, as `__setstate__` of a partial does
    elif isinstance(holder, tuple):
        return _replace_in_defaults(holder, places)
    else:  # the frame of a call that has ended, kept by a traceback, holds nothing back: one that still runs shows no holder
        return isinstance(holder, types.FrameType)
    return True


def _replace_in_defaults(holder: tuple[Any, ...], places: Mapping[int, Any]) -> bool:
    """Replace in a tuple of default arguments: tuples do not change, but the function that holds one takes another."""
    owners = [owner for owner in gc.get_referrers(holder) if isinstance(owner, types.FunctionType) and owner.__defaults__ is holder]
    for owner in owners:
        owner.__defaults__ = tuple(places.get(id(value), value) for value in holder)
    return bool(owners)


# What an onnxruntime session made of its model: the graph that was given, and the optimized one.
#
# onnxruntime never hands the optimized graph out, but writes it to a file if the session's options name one. The name is put into the
# options while the native session copies them, and taken out again.


class SessionGraphs:
    """Keeps, for sessions that were made but not yet initialized, where their two graphs are."""

    def __init__(self) -> None:
        """Nothing is patched yet."""
        self._native: Any = None
        self._original: Any = None
        self._pending = threading.local()

    def install(self, native: Any, wanted: Callable[[bool], bool]) -> None:
        """Patch the constructor of the native session.

        Args:
            native: the native class.
            wanted: (whether it writes its optimized graph) to whether a session that is made now will be judged.
        """
        if self._native is not None:
            return
        original = native.__init__

        def construct(session: Any, options: Any, model: Any, *rest: Any) -> None:
            self._discard()
            given = options.optimized_model_filepath
            self._pending.writes = bool(given)
            if not wanted(bool(given)):
                original(session, options, model, *rest)
                return
            target = given or str(Path(tempfile.mkdtemp(prefix="session-graph-")) / "optimized.onnx")
            self._pending.graphs = (session, model, target, not given)
            options.optimized_model_filepath = target
            try:
                original(session, options, model, *rest)
            finally:
                options.optimized_model_filepath = given

        self._native, self._original = native, original
        native.__init__ = construct

    def uninstall(self) -> None:
        """Put the constructor back."""
        if self._native is not None:
            self._native.__init__ = self._original
            self._native = self._original = None
        self._discard()

    def writes(self) -> bool:
        """Whether the session that was made last in this thread writes its optimized graph to a file."""
        return getattr(self._pending, "writes", False)

    def graphs(self, session: Any) -> tuple[Any, Any]:
        """Give the graphs of a session that has been initialized in this thread.

        Args:
            session: the native session.

        Returns:
            The model before (bytes or path) and after (bytes); the temporary file is gone.
        """
        held, model, target, _ = self._pending.graphs
        if held is not session:
            raise HarnessError("onnxruntime: a session was made before the last one was initialized; make them one after the other")
        after = Path(target).read_bytes()
        self._discard()
        return model, after

    def _discard(self) -> None:
        """Forget the last session of this thread, and remove the file if its name was ours; it may have failed before there was one."""
        pending = getattr(self._pending, "graphs", None)
        if pending is not None and pending[3]:
            shutil.rmtree(Path(pending[2]).parent)
        self._pending.graphs = None


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


@dataclass(frozen=True)
class _Installed:
    """One native function that was replaced: where it is, and what took its place."""

    owner: Any
    name: str
    trampoline: Callable[..., Any]


class Interceptor:
    """All policies of this process. One instance: the pass list that it guards is one per process as well."""

    def __init__(self) -> None:
        """Nothing is intercepted yet."""
        self._lock = threading.RLock()
        self._policies: list[Policy] = []
        self._natives: dict[int, Any] = {}  # by id; kept for good: somebody may hold a trampoline for longer than we can see
        self._installed: dict[int, _Installed] = {}
        self._exec_dynamic = _imp.exec_dynamic
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

        Raises:
            HarnessError: somebody holds a native function where it cannot be replaced.
        """
        with self._lock:
            if not self._policies:
                try:
                    self._install()
                except HarnessError:
                    self._uninstall()
                    raise
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
        """Take hold of what is loaded, and of whatever is loaded from now on: every way in which Python imports an extension ends here."""
        self._exec_dynamic = _imp.exec_dynamic

        def exec_dynamic(module: ModuleType) -> int:
            code: int = self._exec_dynamic(module)
            self._install_modules([module])
            return code

        _imp.exec_dynamic = exec_dynamic
        self._install_modules([one for one in gc.get_objects() if type(one) is ModuleType])

    def _install_modules(self, modules: Sequence[ModuleType]) -> None:
        before = set(self._installed)
        for module in modules:
            self._install_module(module)
        fresh = {key: one for key, one in self._installed.items() if key not in before and isinstance(one.owner, ModuleType)}
        for holder in replace_everywhere(self._natives, {key: one.trampoline for key, one in fresh.items()}):
            held = next(one for key, one in fresh.items() if any(each is holder for each in gc.get_referrers(self._natives[key])))
            raise HarnessError(
                f"forced skips: {held.owner.__name__}.{held.name} is held by what cannot be changed ({type(holder).__name__}), and calls "
                "through it would not be seen; hold it in a list or a dict, or import it inside of the context"
            )

    def _install_module(self, module: ModuleType) -> None:
        extension = str(vars(module).get("__name__")).rpartition(".")[2]
        if extension not in EXTENSIONS:
            return
        for entry in ENTRIES:
            if entry.extension == extension and not (entry.takes_no_list and not hasattr(module, entry.path.partition(".")[0])):
                self._install_entry(entry, module)
        if EXTENSIONS[extension] == "ort":
            self._sessions.install(module.InferenceSession, self._wants_graphs)

    def _install_entry(self, entry: Entry, module: ModuleType) -> None:
        owner, name = _owner(module, entry.path)
        current = getattr(owner, name)
        if any(current is one.trampoline for one in self._installed.values()):
            return
        self._natives[id(current)] = current
        trampoline = self._trampoline(entry, id(current), entry.position(current))
        trampoline.__name__, trampoline.__doc__ = name, current.__doc__
        self._installed[id(current)] = _Installed(owner, name, trampoline)
        setattr(owner, name, trampoline)

    def _uninstall(self) -> None:
        _imp.exec_dynamic = self._exec_dynamic
        installed, self._installed = self._installed, {}
        for key, one in installed.items():
            if getattr(one.owner, one.name) is one.trampoline:
                setattr(one.owner, one.name, self._natives[key])
        trampolines = {key: one.trampoline for key, one in installed.items() if isinstance(one.owner, ModuleType)}
        replace_everywhere(trampolines, {key: self._natives[key] for key in trampolines})
        self._sessions.uninstall()

    def _trampoline(self, entry: Entry, key: int, position: int) -> Callable[..., Any]:
        natives = self._natives  # not the function itself: a closure over it would be rebound as well

        def trampoline(*args: Any, **kwargs: Any) -> Any:
            return self._call(entry, natives[key], position, args, kwargs)

        return trampoline

    def _call(self, entry: Entry, original: Callable[..., Any], position: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with self._lock:  # also where no policy applies: the native pass list is one for all threads
            policies = self._applying()
            if entry.takes_no_list:
                _refuse(entry, args[position:], policies)
            if not policies or entry.takes_no_list:
                return original(*args, **kwargs)
            arguments, names = _with_skips(entry, position, args, kwargs, policies)
            return self._recorded(entry, original, arguments, names, policies if entry.graphs else self._watching(self._sessions.writes()))

    def _applying(self) -> list[Policy]:
        return [] if getattr(self._inside, "judging", False) else [policy for policy in self._policies if policy.applies()]

    def _watching(self, writes: bool) -> list[Policy]:
        """Return the policies that a session concerns: all, if it writes its optimized graph; if it only runs it, those with a pass of
        onnxruntime's; none, if an optimizer opened it for itself, to fold constants or to compare outputs."""
        if writes:
            return self._applying()
        if getattr(self._inside, "native", False) or called_by_an_optimizer():
            return []
        return [policy for policy in self._applying() if "ort" in policy.skips]

    def _recorded(
        self, entry: Entry, original: Callable[..., Any], arguments: _Arguments, names: _Names, policies: Sequence[Policy]
    ) -> Any:
        caller, begin = calling_line(), time.perf_counter()

        def call(error: str = "") -> OptimizerCall:
            seconds, thread = time.perf_counter() - begin, threading.current_thread().name
            return OptimizerCall(entry.backend, entry.path, names.asked, names.used, caller, seconds, os.getpid(), thread, error)

        nested, self._inside.native = getattr(self._inside, "native", False), True
        try:
            result = original(*arguments.args, **arguments.kwargs)
        except BaseException as error:
            failed = call(f"{type(error).__name__}: {error}")
            for policy in policies:
                policy.record(failed)
            raise
        finally:
            self._inside.native = nested
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

    def _wants_graphs(self, writes: bool) -> bool:
        return any(policy.judge is not None for policy in self._watching(writes))

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
    if given is None or not isinstance(given, Iterable):  # optimizing is off, or the optimizer refuses the call itself
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


def _refuse(entry: Entry, level: Sequence[Any], policies: Sequence[Policy]) -> None:
    """Raise where an entry that takes no list of passes would run one that is to be skipped."""
    skips = sorted({name for policy in policies for name in policy.skips.get(entry.backend, ())})
    if skips and level and level[0].name != "ORT_DISABLE_ALL":
        raise HarnessError(
            f"{calling_line()}: onnxruntime.ModelCompiler takes no list of passes, so {', '.join(skips)} cannot be kept from running at "
            f"{level[0].name}; let an InferenceSession write the optimized graph, or give the compiler ORT_DISABLE_ALL"
        )


def _owner(module: ModuleType, path: str) -> tuple[Any, str]:
    *classes, name = path.split(".")
    return functools.reduce(getattr, classes, module), name


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
