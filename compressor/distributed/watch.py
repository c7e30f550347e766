"""Signs of life of the processes of a run, and the one error that ends all of them.

A thread of each rank writes to the rendezvous store that it lives, and reads whether somebody has failed. Who fails first says so there,
and nobody else speaks: the others end with a RankError that is told by one rank at most. A rank that was killed, or stopped by a signal,
cannot say so; on one host the others see it in /proc within a few seconds, elsewhere by signs of life that stay away for a minute. A rank
that is stopped does not end when it is asked to, so whoever finds it kills it.

When one has ended, torchrun asks the others to, by SIGTERM: the first time it is an error in the main thread, later ones are nothing.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from compressor.errors import RankError
from compressor.json_text import from_json

T = TypeVar("T")
_EVERY_SECONDS = 0.25
_STOPPED_LOOKS = 12  # in a row: 3 seconds; who stops a whole job and lets it go on stops us as well
_SILENT_LOOKS = 240  # without a sign of life: a minute, for a thread may wait long for an interpreter that is busy
_PATIENCE_SECONDS = 5.0  # until a broken connection is explained


class EndedBySigterm(KeyboardInterrupt):
    """A rank was asked to end; no Exception, which a model's own code might take for one of its own."""


def end_by_sigterm(number: int, frame: FrameType | None) -> None:
    """What torchrun does to all ranks when one has failed: time to say which one, and to let the run folder go."""
    ignore_sigterm()
    raise EndedBySigterm("SIGTERM")


def ignore_sigterm() -> None:
    """Take no more notice of SIGTERM where `end_by_sigterm` would: this process ends anyway."""
    if signal.getsignal(signal.SIGTERM) is end_by_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class _Process(NamedTuple):
    """Who a rank is on its host."""

    host: str
    pid: int
    began: str


