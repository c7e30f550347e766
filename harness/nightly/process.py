"""Runs a program in a process group of its own, within limits of time and memory, and ends all of it when it goes beyond."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import reason
from harness.errors import HarnessError

_LOOK_EVERY = 0.1  # seconds
_MARK = "HARNESS_NIGHTLY_CELL"
_GRACE = 5.0  # seconds from SIGTERM to SIGKILL


@contextmanager
def alone_in(folder: Path, remedy: str) -> Iterator[None]:
    """Keep a second process out of a folder that this one works in, until the end of the block or of the process.

    Args:
        folder: made where it is not there.
        remedy: what else the other one may do, for its message.

    Raises:
        HarnessError: another process works there, or the folder cannot be made.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / "lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise HarnessError(f"{folder}: another process works there; wait for its end, or {remedy}") from error
        except OSError as error:
            raise HarnessError(f"{folder}: cannot be made ({reason(error)}); {remedy}") from error
        yield


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    Attributes:
        code: exit code; below 0 the signal.
        beyond: `timeout` or `memory` where it was ended for that; empty otherwise.
        seconds: wall time.
        memory: peak of the resident memory of all its processes, bytes, as seen every 0.1 s; without those that detached themselves.
        strays: processes that had detached themselves from it, and were ended after it.
    """

    code: int
    beyond: str
    seconds: float
    memory: int
    strays: int = 0


def run_limited(
    command: Sequence[str], log: Path, *, seconds: float, memory: float | None, cwd: Path, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run a program to its end, or to its limits.

    Args:
        command: program and arguments.
        log: file that gets what it prints.
        seconds: wall time that it may take.
        memory: bytes that its processes may hold together; None for no limit.
        cwd: where it runs.
        environment: variables; by default those of this process.

    Returns:
        How it ended. No process of it is left.

    Raises:
        HarnessError: it cannot be started, the log cannot be written, or psutil is not installed.
    """
    start, peak, beyond = time.monotonic(), 0, ""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    try:
        output = log.open("wb")
    except OSError as error:
        raise HarnessError(f"{log}: cannot be written ({error.strerror}); make room, or name another folder") from error
    with output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env={**(os.environ if environment is None else environment), _MARK: mark},
                start_new_session=True,
            )
        except OSError as error:
            raise HarnessError(f"{command[0]}: cannot be started ({error.strerror}); correct the command") from error
        try:
            while process.poll() is None and not beyond:
                time.sleep(_LOOK_EVERY)
                held = _held(process.pid)
                peak = max(peak, held)
                if memory is not None and held > memory:
                    beyond = "memory"
                elif time.monotonic() - start > seconds:
                    beyond = "timeout"
        finally:
            elapsed = time.monotonic() - start
            _end(process)
            strays = _end_strays(mark)
    return Ended(process.returncode, beyond, elapsed, peak, strays)


def _held(pid: int) -> int:
    """Resident memory of a process and all below it."""
    psutil = _psutil()
    total = 0
    with suppress(psutil.NoSuchProcess):
        whole = psutil.Process(pid)
        for process in (whole, *whole.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
    return total


def _psutil() -> Any:
    try:
        import psutil
    except ModuleNotFoundError as error:
        raise HarnessError("harness nightly: psutil is not installed; pip install 'compressor-harness[nightly]'") from error
    return psutil


def _end_strays(mark: str) -> int:
    """End what has left the group (a daemon, by `setsid`): it would run on beside the next program. Its variables still say whose it is."""
    psutil, strays = _psutil(), []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or belongs to somebody else
            if process.environ().get(_MARK) == mark:
                process.kill()
                strays.append(process)
    psutil.wait_procs(strays, timeout=_GRACE)
    return len(strays)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the group, also children that outlive their parent."""
    for number, wait in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait)
