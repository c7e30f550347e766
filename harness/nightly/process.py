"""Runs a program in a process group of its own, within limits of time and memory, and ends all of it when it goes beyond."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HarnessError

_LOOK_EVERY = 0.1  # seconds
_GRACE = 5.0  # seconds from SIGTERM to SIGKILL


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    Attributes:
        code: exit code; below 0 the signal.
        beyond: `timeout` or `memory` where it was ended for that; empty otherwise.
        seconds: wall time.
        memory: peak of the resident memory of all its processes, bytes, as seen every 0.1 s.
    """

    code: int
    beyond: str
    seconds: float
    memory: int


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
        HarnessError: it cannot be started, or psutil is not installed.
    """
    start, peak, beyond = time.monotonic(), 0, ""
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=environment,
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
            _end(process)
    return Ended(process.returncode, beyond, time.monotonic() - start, peak)


def _held(pid: int) -> int:
    """Resident memory of a process and all below it."""
    try:
        import psutil
    except ModuleNotFoundError as error:
        raise HarnessError("harness nightly: psutil is not installed; pip install 'compressor-harness[nightly]'") from error
    total = 0
    with suppress(psutil.NoSuchProcess):
        whole = psutil.Process(pid)
        for process in (whole, *whole.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
    return total


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the group, also children that outlive their parent."""
    for number, wait in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait)
