"""A run in another process that hangs ends with who asked for it, and the next question finds a process that answers."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from compressor.recipe import load_recipe
from harness.lifecycle.other_process import NoAnswerError, run_elsewhere

HANGING = """
import time
from pathlib import Path
from compressor import Modifier

class Hanging(Modifier):
    def on_initialize(self, state):
        Path(__file__).with_suffix(".begun").touch()
        while {hangs}:
            time.sleep(0.1)
        return True
"""


def test_a_run_that_hangs_is_killed_with_the_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, hangs in (("hangs_elsewhere", True), ("answers_elsewhere", False)):
        (tmp_path / f"{name}.py").write_text(HANGING.format(hangs=hangs), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    hanging, answering = (
        load_recipe([importlib.import_module(name).Hanging()]).dump() for name in ("hangs_elsewhere", "answers_elsewhere")
    )
    with pytest.raises(NoAnswerError, match=r"one call took longer than 0\.5 s, in Hanging\.on_initialize"):
        run_elsewhere(hanging, frozenset(), 1, 0.5, lambda: None)
    begun = tmp_path / "hangs_elsewhere.begun"
    begun.unlink()

    def give_up() -> None:
        if begun.exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_elsewhere(hanging, frozenset(), 1, 60.0, give_up)
    assert run_elsewhere(answering, frozenset(), 1, 60.0, lambda: None)
