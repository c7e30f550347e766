"""More wrong modifiers than any list of the harness knows of: each is told by the check that is there for its kind of mistake."""

from __future__ import annotations

import os
import sys
import threading
from array import array
from collections import Counter, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy
import pytest
import torch
from pydantic import PrivateAttr
from torch import nn
from torch.nn.modules import module as torch_module

from compressor.lifecycle import Event, Modifier, Session, State
from compressor.lifecycle.interface import Flags
from harness.lifecycle.driving.probes import CalibratingWorker, TinyModel, tiny_batches
from harness.lifecycle.driving.snapshot import freeze
from harness.lifecycle.verify import verify
from harness.reporting.verdict import Outcome, Verdict


class Willing(Modifier):
    """Base of the wrong ones here; nothing is wrong with it."""

    def on_initialize(self, state: State) -> bool:
        return True


# The process, the state, the model.


class PatchesTorch(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        own = nn.functional.relu
        nn.functional.relu = lambda *args, **options: own(*args, **options)


class HooksEveryModule(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        torch_module.register_module_forward_hook(lambda *args: None)


class SetsTheEnvironment(Willing):
    def on_initialize(self, state: State) -> bool:
        os.environ["MY_MODIFIER"] = "1"
        return True


class SwitchesAutocastOn(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        torch.set_autocast_enabled("cpu", True)


class DropsClaims(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        state.claims = {}


class AddsToTheState(Willing):
    def on_initialize(self, state: State) -> bool:
        state.cache = {}  # type: ignore[attr-defined]
        return True


class AddsObservers(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        state.model.get_submodule("lm_head").add_module("observer", nn.Identity())


class AddsObserversUntilAnError(AddsObservers):
    def on_calibration_end(self, state: State, event: Event) -> None:
        del state.model.get_submodule("lm_head").observer


class AddsBuffers(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        state.model.get_submodule("lm_head").register_buffer("largest", torch.zeros(1))


class ClearsHooksOfOthers(Willing):
    def on_calibration_end(self, state: State, event: Event) -> None:
        for module in state.model.modules():
            module._forward_hooks.clear()


class LeavesGradients(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        state.model(torch.ones(1, 2, dtype=torch.long)).sum().backward()


class ChangesADtype(Willing):
    def on_calibration_end(self, state: State, event: Event) -> None:
        state.model.get_submodule("lm_head").to(torch.float64)


class KeepsCountInTheClass(Willing):
    count: ClassVar[int] = 0

    def on_initialize(self, state: State) -> bool:
        KeepsCountInTheClass.count += 1
        return True


class SharesStatistics(Willing):
    seen: ClassVar[dict[str, int]] = {}

    def on_calibration_start(self, state: State, event: Event) -> None:
        self.seen["calibrations"] = self.seen.get("calibrations", 0) + 1


class KeepsCountInWhateverClassItHas(Willing):
    def on_initialize(self, state: State) -> bool:
        type(self).count_ = getattr(self, "count_", 0) + 1  # type: ignore[attr-defined]
        return True


class KeepsATableForAllModifiers(Willing):
    def on_initialize(self, state: State) -> bool:
        Modifier.table = {"seen": 1}  # type: ignore[attr-defined]
        return True


class _Mixin:
    limits: ClassVar[list[int]] = []


class KeepsLimitsInAMixin(_Mixin, Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        self.limits[:] = [3]


# Plain data of this file, and how a run changes it.
IN_ITS_FILE: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "deque": (deque([1]), lambda held: held.append(1)),
    "array": (array("d", [1]), lambda held: held.append(2.5)),
    "bytearray": (bytearray(b"ab"), lambda held: held.append(1)),
    "numpy": (numpy.zeros((2, 2)), lambda held: held.__iadd__(1)),
    "Counter": (Counter("a"), lambda held: held.update("a")),
    "OrderedDict": (OrderedDict(a=1), lambda held: held.update(a=2)),
    "UserDict": (UserDict(a=1), lambda held: held.update(a=2)),
    "UserList": (UserList([1]), lambda held: held.append(2)),
}
HELD: Any = None


@pytest.mark.parametrize("what", IN_ITS_FILE)
def test_plain_data_in_the_file_of_a_modifier_that_a_run_changes_is_told_and_put_back(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held, change = IN_ITS_FILE[what]
    monkeypatch.setattr(sys.modules[__name__], "HELD", held)
    before = freeze(held)

    class ChangesItsFile(Willing):
        def on_finalize(self, state: State) -> bool:
            change(held)
            return True

    record = verify(ChangesItsFile, TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.nothing_left"]).records[-1]
    assert record.outcome is Outcome.FAIL
    assert "test_wrong_modifiers" in record.summary
    assert freeze(held) == before


class WritesItsDocstring(Willing):
    def on_calibration_end(self, state: State, event: Event) -> None:
        type(self).__doc__ = "It has been used."


class ReplacesAMethodOfItsClass(Willing):
    def on_calibration_end(self, state: State, event: Event) -> None:
        ReplacesAMethodOfItsClass.check_settings = lambda self: None  # type: ignore[method-assign]


IN_CLASSES = {
    KeepsCountInWhateverClassItHas: "type(self).count_",
    KeepsATableForAllModifiers: "Modifier.table",
    KeepsLimitsInAMixin: "_Mixin.limits",
    WritesItsDocstring: "type(self).__doc__",
    ReplacesAMethodOfItsClass: "ReplacesAMethodOfItsClass.check_settings",
}


# The lifecycle.


class FinalizesItself(Willing):
    def on_calibration_end(self, state: State, event: Event) -> None:
        self.finalize(state)


class ResetsItself(Willing):
    def on_calibration_end(self, state: State, event: Event) -> None:
        self.restore_flags(Flags())


class SkipsItsCallbacks(Willing):
    def finalize(self, state: State) -> bool:
        return True


class LiesAboutItsFlags(Willing):
    @property
    def started(self) -> bool:
        return True


class CallsTooSoon(Willing):
    def update_event(self, state: State, event: Event) -> None:
        if event.type == "calibration_start":
            self.on_calibration_start(state, event)
        super().update_event(state, event)


class CallsTwice(Willing):
    def update_event(self, state: State, event: Event) -> None:
        super().update_event(state, event)
        super().update_event(state, event)


class StartsAgain(Willing):
    def update_event(self, state: State, event: Event) -> None:
        if self.started and event.type == "batch_start":
            self.on_start(state, event)
        super().update_event(state, event)


class EndsOneEarly(Willing):
    def should_end(self, index: float) -> bool:
        return self.end is not None and index > self.end - 1


class NeverUpdates(Willing):
    def should_update(self, index: float) -> bool:
        return False


class KnowsSomeEventsOnly(Willing):
    def on_event(self, state: State, event: Event) -> None:
        if event.type == "loss_calculated":
            raise KeyError(event.type)


class ChangesTheEvent(Willing):
    def on_event(self, state: State, event: Event) -> None:
        object.__setattr__(event, "index", event.index + 1)


class WrapsErrors(Willing):
    def update_event(self, state: State, event: Event) -> None:
        try:
            super().update_event(state, event)
        except Exception as error:
            raise ValueError("wrapped") from error


class RefusesWithAnotherError(Willing):
    def initialize(self, state: State) -> bool:
        if self.initialized:
            raise ValueError("again")
        return super().initialize(state)


class Exits(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        sys.exit(3)


class NeverFinalizes(Willing):
    def on_finalize(self, state: State) -> bool:
        return False


# Hooks and recipes.


class ForgetsOptions(Willing):
    def register_hook(self, module: nn.Module, fn: Any, kind: Any, with_kwargs: bool = False, always_call: bool = False) -> Any:
        return super().register_hook(module, fn, kind)


class LosesWhatHooksReturn(Willing):
    def register_hook(self, module: nn.Module, fn: Any, kind: Any, with_kwargs: bool = False, always_call: bool = False) -> Any:
        def mute(*args: Any) -> None:
            fn(*args)

        return super().register_hook(module, mute, kind, with_kwargs, always_call)


class HooksBehindItsOwnBack(Willing):
    def register_hook(self, module: nn.Module, fn: Any, kind: Any, with_kwargs: bool = False, always_call: bool = False) -> Any:
        return getattr(module, f"register_{kind}_hook")(fn)


class EqualsEverything(Willing):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)


class EqualsWhateverItsRatio(Willing):
    ratio: float = 0.5
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EqualsWhateverItsRatio) and (self.start, self.end, self.group) == (other.start, other.end, other.group)


class WritesNoRatio(Willing):
    ratio: float = 0.5

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return {key: value for key, value in super().model_dump(**options).items() if key != "ratio"}


WRONG: dict[type[Modifier], str] = {
    PatchesTorch: "completes",
    HooksEveryModule: "completes",
    SetsTheEnvironment: "completes",
    SwitchesAutocastOn: "completes",
    DropsClaims: "completes",
    AddsToTheState: "completes",
    AddsObservers: "completes",
    AddsObserversUntilAnError: "nothing_left",
    AddsBuffers: "completes",
    ClearsHooksOfOthers: "surroundings",
    LeavesGradients: "surroundings",
    ChangesADtype: "surroundings",
    KeepsCountInTheClass: "surroundings",
    SharesStatistics: "surroundings",
    FinalizesItself: "completes",
    ResetsItself: "completes",
    SkipsItsCallbacks: "completes",
    LiesAboutItsFlags: "completes",
    CallsTooSoon: "completes",
    CallsTwice: "completes",
    StartsAgain: "start_and_end",
    EndsOneEarly: "start_and_end",
    NeverUpdates: "start_and_end",
    KnowsSomeEventsOnly: "start_and_end",
    ChangesTheEvent: "completes",
    WrapsErrors: "nothing_left",
    RefusesWithAnotherError: "illegal_calls",
    Exits: "completes",
    NeverFinalizes: "completes",
    ForgetsOptions: "hooks",
    LosesWhatHooksReturn: "hooks",
    HooksBehindItsOwnBack: "hooks",
    EqualsEverything: "recipe",
    EqualsWhateverItsRatio: "recipe",
    WritesNoRatio: "recipe",
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Take back what the wrong ones leave in the process."""
    relu = nn.functional.relu
    yield
    nn.functional.relu = relu
    torch_module._global_forward_hooks.clear()
    os.environ.pop("MY_MODIFIER", None)
    torch.set_autocast_enabled("cpu", False)


@pytest.mark.parametrize(("modifier", "check"), WRONG.items(), ids=[cls.__name__ for cls in WRONG])
def test_a_wrong_modifier_is_told(modifier: type[Modifier], check: str) -> None:
    report = verify(modifier, TinyModel(8), inputs=tiny_batches(1), checks=[f"lifecycle.{check}"], profile="pr")
    assert report.records[-1].outcome is Outcome.FAIL, report.to_text()


@pytest.mark.parametrize("check", ["surroundings", "nothing_left"])
@pytest.mark.parametrize("modifier", IN_CLASSES, ids=lambda cls: cls.__name__)
def test_state_in_a_class_is_told_by_name_each_time_and_put_back(modifier: type[Modifier], check: str) -> None:
    for _ in range(2):  # the same values come again
        report = verify(modifier, TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.completes", f"lifecycle.{check}"], profile="pr")
        record = report.records[-1]
        assert record.outcome is Outcome.FAIL and IN_CLASSES[modifier] in record.summary, report.to_text()
    assert not hasattr(Modifier, "table") and not _Mixin.limits
    assert "check_settings" not in vars(ReplacesAMethodOfItsClass)


class LosesASetting(CalibratingWorker):
    keep: float = 0.0

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> LosesASetting:
        return LosesASetting()


class BecomesAnother(CalibratingWorker):
    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> CalibratingWorker:
        return CalibratingWorker()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (LosesASetting(keep=0.9), "a copy of a LosesASetting object has another keep, and every run takes one; mend __deepcopy__"),
        (BecomesAnother(), "a copy of a BecomesAnother object is of type CalibratingWorker, and every run takes one; mend __deepcopy__"),
    ],
)
def test_an_object_is_not_judged_by_a_copy_that_is_another(given: Any, said: str) -> None:
    report = verify(given, checks=["lifecycle.completes"])
    assert report.verdict is Verdict.REGRESSION and said in report.records[0].summary, report.to_text()
    assert verify(LosesASetting(), checks=["lifecycle.completes"]).passed


def test_a_modifier_that_holds_what_cannot_be_copied_is_made_anew_for_each_run() -> None:
    class HoldsALock(CalibratingWorker):
        _lock: Any = PrivateAttr(default_factory=threading.Lock)

    checks = ["lifecycle.completes", "lifecycle.start_and_end"]
    assert verify(HoldsALock, TinyModel(8), inputs=tiny_batches(1), checks=checks).passed
    report = verify(HoldsALock(), TinyModel(8), inputs=tiny_batches(1), checks=checks)
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "cannot be copied" in report.records[0].summary
    assert "give the class" in report.records[0].summary


class _Exits(Willing):
    def __init__(self) -> None:
        sys.exit(3)


class _Interrupts(Willing):
    def __init__(self) -> None:
        raise KeyboardInterrupt


class _TagsNoSet(Willing):
    contract_tags = 5  # type: ignore[assignment]


class _TagsAString(Willing):
    contract_tags = "in_place"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (_Exits, "SystemExit: 3"),
        (_Interrupts, "KeyboardInterrupt"),
        (_TagsNoSet, "5 is no set of contract tags"),
        (_TagsAString, "'in_place' is no set of contract tags"),
    ],
)
def test_a_bad_class_ends_no_program(given: type[Modifier], says: str) -> None:
    report = verify(given)
    assert report.verdict is Verdict.REGRESSION
    assert says in report.records[0].summary


# Sessions.


class _Swallows(Session):
    def __exit__(self, *error: Any) -> bool:  # type: ignore[override]
        super().__exit__(*error)
        return True


class _LosesTheLoss(Session):
    def send(self, event_type: Any, loss: Any = None, modules: Any = ()) -> None:
        super().send(event_type, None if loss is None else loss * 2, modules)


@pytest.mark.parametrize(
    ("session", "check", "says"),
    [(_Swallows, "nothing_left", "swallows"), (_LosesTheLoss, "start_and_end", "did not get the loss that was sent")],
)
def test_a_wrong_session_is_told(session: type[Session], check: str, says: str) -> None:
    report = verify(Willing, TinyModel(8), inputs=tiny_batches(1), checks=[f"lifecycle.{check}"], session_class=session)
    assert says in report.records[-1].summary


class ChangesAnEarlierStage(CalibratingWorker):
    """Doubles the first layer as each stage is compressed."""

    _kind: ClassVar[type[torch.nn.Module]] = torch.nn.Linear

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        first: Any = next(one for one in state.model.modules() if isinstance(one, self._kind))
        first.weight.data.mul_(2)


class ChangesTheEmbedding(ChangesAnEarlierStage):
    """Which stands in the last stage, and runs before the first."""

    _kind = torch.nn.Embedding


@pytest.mark.parametrize("cls", [ChangesAnEarlierStage, ChangesTheEmbedding])
def test_a_stage_that_is_compressed_by_a_change_of_what_runs_before_it_is_told(cls: type[Modifier]) -> None:
    report = verify(cls, checks=["lifecycle.completes"])
    assert report.verdict is Verdict.REGRESSION and "others have learnt from what it was" in report.records[1].summary, report.to_text()
