"""Signs of life of the processes of a run, and the one error that ends all of them.

A thread of each rank writes to the rendezvous store that it lives, and reads whether somebody has failed. Who fails first says so there,
and nobody else speaks: the others end with a RankError that is told by one rank at most. A rank that was killed, or stopped by a signal,
cannot say so; on one host the others see it in /proc within a few seconds, elsewhere by signs of life that stay away for a minute. A rank
that is stopped does not end when it is asked to, so whoever finds it kills it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from compressor.errors import RankError
from compressor.json_text import from_json

_EVERY_SECONDS = 0.25
_STOPPED_LOOKS = 12  # in a row: 3 seconds; who stops a whole job and lets it go on stops us as well
_SILENT_LOOKS = 240  # without a sign of life: a minute, for a thread may wait long for an interpreter that is busy
_PATIENCE_SECONDS = 5.0  # until a broken connection is explained


class _Process(NamedTuple):
    """Who a rank is on its host."""

    host: str
    pid: int
    began: str


class Watch:
    """Follows the other ranks of a run from a thread; a context manager."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """Begin to watch.

        Args:
            store: of torch.distributed, for this run alone; used by this object alone.
            rank: of this process.
            size: number of ranks.
        """
        self._store, self._rank, self._size = store, rank, size
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
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        found = self._error(self._failure or self._post(self._rank, f"lost the connection to another rank ({said})", "RankError"))
        for note in getattr(error, "__notes__", ()):
            found.add_note(note)
        return found

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
            self._store.set(f"left {self._rank}", "1")
        self._quit.set()
        self._thread.join()

    def _error(self, failure: str) -> RankError:
        told = from_json(failure)
        error = RankError(f"rank {told['rank']} of {self._size}: {told['text']}")
        error.kind, error.is_mine_to_tell = told["kind"], told["teller"] == self._rank
        return error

    def _post(self, rank: int, text: str, kind: str, teller: int | None = None) -> str:
        """Say once for all what has happened, and who tells the user; the first word counts."""
        first = min(other for other in range(self._size) if other != rank)  # the first rank knows what was kept for a resume
        word = json.dumps({"rank": rank, "text": text, "kind": kind, "teller": first if teller is None else teller})
        try:
            self._failure = self._store.compare_set("failure", "", word).decode()
        except RuntimeError:
            self._failure = word
        return self._failure

    def _run(self) -> None:
        count = 0
        while not self._quit.wait(_EVERY_SECONDS) and self._failure is None:
            count += 1
            try:
                self._store.set(f"life {self._rank}", str(count))
                if self._store.check(["failure"]):
                    self._failure = self._store.get("failure").decode()
                    return
                for rank, other in self._others.items():
                    self._look(rank, other)
            except RuntimeError as error:
                if not self._quit.is_set():
                    self._post(self._rank, f"lost the rendezvous store ({error})", "RankError", self._rank)

    def _look(self, rank: int, other: _Other) -> None:
        """Post what is wrong with a rank."""
        if self._store.check([f"left {rank}"]):
            return
        if other.process is None and self._store.check([f"process {rank}"]):
            other.process = _Process(*from_json(self._store.get(f"process {rank}")))
        life = self._store.get(f"life {rank}") if self._store.check([f"life {rank}"]) else b""
        other.silent = 0 if life != other.life else other.silent + 1
        other.life = life
        state = "?" if other.process is None or other.process.host != _host() else _state(other.process)
        other.stopped = other.stopped + 1 if state == "T" else 0
        who = "" if other.process is None else f" (process {other.process.pid})"
        if state == "-" and not self._store.check([f"left {rank}"]):
            self._post(rank, f"was killed, or ended without a word{who}", "RankError")
        elif other.stopped >= _STOPPED_LOOKS and other.process is not None:
            self._post(rank, f"is stopped by a signal{who}, and was killed with all others", "RankError")
            os.kill(other.process.pid, signal.SIGKILL)
        elif other.silent >= _SILENT_LOOKS:
            self._post(rank, f"gave no sign of life for {_SILENT_LOOKS * _EVERY_SECONDS:.0f} seconds{who}", "RankError")


class _Other:
    """What is known of another rank."""

    def __init__(self) -> None:
        self.process: _Process | None = None
        self.life = b""
        self.silent = self.stopped = 0


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
