"""A run in another process that hangs ends with who asked for it, and the next question finds a process that answers."""

from __future__ import annotations

import importlib
import time
from pathlib import Path

import pytest

from compressor.recipe import load_recipe
from harness.lifecycle.other_process import run_elsewhere

HANGING = """
import time
from compressor import Modifier

class Hanging(Modifier):
    def on_initialize(self, state):
        while {hangs}:
            time.sleep(0.1)
        return True
"""


def test_a_run_that_hangs_is_killed_with_the_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, hangs in (("hangs_elsewhere", True), ("answers_elsewhere", False)):
        (tmp_path / f"{name}.py").write_text(HANGING.format(hangs=hangs), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    begun = time.monotonic()

    def give_up() -> None:
        if time.monotonic() - begun > 20:  # long enough for the process to have begun
            raise KeyboardInterrupt

    hanging, answering = (
        load_recipe([importlib.import_module(name).Hanging()]).dump() for name in ("hangs_elsewhere", "answers_elsewhere")
    )
    with pytest.raises(KeyboardInterrupt):
        run_elsewhere(hanging, frozenset(), 1, give_up)
    begun = time.monotonic()
    assert run_elsewhere(answering, frozenset(), 1, give_up)
