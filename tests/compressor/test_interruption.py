"""Ctrl-C and SIGTERM during the imports of a command end it with 130 in one line, as later ones do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from compressor.interruption import interruptible

# A signal in the midst of the imports, whatever the machine's speed: at the first import of a module, while text is executed.
STOPPED = """
import os, signal, sys, time

signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests in the background may ignore it

class Stop:
    def find_spec(self, name, *rest):
        if name == os.environ["STOP_AT"]:
            exec("os.kill(os.getpid(), int(os.environ['SIGNAL'])); time.sleep(9)")

sys.meta_path.insert(0, Stop())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("package", "module"), [("compressor", "compressor.cli.main"), ("compressor", "rich.console"), ("harness", "rich")]
)
def test_an_interruption_while_a_command_is_imported_ends_it_in_one_line(package: str, module: str, number: int, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(STOPPED)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-m", package, "--help"],
        env={**os.environ, "PYTHONPATH": path, "STOP_AT": module, "SIGNAL": str(int(number))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr, ended.stdout) == (130, f"{package}: interrupted\n", "")


def test_an_import_that_an_interruption_ends_is_one_and_any_other_stays_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def load(came_of: BaseException) -> Callable[[], int]:
        try:
            try:
                raise came_of
            except type(came_of) as error:
                raise ImportError("initialization failed") from error
        except ImportError:
            raise ModuleNotFoundError("could not import Trainer")  # noqa: B904 - as transformers says it

    assert interruptible("compressor", lambda: load(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "compressor: interrupted\n"
    with pytest.raises(ModuleNotFoundError):
        interruptible("compressor", lambda: load(OSError()))
