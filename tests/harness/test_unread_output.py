"""Nobody reads what a command prints, or the disk under it is full: it ends quietly or with one line, with no traceback and no verdict."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compressor.console import EXIT_CLOSED_PIPE, with_output

COMMANDS = (
    ("compressor.cli.main", "recipe", "schema"),
    ("harness.cli", "catalogue"),
    ("harness.cli", "replay", "hazards", "--list"),
    ("harness.cli", "onnx", "--help"),
)
FULL = Path("/dev/full")


def _run(command: tuple[str, ...], output: int, unbuffered: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(
        [sys.executable, "-m", *command], stdout=output, stderr=subprocess.PIPE, text=True, env=environment, timeout=120, check=False
    )


@pytest.mark.parametrize(("command", "unbuffered"), [*((one, "") for one in COMMANDS), *((one, "1") for one in COMMANDS[:3])])
def test_a_closed_pipe_ends_a_command_quietly(command: tuple[str, ...], unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = _run(command, writing, unbuffered)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (EXIT_CLOSED_PIPE, "")


def test_bars_on_a_closed_pipe_are_no_verdict() -> None:
    work = "from compressor.progress import RichProgress\n"
    work += "from compressor.console import with_output\n"
    work += "def run():\n with RichProgress().task('work', 1) as task: task.advance()\n return 0\n"
    reading, writing = os.pipe()
    os.close(reading)
    program = [sys.executable, "-c", f"{work}raise SystemExit(with_output('harness', run, 3))"]
    try:
        ended = subprocess.run(program, stdout=writing, stderr=writing, timeout=120, check=False)
    finally:
        os.close(writing)
    assert ended.returncode == EXIT_CLOSED_PIPE


@pytest.mark.skipif(not FULL.exists(), reason="the device /dev/full stands for a full disk")
@pytest.mark.parametrize(("command", "unbuffered"), [(COMMANDS[0], ""), (COMMANDS[1], "1")])
def test_a_full_disk_is_an_error_of_one_line(command: tuple[str, ...], unbuffered: str) -> None:
    with FULL.open("w") as full:
        ended = _run(command, full.fileno(), unbuffered)
    assert ended.returncode in (1, 3)
    assert ended.stderr.count("\n") == 1 and "standard output: it cannot be written (No space left on device)" in ended.stderr


def test_a_command_whose_output_is_closed_does_its_work() -> None:
    ended = subprocess.run(["sh", "-c", f"{sys.executable} -m harness.cli catalogue >&-"], stderr=subprocess.PIPE, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_pipe_of_somebody_else_is_no_closed_output() -> None:
    def work() -> int:
        raise BrokenPipeError(32, "of a worker process")

    with pytest.raises(BrokenPipeError, match="of a worker process"):
        with_output("harness", work, 3)
