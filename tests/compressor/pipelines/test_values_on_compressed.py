"""Values that a forward keeps on a module that is calibrated, and that another one takes the place of: each sample finds its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from compressor import QuantizationModifier, oneshot
from compressor.tracing import trace

WIDTH = 16
LAYERS = ["layers.0", "layers.1", "layers.2"]
INT8 = {"num_bits": 8, "type": "int"}
GROUP = {
    "targets": ["Linear"],
    "weights": {**INT8, "strategy": "channel"},
    "input_activations": {**INT8, "strategy": "tensor", "dynamic": False},
}


class Layer(nn.Module):
    """Two products; the first one's result may be kept on its module."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.keeps = keeps

    def forward(self, x: Tensor) -> Tensor:
        made = self.a(x)
        if self.keeps:
            self.a.kept = made
        return x + self.b(torch.relu(made))


class Model(nn.Module):
    """Three layers; the later ones get what was kept on a module in the first one."""

    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(keeps=keeps and index == 0) for index in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        first: Any = self.layers[0]
        x = self.layers[1](x + first.a.kept)
        return self.layers[2](x * first.a.kept.sigmoid())


def keep(module: nn.Module, args: object, out: Tensor) -> None:
    module.kept = out


def hooked(*, is_buffer: bool) -> Model:
    model = Model()
    first: Any = model.layers[0]
    if is_buffer:
        first.a.register_buffer("kept", torch.zeros(1))
    first.a.register_forward_hook(keep)
    return model


WAYS: dict[str, Callable[[], Model]] = {
    "by a hook": lambda: hooked(is_buffer=False),
    "by a hook, in a buffer": lambda: hooked(is_buffer=True),
    "by the layer around": lambda: Model(keeps=True),
}


def batches(rows: tuple[int, ...]) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [{"x": torch.randn(rows[i % len(rows)], 6, WIDTH, generator=draw) * (1 + 0.5 * i)} for i in range(5)]


@torch.no_grad()
def largest(model: nn.Module, name: str, data: list[dict[str, Tensor]]) -> float:
    """The largest input of a module in plain forwards."""
    seen: list[float] = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda module, args: seen.append(float(args[0].abs().max())))
    for batch in data:
        model(**batch)
    hook.remove()
    return max(seen)


@pytest.mark.parametrize("rows", [(2,), (2, 3)])
@pytest.mark.parametrize("settings", [{"engine": "graph", "passes": "two"}, {"engine": "suspend"}, {"passes": "one"}], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_every_sample_finds_what_it_kept_on_a_compressed_module(way: str, settings: dict[str, Any], rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, data = WAYS[way]().eval(), batches(rows)
    plain = copy.deepcopy(model)
    recipe = QuantizationModifier(config_groups={"g": GROUP})
    result = oneshot(model, recipe=recipe, dataset=DataLoader(data, batch_size=None), pipeline="sequential", **settings)
    names = [f"{layer}.{name}" for layer in LAYERS for name in "ab"]
    stages = [[name] for name in names] if settings.get("passes") == "one" else [names[at : at + 2] for at in (0, 2, 4)]
    for stage in stages:
        for name in stage:
            scale: Any = result.model.get_submodule(name).input_scale
            assert float(scale) * 127.5 == pytest.approx(largest(plain, name, data), rel=1e-3), name
        for name in stage:
            plain.set_submodule(name, copy.deepcopy(result.model.get_submodule(name)))


@pytest.mark.parametrize("engine", ["graph", "suspend"])
def test_what_hooks_of_a_run_keep_beside_is_of_all_samples(engine: Any) -> None:
    """The model keeps a value on the very module on which a hook of the caller counts."""
    torch.manual_seed(0)
    model, data = hooked(is_buffer=False).eval(), batches((2, 3))
    plan = trace(model, data[:2], LAYERS, engine=engine)
    watched: Any = model.get_submodule("layers.0.a")
    watched.total = 0.0

    def count(module: Any, args: tuple[Tensor, ...]) -> None:
        module.total = module.total + float(args[0].abs().sum())

    watched.register_forward_pre_hook(count)
    for stage in plan.run(data):
        stage.calibrate()
        counted = watched.total
        stage.propagate()
        if stage.name == "layers.0":
            assert counted == pytest.approx(sum(float(batch["x"].abs().sum()) for batch in data), rel=1e-5)
