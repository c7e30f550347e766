"""Modes of torch that a modifier or subject enters: told and taken off where they are left, and left alone where they end in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

import harness
from compressor.lifecycle import Event, Modifier, State
from compressor.numerics import QuantizationArgs
from harness.checks.adapters.ours import OurQuantizer
from harness.checks.protocols import Quantized
from harness.lifecycle.driving.probes import TinyModel, tiny_batches
from harness.lifecycle.driving.torch_settings import EnteredModes
from harness.lifecycle.process_state import ModulesMayDraw, process_kept
from harness.lifecycle.subject import Subject


class Passes(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Raises(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("this mode is over")


class DispatchRaises(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("this mode is over")


RAISING: tuple[Callable[[], Any], ...] = (Raises, DispatchRaises, TorchFunctionMode)


def _saves() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


MODES: dict[str, Callable[[], Any]] = {"functions": Passes, "operators": Dispatches, "saved tensors": _saves}


def entering(make: Callable[[], Any], *, leaves: bool) -> type[Modifier]:
    class Enters(Modifier):
        _mode: Any = None

        def on_initialize(self, state: State) -> bool:
            return True

        def on_calibration_start(self, state: State, event: Event) -> None:
            self._mode = make()
            self._mode.__enter__()

        def on_calibration_end(self, state: State, event: Event) -> None:
            if leaves:
                self._mode.__exit__(None, None, None)

    return Enters


def _standing() -> tuple[int, int, bool]:
    saved = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(), saved


@pytest.mark.parametrize("name", MODES)
def test_a_mode_that_is_left_on_is_told(name: str) -> None:
    report = harness.verify(entering(MODES[name], leaves=False), TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.completes"])
    assert "left torch's modes" in report.records[1].summary, report.to_text()
    assert _standing() == (0, 0, False)


@pytest.mark.parametrize("name", MODES)
def test_a_run_begins_without_the_modes_of_those_before(name: str) -> None:
    """A state machine makes hundreds of runs in one thread, and had gone through the modes of all of them at every call of torch."""
    subject, before = Subject(entering(MODES[name], leaves=False)(), TinyModel(8), tiny_batches(1)), EnteredModes()
    for _ in range(3):
        run = subject.open()
        assert _standing() == (0, 0, False)
        run.initialize()
        run.send("CALIBRATION_START")
        assert sum(_standing()) == 1
    before.put_back()


@pytest.mark.parametrize("name", MODES)
def test_a_mode_that_ends_in_time_is_there_meanwhile_and_no_finding(name: str) -> None:
    report = harness.verify(entering(MODES[name], leaves=True), TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.completes"])
    assert report.passed, report.to_text()


def test_the_watch_over_drawn_numbers_leaves_other_modes_where_they_are() -> None:
    kept, watch = Passes(), ModulesMayDraw()
    with watch:
        kept.__enter__()
    assert _get_current_function_mode_stack() == [kept]
    with watch:
        kept.__exit__(None, None, None)
        assert _get_current_function_mode_stack() == [watch]
    assert _standing() == (0, 0, False)


def test_a_default_device_is_a_setting_and_stays_below() -> None:
    before = EnteredModes()
    with ModulesMayDraw(), torch.device("meta"):
        assert torch.ones(1).device.type == "meta"
    with torch.device("meta"), ModulesMayDraw(), Passes():
        assert torch.ones(1).device.type == "meta"
    Passes().__enter__()
    before.put_back()
    assert _standing() == (0, 0, False)


def test_the_caller_of_check_keeps_the_modes_that_were_there() -> None:
    class Enters(OurQuantizer):
        def quantize(self, weight: Tensor) -> Quantized:
            Passes().__enter__()
            return super().quantize(weight)

    with Passes() as own:
        record = harness.check(Enters(QuantizationArgs(num_bits=4, group_size=16)), checks=["quantizer.zero"], draws=False).records[0]
        assert _get_current_function_mode_stack() == [own]
        with process_kept():
            own.__exit__(None, None, None)  # who takes off what is another's has it put back
        assert _get_current_function_mode_stack() == [own]
    assert "torch's modes" in record.summary, record.summary


@pytest.mark.parametrize("mode", RAISING)
@pytest.mark.parametrize("where", ["on_initialize", "on_calibration_start", "on_finalize"])
def test_a_mode_that_raises_is_a_finding_of_verify_and_taken_off(mode: Callable[[], Any], where: str) -> None:
    def enter(self: Modifier, state: State, event: Event | None = None) -> bool:
        mode().__enter__()
        return True

    methods: dict[str, Any] = {"__module__": __name__, "on_initialize": lambda self, state: True} | {where: enter}
    modifier: type[Modifier] = type("Enters", (Modifier,), methods)
    checks = ["lifecycle.nothing_left", "lifecycle.completes"]
    report = harness.verify(modifier, TinyModel(8), inputs=tiny_batches(1), checks=checks)
    assert all("torch's modes" in record.summary for record in report.records[1:]), report.to_text()
    assert _standing() == (0, 0, False)


@pytest.mark.parametrize("mode", RAISING)
def test_a_mode_that_raises_is_a_finding_of_verify_module_and_check(mode: Callable[[], Any]) -> None:
    class Enters(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            mode().__enter__()
            return y

    class EntersToo(OurQuantizer):
        def quantize(self, weight: Tensor) -> Quantized:
            found = super().quantize(weight)
            mode().__enter__()
            return found

    around = next(one for one in harness.verify_module(Enters(4, 4), torch.ones(2, 4)).records if one.name == "module.surroundings")
    assert "torch's modes" in around.summary, around
    report = harness.check(EntersToo(QuantizationArgs(num_bits=4, group_size=16)), checks=["quantizer.zero"], draws=False)
    assert "torch's modes" in report.records[0].summary, report.to_text()
    assert _standing() == (0, 0, False)
