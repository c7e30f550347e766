"""What of the engines can be decided without a device: who serves which, what a graph cannot hold, and which memory it owns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compressor.errors import HostReadError, ReplayError, UserInputError
from compressor.training import Trainer, TrainStep, adamw
from compressor.training.capture.recorder import host_hazard
from compressor.training.capture.signature import drift, neutral
from compressor.training.engines.cuda_graph import Interval, bytes_at, merged, run_captured
from compressor.training.engines.select import TapeEngine, engine_for

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_a_device_without_an_engine_is_refused_where_a_mode_captures(kind):
    for mode in ("capture", "replay"):
        with pytest.raises(UserInputError, match=rf"mode='{mode}' needs an engine that captures on {kind}, and only cpu and cuda have one"):
            engine_for(torch.device(kind), mode)
    assert isinstance(engine_for(torch.device(kind), "eager"), TapeEngine)
    assert isinstance(engine_for(CPU), TapeEngine)


def test_a_trainer_on_such_a_device_says_so_at_once():
    model = nn.Linear(2, 2, device="meta")
    step = TrainStep(model, lambda model, batch: model(batch).sum(), adamw(model.parameters()))
    with pytest.raises(UserInputError, match="on meta, and only cpu and cuda"):
        Trainer(step, "replay")
    assert Trainer(step, "eager").mode == "eager"


@pytest.mark.parametrize(
    ("name", "operands", "target", "hazard"),
    [
        ("aten::mm", [(GPU, True), (GPU, False)], None, None),
        ("aten::_foreach_add_", [(CPU, False), (CPU, False)], None, "on the CPU"),  # an optimizer's counter
        ("aten::mul", [(GPU, True), (CPU, False)], None, "on the CPU"),  # a rate on the host
        ("aten::mul", [(GPU, True), (CPU, True)], None, None),  # a constant of the step, part of its signature
        ("aten::_efficient_attention_backward", [(GPU, True), (CPU, True)], None, None),  # a seed that a kernel keeps on the host
        ("aten::copy_", [(GPU, False), (CPU, True)], None, "between host and device"),
        ("aten::_to_copy", [(CPU, True)], GPU, "from the host"),
        ("aten::_to_copy", [(CPU, True)], CPU, None),
        ("aten::_to_copy", [(GPU, True)], CPU, "between host and device"),
        ("aten::_to_copy", [(GPU, True)], GPU, None),
        ("aten::_to_copy", [(GPU, True)], None, None),
        ("aten::lift_fresh", [(CPU, False)], None, None),
        ("aten::lift_fresh", [(GPU, False)], None, "from Python's values"),
        ("aten::zeros", [], GPU, None),
    ],
)
def test_what_works_on_the_host_is_no_part_of_a_graph(name, operands, target, hazard):
    found = host_hazard(name, GPU, operands, target)
    assert found is None if hazard is None else hazard in found
    assert host_hazard(name, CPU, operands, target) is None


def test_ranges_that_overlap_are_one_and_those_that_touch_are_two():
    given = [Interval(64, 96), Interval(0, 32), Interval(16, 48), Interval(48, 64), Interval(70, 80), Interval(5, 5)]
    assert merged(given) == [Interval(0, 48), Interval(48, 64), Interval(64, 96)]
    assert sum(interval.size for interval in merged(given)) == 96


def test_memory_is_found_again_by_its_address():
    owner = torch.zeros(32, dtype=torch.uint8)
    bytes_at(Interval(owner.data_ptr() + 8, owner.data_ptr() + 16), CPU).fill_(0xA5)
    assert owner.tolist() == [0] * 8 + [0xA5] * 8 + [0] * 16


def test_where_a_kernel_keeps_its_seed_is_no_drift_but_another_operator_is():
    eager = ["forward   aten._efficient(in:x:f32[2]@cuda:0) -> %0:f32[2]@cuda:0, %1:i64[]", "forward   aten.relu(%0:f32[2]@cuda:0) -> %2"]
    captured = [eager[0] + "@cuda:0", eager[1]]
    assert drift(eager, captured) is not None
    assert drift(neutral(eager), neutral(captured)) is None
    assert drift(neutral(eager), neutral(captured[:1])) is not None


def _captured(run_error=None, end_error=None):
    """Capture something that fails as asked for; return what was called, and what was raised or returned."""
    calls = []

    def step(name, error=None):
        def call():
            calls.append(name)
            if error is not None:
                raise error
            return name

        return call

    try:
        result = run_captured(
            step("begin"), step("run", run_error), step("end", end_error), step("recover"), lambda error: ReplayError(f"named: {error}; do")
        )
    except (RuntimeError, KeyError, KeyboardInterrupt) as error:
        return calls, error
    return calls, result


def test_a_capture_that_fails_is_ended_put_right_and_named():
    assert _captured() == (["begin", "run", "end"], "run")
    calls, error = _captured(run_error=RuntimeError("not permitted"))
    assert calls == ["begin", "run", "end"] and isinstance(error, ReplayError) and str(error) == "named: not permitted; do"
    calls, error = _captured(run_error=RuntimeError("not permitted"), end_error=RuntimeError("invalidated"))
    assert calls == ["begin", "run", "end", "recover"] and str(error) == "named: not permitted; do"
    calls, error = _captured(end_error=RuntimeError("unjoined work"))
    assert calls == ["begin", "run", "end", "recover"] and str(error) == "named: unjoined work; do"


@pytest.mark.parametrize("error", [HostReadError("op 3: read; do"), KeyError("of the step"), KeyboardInterrupt()])
def test_what_the_recorder_or_the_step_raises_is_passed_on_from_a_closed_capture(error):
    for end_error, calls in ((None, ["begin", "run", "end"]), (RuntimeError("invalidated"), ["begin", "run", "end", "recover"])):
        assert _captured(error, end_error) == (calls, error)
