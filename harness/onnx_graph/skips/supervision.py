"""Watch every program that a command starts, through the kernel: which of them loaded an optimizer, and did the hook reach it?

An interpreter that ignores its environment (`python -I`), a child that was given an empty one or a program that is no Python runs no hook,
and says nothing of itself. The kernel does: as a tracer (ptrace) this process is told of every fork, exec and exit of all descendants, and
reads from their memory maps which libraries they hold. Nothing else of them is touched, and between those moments they run at full speed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import HarnessError

# What is not promised, in the words in which the chapter of this room, `--help` and docstrings say it. Light: help imports it.

NOT_SEEN = (
    "Not seen: recurrences (LSTM, GRU, RNN), a Loop, Scan or If without a matrix product, sorting, lookups of what a single layer chose "
    "(routers, detectors), messages along edges that are given, and sampling, Fourier transforms or repetition that other operators "
    "spell out"
)
"""What may mix activations and makes no block, so that contracts can hold beside it."""

EVIDENCE = (
    "An output that is constant, NaN everywhere, empty or drawn at random is no evidence; another type or shape, or NaN elsewhere, is "
    "a violation. An error passes if it has less than a billionth of an output's energy and less than a thousandth (3 % in amplitude) of "
    "each slice along an axis that it lies in; at 35 dB less than 1/3000, and a small slice may be wrong altogether. Of ids, places and "
    "truth values (integers of 4 bytes or more) one in 31,623 may be another, at 35 dB one in 56: ties that fall the other way"
)
"""What numeric-equal asks for, and where it ends."""

OUT_OF_REACH = (
    "An interpreter that ignores its environment (`python -I`, `-E`, `-S`) or is given another one runs no hook: inside of `forced_skips` "
    "it goes unnoticed beside a call that was seen, `harness onnx run` sees it"
)
"""What forced skips do not reach."""

OUTSIDE = (
    "Outside of `harness onnx run` stay programs that carry an optimizer in a file of another name, children that their parent clones as "
    "untraceable (CLONE_UNTRACED), what a service that runs already starts, and other machines"
)
"""What not even the kernel tells."""

_SEIZE, _CONT, _LISTEN, _EVENT_MESSAGE = 0x4206, 7, 0x4208, 0x4201
_FORK, _VFORK, _CLONE, _EXEC, _EXIT, _STOP = 1, 2, 3, 4, 6, 128
_OPTIONS = sum(1 << event for event in (_FORK, _VFORK, _CLONE, _EXEC, _EXIT))
_WALL = 0x40000000
_JOB_CONTROL = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)

_LIBRARIES: Mapping[str, str] = {
    "onnxsim": r"onnxsim_cpp2py_export|^libonnxsim|^onnxsim(_bin)?$",
    "onnxoptimizer": r"onnx_opt_cpp2py_export|^libonnx_optimizer",
    "ort": r"onnxruntime_pybind11_state|^libonnxruntime\.",
}
"""Back end to the names of the files that hold its code."""


@dataclass(frozen=True)
class Unseen:
    """A program whose calls of an optimizer, if it made any, are not known.

    Attributes:
        command: its command line.
        reason: why it is suspected.
    """

    command: str
    reason: str


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: its exit code; negative for a signal.
        unseen: programs that optimized, or may have, out of reach; in the order in which they were found.
    """

    code: int
    unseen: tuple[Unseen, ...]


@dataclass(frozen=True)
class _Program:
    """What a process runs: a fork goes on with that of its parent, an exec begins a new one."""

    command: str
    python: bool
    reached: bool


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    backends: Collection[str],
    reached: Callable[[int], bool],
    forget: Callable[[int], None],
) -> Ended:
    """Run a command to the end of everything that it starts.

    Args:
        command: and its arguments.
        environment: of the command.
        backends: the optimizers to look for.
        reached: whether the process of that identifier has run the hook.
        forget: called when that process begins another program, or a new process takes that identifier.

    Returns:
        Exit code, and the programs out of reach.

    Raises:
        HarnessError: this system does not let a process be watched.
    """
    if sys.platform != "linux":
        raise HarnessError(f"run: on {sys.platform} it cannot be watched which programs a command starts; run it on Linux")
    process = subprocess.Popen(["/bin/sh", "-c", 'kill -STOP $$; exec "$@"', "sh", *command], env=dict(environment))
    os.waitpid(process.pid, os.WUNTRACED)
    try:
        _ptrace(_SEIZE, process.pid, _OPTIONS)
    except OSError as error:
        process.kill()
        process.wait()
        raise HarnessError(
            f"run: the system does not let a command be watched ({error.strerror}), so it would not be known whether another program "
            "optimizes; allow ptrace (containers: the capability SYS_PTRACE)"
        ) from error
    pattern = re.compile("|".join(_LIBRARIES[backend] for backend in backends))
    supervisor = _Supervisor(process.pid, pattern, reached, forget)
    with _interrupts_left_to_the_command():
        os.kill(process.pid, signal.SIGCONT)
        code = supervisor.run()
    process.returncode = code  # it has been waited for
    return Ended(code, tuple(supervisor.unseen))


