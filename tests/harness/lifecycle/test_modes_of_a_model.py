"""verify looks at a calibration over a model in training mode and in evaluation mode, which is how models are loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import pytest
import torch
from pydantic import PrivateAttr
from torch import Tensor, nn

from compressor.lifecycle import Event, Modifier, State
from compressor.lifecycle.interface import CalibrationNeed
from harness import verify
from harness.lifecycle.driving.probes import TinyModel, tiny_batches
from harness.reporting.verdict import Verdict

OWN, OTHER = "layers.0.up_proj", "layers.1.up_proj"


def not_claimed(state: State) -> None:
    state.model.get_submodule(OTHER).weight.data.mul_(0.5)


def not_finite(state: State) -> None:
    state.model.get_submodule(OWN).weight.data[0, 0] = float("inf")


class ActsInOneMode(Modifier):
    """Does something at the end of a calibration, in one mode of the model alone."""

    contract_tags: ClassVar = {"in_place"}
    training: bool = False
    _act: Callable[[State], None] = PrivateAttr(not_claimed)

    def on_initialize(self, state: State) -> bool:
        state.touch([OWN])
        return True

    def on_calibration_end(self, state: State, event: Event) -> None:
        if state.model.training is self.training:
            self._act(state)


class NotFinite(ActsInOneMode):
    _act: Callable[[State], None] = PrivateAttr(not_finite)


class WatchesTooMuch(ActsInOneMode):
    def on_calibration_start(self, state: State, event: Event) -> None:
        if state.model.training is self.training:
            self.register_hook(state.model.get_submodule(OWN), lambda module, args, output: output * 2, "forward")

    def on_calibration_end(self, state: State, event: Event) -> None:
        self.remove_hooks()


class EarlierLayer(ActsInOneMode):
    """Changes the first layer as the second is compressed."""

    calibration: ClassVar[CalibrationNeed] = "sequential"

    def on_calibration_end(self, state: State, event: Event) -> None:
        pass

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        if state.model.training is self.training and any(OTHER.startswith(name) for name in event.modules):
            state.model.get_submodule(OWN).weight.data.mul_(0.5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("cls", "check"),
    [(ActsInOneMode, "claims"), (NotFinite, "finite"), (WatchesTooMuch, "hooks_watch"), (EarlierLayer, "completes")],
)
def test_what_is_done_in_one_mode_alone_is_told(cls: type[ActsInOneMode], check: str, training: bool) -> None:
    for given in (True, False):
        model = TinyModel(8).train(given)
        report = verify(cls(training=training), model, inputs=tiny_batches(1), checks=[f"lifecycle.{check}"])
        said = report.records[-1].summary
        assert report.verdict is Verdict.REGRESSION, report.to_text()
        assert (f"in {'training' if training else 'evaluation'} mode, " in said) == (given is not training), said


class Cached(Modifier):
    """Makes a number of its settings, once."""

    contract_tags: ClassVar = {"in_place"}
    keep: float = 0.5

    @cached_property
    def factor(self) -> float:
        return 1 - self.keep**2

    def on_initialize(self, state: State) -> bool:
        state.touch([OWN])
        return True

    def on_calibration_end(self, state: State, event: Event) -> None:
        with torch.no_grad():
            state.model.get_submodule(OWN).weight.mul_(self.factor)


class KeepsAnotherSetting(Cached):
    keep: float = 0.5

    def on_calibration_end(self, state: State, event: Event) -> None:
        self.keep = 0.25


@pytest.mark.parametrize(("cls", "passes"), [(Cached, True), (KeepsAnotherSetting, False)])
def test_a_cached_property_is_no_setting(cls: type[Any], passes: bool) -> None:
    report = verify(cls(), TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.surroundings", "lifecycle.rolls_back"])
    assert report.passed is passes, report.to_text()


class BothOfThem(ActsInOneMode):
    """Has callbacks of a calibration and a start of its own, as one that quantizes, and trains on."""

    start: float | None = 0.0
    end: float | None = 2.0

    def on_start(self, state: State, event: Event) -> None:
        pass

    def on_calibration_end(self, state: State, event: Event) -> None:
        not_claimed(state)


def test_callbacks_of_a_calibration_are_called_where_there_is_a_start() -> None:
    report = verify(BothOfThem(), TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.claims"])
    assert report.verdict is Verdict.REGRESSION, report.to_text()


class Normalized(nn.Module):
    """Its own forward writes running statistics in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.norm = nn.Embedding(16, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, input: Tensor) -> Any:
        return self.norm(self.first(self.embed(input)).transpose(1, 2))


