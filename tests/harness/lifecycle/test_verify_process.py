"""What one wrong modifier leaves in the process is put back; what is kept outside of models and modifiers is told by its name."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from compressor.lifecycle import Event, Modifier, State
from harness.lifecycle.driving.probes import TinyModel, tiny_batches
from harness.lifecycle.driving.snapshot import Snapshot
from harness.lifecycle.process_state import process_kept
from harness.lifecycle.verify import verify

SEEN: dict[str, float] = {}


class Willing(Modifier):
    def on_initialize(self, state: State) -> bool:
        return True


class _CachesInItsModule(Willing):
    def on_calibration_end(self, state: State, event: Event) -> None:
        SEEN.setdefault("largest", 1.0)


class _HooksAParameter(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        state.model.get_submodule("lm_head").weight.register_hook(lambda gradient: None)  # type: ignore[union-attr, operator]


class _SwitchesGradientsOff(Willing):
    def on_calibration_start(self, state: State, event: Event) -> None:
        torch.set_grad_enabled(False)


class _AddsAdapters(Willing):
    def on_initialize(self, state: State) -> bool:
        if any("Adapted" in type(module).__name__ for module in state.model.modules()):
            raise ValueError("there are adapters")
        state.replace_module("lm_head", _Adapted(state.model.get_submodule("lm_head")))
        return True


class _Adapted(nn.Module):
    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class _CountsItsRuns(Willing):
    def on_calibration_end(self, state: State, event: Event) -> None:
        SEEN["runs"] = SEEN.get("runs", 0.0) + 1
        state.model.get_submodule("lm_head").weight.data.mul_(SEEN["runs"])  # type: ignore[union-attr, operator]


class _AnswersNothing(Willing):
    def on_finalize(self, state: State) -> bool:
        return None  # type: ignore[return-value]


class _HooksEveryModuleThatIsMade(Willing):
    def on_calibration_end(self, state: State, event: Event) -> None:
        nn.modules.module.register_module_parameter_registration_hook(lambda *args: None)


class _NotesOnAWeight(Willing):
    def on_calibration_end(self, state: State, event: Event) -> None:
        state.model.get_submodule("lm_head").weight.scale_seen = torch.ones(3)  # type: ignore[union-attr]


class _NotesOnAllTensors(Willing):
    def on_calibration_end(self, state: State, event: Event) -> None:
        torch.Tensor.scale_seen = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("modifier", "check", "says"),
    [
        (_HooksEveryModuleThatIsMade, "nothing_left", "of every module._global_parameter_registration_hooks: hooks changed"),
        (_NotesOnAWeight, "nothing_left", "lm_head.weight.scale_seen: attribute appeared"),
        (_NotesOnAllTensors, "nothing_left", "the class Tensor: process changed: scale_seen"),
        (_CachesInItsModule, "surroundings", ".SEEN: class changed"),
        (_HooksAParameter, "completes", "lm_head.weight._backward_hooks"),
        (_SwitchesGradientsOff, "state_machine", "grad mode: torch changed: True -> False"),
        (_AddsAdapters, "repeatable", "they follow the caller's random numbers"),
        (_AnswersNothing, "completes", "returned None, where True is due"),
    ],
)
def test_the_cause_is_named(modifier: type[Modifier], check: str, says: str) -> None:
    SEEN.clear()
    report = verify(modifier, TinyModel(8), inputs=tiny_batches(1), checks=[f"lifecycle.{check}"])
    assert says in report.records[-1].summary, report.to_text()


def test_what_follows_random_numbers_may_do_so_where_it_says_so() -> None:
    assert verify(_AddsAdapters, TinyModel(8), inputs=tiny_batches(1), tags=["random"], checks=[43]).passed
    assert not verify(_CountsItsRuns, TinyModel(8), inputs=tiny_batches(1), tags=["random"], checks=[43]).passed


def test_a_note_on_a_weight_is_left_where_the_modifier_says_so() -> None:
    assert verify(_NotesOnAWeight, TinyModel(8), inputs=tiny_batches(1), tags=["annotates"], checks=[49]).passed


class _Table(nn.Module):
    """A model with a buffer that no checkpoint holds; one that grows with the sequence is its own affair."""

    def __init__(self, *, grows: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.grows = nn.Linear(4, 4), nn.Linear(4, 4), grows
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.grows:
            self.table.add_(1)
        return self.last(torch.relu(self.first(x)) * self.table)


class _ScalesBuffers(Willing):
    def on_calibration_end(self, state: State, event: Event) -> None:
        for buffer in state.model.buffers():
            buffer.mul_(1.01)


class _ScalesItsBuffers(_ScalesBuffers):
    def on_initialize(self, state: State) -> bool:
        state.touch([""])
        return True


def test_a_buffer_that_no_checkpoint_holds_is_claimed_too() -> None:
    for modifier, model, is_right in (
        (_ScalesBuffers, _Table(), False),
        (_ScalesItsBuffers, _Table(), True),
        (Willing, _Table(grows=True), True),
    ):
        report = verify(modifier, model, inputs=[torch.ones(2, 4)], tags=["in_place"], checks=["lifecycle.claims"])
        assert report.passed is is_right, report.to_text()
    text = verify(_ScalesBuffers, _Table(), inputs=[torch.ones(2, 4)], tags=["in_place"], checks=["lifecycle.claims"]).to_text()
    assert "table: 1 buffers that no checkpoint holds" in " ".join(text.split())


class _BreaksTheProcess(Willing):
    def on_calibration_end(self, state: State, event: Event) -> None:
        _break()


def _break() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_autocast_enabled("cpu", True)
    torch.set_flush_denormal(True)
    torch.set_printoptions(precision=2)
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    nn.modules.module.register_module_forward_hook(lambda *args: None)
    nn.modules.module.register_module_buffer_registration_hook(lambda *args: None)
    register_optimizer_step_post_hook(lambda *args: None)
    torch.Tensor.extra = 1  # type: ignore[attr-defined]
    nn.Linear.forward = lambda self, x: x  # type: ignore[method-assign, assignment]
    nn.Linear.extra = 1  # type: ignore[attr-defined]
    nn.functional.relu = torch.sigmoid
    numpy.seterr(all="ignore")
    warnings.simplefilter("ignore")
    os.environ["BROKEN"] = "1"
    os.chdir("/")
    os.umask(0o077)
    torch.mine = {}  # type: ignore[attr-defined]
    nn.init.mine = 1  # type: ignore[attr-defined]
    torch.pi = 3
    sys.setrecursionlimit(5000)
    sys.path.append("/broken")
    gc.disable()


LEFT: dict[str, Callable[[], object]] = {
    "changed: mine": lambda: setattr(torch, "mine", {}),
    "torch.nn.init: process changed: mine": lambda: setattr(nn.init, "mine", print),
    "changed: inf": lambda: setattr(torch, "inf", 1e9),
    "umask": lambda: os.umask(0o077),
}


@pytest.mark.parametrize("told", LEFT)
def test_what_is_put_into_what_all_share_is_told(told: str) -> None:
    class Leaves(Willing):
        def on_calibration_end(self, state: State, event: Event) -> None:
            LEFT[told]()

    report = verify(Leaves, TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.nothing_left"])
    assert not report.passed and told in report.records[-1].summary, report.to_text()


def test_hooks_on_what_autograd_saves_are_told() -> None:
    before = Snapshot.of_process()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        assert ["torch's modes" in str(one) for one in before.differences(Snapshot.of_process())] == [True]


def test_the_process_is_as_it_was() -> None:
    model, process, filters = nn.Linear(2, 2), Snapshot.of_process(), warnings.filters[:]
    before = Snapshot(model)
    with process_kept():
        _break()
    left = [str(one) for one in before.differences(Snapshot(model))]
    assert left + [str(one) for one in process.differences(Snapshot.of_process())] == []
    assert (warnings.filters[:], hasattr(nn.Linear, "extra")) == (filters, False)


def test_nobody_is_blamed_for_what_another_has_left() -> None:
    checks = ["completes", "repeatable", "nothing_left", "hooks", "nested_contexts", "surroundings"]
    for modifier, is_right in ((_BreaksTheProcess, False), (Willing, True)):
        report = verify(modifier, TinyModel(8), inputs=tiny_batches(1), checks=[f"lifecycle.{name}" for name in checks])
        assert report.passed is is_right, report.to_text()
        assert len(report.causes()) <= 1
