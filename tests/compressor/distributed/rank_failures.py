"""Runs of the command in several processes, of which one fails in a way and at a moment that are chosen."""

from __future__ import annotations

import errno
import functools
import importlib
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import distributed as dist

from compressor.__main__ import main
from compressor.errors import CalibrationError
from tests.compressor.distributed.rank_jobs import CONTEXT

# A function of the run, and at which of its calls something happens.
MOMENTS = {
    "it comes": ("torch.distributed:rendezvous", 1),
    "it connects": ("torch.distributed:init_process_group", 1),
    "it joins": ("torch.distributed:new_group", 1),
    "it loads": ("compressor.entrypoints.oneshot:_load", 1),
    "it traces": ("compressor.pipelines.sequential:_trace", 1),
    "it calibrates": ("compressor.algorithms.hessian:Hessian.add", 20),
    "sums are added up": ("compressor.distributed.ranks:Ranks.add_up", 3),
    "it solves": ("compressor.modifiers.gptq:GPTQModifier._solve", 2),
    "a stage ends": ("compressor.pipelines.journal.shared:SharedJournal.finish_stage", 3),
    "a stage is noted": ("compressor.pipelines.journal.journal:Journal._append", 3),
    "all is compressed": ("compressor.monitor:Monitor.end_phase", 3),
    "the checkpoint is flushed": ("compressor.atomic:flush_all", 1),
    "the journal goes": ("compressor.pipelines.journal.shared:SharedJournal.finish", 1),
}


def _break_links(are_broken: Callable[[bool], bool]) -> None:
    """Shut connections of this process, chosen by whether they lead to the store."""
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as link:
            if are_broken(link.getpeername()[1] == int(os.environ["MASTER_PORT"])):
                link.shutdown(socket.SHUT_RDWR)


def _raise(error: BaseException) -> None:
    raise error


def _fail_to_flush() -> None:
    os.fsync = lambda descriptor: _raise(OSError(errno.EIO, os.strerror(errno.EIO)))


HOWS: dict[str, Callable[[], object]] = {
    **{name: functools.partial(signal.raise_signal, signal.Signals[name]) for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP")},
    "an error of ours": lambda: _raise(CalibrationError("layer: a planted error; repair it")),
    "no memory": lambda: _raise(MemoryError("planted")),
    "no link to the store": lambda: _break_links(lambda is_store: is_store),
    "no link to ranks": lambda: _break_links(lambda is_store: not is_store),
    "no link": lambda: _break_links(lambda is_store: True),
    "a full disk": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    "a disk that fails": _fail_to_flush,
}


class Ended(NamedTuple):
    """How the ranks of a run have ended.

    Attributes:
        codes: exit codes by rank.
        said: standard error of all ranks.
        seconds: from the failure to the end of the last rank; 0 without one.
    """

    codes: list[int]
    said: list[str]
    seconds: float


def run_ranks(size: int, folder: Path, argv: Sequence[str], fails: tuple[str, str, int] | None = None, *, helped: bool = False) -> Ended:
    """Run a command on so many ranks.

    Args:
        size: number of ranks.
        folder: for what they print; made.
        argv: arguments of `compressor`.
        fails: what happens to one (of HOWS), when (of MOMENTS), and which rank it is.
        helped: somebody asks all to end when one has ended badly, as torchrun does; else each ends by itself.

    Returns:
        How they have ended, or were killed after 40 seconds.
    """
    folder.mkdir()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # outlives all ranks, as that of torchrun
    ranks: list[Any] = [CONTEXT.Process(target=_rank, args=(rank, size, store.port, folder, argv, fails)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    _wait(ranks, helped)
    ended, begun = time.time(), folder / "failing"
    said = [(folder / f"{rank}.txt").read_text() for rank in range(size)]
    return Ended([rank.exitcode for rank in ranks], said, ended - begun.stat().st_mtime if begun.exists() else 0.0)


def _wait(ranks: Sequence[Any], helped: bool) -> None:
    deadline, asked = time.monotonic() + 40, False
    while any(rank.exitcode is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
        if helped and not asked and any(rank.exitcode for rank in ranks):
            asked = True
            for rank in ranks:
                rank.terminate()
    for rank in ranks:  # a failed test leaves nobody behind
        rank.kill()
        rank.join()


def _rank(rank: int, size: int, port: int, folder: Path, argv: Sequence[str], fails: tuple[str, str, int] | None) -> None:
    with (folder / f"{rank}.txt").open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 (of the process)
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    where |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update({name: str(value) for name, value in where.items()})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if fails is not None and fails[2] == rank:
        _plant(HOWS[fails[0]], *MOMENTS[fails[1]], folder / "failing")
    sys.argv = ["compressor", *argv]
    code = main()
    sys.stderr.flush()
    os._exit(code)


def _plant(happens: Callable[[], object], where: str, number: int, begun: Path) -> None:
    module, _, path = where.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    plain, calls = getattr(owner, name), [0]

    @functools.wraps(plain)
    def failing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            begun.touch()
            happens()
        return plain(*args, **kwargs)

    setattr(owner, name, failing)