class Halves(Modifier):
    contract_tags: ClassVar = {"in_place"}
    name: str = "first"

    def on_initialize(self, state: State) -> bool:
        state.touch([self.name])
        return True

    def on_calibration_end(self, state: State, event: Event) -> None:
        state.model.get_submodule(self.name).weight.data.mul_(0.5)


CHEAP = ["completes", "claims", "finite", "nothing_left", "hooks_watch", "surroundings", "repeatable", "rolls_back"]


@pytest.mark.parametrize("given", [True, False])
def test_what_the_models_own_forward_changes_is_not_held_against_a_modifier(given: bool) -> None:
    inputs, checks = [torch.arange(8).reshape(2, 4)], [f"lifecycle.{name}" for name in CHEAP]
    report = verify(Halves(), Normalized().train(given), inputs=inputs, checks=checks)
    assert report.passed, report.to_text()


class HalvesAnother(Halves):
    training: bool = True

    def on_calibration_end(self, state: State, event: Event) -> None:
        if state.model.training is self.training:
            state.model.embed.weight.data.mul_(0.5)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_what_else_a_modifier_does_to_such_a_model_is(training: bool, given: bool) -> None:
    inputs = [torch.arange(8).reshape(2, 4)]
    report = verify(HalvesAnother(training=training), Normalized().train(given), inputs=inputs, checks=["lifecycle.claims"])
    assert report.verdict is Verdict.REGRESSION, report.to_text()


class ActsAsCalibrated(Modifier):
    """Its hook does something by what the state says of the batch that runs."""

    contract_tags: ClassVar = {"in_place"}
    stream: str = "unused"
    case: str = ""

    @property
    def calibration_need(self) -> Any:
        return "sequential"

    @property
    def base_stream(self) -> Any:
        return self.stream

    def on_initialize(self, state: State) -> bool:
        state.touch([OWN])
        return True

    def on_calibration_start(self, state: State, event: Event) -> None:
        self.register_hook(state.model.get_submodule(OWN), lambda module, args, output: self._see(state, output), "forward")

    def _see(self, state: State, output: Tensor) -> None:
        seen = {
            "base stream": state.base_stream,
            "first batch": state.batch_index == 0,
            "shape": state.batch_shape is not None and len(state.batch_shape) == 2,
            "calibration": not state.has_steps,
            "rows": state.batch_shape is not None and len(state.sample_parts) == state.batch_shape[0] > 1,
        }
        if self.case and seen[self.case]:
            output.data.mul_(2)

    def on_calibration_end(self, state: State, event: Event) -> None:
        self.remove_hooks()


CASES = {"base stream": "wanted", "first batch": "unused", "shape": "unused", "rows": "unused", "calibration": "unused"}


@pytest.mark.parametrize(("case", "stream"), CASES.items(), ids=CASES)
def test_hooks_see_the_state_that_a_calibration_shows(case: str, stream: str) -> None:
    checks, inputs = ["lifecycle.hooks_watch", "lifecycle.completes"], tiny_batches(1)
    report = verify(ActsAsCalibrated(case=case, stream=stream), TinyModel(8), inputs=inputs, checks=checks)
    assert report.verdict is Verdict.REGRESSION, report.to_text()
    sound = verify(ActsAsCalibrated(stream=stream), TinyModel(8), inputs=inputs, checks=checks)
    assert sound.passed, sound.to_text()
