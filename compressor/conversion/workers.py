"""Doing all units, here or in several processes; whatever happens to one of those ends all of them at once, with one message."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import torch
from pydantic import TypeAdapter

from compressor import errors
from compressor.atomic import reason
from compressor.conversion.files import Files
from compressor.conversion.rounding import run_unit
from compressor.conversion.units import Done, Unit
from compressor.conversion.worker import EXPECTED, Failure
from compressor.errors import CheckpointError, CompressorError, OutOfMemoryError

_AHEAD = 2  # units that a worker has before it, so that it never waits
_ANSWER: TypeAdapter[Done | Failure] = TypeAdapter(Done | Failure)
_READ_BYTES = 1 << 16


def run_units(
    units: Sequence[Unit], known: Mapping[str, tuple[float, float]], base: Path, made: Path, device: torch.device, workers: int
) -> Iterator[Done]:
    """Do units.

    Args:
        units: those that find ranges before those that need them.
        known: ranges that were found earlier.
        base: folder that is read.
        made: folder of the files that are filled.
        device: where weights are rounded.
        workers: processes; 1 does all in this one. The bytes do not depend on it.

    Yields:
        What came of each, as they end.

    Raises:
        CompressorError: of the unit that failed.
        CheckpointError: the disk is full or fails, or a worker was killed.
        OutOfMemoryError: memory ran out.
    """
    waiting = _Waiting(units, known)
    if workers == 1:
        yield from _run_here(waiting, base, made, device)
    else:
        with ExitStack() as held:
            yield from _run_apart(waiting, [held.enter_context(_Worker(base, made, device, workers)) for _ in range(workers)])


class _Waiting:
    """Units that nobody has begun."""

    def __init__(self, units: Sequence[Unit], known: Mapping[str, tuple[float, float]]) -> None:
        self._units = deque(units)
        self._known = dict(known)
        self.num_open = len(units)

    def next(self) -> Unit | None:
        """Take the first unit whose ranges are known, and give it these; None where there is none just now."""
        for _ in range(len(self._units)):
            unit = self._units.popleft()
            if all(name in self._known for name in unit.needs):
                return unit.model_copy(update={"extremes": tuple(self._known[name] for name in unit.needs)})
            self._units.append(unit)
        return None

    def finish(self, done: Done) -> None:
        """Note what came of one."""
        self.num_open -= 1
        if done.extremes is not None:
            self._known[done.name] = done.extremes


def _run_here(waiting: _Waiting, base: Path, made: Path, device: torch.device) -> Iterator[Done]:
    with Files(base) as read, Files(made, writable=True) as written:
        while (unit := waiting.next()) is not None:
            try:
                done = run_unit(unit, read, written, device)
            except EXPECTED as error:
                if isinstance(error, CompressorError):
                    raise
                raise _said(Failure(kind=type(error).__name__, text=_text(error)), unit.name) from error
            waiting.finish(done)
            yield done


def _text(error: BaseException) -> str:
    return reason(error) if isinstance(error, OSError) else str(error)


def _said(failure: Failure, name: str) -> CompressorError:
    """The error for what happened, in this process or another."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, CompressorError):
        made: CompressorError = kind(failure.text)
        return made
    text = os.strerror(failure.code) if failure.code else failure.text
    if "Memory" in failure.kind:
        return OutOfMemoryError(f"{name}: memory ran out while it was converted ({text}); use fewer workers, or device='cpu'")
    return CheckpointError(f"{name}: cannot be converted ({text}); make room or repair the disk, and go on with --resume")


class _Worker:
    """One process, with the units that it has been given and has not answered, and the pipe on which it answers."""

    units: deque[Unit]
    output: IO[bytes]

    def __init__(self, base: Path, made: Path, device: torch.device, workers: int) -> None:
        threads = max(1, torch.get_num_threads() // workers)
        root = str(Path(errors.__file__).parents[1])  # the child shall be of this very package
        paths = os.pathsep.join(path for path in (root, os.environ.get("PYTHONPATH")) if path)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "compressor.conversion.worker", str(base), str(made), str(device)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)},
        )
        assert self._process.stdout is not None and self._process.stdin is not None
        self.output, self._input = self._process.stdout, self._process.stdin
        self.units, self._partial = deque(), b""

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._input, self.output, self._stderr):
            stream.close()

    def give(self, unit: Unit) -> None:
        self.units.append(unit)
        try:
            self._input.write(unit.model_dump_json().encode() + b"\n")
        except BrokenPipeError:
            raise self._ended() from None

    def answers(self) -> Iterator[Done]:
        """Read what it has written so far; raises what it failed of."""
        data = os.read(self.output.fileno(), _READ_BYTES)
        if not data:
            raise self._ended()
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            answer = _ANSWER.validate_json(line)
            unit = self.units.popleft()
            if isinstance(answer, Failure):
                raise _said(answer, unit.name)
            yield answer

    def _ended(self) -> CompressorError:
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").strip().splitlines()
        where = f" while it converted {self.units[0].name}" if self.units else ""
        last = f" ({said[-1]})" if said else ""
        return CheckpointError(
            f"worker {self._process.pid}: {how}{where}{last}; give it what it lacks (memory: fewer workers), and go on with --resume"
        )


def _run_apart(waiting: _Waiting, workers: Sequence[_Worker]) -> Iterator[Done]:
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.output, selectors.EVENT_READ, worker)
        while waiting.num_open:
            _hand_out(waiting, workers)
            for key, _ in selector.select():
                for done in key.data.answers():
                    waiting.finish(done)
                    yield done


def _hand_out(waiting: _Waiting, workers: Sequence[_Worker]) -> None:
    for depth in range(1, _AHEAD + 1):
        for worker in workers:
            if len(worker.units) < depth and (unit := waiting.next()) is not None:
                worker.give(unit)
