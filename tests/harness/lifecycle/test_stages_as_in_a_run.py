"""The stages that verify shows are those of a real run: the model itself in the last, data through each, hooks that see some."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
from pydantic import PrivateAttr
from torch import Tensor, nn

from compressor.lifecycle import Event, Modifier, State
from compressor.lifecycle.interface import CalibrationNeed
from harness import verify
from harness.lifecycle.driving.probes import TinyModel, masked_batch, tiny_batches
from harness.lifecycle.machines.machine_subjects import guest_stage
from harness.lifecycle.subject import Subject
from harness.reporting.verdict import Verdict


def linears(state: State) -> dict[str, nn.Linear]:
    return {name: module for name, module in state.model.named_modules() if isinstance(module, nn.Linear)}


class Scales(Modifier):
    """Looks up what its hooks have seen of each layer, and is right to expect it there."""

    contract_tags: ClassVar = {"in_place"}
    calibration: ClassVar[CalibrationNeed] = "sequential"
    _most: dict[str, Tensor] = PrivateAttr(default_factory=dict)

    def on_initialize(self, state: State) -> bool:
        state.touch(linears(state))
        return True

    def on_calibration_start(self, state: State, event: Event) -> None:
        for name, module in linears(state).items():
            self.register_hook(module, self._see(name), "forward")

    def _see(self, name: str) -> Any:
        def see(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            self._most[name] = args[0].detach().abs().amax()

        return see

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        for name, module in linears(state).items():
            if name in event.modules:
                module.weight.data.mul_(1 / (1 + self._most[name]))

    def on_calibration_end(self, state: State, event: Event) -> None:
        self.remove_hooks()
        self._most = {}


class ScalesAtTheEnd(Scales):
    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        pass

    def on_calibration_end(self, state: State, event: Event) -> None:
        self.remove_hooks()
        for name, module in linears(state).items():
            module.weight.data.mul_(1 / (1 + self._most[name]))
        self._most = {}


class ScalesAsItFinalizes(ScalesAtTheEnd):
    """Needs the calibration that it asks for, and what each stage has left."""

    _stages: dict[str, Tensor] = PrivateAttr(default_factory=dict)

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        self._stages.update({name: self._most[name] for name in linears(state) if name in event.modules})

    def on_calibration_end(self, state: State, event: Event) -> None:
        self.remove_hooks()
        self._stages = {name: self._stages[name] for name in linears(state)}

    def on_finalize(self, state: State) -> bool:
        for name, module in linears(state).items():
            module.weight.data.mul_(1 / (1 + self._stages[name]))
        self._most, self._stages = {}, {}
        return True


class ReadsFirstLetters(Scales):
    """Fails where the name of the model itself comes, which is empty."""

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        if any(name[0] == "_" for name in event.modules):
            raise AssertionError


class AsksForNoData(Scales):
    calibration: ClassVar[CalibrationNeed] = "none"


class PutsIn(Modifier):
    """A linear layer of its own in the place of one."""

    rows: int = 48
    name: ClassVar = "layers.0.down_proj"

    def on_initialize(self, state: State) -> bool:
        state.claim([self.name], self.label)
        return True

    def on_calibration_end(self, state: State, event: Event) -> None:
        old = state.model.get_submodule(self.name)
        new = self.made(old.in_features, self.rows or old.out_features).train(old.training)
        with torch.no_grad():
            new.weight.copy_(old.weight[: len(new.weight)])
        state.replace_module(self.name, new)

    def made(self, columns: int, rows: int) -> nn.Linear:
        return nn.Linear(columns, rows, bias=False)


class PutsInWider(PutsIn):
    rows: int = 0

    def on_calibration_end(self, state: State, event: Event) -> None:
        trains = state.model.get_submodule(self.name).weight.requires_grad
        super().on_calibration_end(state, event)
        state.model.get_submodule(self.name).weight.requires_grad_(trains)


class PutsInItsLike(PutsIn):
    def on_calibration_end(self, state: State, event: Event) -> None:
        state.replace_module(self.name, copy.deepcopy(state.model.get_submodule(self.name)))


class TakesAllSeen(Scales):
    """Compresses what its hooks have seen since the last stage: of later layers they see nothing before."""

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        for name in list(self._most):
            state.model.get_submodule(name).weight.data.mul_(1 / (1 + self._most.pop(name)))


class CountsBatches(Scales):
    """Of each layer as many are seen before its stage, those of what runs before all stages among them."""

    _counts: dict[str, int] = PrivateAttr(default_factory=dict)

    def on_calibration_start(self, state: State, event: Event) -> None:
        super().on_calibration_start(state, event)
        self.register_hook(state.model.embed_tokens, self._see("embed_tokens"), "forward")

    def _see(self, name: str) -> Any:
        return lambda module, args, output: self._counts.update({name: self._counts.get(name, 0) + 1})

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        if {self._counts.get(name) for name in linears(state) if name in event.modules} - {self._counts["embed_tokens"]}:
            raise ArithmeticError

    def on_calibration_end(self, state: State, event: Event) -> None:
        super().on_calibration_end(state, event)
        self._counts = {}


@pytest.mark.parametrize("cls", [Scales, ScalesAtTheEnd, ScalesAsItFinalizes, TakesAllSeen, CountsBatches])
def test_who_looks_up_what_its_hooks_have_seen_passes(cls: type[Scales]) -> None:
    checks = [
        f"lifecycle.{name}" for name in ("completes", "illegal_calls", "nothing_left", "nested_contexts", "rolls_back", "state_machine")
    ]
    report = verify(cls, TinyModel(8), inputs=tiny_batches(1), checks=checks)
    assert report.verdict is Verdict.PASS, report.to_text()


def test_a_stage_that_was_refused_for_its_payload_comes_before_the_calibration_ends() -> None:
    subject = Subject(ScalesAsItFinalizes(), TinyModel(8), tiny_batches(1))
    checked = guest_stage(subject).open_run(subject.alone())
    checked.go("INITIALIZE")
    checked.go("CALIBRATION_START")
    assert checked.send("SEQUENTIAL_EPOCH_END", has_loss=True, modules=subject.parts[0]).kind == "refused"
    assert checked.send("SEQUENTIAL_EPOCH_END", modules=subject.parts[1]).kind == "done"
    assert checked.past == subject.parts[:1]  # the one that is next, and no other
    assert checked.go("CALIBRATION_END").kind == "done"


class WatchesInTraining(Scales):
    def on_calibration_start(self, state: State, event: Event) -> None:
        if state.model.training:
            super().on_calibration_start(state, event)

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        pass


def test_what_is_watched_in_the_other_look_changes_no_stages_of_it() -> None:
    subject = Subject(WatchesInTraining(), TinyModel(8).eval(), tiny_batches(1))
    for look in (nullcontext(), subject.in_other_mode()):
        with look:
            run = subject.open()
            subject.live(subject.check(run), run)
            assert not subject.watched


@pytest.mark.parametrize("cls", [TakesAllSeen, CountsBatches])
def test_who_relies_on_one_layer_after_another_passes(cls: type[Scales]) -> None:
    report = verify(cls, TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.completes", "lifecycle.rolls_back"])
    assert report.verdict is Verdict.PASS, report.to_text()


class OneStageOrMore(Scales):
    """Takes for granted that a stage is a part of the model, as it is where layers are compressed one after another."""

    calibration: ClassVar[CalibrationNeed] = "basic"

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        if set(linears(state)) <= set(event.modules):
            raise LookupError


def test_who_asks_for_whole_forwards_gets_one_stage() -> None:
    report = verify(OneStageOrMore, TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.completes"])
    assert "LookupError" in report.records[-1].summary and "in evaluation mode" in report.records[-1].summary, report.to_text()


def test_a_model_that_draws_in_its_other_mode_is_no_modifiers_fault() -> None:
    model = TinyModel(8).eval()
    model.norm = nn.Sequential(model.norm, nn.Dropout())
    report = verify(Scales, model, inputs=tiny_batches(1), checks=["lifecycle.completes", "lifecycle.claims"])
    assert report.verdict is Verdict.PASS, report.to_text()


def test_the_model_itself_is_in_the_last_stage() -> None:
    report = verify(ReadsFirstLetters, checks=["lifecycle.completes"])
    assert report.verdict is Verdict.REGRESSION and "IndexError" in report.records[-1].summary, report.to_text()


def test_who_has_hooks_and_asks_for_no_data_is_told() -> None:
    report = verify(AsksForNoData, checks=["lifecycle.completes"])
    assert report.verdict is Verdict.REGRESSION and "set calibration = 'basic' in its class" in report.records[-1].summary, report.to_text()


class StartsForNothing(Scales):
    start: float | None = 1.0


def test_who_has_times_and_takes_part_in_no_training_is_told() -> None:
    report = verify(StartsForNothing, checks=["lifecycle.completes"])
    assert report.verdict is Verdict.REGRESSION and "start=1.0 is for training, in which it takes no part" in report.records[-1].summary


def test_what_is_put_in_takes_what_came_before_and_trains_as_before() -> None:
    model = TinyModel(8)
    report = verify(PutsIn(rows=7), model, inputs=tiny_batches(1), checks=["lifecycle.completes"])
    assert "behind the run the model does not take inputs[0] any more (RuntimeError" in report.records[-1].summary, report.to_text()
    model.requires_grad_(False)
    surroundings = verify(PutsIn(rows=0), model, inputs=tiny_batches(1), checks=["lifecycle.surroundings"])
    assert "layers.0.down_proj.weight: requires_grad False -> True" in surroundings.records[-1].summary, surroundings.to_text()
    half = verify(PutsInWider, TinyModel(8).bfloat16(), inputs=tiny_batches(1), checks=["lifecycle.surroundings"])
    assert "layers.0.down_proj.weight: torch.bfloat16 -> torch.float32" in half.records[-1].summary, half.to_text()
    for checks in (["lifecycle.completes"], ["lifecycle.surroundings"]):
        assert verify(PutsInItsLike, model, inputs=tiny_batches(1), checks=checks).verdict is Verdict.PASS


class Shrinks(Scales):
    """Takes rows off a layer and columns off the next, each in its stage: in `oneshot` they have stages of their own."""

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        for name in linears(state):
            if name in event.modules and name.endswith("_proj"):
                state.replace_module(name, self.smaller(name, state.model.get_submodule(name)))

    def smaller(self, name: str, old: nn.Linear) -> nn.Linear:
        rows, columns = (5, old.in_features) if name.endswith("up_proj") else (old.out_features, 5)
        new = nn.Linear(columns, rows, bias=old.bias is not None).train(old.training).requires_grad_(old.weight.requires_grad)
        with torch.no_grad():
            new.weight.copy_(old.weight[:rows, :columns])
            if old.bias is not None:
                new.bias.copy_(old.bias[:rows])
        return new


def test_who_needs_two_layers_in_one_stage_is_told() -> None:
    report = verify(Shrinks, TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.completes"])
    text = "in evaluation mode, before the stage of layers.0.down_proj the model does not take its batches any more (RuntimeError"
    assert text in report.records[-1].summary, report.to_text()


class RunsItself(Scales):
    """Runs forwards of its own, on batches that it leaves as they are."""

    calibration: ClassVar[CalibrationNeed] = "own"

    def on_calibration_start(self, state: State, event: Event) -> None:
        assert state.data is not None
        self.change(state.data.batches)
        linears(state)["lm_head"].weight.data.mul_(2)

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        pass

    def change(self, batches: list[Any]) -> None:
        pass


class ZeroesBatches(RunsItself):
    def change(self, batches: list[Any]) -> None:
        batches[0][0].zero_()


def test_who_changes_the_data_is_told() -> None:
    report = verify(ZeroesBatches, TinyModel(8), inputs=tiny_batches(2), checks=["lifecycle.completes"])
    assert "state.data was changed" in report.records[-1].summary, report.to_text()
    assert verify(RunsItself, TinyModel(8), inputs=tiny_batches(2), checks=["lifecycle.completes"]).verdict is Verdict.PASS


class TakesNoMask(RunsItself):
    """Goes on without a mask alone, and counts padding for others where there is one."""

    def on_calibration_start(self, state: State, event: Event) -> None:
        super().on_calibration_start(state, event)
        assert state.data is not None
        state.data.token_masks[:] = [None if mask is None else torch.ones_like(mask) for mask in state.data.token_masks]


def test_padded_inputs_have_their_masks() -> None:
    model, inputs = TinyModel(8), [masked_batch()]
    changed = verify(TakesNoMask, model, inputs=inputs, checks=["lifecycle.completes"])
    assert "state.data was changed" in changed.records[-1].summary, changed.to_text()
    assert verify(RunsItself, model, inputs=inputs, checks=["lifecycle.completes"]).verdict is Verdict.PASS


class SeedsInAHook(Scales):
    def on_calibration_start(self, state: State, event: Event) -> None:
        self.register_hook(state.model, lambda module, args, output: setattr(state, "seed", 77), "forward")

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        pass


def test_a_hook_that_seeds_others_is_told() -> None:
    report = verify(SeedsInAHook, TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.hooks_watch"])
    assert "state.seed" in report.records[-1].summary, report.to_text()
