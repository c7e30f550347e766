"""Paused forwards and what they share: targets called repeatedly, batches of different kinds, random numbers, errors, threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from compressor.data import Batch, call_model
from compressor.errors import NumericsError, TracingError
from compressor.random_state import RandomState
from compressor.tracing import SuspendedRun, trace
from compressor.tracing.targets.order import Trail, merged_rank, repeated


class Model(nn.Module):
    """Three layers; a subclass says how they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))


class Again(Model):
    """The first layer comes again at the end."""

    def forward(self, x: Tensor) -> Tensor:
        x += 1  # a batch that is written to must be whole when it runs again
        for layer in [*self.layers, self.layers[0]]:
            x = torch.tanh(layer(x))
        return x


TARGETS = ["layers.0", "layers.1", "layers.2"]
WATCHED = {f"layers.{index}.0": False for index in range(3)}


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def batches(num: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(2, 4, generator=generator)} for _ in range(num)]


def fresh(batch: Batch) -> Batch:
    assert isinstance(batch, dict)
    return {name: value.clone() for name, value in batch.items()}


@contextmanager
def seen_by(model: nn.Module, name: str, seen: dict[str, list[Tensor]]) -> Iterator[None]:
    handle = model.get_submodule(name).register_forward_pre_hook(
        lambda module, args: seen.setdefault(name, []).append(args[0].clone())  # type: ignore[func-returns-value]
    )
    yield
    handle.remove()


def halve(model: nn.Module, name: str) -> None:
    with torch.no_grad():
        model.get_submodule(name).weight.div_(2)  # type: ignore[operator,union-attr]


@torch.no_grad()
def naive(model: nn.Module, data: list[Batch], stages: list[str]) -> tuple[dict[str, list[Tensor]], list[Any]]:
    seen: dict[str, list[Tensor]] = {}
    for stage in stages:
        with seen_by(model, f"{stage}.0", seen):
            for batch in data:
                call_model(model, fresh(batch))
        halve(model, f"{stage}.0")
    return seen, [call_model(model, fresh(batch)) for batch in data]


def planned(model: nn.Module, data: list[Batch], *, propagate_first: bool = False) -> tuple[dict[str, list[Tensor]], list[Any], list[str]]:
    plan = trace(model, [fresh(data[0])], TARGETS, engine="suspend")
    seen: dict[str, list[Tensor]] = {}
    watched: dict[str, bool] = {}
    stages = []
    with plan.run([fresh(batch) for batch in data], watched=lambda: watched, keep_outputs=True) as run:
        for stage in run:
            stages.append(stage.name)
            watched = {f"{stage.name}.0": False}
            with seen_by(model, f"{stage.name}.0", seen):
                stage.calibrate()
            if propagate_first:
                stage.propagate()
            watched = {}
            halve(model, f"{stage.name}.0")
            if not propagate_first:
                stage.propagate()
    return seen, run.outputs, stages


