"""What a modifier leaves is the same in another process, whose texts have other hashes, and is finite."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import harness
from compressor import QuantizationModifier
from compressor.lifecycle import Event, Modifier, State
from harness.lifecycle.driving.probes import TinyModel, tiny_batches
from harness.reporting.record import CheckRecord
from harness.reporting.verdict import Outcome

MODULE = """
import os, sys, torch
from compressor.lifecycle import Modifier
from harness.lifecycle.other_process import HASH_SEEDS

print("a module that prints")

class Base(Modifier):
    amount: float = 1.0
    def on_initialize(self, state):
        return True
    def on_calibration_end(self, state, event):
        with torch.no_grad():
            for name, parameter in state.model.named_parameters():
                parameter.mul_(self.factor(name, len(list(state.model.parameters()))))

class Even(Base):
    def factor(self, name, count):
        print("a modifier that prints")
        return 1 + self.amount / (2 + len(name))

class ByHash(Base):
    def factor(self, name, count):
        return 1 + self.amount * (hash(name) % 7)

class BySet(Base):
    def factor(self, name, count):
        return 1 + self.amount * list({f"layer {number}" for number in range(16)}).index("layer 3")

class Dies(Base):
    def factor(self, name, count):
        if os.environ.get("PYTHONHASHSEED") == HASH_SEEDS[0]:
            os._exit(3)
        return 1.0
"""


@pytest.fixture(scope="module")
def modifiers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "modifiers_elsewhere.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield importlib.import_module("modifiers_elsewhere")


def look(modifier: object, check: str, **more: Any) -> CheckRecord:
    return harness.verify(modifier, checks=[f"lifecycle.{check}"], **more).records[-1]


def test_a_result_that_hangs_on_the_hashes_of_texts_is_told(modifiers: Any) -> None:
    assert look(modifiers.Even(amount=0.5), "new_process").summary == "15 tensors are equal"
    assert look(QuantizationModifier(scheme="W4A16"), "new_process").outcome is Outcome.PASS
    for wrong in (modifiers.ByHash, modifiers.BySet(amount=0.5)):
        assert look(wrong, "repeatable").outcome is Outcome.PASS
        record = look(wrong, "new_process", time_limit=1.0)
        assert record.outcome is Outcome.FAIL and "in another process it gives other values in " in record.summary


def test_what_another_process_cannot_make_is_skipped_with_the_reason(modifiers: Any, tmp_path: Path) -> None:
    class Local(modifiers.Even):  # type: ignore[misc, name-defined]
        pass

    assert "move it into a module" in look(Local, "new_process").summary
    assert "neither the model nor" in look(modifiers.Even, "new_process", model=TinyModel(8), inputs=tiny_batches(1)).summary
    record = look(modifiers.Dies, "new_process")
    assert (record.outcome, record.summary) == (Outcome.SKIP, "another process cannot tell: there the process died")
    assert look(modifiers.Even, "new_process").outcome is Outcome.PASS  # the next one is asked as before


class LeavesNaN(Modifier):
    value: float | None = None

    def on_initialize(self, state: State) -> bool:
        return True

    def on_calibration_end(self, state: State, event: Event) -> None:
        with torch.no_grad():
            state.model.get_parameter("norm.bias")[0] = float("nan") if self.value is None else self.value


class LeavesAnInfiniteScale(LeavesNaN):
    def on_calibration_end(self, state: State, event: Event) -> None:
        state.model.get_submodule("norm").register_buffer("scale", torch.tensor([float("inf")]))


def test_what_a_run_leaves_is_finite() -> None:
    for wrong in (LeavesNaN(), LeavesAnInfiniteScale()):
        record = look(wrong, "finite", model=TinyModel(8), inputs=tiny_batches(1), tags=["annotates"])
        assert record.outcome is Outcome.FAIL and "it leaves NaN or infinity in norm." in record.summary
    assert look(LeavesNaN(value=2.0), "finite").outcome is Outcome.PASS


def test_what_was_not_finite_before_is_not_the_modifiers() -> None:
    model = TinyModel(8)
    model.register_buffer("mask", torch.full((2,), float("-inf")))
    assert look(LeavesNaN(value=2.0), "finite", model=model, inputs=tiny_batches(1)).outcome is Outcome.PASS


def test_a_class_whose_file_no_import_finds_is_verified(tmp_path: Path) -> None:
    path = tmp_path / "of_nowhere.py"
    path.write_text("from compressor import Modifier\nclass Nothing(Modifier):\n    def on_initialize(self, state):\n        return True\n")
    spec = importlib.util.spec_from_file_location("of_nowhere", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    report = harness.verify(module.Nothing, checks=["lifecycle.completes", "lifecycle.recipe", "lifecycle.new_process"])
    assert [record.outcome for record in report.records[1:]] == [Outcome.PASS, Outcome.SKIP, Outcome.SKIP], report.to_text()
