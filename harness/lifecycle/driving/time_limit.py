"""A time limit for code that may never come back."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

TIME_LIMIT = 20.0
"""Seconds that one call may take, unless somebody says otherwise."""

_WAIT_SECONDS = 0.05
_IDLE = 0.02  # of a stretch: who works less waits for something
_LEAST_SHARE = 0.1  # of a stretch that counts in any case, lest who works a little now and then goes on for ever


class TimeLimitError(BaseException):
    """Thrown into code that took too long; no Exception, so that it is not taken for an error of that code."""


class _NeverAgain(TimeLimitError):
    """Thrown into code that sleeps beyond its limit: when it wakes up it stops here, before a handler puts back what is others' by then."""

    def __init__(self) -> None:
        threading.Event().wait()


class Stopwatch:
    """Measures one call after another; whoever makes calls says when a new one begins.

    It is moved by whoever waits, in small steps, so that a process that is stopped for a while has not hung.
    """

    def __init__(self, limit: float = TIME_LIMIT) -> None:
        """Stand at zero.

        Args:
            limit: seconds that one call may take.
        """
        self.limit, self.seconds = limit, 0.0

    def restart(self) -> None:
        """A new call begins."""
        self.seconds = 0.0

    def pause(self) -> None:
        """What comes now does not count, until the next restart."""
        self.seconds = -math.inf

    def move(self, seconds: float) -> None:
        """So much time has gone by."""
        self.seconds += seconds


def run_limited(call: Callable[[], Result], stopwatch: Stopwatch, where: Callable[[], str] | None = None) -> Result:
    """Run something in a thread of its own, and give up on it when one call takes too long.

    Python code in a loop is stopped; code that sleeps or waits is left behind in a daemon thread, which does nothing any more when it
    wakes up, and ends with the process.

    Args:
        call: what to run.
        stopwatch: restarted by `call` at the start of each of its calls.
        where: says what is running, for the error.

    Returns:
        What it returns.

    Raises:
        TimeLimitError: one of them took longer.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - carried over to the thread that waits
            errors.append(error)

    stopwatch.restart()
    thread = threading.Thread(target=work, daemon=True, name="harness-limited")
    thread.start()
    while thread.is_alive():
        before, worked = time.monotonic(), time.process_time()
        thread.join(timeout=_WAIT_SECONDS)
        stopwatch.move(counted(min(time.monotonic() - before, 4 * _WAIT_SECONDS), time.process_time() - worked))
        if thread.is_alive() and stopwatch.seconds > stopwatch.limit:
            error = TimeLimitError(f"one call took longer than {stopwatch.limit:g} s" + (f", in {where()}" if where else ""))
            _interrupt(thread)
            raise error
    if errors:
        raise errors[0]
    return results[0]


def counted(elapsed: float, worked: float) -> float:
    """Say how much of a stretch of time counts: what other processes take of a busy machine does not.

    Args:
        elapsed: seconds.
        worked: seconds of the processor that this process had meanwhile.

    Returns:
        All of it where the process waits for something, else its own work.
    """
    return elapsed if worked < _IDLE * elapsed else min(elapsed, max(worked, _LEAST_SHARE * elapsed))


def _interrupt(thread: threading.Thread) -> None:
    _throw(thread, TimeLimitError)
    thread.join(timeout=1.0)
    if thread.is_alive():
        _throw(thread, _NeverAgain)


def _throw(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise an error in another thread, before its next line; one that waits there takes this one in the place of an earlier one."""
    assert thread.ident is not None
    given: Any = ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), given)
