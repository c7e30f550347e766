"""A run in another process that hangs ends with who asked for it, and the next question finds a process that answers."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from compressor.recipe import load_recipe
from harness.lifecycle.driving.probes import TinyModel
from harness.lifecycle.other_process import HASH_SEEDS, NoAnswerError, run_elsewhere

ORDERS = "import sys; n = sys.argv[1:]; print(sorted(n, key=lambda one: (hash(one), one)), list(set(n)))"


def test_any_two_linear_layers_stand_in_both_orders_in_the_other_processes() -> None:
    names = [name for name, module in TinyModel().named_modules() if isinstance(module, nn.Linear)]
    pairs: list[set[tuple[str, str]]] = [set(), set()]
    for seed in HASH_SEEDS:
        done = subprocess.run([sys.executable, "-S", "-c", ORDERS, *names], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True)
        by_hash, in_set = done.stdout.strip()[1:-1].split("] [")
        for found, text in zip(pairs, (by_hash, in_set), strict=True):
            found |= set(itertools.combinations([name.strip("' ") for name in text.split(",")], 2))
    assert pairs == [set(itertools.permutations(names, 2))] * 2 and len(names) == 5


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