class _Supervisor:
    """Answers the stops of all descendants, until none is left."""

    def __init__(self, root: int, libraries: re.Pattern[str], reached: Callable[[int], bool], forget: Callable[[int], None]) -> None:
        self.unseen: dict[Unseen, None] = {}
        self._root = root
        self._libraries = libraries
        self._reached_hook, self._forget = reached, forget
        self._alive = {root}  # threads and processes
        self._early: set[int] = set()  # stopped before the fork that made them was reported
        self._programs = {root: _Program("sh", python=False, reached=False)}

    def run(self) -> int:
        """Return the exit code of the first process, when all have ended."""
        code = 0
        while self._alive:
            task, status = os.waitpid(-1, _WALL)
            if os.WIFSTOPPED(status):
                with contextlib.suppress(ProcessLookupError):  # killed while it was stopped
                    self._stopped(task, status >> 16, os.WSTOPSIG(status))
                continue
            self._alive.discard(task)
            self._programs.pop(task, None)
            if task == self._root:
                code = os.waitstatus_to_exitcode(status)
        return code

    def _stopped(self, task: int, event: int, number: int) -> None:
        if event in (_FORK, _VFORK, _CLONE):
            self._forked(task, _message(task))
        elif event == _EXEC:
            self._executed(task, _message(task))
        elif event == _EXIT:
            self._ending(_process_of(task))
        elif event == _STOP and number in _JOB_CONTROL:
            _ptrace(_LISTEN, task)
            return
        elif event == _STOP and task not in self._alive:
            self._early.add(task)
            return
        _ptrace(_CONT, task, 0 if event else number)

    def _forked(self, task: int, new: int) -> None:
        self._alive.add(new)
        if _process_of(new) == new:
            self._forget(new)
            parent = _process_of(task)
            self._programs[new] = replace(self._programs[parent], python=False, reached=self._is_reached(parent))
        if new in self._early:
            self._early.remove(new)
            _ptrace(_CONT, new)

    def _executed(self, process: int, former_task: int) -> None:
        old = self._programs[process]
        if old.python and not self._is_reached(process):
            self._add(old, "it did not run the hook, and what it did before it became another program was not seen")
        self._alive.discard(former_task)  # the thread that called exec goes on under the process's number
        self._alive.add(process)
        self._forget(process)
        python = Path(f"/proc/{process}/exe").readlink().name.startswith(("python", "pypy"))
        words = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        self._programs[process] = _Program(" ".join(words.split())[:300], python, reached=False)

    def _ending(self, process: int) -> None:
        if self._is_reached(process):
            return
        with contextlib.suppress(OSError):  # the maps of a process that is being killed
            for line in Path(f"/proc/{process}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                name = line.removesuffix(" (deleted)").rpartition("/")[2]
                if self._libraries.search(name):
                    self._add(self._programs[process], f"it loaded {name} and did not run the hook")

    def _is_reached(self, process: int) -> bool:
        return self._programs[process].reached or self._reached_hook(process)

    def _add(self, program: _Program, reason: str) -> None:
        self.unseen[Unseen(program.command, reason)] = None


def _process_of(task: int) -> int:
    """The process that a thread belongs to; of one that is gone, the thread itself."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        found = re.search(r"^Tgid:\s+(\d+)", Path(f"/proc/{task}/status").read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        return int(found.group(1)) if found else task
    return task


def _message(task: int) -> int:
    value = ctypes.c_ulong()
    _ptrace(_EVENT_MESSAGE, task, ctypes.addressof(value))
    return value.value


def _ptrace(request: int, task: int, data: int = 0) -> None:
    function = ctypes.CDLL(None, use_errno=True).ptrace
    function.argtypes, function.restype = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p], ctypes.c_long
    if function(request, task, None, data) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextlib.contextmanager
def _interrupts_left_to_the_command() -> Iterator[None]:
    """Ctrl-C reaches the command, too; it is its end that ends the watch."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