class Watch:
    """Follows the other ranks of a run from a thread."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """Begin to watch.

        Args:
            store: of torch.distributed, for this run alone; used by this object alone.
            rank: of this process.
            size: number of ranks.
        """
        self._store, self._rank, self._size = store, rank, size
        store.set_timeout(timedelta(seconds=_PATIENCE_SECONDS))  # torch would look half an hour for a store whose process is gone
        self._is_lost = False
        self._others = {other: _Other() for other in range(size) if other != rank}
        self._failure: str | None = None
        self._quit = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        store.set(f"process {rank}", json.dumps(_myself()))
        self._thread.start()

    def check(self) -> None:
        """Raise what has happened to another rank.

        Raises:
            RankError: one has failed, or does not answer.
        """
        if self._failure is not None:
            raise self._error(self._failure)

    def during(self, work: Callable[[], T]) -> T:
        """Do something that cannot be interrupted, such as to connect; wait for it not longer than all ranks live.

        Args:
            work: runs in a thread of its own, which is left behind where a rank fails.

        Returns:
            What it returns.

        Raises:
            RankError: a rank has failed, or the connection to it.
        """
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except RuntimeError as error:
                done.set_exception(error)

        threading.Thread(target=run, name="connects", daemon=True).start()
        while not done.done():
            self.check()
            time.sleep(_EVERY_SECONDS / 25)
        try:
            return done.result()
        except RuntimeError as error:
            raise self.explain(error) from error

    def explain(self, error: BaseException) -> RankError:
        """Find out why the connection to another rank broke, or why this one was asked to end.

        Args:
            error: of torch, or of the signal.

        Returns:
            The error to raise.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(_EVERY_SECONDS / 5)
        found = self._error(self._failure or self._post(*self._guess(error), "RankError"))
        for note in getattr(error, "__notes__", ()):
            found.add_note(note)
        return found

    def _guess(self, error: BaseException) -> tuple[int, str]:
        """What is said where nothing is known: of which rank, and what."""
        if not isinstance(error, EndedBySigterm):
            return self._rank, f"lost the connection to another rank ({_first_sentence(error)})"
        absent = [rank for rank, other in self._others.items() if other.process is None]
        return (absent[0], "has not come, and the others were ended by SIGTERM") if absent else (self._rank, "was ended by SIGTERM")

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank fails.

        Args:
            error: why.

        Raises:
            RankError: another one has failed before, and this may be its consequence.
        """
        text = str(error) or type(error).__name__
        if self._failure is None:
            self._post(self._rank, text, type(error).__name__, self._rank)
        if from_json(self._failure or "{}").get("teller") != self._rank:
            self.check()

    def close(self) -> None:
        """Watch no more; the others no longer wait for signs of life from here."""
        with suppress(RuntimeError):  # the store is on a rank that has ended
            self._ask("set", f"left {self._rank}", "1")
        self._quit.set()
        self._thread.join()

    def _error(self, failure: str) -> RankError:
        told = from_json(failure)
        error = RankError(f"rank {told['rank']} of {self._size}: {told['text']}")
        error.kind, error.is_mine_to_tell = told["kind"], told["teller"] == self._rank
        return error

    def _post(self, rank: int, text: str, kind: str, teller: int | None = None) -> str:
        """Say once for all what has happened, and who tells the user; the first word counts."""
        # The first rank that is here knows what was kept for a resume.
        here = {self._rank, *(other for other, known in self._others.items() if known.process is not None)}
        first = min(here - {rank}, default=self._rank)
        word = json.dumps({"rank": rank, "text": text, "kind": kind, "teller": first if teller is None else teller})
        try:
            self._failure = self._ask("compare_set", "failure", "", word).decode()
        except RuntimeError:
            self._failure = word
        return self._failure

    def _run(self) -> None:
        count = 0
        while not self._quit.wait(_EVERY_SECONDS) and self._failure is None:
            count += 1
            try:
                self._ask("set", f"life {self._rank}", str(count))
                if self._ask("check", ["failure"]):
                    self._failure = self._ask("get", "failure").decode()
                    return
                for rank, other in self._others.items():
                    self._look(rank, other)
            except RuntimeError as error:
                if not self._quit.is_set():  # the others cannot be told: they see that it ends, or have lost the store as well
                    self._post(self._rank, f"lost the rendezvous store ({_first_sentence(error)})", "RankError", 0)

    def _ask(self, what: str, *given: Any) -> Any:
        """Call the store; over a new connection where the old one is broken, which is tried once."""
        try:
            return getattr(self._store, what)(*given)
        except RuntimeError:
            if self._is_lost:
                raise
            self._is_lost = True
            self._store = self._store.clone()
            self._is_lost = False
            return getattr(self._store, what)(*given)

    def _look(self, rank: int, other: _Other) -> None:
        """Post what is wrong with a rank."""
        if self._ask("check", [f"left {rank}"]):
            return
        if other.process is None and self._ask("check", [f"process {rank}"]):
            other.process = _Process(*from_json(self._ask("get", f"process {rank}")))
        life = self._ask("get", f"life {rank}") if self._ask("check", [f"life {rank}"]) else b""
        other.silent = 0 if life != other.life or other.process is None else other.silent + 1  # one may come late
        other.life = life
        state = "?" if other.process is None or other.process.host != _host() else _state(other.process)
        other.stopped = other.stopped + 1 if state == "T" else 0
        who = "" if other.process is None else f" (process {other.process.pid})"
        if state == "-" and not self._ask("check", [f"left {rank}"]):
            self._post(rank, f"was killed, or ended without a word{who}", "RankError")
        elif other.stopped >= _STOPPED_LOOKS and other.process is not None:
            self._post(rank, f"is stopped by a signal{who}, and was killed with all others", "RankError")
            os.kill(other.process.pid, signal.SIGKILL)
        elif other.silent >= _SILENT_LOOKS:
            self._post(rank, f"gave no sign of life for {_SILENT_LOOKS * _EVERY_SECONDS:.0f} seconds{who}", "RankError")


@contextmanager
def watched(store: Any, rank: int, size: int) -> Iterator[Watch]:
    """Watch the other ranks; when one fails all do.

    Args:
        store: of torch.distributed, for this run alone.
        rank: of this process.
        size: number of ranks.

    Yields:
        The watch.

    Raises:
        RankError: another rank has failed, or this one was asked to end.
    """
    watch = Watch(store, rank, size)
    try:
        yield watch
    except RankError:
        ignore_sigterm()
        raise
    except EndedBySigterm as error:
        raise watch.explain(error) from error
    except BaseException as error:
        ignore_sigterm()
        watch.fail(error)
        error.add_note(f"rank {rank} of {size}")
        raise
    finally:
        watch.close()


class _Other:
    """What is known of another rank."""

    def __init__(self) -> None:
        self.process: _Process | None = None
        self.life = b""
        self.silent = self.stopped = 0


def _first_sentence(error: BaseException) -> str:
    """What an error of torch says, without the place in its sources and the advice."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r"^\[\S+:\d+\] ", "", lines[0]).partition(". ")[0]


def _host() -> str:
    """The names of processes, which are numbers, mean something in one namespace of one running kernel."""
    parts = [Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")]
    return f"{parts[0].read_text().strip()} {parts[1].readlink()}" if all(part.exists() for part in parts) else ""


def _myself() -> _Process:
    return _Process(_host() or f"no /proc, {os.getpid()}", os.getpid(), _stat(os.getpid())[1])


def _state(process: _Process) -> str:
    """The state of a process as the kernel writes it; - for one that has ended."""
    state, began = _stat(process.pid)
    return "-" if began != process.began or state in ("Z", "X") else state


def _stat(pid: int) -> tuple[str, str]:
    """State, and the moment at which it began."""
    try:
        parts = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return "-", ""
    return parts[0], parts[19]
