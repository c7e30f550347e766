"""What depends on the batch or on Python is decided before the first stage: by either engine, or as an error."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compressor.data.collate import Batch, call_model
from compressor.errors import CalibrationError, TracingError
from compressor.tracing import Engine, trace

WIDTH = 4
ENGINES: tuple[Engine, ...] = ("graph", "suspend", "auto")
TARGETS = ["re:layers[.][0-9]$"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x)) + x


class Model(nn.Module):
    def __init__(self, way: Callable[[Any, Tensor], Tensor], layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.layers, x)


def through(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def profiled(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        with torch.profiler.record_function("layer"):
            x = layer(x)
    return x


def profiled_around(layers: Any, x: Tensor) -> Tensor:
    with torch.profiler.record_function("all"):
        return through(layers, x)


def by_sum(layers: Any, x: Tensor) -> Tensor:
    return through([*layers][::-1] if float(x.sum()) > 0 else layers, x)


def by_sum_in_numpy(layers: Any, x: Tensor) -> Tensor:
    return through([*layers][::-1] if x.numpy().sum() > 0 else layers, x)


def by_length_in_numpy(layers: Any, x: Tensor) -> Tensor:
    return through([*layers][::-1] if len(x.numpy()) > 2 else layers, x)


def dropped(layers: Any, x: Tensor) -> Tensor:
    return through([layer for layer in layers if torch.rand(()) > 0.3], x)


def dropped_by_python(layers: Any, x: Tensor) -> Tensor:
    return through([layer for layer in layers if random.random() > 0.3], x)


def dropped_by_numpy(layers: Any, x: Tensor) -> Tensor:
    return through([layer for layer in layers if np.random.rand() > 0.3], x)


def shuffled_by_python(layers: Any, x: Tensor) -> Tensor:
    return through(random.sample([*layers], 4), x)


def left_out(layers: Any, x: Tensor) -> Tensor:
    return through(layers if x.numpy().sum() > 0 else layers[1:], x)


def left_out_behind(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x) if float(x.sum()) > 0 else x + 1
    return x


def again(layers: Any, x: Tensor) -> Tensor:
    x = through(layers, x)
    return layers[0](x) if len(x.numpy()) > 2 else x


# way, the engines that follow it; all others refuse before anything runs for real
WAYS: dict[Callable[[Any, Tensor], Tensor], str] = {
    profiled: "suspend auto",
    profiled_around: "suspend auto",
    by_sum: "",
    by_sum_in_numpy: "",
    by_length_in_numpy: "",
    dropped: "graph suspend auto",
    dropped_by_python: "suspend auto",
    dropped_by_numpy: "suspend auto",
    shuffled_by_python: "suspend auto",
    left_out: "suspend auto",
    left_out_behind: "suspend auto",
    again: "suspend auto",
}


def batches() -> list[Batch]:
    """The sums are below and above 0, and so are lengths; the odd ones come last."""
    made = torch.linspace(0.1, 1, 12).reshape(3, WIDTH)
    return [(-made[:2],), (-made[:1],), (-made[1:],), (made,), (made[:2],)]


def seed() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)


def runs(model: nn.Module, engine: Engine) -> list[Tensor]:
    seed()
    with trace(model, batches(), TARGETS, engine=engine).run(batches(), keep_outputs=True) as run:
        for stage in run:
            stage.rehearse()
            stage.propagate()
    return run.outputs


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("engine", ENGINES)
def test_what_differs_from_batch_to_batch_is_followed_or_refused_at_once(way: Callable[[Any, Tensor], Tensor], engine: Engine) -> None:
    torch.manual_seed(0)
    model = Model(way).eval()
    if engine not in WAYS[way].split():
        seed()
        with pytest.raises(TracingError):
            trace(model, batches(), TARGETS, engine=engine)
        return
    expected = []
    for batch in batches():
        seed()
        with torch.no_grad():
            expected.append(call_model(model, batch))
    assert all(map(torch.equal, runs(model, engine), expected))


@pytest.mark.parametrize("way", [by_sum, by_sum_in_numpy, by_length_in_numpy])
def test_orders_that_contradict_each_other_name_batch_and_target(way: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(TracingError, match=r"layers.[0-9]: batch [0-9] reaches this sequential target after its stage"):
        trace(Model(way).eval(), batches(), TARGETS)


def by_forward(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer.forward(x)
    return x


def by_inner_call(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer._call_impl(x)
    return x


def second_by_forward(layers: Any, x: Tensor) -> Tensor:
    for index, layer in enumerate(layers):
        x = layer.forward(x) if index == 1 else layer(x)
    return x


@pytest.mark.parametrize("engine", ENGINES)
def test_layers_that_are_not_called_as_modules_are_an_error(engine: Engine) -> None:
    with pytest.raises(TracingError, match=r"calls (any|none) of the sequential targets"):
        trace(Model(by_forward).eval(), batches(), TARGETS, engine=engine)
    with pytest.raises(TracingError, match=r"calls none of|no stage stops there"):
        trace(Model(by_inner_call).eval(), batches(), TARGETS, engine=engine)
    with pytest.raises(TracingError, match=r"no batch calls any of the sequential targets \(layers.0, layers.1, layers.2, ...\)"):
        trace(Model(lambda layers, x: x).eval(), batches(), TARGETS)
    assert trace(Model(second_by_forward).eval(), batches(), TARGETS, engine=engine).uncalled == ("layers.1",)


@pytest.mark.parametrize("engine", ENGINES)
def test_compiled_modules_are_an_error(engine: Engine) -> None:
    in_place, wrapped = Model(through).eval(), Model(through).eval()
    in_place.layers[1].compile(backend="eager")  # type: ignore[operator]
    wrapped.layers[2] = torch.compile(wrapped.layers[2], backend="eager")  # type: ignore[assignment]
    whole: Any = torch.compile(Model(through).eval(), backend="eager")
    for model, name in ((in_place, "layers.1"), (wrapped, "layers.2"), (whole, "the model")):
        with pytest.raises(TracingError, match=f"^{name}: is compiled"):
            trace(model, batches(), engine=engine)


class Writing(Layer):
    """Writes to its input where a value is large, as padded inputs are cleared."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x[:, 0] > 0.6).any()):
            x[x[:, 0] > 0.6] = 0
        return super().forward(x)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_write_in_some_batches_only_is_right_in_all(engine: Engine) -> None:
    torch.manual_seed(0)
    model = Model(lambda layers, x: through(layers, x * 1), Writing).eval()
    with torch.no_grad():
        expected = [call_model(model, (batch[0].clone(),)) for batch in batches()]  # type: ignore[index]
    assert all(map(torch.equal, runs(model, engine), expected))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_watched_module_that_two_targets_call_is_refused_before_the_first_stage(engine: Engine) -> None:
    model: Any = Model(through).eval()
    model.layers[2].lin = model.layers[1].lin
    plan = trace(model, batches(), TARGETS, engine=engine)
    watched = {"layers.0.lin": False, "layers.1.lin": False}
    with (
        pytest.raises(CalibrationError, match=r"^layers.1.lin: batch 0 calls it outside layers.1"),
        plan.run(batches(), watched=lambda: watched) as run,
    ):
        next(iter(run))
    del watched["layers.1.lin"]  # what nobody watches may be called anywhere
    with plan.run(batches(), watched=lambda: watched) as run:
        for stage in run:
            stage.calibrate()
            stage.propagate()
    assert run.uncalled == ()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", [lambda size: random.Random(size), lambda size: np.random.RandomState(size)])
