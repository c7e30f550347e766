"""Forwards that take turns share a thread: where one waits for what a paused one holds (a lock, the only ticket of a queue), none goes on.

Locks cannot be seen from here, and there are many kinds, also in files and in other languages. So a thread of its own looks whether the
one that runs forwards still does anything. Where it has not for long, and the rest of the process is as good as idle, a signal takes it out
of its wait.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from compressor.errors import TracingError
from compressor.tracing.suspend.paused_forward import Sample, running_sample

PATIENCE_SECONDS = 15.0
_LOOKS = 30  # in that time
_BUSY = 0.2  # of a processor, by other threads: what a forward waits for may be computed there; bars take less
_STILL = 0.002  # of a processor, by the thread itself: what it takes to be switched to and back


class StandstillWatch:
    """Ends a forward that waits for ever, by an error in it. Runs in the main thread alone, for no other can be woken."""

    def __init__(self) -> None:
        """Nothing is watched yet."""
        self._sample: Sample | None = None
        self._found: str | None = None
        self._quit = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for the duration."""
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_kill"):
            yield
            return
        before = signal.signal(signal.SIGURG, self._raise)  # means nothing to anybody else: it is ignored by default
        self._quit.clear()
        thread = threading.Thread(target=self._look, args=(threading.get_ident(),), name="standstill", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._quit.set()
            thread.join()
            signal.signal(signal.SIGURG, before)

    @contextmanager
    def turn(self, sample: Sample) -> Iterator[None]:
        """Note that a forward runs.

        Args:
            sample: the forward.
        """
        self._sample = sample
        try:
            yield
        finally:
            self._sample = None

    def _look(self, main: int) -> None:
        clock, seconds = time.pthread_getcpuclockid(main), PATIENCE_SECONDS / _LOOKS
        still, last = 0, (self._sample, time.clock_gettime(clock), time.process_time())
        while not self._quit.wait(seconds):  # looks are counted, not time: a process that was stopped or frozen for an hour has had one
            now = (self._sample, time.clock_gettime(clock), time.process_time())
            is_same = now[0] is not None and now[0] is last[0]
            still = still + 1 if is_same and now[1] - last[1] <= _STILL * seconds and now[2] - last[2] <= _BUSY * seconds else 0
            last = now
            if still == _LOOKS:
                self._found = _place(sys._current_frames()[main])
                signal.pthread_kill(main, signal.SIGURG)
                return

    def _raise(self, number: int, frame: FrameType | None) -> None:
        """In the thread that waits, inside of the forward that does."""
        del number, frame
        sample, found = running_sample(), self._found
        if sample is not None and found is not None:
            sample.escape(
                TracingError(
                    f"suspend: {found}: batch {sample.index} waits there and nothing happens, as for a lock that another batch holds, "
                    'whose forward is paused; let go of it before a layer is called, or use pipeline="basic"'
                )
            )


def _place(frame: FrameType) -> str:
    """Where in the model's code a thread waits: outside of the library that has the lock, the queue or the condition."""
    inner: FrameType | None = frame
    library = Path(threading.__file__).parent
    while inner is not None and library in Path(inner.f_code.co_filename).parents and "site-packages" not in inner.f_code.co_filename:
        inner = inner.f_back
    shown = inner or frame
    return f"{Path(shown.f_code.co_filename).name}:{shown.f_lineno}"
