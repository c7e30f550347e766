"""Settings of Python and numpy that hold for the whole process or thread, by the names that a finding has for them: how to read each, and
how to set it. Filters of warnings stand apart: libraries add some when they are imported."""

from __future__ import annotations

import decimal
import faulthandler
import gc
import locale
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy

from harness.lifecycle.driving.torch_settings import attribute

_SIGNALS = tuple((one.name, one) for one in signal.Signals)  # read before and after each call: an enumeration is slow to go through
_DECIMAL = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


def _umask() -> int:
    """The mask of new files, which the system tells only to whoever sets it."""
    held = os.umask(0o077)
    os.umask(held)
    return held


def _decimal() -> tuple[Any, ...]:
    """How decimal numbers are computed, without the flags that every computation sets."""
    context = decimal.getcontext()
    return *(getattr(context, name) for name in _DECIMAL), frozenset(trap for trap, is_on in context.traps.items() if is_on)


def _set_decimal(value: tuple[Any, ...]) -> None:
    context = decimal.getcontext()
    for name, one in zip(_DECIMAL, value, strict=False):
        setattr(context, name, one)
    for trap in context.traps:
        context.traps[trap] = trap in value[-1]


def _handlers() -> list[logging.Handler]:
    """Those of the root logger, without the one that `logging.warning` makes when there is none."""
    return [one for one in logging.root.handlers if type(one) is not logging.StreamHandler or one.stream is not sys.stderr]


def _set_handlers(handlers: list[logging.Handler]) -> None:
    logging.root.handlers[:] = handlers


def _collect(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()


def _signal_handlers() -> dict[str, Any]:
    return {name: signal.getsignal(number) for name, number in _SIGNALS}


def _set_signal_handlers(handlers: dict[str, Any]) -> None:
    """Python sets them in its main thread alone, and none that it did not set."""
    for name, handler in handlers.items() if threading.current_thread() is threading.main_thread() else ():
        if handler is not None and signal.getsignal(signal.Signals[name]) is not handler:
            signal.signal(signal.Signals[name], handler)


def _set_timer(is_on: bool) -> None:
    """What was left of one that somebody stopped nobody knows: an hour is more than a test may take."""
    signal.setitimer(signal.ITIMER_REAL, 3600.0 if is_on else 0.0)


_affinity: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = (
    {"processors": (lambda: os.sched_getaffinity(0), lambda value: os.sched_setaffinity(0, value))}
    if hasattr(os, "sched_getaffinity")
    else {}
)
_signals: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = (
    {
        "handlers of signals": (_signal_handlers, _set_signal_handlers),
        "timer of signals": (lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0, _set_timer),
    }
    if hasattr(signal, "getitimer")
    else {}
)
PYTHON_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = MappingProxyType(
    {
        "working directory": (Path.cwd, os.chdir),
        "module search path": (lambda: list(sys.path), lambda value: sys.path.__setitem__(slice(None), value)),
        "garbage collection": (gc.isenabled, _collect),
        "thresholds of garbage collection": (gc.get_threshold, lambda value: gc.set_threshold(*value)),
        "callbacks of garbage collection": (lambda: list(gc.callbacks), lambda value: gc.callbacks.__setitem__(slice(None), value)),
        "recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
        "switch interval": (sys.getswitchinterval, sys.setswitchinterval),
        "longest integers as text": (sys.get_int_max_str_digits, sys.set_int_max_str_digits),
        "profiler": (sys.getprofile, sys.setprofile),
        "tracer": (sys.gettrace, sys.settrace),
        "profiler of threads": (threading.getprofile, threading.setprofile),
        "tracer of threads": (threading.gettrace, threading.settrace),
        **_signals,
        **{f"sys.{name}": attribute(sys, name) for name in ("stdin", "stdout", "stderr")},
        "sys.dont_write_bytecode": attribute(sys, "dont_write_bytecode"),
        "faulthandler": (faulthandler.is_enabled, lambda enabled: (faulthandler.enable if enabled else faulthandler.disable)()),
        **{f"sys.{name}": attribute(sys, name) for name in ("excepthook", "unraisablehook", "displayhook", "breakpointhook")},
        "threading.excepthook": attribute(threading, "excepthook"),
        "warnings.showwarning": attribute(warnings, "showwarning"),
        "warnings.formatwarning": attribute(warnings, "formatwarning"),
        "logging": attribute(logging.root, "level"),
        "logging.disable": attribute(logging.root.manager, "disable"),
        "logging.raiseExceptions": attribute(logging, "raiseExceptions"),
        "class of loggers": (logging.getLoggerClass, logging.setLoggerClass),
        "handlers of the root logger": (_handlers, _set_handlers),
        "umask": (_umask, os.umask),
        "locale": (lambda: locale.setlocale(locale.LC_ALL), lambda value: locale.setlocale(locale.LC_ALL, value)),
        "timeout of sockets": (socket.getdefaulttimeout, socket.setdefaulttimeout),
        "directory of temporary files": (tempfile.gettempdir, lambda value: setattr(tempfile, "tempdir", value)),
        "arithmetic of decimal": (_decimal, _set_decimal),
        "numpy.errstate": (lambda: dict(numpy.geterr()), lambda value: numpy.seterr(**value)),
        "numpy.errcall": (numpy.geterrcall, numpy.seterrcall),
        "numpy's print options": (numpy.get_printoptions, lambda value: numpy.set_printoptions(**value)),
        **_affinity,
    }
)


class WarningFilters:
    """Filters of warnings. A library that is imported for the first time may filter its own, by message, module or class."""

    def __init__(self) -> None:
        self.all, self.num_modules = list(warnings.filters), len(sys.modules)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WarningFilters):
            return NotImplemented
        if self.num_modules == other.num_modules:
            return self.all == other.all
        return self._of_everybody() == other._of_everybody()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{len(self.all)} filters, the first one {self.all[0][:3] if self.all else None}"

    def _of_everybody(self) -> list[Any]:
        return [one for one in self.all if one[1] is None and one[3] is None and one[2].__module__ == "builtins"]
