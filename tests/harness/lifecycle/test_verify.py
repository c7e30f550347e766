"""verify() passes modifiers that keep the contract, and names what a wrong one does wrong, whatever it does."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from contextlib import nullcontext, suppress
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn

import harness
from compressor import AWQModifier, SmoothQuantModifier, SparseGPTModifier, SpinQuantModifier, WandaPruningModifier
from compressor.errors import UserInputError
from compressor.lifecycle import Event, Modifier, Session, State
from compressor.modifiers.autoround import AutoRoundModifier
from compressor.modifiers.gptq import GPTQModifier
from compressor.modifiers.quantization import QuantizationModifier
from compressor.modifiers.scale_tuning import ScaleTuningModifier
from harness.lifecycle.checks.registry import CHECKS
from harness.lifecycle.driving.compare import Violation
from harness.lifecycle.driving.probes import CalibratingWorker, TinyModel, TrainingWorker, tiny_batches
from harness.lifecycle.machines.machine_subjects import GUEST_SHARE, drive_session, guest_stage
from harness.lifecycle.report import VerifyReport
from harness.lifecycle.subject import Subject
from harness.lifecycle.verify import verify
from harness.profiles import PROFILES
from harness.reporting.verdict import Outcome, Verdict

FAST = [name for name in CHECKS if name not in ("lifecycle.state_machine", "lifecycle.rolls_back")]


class Willing(Modifier):
    """Base of the wrong ones here; nothing is wrong with it."""

    def on_initialize(self, state: State) -> bool:
        return True


def outcome_of(modifier: object, check: str, **options: Any) -> tuple[Outcome, str]:
    report = verify(modifier, TinyModel(8), inputs=tiny_batches(1), checks=[f"lifecycle.{check}"], profile="pr", **options)
    return report.records[-1].outcome, report.records[-1].summary


@pytest.mark.parametrize(
    "modifier",
    [
        GPTQModifier(scheme="W4A16", ignore=["lm_head"]),
        QuantizationModifier(scheme="W4A16"),
        QuantizationModifier(scheme="FP8", ignore=["re:.*down_proj"]),
        AutoRoundModifier(scheme="W4A16", ignore=["lm_head"], iters=2),
        SmoothQuantModifier(),
        WandaPruningModifier(sparsity=0.5),
        SparseGPTModifier(sparsity=0.5, mask_structure="2:4"),
        SpinQuantModifier(rotations=["R1"]),
    ],
    ids=["GPTQ", "W4A16", "FP8", "AutoRound", "SmoothQuant", "Wanda", "SparseGPT", "SpinQuant"],
)
def test_our_own_modifiers_keep_the_contract(modifier: Modifier, checks_of_right_ones: list[str] | None) -> None:
    report = harness.verify(modifier, profile="change", checks=checks_of_right_ones)
    assert report.passed, report.to_text()
    skipped = {record.name for record in report.records if record.outcome is Outcome.SKIP}
    # what runs forwards of its own has no hook outside of them, and what changes weights in place replaces no module
    assert skipped <= {"lifecycle.nested_contexts", "lifecycle.already_quantized"}


@pytest.mark.parametrize("modifier", [CalibratingWorker(), TrainingWorker(start=1.0, end=3.0), Willing()], ids=lambda one: one.label)
def test_well_behaved_modifiers_pass(modifier: Modifier) -> None:
    report = verify(modifier, TinyModel(8), inputs=tiny_batches(1), profile="change")
    assert report.passed, report.to_text()


# What is wrong, by the check that must say so.


class ForgetsToReturn(Modifier):
    def on_initialize(self, state: State) -> None:  # type: ignore[override]
        pass


class IsUnwilling(Modifier):
    def on_initialize(self, state: State) -> bool:
        return False


class RaisesInACallback(Willing):
    def on_calibration_end(self, state: State, event: Event) -> None:
        raise KeyError("layer")


class HasAWrongSignature(Willing):
    def on_start(self, state: State) -> None:  # type: ignore[override]
        pass


class InitializesAgain(Willing):
    def initialize(self, state: State) -> bool:
        return True if self.initialized else super().initialize(state)


class SwallowsErrors(Willing):
    def update_event(self, state: State, event: Event) -> None:
        with suppress(Exception):
            super().update_event(state, event)


class StartsLate(Willing):
    def should_start(self, index: float) -> bool:
        return super().should_start(index - 1)


class EndsLate(Willing):
    def should_end(self, index: float) -> bool:
        return self.end is not None and index > self.end


class ForgetsOnEvent(Willing):
    def update_event(self, state: State, event: Event) -> None:
        if event.type.startswith("calibration"):
            super().update_event(state, event)


class LeavesATorchHook(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        state.model.get_submodule("lm_head").register_forward_hook(lambda *args: None)


class LeavesHooksAfterCalibration(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        self.register_hook(state.model, lambda *args: None, "forward")


class LeavesAHookAfterAnError(Willing):
    _handle: Any = None

    def on_calibration_start(self, state: State, event: Event) -> None:
        self._handle = state.model.get_submodule("norm").register_forward_hook(lambda *args: None)

    def on_calibration_end(self, state: State, event: Event) -> None:
        self._handle.remove()


class PatchesForward(Willing):
    def on_initialize(self, state: State) -> bool:
        module = state.model.get_submodule("norm")
        forward = module.forward
        module.forward = lambda x: forward(x)  # type: ignore[method-assign]
        return True


class PatchesAClass(Willing):
    def on_initialize(self, state: State) -> bool:
        nn.LayerNorm.patched = True  # type: ignore[attr-defined]
        return True


class SwitchesTheCacheOff(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        state.model.config.use_cache = False  # type: ignore[union-attr]


class SwitchesToEval(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        state.model.eval()


class FreezesWeights(Willing):
    def on_initialize(self, state: State) -> bool:
        state.model.requires_grad_(False)
        return True


class ChangesTheDtype(Willing):
    def on_initialize(self, state: State) -> bool:
        state.model.to(torch.bfloat16)
        return True


class Seeds(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        torch.manual_seed(0)


class SeedsPython(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        random.seed(0)


class SeedsNumpy(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        numpy.random.seed(0)


class SwitchesGradientsOff(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        torch.set_grad_enabled(False)


class ChangesItsSettings(Willing):
    ratio: float = 0.5

    def on_initialize(self, state: State) -> bool:
        self.ratio *= 2
        return True


class KeepsTheModel(Willing):
    seen: ClassVar[list[nn.Module]] = []

    def on_initialize(self, state: State) -> bool:
        self.seen.append(state.model)
        return True


class LeavesAThread(Willing):
    stops: ClassVar[list[threading.Event]] = []

    def on_calibration_start(self, state: State, event: Event) -> None:
        self.stops.append(threading.Event())
        threading.Thread(target=self.stops[-1].wait).start()


class LearnsAcrossRuns(Willing):
    count: ClassVar[list[int]] = []

    def on_calibration_end(self, state: State, event: Event) -> None:
        self.count.append(1)
        with torch.no_grad():
            state.model.get_parameter("norm.bias").fill_(len(self.count))


class QuantizesAgain(Willing):
    def on_calibration_end(self, state: State, event: Event) -> None:
        state.replace_module("lm_head", nn.Linear(8, 32, bias=False))


class ChangesABuffer(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        state.model.get_buffer("logit_scale").mul_(1.5)


class CannotBringBack(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        with torch.no_grad():
            state.model.get_parameter("norm.bias").add_(1)


class ReplacesBehindTheStatesBack(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        state.model.norm = nn.LayerNorm(8)


class AcceptsEverything(Willing):
    model_config = {"extra": "allow"}  # noqa: RUF012 - pydantic's way


class CannotBeWritten(Willing):
    count: int = 1

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return {key: value for key, value in super().model_dump(**options).items() if key not in ("start", "end")}


class ReplacesTheModel(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        state.model = TinyModel(8)


class RebindsTheMask(Willing):
    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        state.token_mask = torch.ones(1, 1, dtype=torch.bool)


class MakesHooksUnasked(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        self._own = state.model.get_submodule("norm").register_forward_hook(lambda *args: None)

    def on_calibration_end(self, state: State, event: Event) -> None:
        self._own.remove()

    _own: Any = None


class ExchangesAnEqualParameter(Willing):
    def on_calibration_end(self, state: State, event: Event) -> None:
        norm = state.model.get_submodule("norm")
        norm.weight = nn.Parameter(norm.weight.detach().clone())


class TurnsLayersAround(Willing):
    def on_calibration_end(self, state: State, event: Event) -> None:
        layers = state.model.get_submodule("layers")._modules
        content = dict(reversed(layers.items()))
        layers.clear()
        layers.update(content)


class WakesHooks(CalibratingWorker):
    def disable_hooks(self) -> Any:
        return nullcontext()


WRONG = {
    ForgetsToReturn: "completes",
    IsUnwilling: "completes",
    RaisesInACallback: "completes",
    HasAWrongSignature: "start_and_end",
    InitializesAgain: "illegal_calls",
    SwallowsErrors: "nothing_left",
    StartsLate: "start_and_end",
    EndsLate: "start_and_end",
    ForgetsOnEvent: "completes",
    LeavesATorchHook: "completes",
    LeavesHooksAfterCalibration: "nothing_left",
    LeavesAHookAfterAnError: "nothing_left",
    ExchangesAnEqualParameter: "claims",
    TurnsLayersAround: "surroundings",
    PatchesForward: "surroundings",
    PatchesAClass: "surroundings",
    SwitchesTheCacheOff: "surroundings",
    SwitchesToEval: "surroundings",
    FreezesWeights: "surroundings",
    ChangesTheDtype: "surroundings",
    Seeds: "surroundings",
    SeedsPython: "surroundings",
    SeedsNumpy: "surroundings",
    SwitchesGradientsOff: "surroundings",
    ChangesItsSettings: "surroundings",
    KeepsTheModel: "nothing_left",
    LeavesAThread: "surroundings",
    LearnsAcrossRuns: "repeatable",
    QuantizesAgain: "already_quantized",
    ChangesABuffer: "claims",
    CannotBringBack: "rolls_back",
    ReplacesBehindTheStatesBack: "rolls_back",
    AcceptsEverything: "recipe",
    CannotBeWritten: "recipe",
    ReplacesTheModel: "completes",
    RebindsTheMask: "completes",
    MakesHooksUnasked: "nested_contexts",
    WakesHooks: "nested_contexts",
}


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    """Take back what the wrong ones leave in the process."""
    yield
    torch.set_grad_enabled(True)
    for stop in LeavesAThread.stops:
        stop.set()
    if hasattr(nn.LayerNorm, "patched"):
        del nn.LayerNorm.patched


@pytest.mark.parametrize(("modifier", "check"), WRONG.items(), ids=[cls.__name__ for cls in WRONG])
def test_a_wrong_modifier_is_told(modifier: type[Modifier], check: str) -> None:
    outcome, summary = outcome_of(modifier, check)
    assert outcome is Outcome.FAIL, summary
    assert summary


@pytest.mark.nightly
def test_the_state_machine_finds_what_comes_at_odd_moments() -> None:
    class BreaksAfterThreeBatches(Willing):
        _count: int = 0

        def on_event(self, state: State, event: Event) -> None:
            self._count += event.type == "batch_end"
            if self._count == 3:
                state.model.get_submodule("0").left = True  # type: ignore[assignment]

    model = nn.Sequential(nn.Linear(1, 1))
    report = verify(BreaksAfterThreeBatches, model, inputs=[torch.ones(1, 1)], checks=["lifecycle.state_machine"], profile="pr")
    record = report.records[-1]
    assert record.outcome is Outcome.FAIL
    assert "0.left" in record.summary
    assert any("state." in line for line in record.findings)  # the shortest failing run is shown


# Bad input: the report says so, and the run ends.


class NeedsArguments(Willing):
    scheme: str


class NeedsPositionals(Willing):
    def __init__(self, scheme: str) -> None:
        super().__init__()


class CannotBeMade(Willing):
    def __init__(self) -> None:
        raise OSError("no such file")


class HangsWhenMade(Willing):
    def __init__(self) -> None:
        time.sleep(30)


@pytest.mark.parametrize(
    ("given", "verdict", "says"),
    [
        (int, Verdict.REGRESSION, "no subclass"),
        (3, Verdict.REGRESSION, "no modifier"),
        (None, Verdict.REGRESSION, "no modifier"),
        ("compressor.modifiers.gptq:GPTQModifier", Verdict.REGRESSION, "no modifier"),
        (Modifier, Verdict.REGRESSION, "abstract; define on_initialize"),
        (CannotBeMade, Verdict.REGRESSION, "OSError: no such file"),
        (HangsWhenMade, Verdict.REGRESSION, "longer than"),
        (NeedsArguments, Verdict.INCONCLUSIVE, "'scheme' is required"),
        (NeedsPositionals, Verdict.INCONCLUSIVE, "'scheme'"),
        (GPTQModifier, Verdict.INCONCLUSIVE, "scheme"),
    ],
)
def test_what_cannot_be_verified_is_reported(given: object, verdict: Verdict, says: str) -> None:
    report = verify(given, time_limit=0.5 if given is HangsWhenMade else 60)  # a slow machine may need more than half a second
    assert report.verdict is verdict
    assert says in report.records[0].summary
    assert len(report.records) == 1


@pytest.mark.parametrize("modifier", [AWQModifier(), ScaleTuningModifier(), SpinQuantModifier()], ids=lambda one: one.label)
def test_what_refuses_to_run_alone_is_not_judged(modifier: Modifier) -> None:
    report = verify(modifier, TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.completes"])
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "alone and on this model it does not run" in report.records[-1].summary


def test_a_used_modifier_is_refused() -> None:
    used = Willing()
    Session(State(TinyModel(8)), [used]).initialize()
    assert "used already" in verify(used).records[0].summary


def test_a_modifier_that_hangs_ends_the_run() -> None:
    class Loops(Willing):
        def on_calibration_start(self, state: State, event: Event) -> None:
            while True:
                pass

    report = verify(Loops, TinyModel(8), inputs=tiny_batches(1), time_limit=2)
    failed = [record for record in report.records if record.outcome is Outcome.FAIL]
    assert len(failed) == 1
    assert "Loops.on_calibration_start" in failed[0].summary
    assert all("the run has ended" in record.summary for record in report.records[2:])


def test_a_modifier_that_waits_ends_the_run() -> None:
    release = threading.Event()

    class Waits(Willing):
        def on_finalize(self, state: State) -> bool:
            return release.wait(timeout=30)

    report = verify(Waits, TinyModel(8), inputs=tiny_batches(1), time_limit=2, checks=["lifecycle.completes"])
    release.set()
    assert "Waits.on_finalize" in report.records[-1].summary


# The options.


@pytest.mark.parametrize(
    ("modifier", "check", "tag"),
    [
        (LeavesHooksAfterCalibration, "nothing_left", "session_hooks"),
        (CannotBringBack, "rolls_back", "in_place"),
        (QuantizesAgain, "already_quantized", "idempotent"),
        (Seeds, "surroundings", "random"),
        (CannotBeWritten, "recipe", "no_recipe"),
        (PatchesForward, "surroundings", "annotates"),
    ],
)
def test_a_contract_tag_takes_its_part_out(modifier: type[Modifier], check: str, tag: str) -> None:
    assert outcome_of(modifier, check)[0] is Outcome.FAIL
    assert outcome_of(modifier, check, tags=[tag])[0] is not Outcome.FAIL


def test_tags_stand_in_the_class_too() -> None:
    class Declares(CannotBringBack):
        contract_tags: ClassVar[frozenset[str]] = frozenset({"in_place"})

    assert outcome_of(Declares, "rolls_back")[0] is Outcome.PASS


def test_a_refusal_of_the_modifiers_own_kind_is_no_bug_where_it_is_declared() -> None:
    class NotNowError(Exception):
        pass

    class Refuses(Willing):
        def on_finalize(self, state: State) -> bool:
            if not self.ended:
                raise NotNowError("nothing was calibrated")
            return True

    subject = Subject(Refuses(), nn.Sequential(nn.Linear(1, 1)), [torch.ones(1, 1)])
    with pytest.raises(Violation, match="NotNowError"):
        drive_session(guest_stage(subject), PROFILES["pr"], GUEST_SHARE, shrink=False)
    report = verify(Refuses, checks=["lifecycle.state_machine"], refusals=[NotNowError], profile="change")
    assert report.passed, report.to_text()


def test_expected_failures_are_strict() -> None:
    reasons = {"lifecycle.completes": "on_initialize is not written yet"}
    expected = verify(ForgetsToReturn, checks=list(reasons), expected_failures=reasons).records[-1]
    assert expected.outcome is Outcome.SKIP
    assert "not written yet" in expected.summary
    unexpected = verify(Willing, checks=list(reasons), expected_failures=reasons).records[-1]
    assert unexpected.outcome is Outcome.FAIL
    assert "take it out" in unexpected.summary
    numbered = verify(Willing, checks=[47], expected_failures={"47": "by its number"})
    assert numbered.records[-1].outcome is Outcome.FAIL and "(by its number), and did not" in numbered.records[-1].summary


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"checks": ["lifecycle.complete"]}, "did you mean 'lifecycle.completes'"),
        ({"expected_failures": {"completes": "x"}}, "lifecycle.completes"),
        ({"checks": [47], "expected_failures": {"lifecycle.completes": "x"}}, "'lifecycle.completes': is none of the checks that run"),
        ({"profile": "ci"}, "pr"),
        ({"tags": ["inplace"]}, "did you mean 'in_place'"),
        ({"model": TinyModel(8)}, "give inputs"),
        ({"model": TinyModel(8), "inputs": []}, "inputs is a list, no list of tensors"),
        ({"model": TinyModel(8), "inputs": {"x": tiny_batches(1)[0]}}, "inputs is a dict, no list of tensors"),
        ({"model": TinyModel(8), "inputs": tiny_batches(1)[0]}, "inputs is a Tensor, no list of tensors"),
        ({"model": TinyModel(8), "inputs": ["x"]}, "inputs is a list of str, no list of tensors"),
        ({"model": TinyModel(8), "inputs": [*tiny_batches(1), {"absent": 1}]}, "does not run inputs[1] (TypeError: "),
    ],
)
def test_wrong_options_are_errors(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserInputError, match=re.escape(says)):
        verify(Willing, **options)


def test_model_modifier_and_random_numbers_of_the_caller_stay_as_they_are() -> None:
    model, modifier = TinyModel(8), CalibratingWorker()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    assert verify(modifier, model, inputs=tiny_batches(1), checks=["lifecycle.completes", "lifecycle.nothing_left"]).passed
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (numpy.random.get_state()[1] == states[2]).all()  # type: ignore[index]
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert not modifier.initialized
    assert type(modifier) is CalibratingWorker


@pytest.mark.nightly
def test_models_with_other_inputs() -> None:
    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(4, 4)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.proj(x) * scale

    for batch in ((torch.ones(1, 4), torch.ones(1)), {"x": torch.ones(1, 4), "scale": torch.ones(1)}):
        assert verify(CalibratingWorker, TwoInputs(), inputs=[batch], checks=FAST).passed


def test_a_wrong_session_is_told() -> None:
    class Tolerant(Session):
        def finalize(self) -> None:
            if self.last.name != "CALIBRATION_START":
                super().finalize()

    report = verify(Willing, TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.illegal_calls"], session_class=Tolerant)
    assert "finalize() is illegal here, and was accepted" in report.records[-1].summary


def test_the_report_as_text_and_json() -> None:
    report = verify(ForgetsToReturn, TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.completes"])
    assert isinstance(report, VerifyReport)
    text = report.to_text()
    assert "lifecycle.completes" in text
    assert "returned None" in text
    assert text.rstrip().endswith("ForgetsToReturn: regression")
    data = json.loads(report.to_json())
    assert data["verdict"] == "regression"
    assert [check["outcome"] for check in data["checks"]] == ["pass", "fail"]
    again = verify(ForgetsToReturn, TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.completes"])
    assert again.to_json() == report.to_json()
    assert (report.exit_code, report.passed) == (1, False)


def test_the_catalogue_has_every_number() -> None:
    numbers = {check.number for check in CHECKS.values()}
    assert set(range(47, 55)) <= numbers
