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
from harness.lifecycle.driving.time_limit import Stopwatch
from harness.lifecycle.other_process import HASH_SEEDS, NoAnswerError, run_elsewhere
from harness.lifecycle.subject import Subject
from harness.lifecycle.verify import verify
from harness.reporting.verdict import Outcome

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
    modifier = importlib.import_module("by_set_elsewhere").BySet()
    found = run_elsewhere(load_recipe([modifier]).dump(), Subject(modifier, tags=frozenset({"in_place"})), 1)
    assert len(found) == 3 and len({tuple(one.items()) for one in found}) == 2


def test_what_a_training_does_in_the_order_of_a_set_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = BY_SET.replace("on_calibration_end", "on_end").replace("BySet", "BySetAtTheEnd")
    (tmp_path / "by_set_at_the_end.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    given = importlib.import_module("by_set_at_the_end").BySetAtTheEnd
    record = verify(given, checks=["lifecycle.new_process"], tags={"in_place"}).records[-1]
    assert record.outcome is Outcome.FAIL
    assert record.summary.startswith("[state] with start=0.0 and end=1.0, in another process it gives other values in")


def test_another_process_counts_epochs_as_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would give other values, and be told for it, if its epochs had other steps."""
    source = BY_SET.partition("        next(")[0].replace("on_calibration_end", "on_end").replace("BySet", "ByIndex")
    source += "        next(state.model.parameters()).data.mul_(1 + event.index)\n"
    (tmp_path / "by_index_at_the_end.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    given = importlib.import_module("by_index_at_the_end").ByIndex
    record = verify(given, checks=["lifecycle.new_process"], tags={"in_place"}).records[-1]
    assert record.outcome is Outcome.PASS and "2 steps an epoch: " in record.summary, record.summary


def test_a_run_that_hangs_is_killed_with_the_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, hangs in (("hangs_elsewhere", True), ("answers_elsewhere", False)):
        (tmp_path / f"{name}.py").write_text(HANGING.format(hangs=hangs), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    hanging, answering = (importlib.import_module(name).Hanging() for name in ("hangs_elsewhere", "answers_elsewhere"))
    with pytest.raises(NoAnswerError, match=r"one call took longer than 0\.5 s, in Hanging\.on_initialize"):
        run_elsewhere(load_recipe([hanging]).dump(), Subject(hanging, stopwatch=Stopwatch(0.5)), 1)
    begun = tmp_path / "hangs_elsewhere.begun"
    begun.unlink()

    class GivesUp(Stopwatch):
        def restart(self) -> None:
            if begun.exists():
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_elsewhere(load_recipe([hanging]).dump(), Subject(hanging, stopwatch=GivesUp(60.0)), 1)
    assert run_elsewhere(load_recipe([answering]).dump(), Subject(answering), 1)