def test_a_generator_seeded_with_a_size_draws_the_same_in_all(seed: Callable[[int], Any], engine: Engine) -> None:
    torch.manual_seed(0)
    model = Model(lambda layers, x: through(layers, x * seed(x.shape[0]).uniform(0, 1))).eval()
    sizes: list[Batch] = [(torch.ones(rows, WIDTH),) for rows in (2, 3, 4)]
    with torch.no_grad():
        expected = [call_model(model, batch) for batch in sizes]
    with trace(model, sizes, TARGETS, engine=engine).run(sizes, keep_outputs=True) as run:
        for stage in run:
            stage.propagate()
    assert all(map(torch.equal, run.outputs, expected))


class Sharing(nn.Module):
    """One linear layer in several places."""

    def __init__(self, holders: tuple[int, ...], is_outside: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.ModuleDict({"lin": nn.Linear(4, 4), "out": nn.Linear(4, 4)}) for _ in range(3))
        for layer in self.layers:
            layer.forward = functools.partial(self.call, layer)  # type: ignore[method-assign]
        for index in holders:
            self.layers[index].lin = self.layers[holders[0]].lin
        self.is_outside, self.first = is_outside, holders[0]

    @staticmethod
    def call(layer: Any, x: Tensor) -> Tensor:
        return layer.out(torch.tanh(layer.lin(x)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.layers[self.first].lin(x) if self.is_outside else x  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("engine", ["graph", "suspend"])
@pytest.mark.parametrize(
    ("holders", "is_outside"), [((0, 1, 2), False), ((0, 2), False), ((1, 2), False), ((0,), True), ((2,), True), ((0, 1), True)]
)
def test_hooks_that_come_with_their_stage_are_refused_where_they_would_miss_calls(
    holders: tuple[int, ...], is_outside: bool, engine: Engine
) -> None:
    model = Sharing(holders, is_outside).eval()
    given: list[Batch] = [{"x": torch.randn(rows, 4)} for rows in (2, 1)]
    changed: list[str] = []
    told = rf"^layers.{holders[0]}.lin: batch 0 calls it outside layers.{holders[0]}, the sequential target|is used outside"
    refused = pytest.raises((CalibrationError, TracingError), match=told)
    with refused, trace(model, given, [r"re:layers[.]\d$"], engine=engine).run(given) as run:
        for stage in run:
            is_shared = stage.index in holders
            hook = stage.module.get_submodule("lin" if is_shared else "out").register_forward_pre_hook(lambda *args: None)
            stage.calibrate()
            hook.remove()
            changed += [stage.name] if is_shared else []
            stage.propagate()
    assert not changed


@pytest.mark.parametrize("engine", ["graph", "suspend"])
def test_a_shared_module_that_nobody_looks_at_is_no_hindrance(engine: Engine) -> None:
    model, seen = Sharing((0, 1, 2)).eval(), []
    given: list[Batch] = [{"x": torch.randn(rows, 4)} for rows in (2, 1)]
    with trace(model, given, [r"re:layers[.]\d$"], engine=engine).run(given) as run:
        for stage in run:
            hook = stage.module.get_submodule("out").register_forward_pre_hook(lambda *args, name=stage.name: seen.append(name))  # type: ignore[misc]
            stage.calibrate()
            hook.remove()
            stage.propagate()
    assert sorted(seen) == [f"layers.{index}" for index in range(3) for _ in given]
