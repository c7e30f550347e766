"""verify over models whose own forward writes attributes: those are no modifier's, and what a modifier does beside them is."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from compressor.errors import UserInputError
from compressor.lifecycle import Event, Modifier, State
from compressor.lifecycle.interface import CalibrationNeed
from harness import verify
from harness.lifecycle.driving.probes import TinyModel, tiny_batches
from harness.reporting.verdict import Verdict

OWN, OTHER = "layers.0.up_proj", "layers.1.up_proj"


class Counts(TinyModel):
    def forward(self, tokens: Tensor) -> Tensor:
        self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
        output: Tensor = super().forward(tokens)
        return output


class KeepsItsOutput(TinyModel):
    def forward(self, tokens: Tensor) -> Tensor:
        self.latest = super().forward(tokens)
        return self.latest


class WritesLate(TinyModel):
    """Writes an attribute in its calls behind the first two alone."""

    def forward(self, tokens: Tensor) -> Tensor:
        calls = [*self.__dict__.get("calls", ()), 1]
        self.__dict__["calls"] = calls
        if len(calls) > 2:
            self.late = len(calls)
        output: Tensor = super().forward(tokens)
        return output


class WritesItsWeight(TinyModel):
    def forward(self, tokens: Tensor) -> Tensor:
        self.get_submodule(OTHER).weight.data.mul_(0.5)
        output: Tensor = super().forward(tokens)
        return output


class Normed(TinyModel):
    """With a hook of torch that computes a plain attribute in each forward."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__(hidden)
        nn.utils.spectral_norm(self.get_submodule("layers.0.down_proj"))


class MakesATable(TinyModel):
    """With a buffer that its first forward makes."""

    def forward(self, tokens: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.ones(2))
        output: Tensor = super().forward(tokens)
        return output


class Halves(Modifier):
    """Halves a weight that it has touched."""

    contract_tags: ClassVar = {"in_place"}

    def on_initialize(self, state: State) -> bool:
        state.touch([OWN])
        return True

    def on_calibration_end(self, state: State, event: Event) -> None:
        state.model.get_submodule(OWN).weight.data.mul_(0.5)


class Watches(Halves):
    calibration: ClassVar[CalibrationNeed] = "basic"

    def on_calibration_start(self, state: State, event: Event) -> None:
        self.register_hook(state.model.get_submodule(OWN), lambda module, args, output: None, "forward")

    def on_calibration_end(self, state: State, event: Event) -> None:
        self.remove_hooks()
        super().on_calibration_end(state, event)


class LeavesANote(Halves):
    def on_calibration_end(self, state: State, event: Event) -> None:
        state.model.get_submodule(OTHER).seen = 1


class HalvesAnotherInMemory(Halves):
    """Changes what it has not named, where a model in memory is compressed alone."""

    def on_calibration_end(self, state: State, event: Event) -> None:
        if state.keep_originals:
            state.model.get_submodule(OTHER).weight.data.mul_(0.5)


class HalvesAnotherOfAPath(Halves):
    def on_calibration_end(self, state: State, event: Event) -> None:
        if not state.keep_originals:
            state.model.get_submodule(OTHER).weight.data.mul_(0.5)


@pytest.mark.parametrize("model", [Counts, KeepsItsOutput, MakesATable, WritesLate, Normed])
def test_what_a_models_own_forward_writes_is_no_modifiers(model: type[TinyModel]) -> None:
    checks = [f"lifecycle.{name}" for name in ("completes", "nothing_left", "hooks_watch", "surroundings", "claims", "rolls_back")]
    batches = [*tiny_batches(1), *tiny_batches(1)][:2]
    report = verify(Halves, model(8), inputs=batches, checks=checks)
    assert report.verdict is Verdict.PASS, report.to_text()
    report = verify(LeavesANote, model(8), inputs=batches, checks=checks[:1])
    assert report.verdict is Verdict.REGRESSION, report.to_text()
    assert f"{OTHER}.seen: attribute appeared: 1" in report.records[-1].summary


def test_hooks_that_were_there_before_are_no_modifiers() -> None:
    report = verify(Halves, Normed(8), inputs=tiny_batches(1), checks=["lifecycle.nested_contexts"])
    assert report.records[-1].summary == "it never has a hook on the model", report.to_text()
    report = verify(Watches, Normed(8), inputs=tiny_batches(1), checks=["lifecycle.nested_contexts"])
    assert report.verdict is Verdict.PASS and report.records[-1].summary.startswith("hooks at "), report.to_text()


def test_a_weight_that_the_forward_writes_is_told_since_nobody_has_claimed_it() -> None:
    """As `oneshot` tells it: the result cannot be saved."""
    report = verify(Halves, WritesItsWeight(8), inputs=tiny_batches(1), checks=["lifecycle.claims"])
    assert report.verdict is Verdict.REGRESSION and f"{OTHER}.weight" in report.records[-1].summary, report.to_text()


@pytest.mark.parametrize("cls", [HalvesAnotherInMemory, HalvesAnotherOfAPath])
def test_what_hangs_on_where_the_model_comes_from_is_told(cls: type[Halves]) -> None:
    report = verify(cls, TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.claims"])
    assert report.verdict is Verdict.REGRESSION, report.to_text()
    assert f"{OTHER}.weight" in report.records[-1].summary


def test_a_model_that_cannot_be_copied_is_refused_in_these_words() -> None:
    model = TinyModel(8)
    model.extra = torch.ones(2, requires_grad=True) * 2
    with pytest.raises(
        UserInputError,
        match=r"^verify: the model cannot be copied \(RuntimeError: Only Tensors created .*; give one that copy\.deepcopy takes$",
    ):
        verify(Halves, model, inputs=tiny_batches(1), checks=["lifecycle.completes"])
