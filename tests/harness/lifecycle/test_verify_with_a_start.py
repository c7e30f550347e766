"""A modifier without `start` that a training can start is tried with one, too: its hooks watch, and on_end leaves none behind."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from compressor.lifecycle import Event, Modifier, State
from harness.lifecycle.driving.probes import TinyModel, tiny_batches
from harness.lifecycle.subject import Subject
from harness.lifecycle.verify import verify
from harness.reporting.verdict import Outcome


class Watches(Modifier):
    """Nothing is wrong with it: `seen` looks on from on_start to on_end."""

    _largest: float = 0.0

    def on_initialize(self, state: State) -> bool:
        return True

    def on_start(self, state: State, event: Event) -> None:
        self.register_hook(state.model.get_submodule("norm"), self.seen, "forward")

    def seen(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        self._largest = float(output.detach().abs().max())
        return None

    def on_end(self, state: State, event: Event) -> None:
        self.remove_hooks()


class Doubles(Watches):
    def seen(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 2


class CutsTheGradient(Watches):
    def seen(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.detach()


class ScalesTheGradient(Watches):
    def seen(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * 2)


class HalvesGradientsThatLieThere(Watches):
    """Those of weights that the backward has reached before it comes to this module."""

    halved: ClassVar[str] = "lm_head"

    def on_start(self, state: State, event: Event) -> None:
        weight = state.model.get_submodule(self.halved).get_parameter("weight")

        def halve(module: nn.Module, before: object, behind: object) -> None:
            if weight.grad is not None:
                weight.grad.mul_(0.5)

        self.register_hook(state.model.get_submodule("norm"), halve, "full_backward")


class HalvesGradientsOfBefore(HalvesGradientsThatLieThere):
    """Those of weights that it has not reached: what an earlier backward has left, where a training adds several up."""

    halved: ClassVar[str] = "layers.0.up_proj"


class DoublesFromAnUpdateOn(Doubles):
    def on_start(self, state: State, event: Event) -> None:
        pass

    def on_update(self, state: State, event: Event) -> None:
        if not self.hooked_modules():
            super().on_start(state, event)


class DoublesBesideACalibration(Doubles):
    calibration = "sequential"


class KeepsItsHooks(Watches):
    def on_end(self, state: State, event: Event) -> None:
        pass


class KeepsItsHooksBetweenWholeIndices(Watches):
    def on_end(self, state: State, event: Event) -> None:
        if event.index == int(event.index):
            super().on_end(state, event)


class FreezesBetweenWholeIndices(Watches):
    def on_start(self, state: State, event: Event) -> None:
        state.model.get_submodule("lm_head").requires_grad_(event.index == int(event.index))
        super().on_start(state, event)


class MovesAWeight(Watches):
    def on_start(self, state: State, event: Event) -> None:
        state.model.get_submodule("lm_head").get_parameter("weight").data.mul_(0.5)


class ExchangesATouchedWeight(Watches):
    def on_initialize(self, state: State) -> bool:
        state.touch(["lm_head"])
        return True

    def on_start(self, state: State, event: Event) -> None:
        head = state.model.get_submodule("lm_head")
        head.weight = nn.Parameter(head.get_parameter("weight").detach().clone())


class FreezesAWeight(Watches):
    def on_end(self, state: State, event: Event) -> None:
        state.model.get_submodule("lm_head").requires_grad_(not event.index)
        super().on_end(state, event)


class ActsAtTheEnd(Watches):
    """What it has touched it changes when a training ends it."""

    def on_initialize(self, state: State) -> bool:
        state.touch(["lm_head"])
        return True

    def on_end(self, state: State, event: Event) -> None:
        super().on_end(state, event)
        state.model.get_submodule("lm_head").get_parameter("weight").data.mul_(self.factor())

    def factor(self) -> float:
        return 0.5


class FollowsTheCallersSeed(ActsAtTheEnd):
    def factor(self) -> float:
        return torch.initial_seed() % 7 + 2.0


class FailsAtTheEnd(ActsAtTheEnd):
    def factor(self) -> float:
        return {"other": 1.0}["factor"]


class OpenRuns:
    """What a modifier keeps in an object of its file."""

    def __init__(self) -> None:
        self.count = 0


OPEN = OpenRuns()


class CountsOpenRuns(ActsAtTheEnd):
    """A run that was given up between on_start and on_end leaves it counting."""

    def on_start(self, state: State, event: Event) -> None:
        OPEN.count += 1
        super().on_start(state, event)

    def factor(self) -> float:
        count, OPEN.count = OPEN.count, 0
        return 0.5**count


def outcome_of(modifier: object, check: str, **options: Any) -> tuple[Outcome, str]:
    report = verify(modifier, TinyModel(8), inputs=tiny_batches(1), checks=[f"lifecycle.{check}"], profile="pr", **options)
    return report.records[-1].outcome, report.records[-1].summary


WRONG: dict[type[Modifier], tuple[str, str]] = {
    Doubles: ("hooks_watch", "the output of norm"),
    CutsTheGradient: ("hooks_watch", "the output of norm"),
    ScalesTheGradient: ("hooks_watch", "what gradients reach the parameters"),
    HalvesGradientsThatLieThere: ("hooks_watch", "what gradients reach the parameters"),
    HalvesGradientsOfBefore: ("hooks_watch", "what gradients reach the parameters"),
    DoublesFromAnUpdateOn: ("hooks_watch", "after BATCH_START"),
    DoublesBesideACalibration: ("hooks_watch", "the output of norm"),
    KeepsItsHooks: ("nothing_left", "1 hooks are on the model after on_end"),
    MovesAWeight: ("claims", "lm_head.weight"),
    ExchangesATouchedWeight: (
        "claims",
        "lm_head.weight: another parameter stands here, or none, while ties and an optimizer keep the old one",
    ),
    FreezesAWeight: ("surroundings", "requires_grad"),
    FollowsTheCallersSeed: ("repeatable", "gives other values in lm_head.weight"),
    CountsOpenRuns: ("repeatable", "a run after one that was "),
    FailsAtTheEnd: ("completes", "on_end of modifier 0"),
    ActsAtTheEnd: ("rolls_back", "lm_head.weight"),
}


@pytest.mark.parametrize("modifier", WRONG, ids=lambda one: one.__name__)
def test_what_only_a_training_starts_is_told(modifier: type[Modifier]) -> None:
    check, says = WRONG[modifier]
    outcome, summary = outcome_of(modifier, check)
    assert outcome is Outcome.FAIL
    assert "with start=0" in summary and says in summary


def test_an_object_is_tried_with_a_start_as_a_class_is() -> None:
    outcome, summary = outcome_of(Doubles(), "hooks_watch")
    assert outcome is Outcome.FAIL and "with start=0" in summary


@pytest.mark.parametrize("times", [{"start": 0.0}, {"start": 2.0}, {"end": 200.0}, {"start": 100.0}, {"start": 100.0, "end": 200.0}])
def test_an_end_that_is_not_given_or_not_reached_is_tried_all_the_same(times: dict[str, float]) -> None:
    outcome, summary = outcome_of(KeepsItsHooks(**times), "nothing_left")
    begin = times.get("start", 0.0) % 100
    assert outcome is Outcome.FAIL
    assert f"with start={begin} and end={begin + 1}, 1 hooks are on the model after on_end" in summary


@pytest.mark.nightly
def test_hooks_that_watch_a_training_pass() -> None:
    for check in ("hooks_watch", "nothing_left", "surroundings", "claims"):
        outcome, summary = outcome_of(Watches, check)
        assert outcome is Outcome.PASS, summary
        assert "with start=0.0 and end=1.0: " in summary and "with start=0.5 and end=1.5, 2 steps an epoch: " in summary


class WatchesBesideACalibration(Watches):
    calibration = "sequential"


class Hears(Modifier):
    """Has no callback but `on_event`, which a training calls without a `start`, too; nothing is wrong with it."""

    _last: float = 0.0

    def on_initialize(self, state: State) -> bool:
        state.touch(["lm_head"])
        return True

    def on_event(self, state: State, event: Event) -> None:
        if event.loss is not None:
            self._last = event.loss.item()
            event.loss.register_hook(lambda gradient: None)
            self.work(state, event.loss)

    def work(self, state: State, loss: Tensor) -> None:
        pass


class HearsBesideACalibration(Hears):
    calibration = "sequential"


class HalvesAWeight(Hears):
    def work(self, state: State, loss: Tensor) -> None:
        state.model.get_submodule("norm").get_parameter("weight").data.mul_(0.5)


class HalvesAWeightBeforeItsStart(HalvesAWeight):
    def work(self, state: State, loss: Tensor) -> None:
        if not self.started:
            super().work(state, loss)


class HalvesAWeightInAMixin(HalvesAWeight, Watches):
    pass


class HalvesAWeightBesideACalibration(HalvesAWeight):
    calibration = "sequential"


class HalvesAWeightInAnUpdateBesideACalibration(WatchesBesideACalibration):
    def on_update(self, state: State, event: Event) -> None:
        state.model.get_submodule("norm").get_parameter("weight").data.mul_(0.5)


class WritesNaN(Hears):
    def work(self, state: State, loss: Tensor) -> None:
        state.model.get_submodule("lm_head").get_parameter("weight").data.fill_(float("nan"))


class Freezes(Hears):
    def work(self, state: State, loss: Tensor) -> None:
        state.model.get_submodule("norm").requires_grad_(False)


class DoublesFromALossOn(Hears):
    def work(self, state: State, loss: Tensor) -> None:
        if not self.hooked_modules():
            self.register_hook(state.model.get_submodule("norm"), lambda module, args, output: output * 2, "forward")


class DoublesFromALossOnBesideACalibration(DoublesFromALossOn):
    calibration = "sequential"


class Detaches(Hears):
    def work(self, state: State, loss: Tensor) -> None:
        loss.detach_()


class ScalesTheGradientOfTheLoss(Hears):
    def work(self, state: State, loss: Tensor) -> None:
        loss.register_hook(lambda gradient: gradient * 2)


class GoesBackItself(Hears):
    def work(self, state: State, loss: Tensor) -> None:
        loss.backward(retain_graph=True)


HEARD: dict[type[Modifier], tuple[str, str]] = {
    HalvesAWeight: ("claims", "with start=None and end=None, the result could not be saved: norm.weight"),
    HalvesAWeightBeforeItsStart: ("claims", "with start=None and end=None, the result could not be saved: norm.weight"),
    HalvesAWeightInAMixin: ("claims", "with start=0.0 and end=1.0, the result could not be saved: norm.weight"),
    HalvesAWeightBesideACalibration: ("claims", "with start=None and end=None, the result could not be saved: norm.weight"),
    HalvesAWeightInAnUpdateBesideACalibration: ("claims", "with start=0.0 and end=1.0, the result could not be saved: norm.weight"),
    WritesNaN: ("finite", "with start=None and end=None, it leaves NaN or infinity in lm_head.weight"),
    Freezes: ("surroundings", "norm.weight: requires_grad"),
    DoublesFromALossOn: ("hooks_watch", "after LOSS_CALCULATED"),
    DoublesFromALossOnBesideACalibration: ("hooks_watch", "after LOSS_CALCULATED"),
    Detaches: ("claims", "Detaches.on_event wrote into event.loss"),
    ScalesTheGradientOfTheLoss: ("claims", "the way from event.loss to the gradients"),
    GoesBackItself: ("claims", "the way from event.loss to the gradients"),
}


@pytest.mark.parametrize("modifier", HEARD, ids=lambda one: one.__name__)
def test_what_batches_bring_is_told(modifier: type[Modifier]) -> None:
    check, says = HEARD[modifier]
    outcome, summary = outcome_of(modifier, check)
    assert outcome is Outcome.FAIL and says in summary


@pytest.mark.parametrize("check", ["claims", "finite", "surroundings", "hooks_watch", "nothing_left", "start_and_end"])
def test_who_hears_of_batches_and_does_nothing_passes(check: str) -> None:
    for modifier in (Hears, HearsBesideACalibration) if check != "nothing_left" else (HearsBesideACalibration,):
        outcome, summary = outcome_of(modifier, check)
        assert outcome is Outcome.PASS, summary


class Idle(Modifier):
    def on_initialize(self, state: State) -> bool:
        return True


BETWEEN = (0.5, 1.5, 2)
Times = tuple[float | None, float | None, int | None]
TRAININGS: list[tuple[Modifier, list[Times]]] = [
    (Watches(), [(0.0, 1.0, None), BETWEEN]),
    (Watches(start=1.0, end=3.0), [BETWEEN]),
    (Watches(start=0.0, end=1.5), [(0.0, 1.5, 2), BETWEEN]),
    (Watches(start=0.5, end=2.25), [(0.5, 2.25, 4), BETWEEN]),
    (Watches(start=0.5, end=1.5), [BETWEEN]),
    (Watches(start=0.1, end=1.7), [(0.1, 1.7, 5), BETWEEN]),  # a tenth of an epoch ends behind what a life reaches
    (Watches(start=0.0, end=9.5), [BETWEEN]),
    (WatchesBesideACalibration(), [(0.0, 1.0, None), (0.0, 1.0, None)]),  # in a calibration, and in batches
    (WatchesBesideACalibration(start=0.0, end=2.0), [(0.0, 2.0, None)]),
    (Idle(), []),
    (Hears(), [(None, None, None), (0.0, 1.0, None), BETWEEN]),
    (Hears(start=0.0, end=2.0), [BETWEEN]),
    (HearsBesideACalibration(), [(None, None, None), (0.0, 1.0, None), (0.0, 1.0, None)]),
]


@pytest.mark.parametrize(("template", "expected"), TRAININGS, ids=lambda one: f"{one.start}, {one.end}" if isinstance(one, Watches) else "")
def test_a_training_is_looked_at_with_times_of_its_own_and_times_between_whole_indices(template: Modifier, expected: list[Times]) -> None:
    subject, before = Subject(template), template.start
    found = [(training.settings.start, training.settings.end, training.steps_per_epoch) for training in subject.trainings()]
    assert found == expected
    for training in subject.trainings():
        with subject.trained(training):
            assert subject.fresh().start == subject.template.start == training.settings.start
            assert subject.open().session.steps_per_epoch == training.steps_per_epoch
            assert (("BATCH_START", ()) in subject.life()) == subject.trains == training.has_batches
    assert subject.template is template and subject.fresh().start == before and subject.steps_per_epoch is None


@pytest.mark.parametrize("times", [{}, {"start": 0.0, "end": 1.5}, {"start": 0.5, "end": 2.25}, {"start": 0.0, "end": 2.0}])
def test_what_goes_wrong_between_two_whole_indices_alone_is_told(times: dict[str, float]) -> None:
    outcome, summary = outcome_of(KeepsItsHooksBetweenWholeIndices(**times), "nothing_left")
    assert outcome is Outcome.FAIL and "steps an epoch, 1 hooks are on the model after on_end" in summary
    outcome, summary = outcome_of(FreezesBetweenWholeIndices(**times), "surroundings")
    assert outcome is Outcome.FAIL and "steps an epoch, " in summary and "requires_grad" in summary