def assert_same(left: dict[str, list[Tensor]], right: dict[str, list[Tensor]]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert len(left[name]) == len(right[name]), name
        assert all(torch.equal(a, b) for a, b in zip(left[name], right[name], strict=True)), name


def test_a_target_that_is_called_again_is_calibrated_with_all_its_calls() -> None:
    seen, outputs, stages = planned(made(Again), batches())
    expected, results = naive(made(Again), batches(), TARGETS)
    assert stages == TARGETS and len(seen["layers.0.0"]) == 6
    assert_same(seen, expected)
    assert all(torch.equal(a, b) for a, b in zip(outputs, results, strict=True))


class Tallying(nn.Sequential):
    """Gives its buffer a new tensor in every call."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4))
        self.register_buffer("tally", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.tally = self.get_buffer("tally") + x.mean(0)
        return super().forward(x) + self.tally


class AgainTallying(Again):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Tallying() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.tally = torch.zeros(4)
        return super().forward(x)


def test_a_repeated_target_may_replace_a_buffer() -> None:
    seen, outputs, _ = planned(made(AgainTallying), batches())
    expected, results = naive(made(AgainTallying), batches(), TARGETS)
    assert_same(seen, expected)
    assert all(torch.equal(a, b) for a, b in zip(outputs, results, strict=True))


def test_a_repeated_target_wants_the_weights_that_the_samples_met() -> None:
    with pytest.raises(TracingError, match=r"^layers.0: its weights changed after the samples had run on"):
        planned(made(Again), batches(), propagate_first=True)


def test_a_call_that_only_some_batches_make_is_foreseen() -> None:
    class Sometimes(Model):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.layers[0](x) if x.shape[0] == 5 else x

    data = [*batches(), {"x": torch.ones(5, 4)}]
    seen, outputs, stages = planned(made(Sometimes), data)
    expected, results = naive(made(Sometimes), data, stages)
    assert_same(seen, expected)
    assert all(map(torch.equal, outputs, results))


def test_a_call_that_compression_brings_about_is_refused() -> None:
    class Deciding(Model):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x if float(self.layers[1].scale) > 0.5 else self.layers[0](x)

    model = made(Deciding)
    model.layers[1].scale = 1.0  # type: ignore[union-attr, index]
    told = r"^layers.0: batch 0 calls this sequential target again after its stage"
    with (
        pytest.raises(TracingError, match=told),
        trace(model, batches(), TARGETS, engine="suspend").run(batches(), watched=lambda: list(WATCHED)) as run,
    ):
        for stage in run:
            stage.calibrate()
            if stage.name == "layers.1":
                stage.module.scale = 0.25  # type: ignore[assignment]
            stage.propagate()


class ByMask(Model):
    """With a mask the last layer comes first."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            x = self.layers[2](x * mask)
        return self.layers[1](self.layers[0](x))


def test_batches_of_different_kinds_meet_at_each_target() -> None:
    data: list[Batch] = [batches(1)[0], {"x": torch.ones(2, 4), "mask": torch.ones(2, 1)}]
    seen, outputs, stages = planned(made(ByMask), data)
    assert stages == ["layers.2", "layers.0", "layers.1"]
    expected, results = naive(made(ByMask), data, stages)
    assert_same(seen, expected)
    assert all(torch.equal(a, b) for a, b in zip(outputs, results, strict=True))


@pytest.mark.parametrize(
    ("trails", "expected"),
    [
        ([], "abc"),
        (["cab", "ab"], "cab"),
        (["bc", "ab"], "abc"),
        (["ab", "ba"], "cab"),
        (["ca", "b"], "bca"),
        (["caac"], "bca"),
    ],
)
def test_orders_of_calls_are_merged(trails: list[str], expected: str) -> None:
    rank = merged_rank([Trail(tuple(trail)) for trail in trails], {"a": 0, "b": 1, "c": 2})
    assert "".join(sorted(rank, key=rank.__getitem__)) == expected


def test_repeated_targets_are_those_that_one_forward_calls_twice() -> None:
    assert repeated([Trail(tuple("aba")), Trail(tuple("bc"))]) == {"a"}
    assert repeated([]) == frozenset()


class Dropping(Model):
    """Random numbers of torch, in glue and in layers."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.dropout(layer(functional.dropout(x, 0.5, training=True)), 0.5, training=True)
        return x


class Seeding(Model):
    """Random numbers of Python and numpy, from a seed of its own."""

    def forward(self, x: Tensor) -> Tensor:
        random.seed(1)
        np.random.seed(2)
        for layer in self.layers:
            x = layer(x * random.random()) + float(np.random.rand())
        return x


class Drawing(Model):
    """Random numbers of Python, from whatever state there is."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x * random.random())
        return x


@pytest.mark.parametrize("kind", [Dropping, Seeding, Drawing])
def test_every_sample_draws_the_numbers_that_it_draws_alone(kind: type[nn.Module]) -> None:
    model, data = made(kind), batches()
    torch.manual_seed(5), random.seed(6), np.random.seed(7)
    start = RandomState.current(foreign=True)
    expected = []
    for batch in data:
        start.restore()
        with torch.no_grad():
            expected.append(call_model(model, fresh(batch)))
    start.restore()
    plan = trace(model, [data[0]], TARGETS, engine="suspend")
    assert RandomState.current(foreign=True).equals(start)
    with plan.run(data, watched=lambda: WATCHED, keep_outputs=True) as run:
        for stage in run:
            stage.calibrate()
            stage.propagate()
    assert all(torch.equal(a, b) for a, b in zip(run.outputs, expected, strict=True))
    assert RandomState.current(foreign=True).equals(start)


def test_numbers_that_were_drawn_unforeseen_are_an_error() -> None:
    with (
        pytest.raises(TracingError, match="draws random numbers from Python or numpy, unlike those"),
        SuspendedRun(made(Drawing), TARGETS, batches()) as run,
    ):
        for stage in run.stages():
            stage.propagate()


class Handling(Model):
    """Handles every error of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            try:
                x = layer(x)
            except (RuntimeError, ValueError, ArithmeticError, KeyError):
                x = x - 1
        return x


class Picky(nn.Sequential):
    """Raises for some data."""

    def forward(self, x: Tensor) -> Tensor:
        inner = super().forward(x)
        if inner[0, 0] > 0:
            raise ValueError("not this one")
        return inner


def test_what_a_layer_raises_is_handled_where_the_plain_forward_handles_it() -> None:
    model = made(Handling)
    for index in range(3):
        model.get_submodule("layers")[index] = Picky(nn.Linear(4, 4))  # type: ignore[index]
    data = batches(6)
    with torch.no_grad():
        expected = [call_model(model, batch) for batch in data]
    with SuspendedRun(model, TARGETS, data, watched=lambda: WATCHED, keep_outputs=True) as run:
        groups = []
        for stage in run.stages():
            groups.append(stage.num_samples)
            stage.calibrate()
            stage.propagate()
    assert groups == [6, 6, 6] and all(torch.equal(a, b) for a, b in zip(run.outputs, expected, strict=True))


def sleepy(failing: Callable[..., None]) -> Callable[[], Any]:
    """A context in which a hook does nothing."""

    @contextmanager
    def quiet() -> Iterator[None]:
        failing.asleep = True  # type: ignore[attr-defined]
        yield
        failing.asleep = False  # type: ignore[attr-defined]

    return quiet


@pytest.mark.parametrize("error", [NumericsError("layers.1.0: bad"), KeyError("bad"), RuntimeError("bad")])
def test_what_a_hook_raises_passes_every_handler_of_the_model(error: Exception) -> None:
    model = made(Handling)

    def fail(module: nn.Module, args: Any) -> None:
        if not getattr(fail, "asleep", False):
            raise error

    handle = model.get_submodule("layers.1.0").register_forward_pre_hook(fail)
    with (
        pytest.raises(type(error), match="bad"),
        SuspendedRun(model, TARGETS, batches(), watched=lambda: WATCHED, quiet=sleepy(fail)) as run,
    ):
        for stage in run.stages():
            stage.calibrate()
            stage.propagate()
    handle.remove()


def test_a_target_that_is_called_in_another_thread_is_refused() -> None:
    class Threading(Model):
        def forward(self, x: Tensor) -> Tensor:
            worker = threading.Thread(target=lambda: self.layers[1](x))
            worker.start()
            worker.join()
            return self.layers[0](x)

    with (
        pytest.raises(TracingError, match=r"^layers.1: batch 0 calls this sequential target from a thread of its own"),
        SuspendedRun(made(Threading), TARGETS, batches()) as run,
    ):
        for stage in run.stages():
            stage.propagate()


OUTSIDE: dict[str, Tensor] = {}


class Reading(nn.Sequential):
    """Reads a global."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * OUTSIDE["scale"]


class Global(Model):
    """Hands a tensor to its layers through a global."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Reading(nn.Linear(4, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            OUTSIDE["scale"] = x.mean()
            x = layer(x)
        return x


class Swapping(Model):
    """Calls its layers with other parameters than their own."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.func.functional_call(layer, {name: value * 2 for name, value in layer.named_parameters()}, (x,))
        return x


def test_weights_that_are_swapped_around_a_layer_are_refused_because_they_are_made_before_it_is_compressed() -> None:
    model = made(Swapping)
    before = {name: (value, value.clone()) for name, value in model.named_parameters()}
    with pytest.raises(TracingError, match=r"layers.0.0.weight is used outside of layers.0, the sequential target that it belongs to"):
        trace(model, batches(), TARGETS, engine="suspend")
    assert all(value is before[name][0] and torch.equal(value, before[name][1]) for name, value in model.named_parameters())


def test_forwards_that_notice_each_other_are_refused_before_the_first_stage() -> None:
    model = made(Global)
    before = {name: (value, value.clone()) for name, value in model.named_parameters()}
    plan = trace(model, batches(1), TARGETS, engine="suspend")
    with pytest.raises(TracingError, match="forwards that take turns do not give what each gives alone"):
        plan.run(batches())
    assert all(value is before[name][0] and torch.equal(value, before[name][1]) for name, value in model.named_parameters())
    alone = plan.run(batches(1), keep_outputs=True)
    with alone as run:
        for stage in run:
            stage.propagate()
    with torch.no_grad():
        assert torch.equal(run.outputs[0], call_model(model, batches(1)[0]))


@pytest.mark.parametrize("verify", ["off", "first"])
def test_batches_are_run_alone_and_in_turns_unless_nothing_is_verified(verify: Any) -> None:
    model, calls = made(Again), []
    plan = trace(model, batches(1), TARGETS, engine="suspend", verify=verify)
    model.register_forward_pre_hook(lambda module, args: calls.append(1))  # type: ignore[func-returns-value]
    plan.run(batches()), plan.run(batches())
    proof = 0 if verify == "off" else 2 + 2 + 2  # alone, in turns, and again for the trial calls
    assert len(calls) == 2 + proof, "each batch is looked at once, and the proof is made once for a plan"
