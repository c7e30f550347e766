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


BY_SET = """
from compressor import Modifier

class BySet(Modifier):
    def on_initialize(self, state):
        state.touch(["layers.0"])
        return True

    def on_calibration_end(self, state, event):
        next(state.model.parameters()).data.mul_({"absmax": 2.0, "percentile": 4.0}[next(iter({"absmax", "percentile"}))])
"""


def test_the_other_processes_order_a_set_of_two_in_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "by_set_elsewhere.py").write_text(BY_SET, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = load_recipe([importlib.import_module("by_set_elsewhere").BySet()]).dump()
    found = run_elsewhere(recipe, frozenset({"in_place"}), 1, 60.0, lambda: None)
    assert len(found) == 3 and len({tuple(one.items()) for one in found}) == 2


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
