"""What changes between planning and running: a run is that of the model as it is when it begins."""

from __future__ import annotations

import enum
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor.data.collate import Batch, call_model
from compressor.tracing import Engine, Plan, trace

WIDTH = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.kind = nn.Linear(WIDTH, WIDTH), "full"

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.lin(x))


class Mode(enum.Enum):
    PLAIN = 1
    OTHER = 2


class Helper:
    shared = 1.0


class Model(nn.Module):
    """What stands between its layers reads all kinds of things."""

    shared = 1.0
    common = types.SimpleNamespace(scale=1.0)

    def between(self, x: Tensor) -> Tensor:
        return x * self.common.scale * self.helper.shared

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.scale, self.several, self.impl, self.mode = 1.0, [1.0], "sin", Mode.PLAIN
        self.config = types.SimpleNamespace(flag=False, nested={"scale": 1.0})
        self.function: Callable[[float], float] = math.exp
        self.switch, self.helper = nn.Dropout(0.25), Helper()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale * self.several[-1] * self.shared * self.config.nested["scale"] * self.function(0.5)
            x = getattr(torch, self.impl)(x) if not self.config.flag else -x
            x = x + (layer.kind == "full") + (self.mode is Mode.PLAIN) + 2 * self.switch.training + 3 * hasattr(self, "late")
            x = self.between(x) + (torch.get_default_dtype() == torch.float64)
        return x


def replaced_layer(model: Any) -> None:
    torch.manual_seed(1)
    model.layers[1].lin = nn.Linear(WIDTH, WIDTH)


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a number": (lambda model: setattr(model, "scale", 2.0), "scale was 1.0 and is 2.0"),
    "a list": (lambda model: model.several.__setitem__(0, 2.0), "several[0] was 1.0 and is 2.0"),
    "a longer list": (lambda model: model.several.append(3.0), "several was 1 and is 2"),
    "a word": (lambda model: setattr(model, "impl", "cos"), "impl was 'sin' and is 'cos'"),
    "an enumeration": (lambda model: setattr(model, "mode", Mode.OTHER), "mode was <Mode.PLAIN: 1> and is <Mode.OTHER: 2>"),
    "a config": (lambda model: setattr(model.config, "flag", True), "config.flag was False and is True"),
    "a dict in a config": (lambda model: model.config.nested.update(scale=2.0), "config.nested['scale'] was 1.0 and is 2.0"),
    "a function": (lambda model: setattr(model, "function", math.log), "function was <built-in function exp> and is"),
    "a training flag": (lambda model: model.switch.train(), "switch.training was False and is True"),
    "an attribute of a layer": (lambda model: setattr(model.layers[1], "kind", "sliding"), "layers.1.kind was 'full' and is 'sliding'"),
    "a new attribute": (lambda model: setattr(model, "late", 1), "late is 1 and was not there"),
    "a class": (lambda model: setattr(type(model), "shared", 2.0), "Model.shared was 1.0 and is 2.0"),
    "an object of a class": (lambda model: setattr(model.common, "scale", 2.0), "Model.common.scale was 1.0 and is 2.0"),
    "a method of a class": (lambda model: setattr(type(model), "between", torch.neg), "Model.between was <function"),
    "the class of an object": (lambda model: setattr(Helper, "shared", 2.0), "Helper.shared was 1.0 and is 2.0"),
    "a setting of torch": (
        lambda model: torch.set_default_dtype(torch.float64),
        "torch get_default_dtype was torch.float32 and is torch.float64",
    ),
}


def batches() -> list[Batch]:
    return [(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float32),) for seed in range(3)]


def outputs(plan: Plan) -> list[Tensor]:
    with plan.run(batches(), keep_outputs=True) as run:
        for stage in run:
            stage.rehearse()
            stage.propagate()
    return run.outputs


@pytest.mark.parametrize("engine", ["graph", "suspend"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_run_is_that_of_the_model_as_it_is_when_the_run_begins(change: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((Model, "shared"), (Model, "between"), (Model.common, "scale"), (Helper, "shared")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    torch.manual_seed(0)
    model = Model().eval()
    plan = trace(model, batches(), ["Layer"], engine=engine)
    outputs(plan)
    assert "planned anew" not in plan.report()
    make, said = CHANGES[change]
    try:
        make(model)
        with torch.no_grad():
            expected = [call_model(model, batch) for batch in batches()]
        assert all(map(torch.equal, outputs(plan), expected))
    finally:
        torch.set_default_dtype(torch.float32)
    assert f"planned anew: {said}" in plan.report()


@pytest.mark.parametrize("engine", ["graph", "suspend"])
def test_what_lies_inside_layers_may_change_without_a_new_plan(engine: Engine) -> None:
    torch.manual_seed(0)
    model = Model().eval()
    plan = trace(model, batches(), ["Layer"], engine=engine)
    replaced_layer(model)
    model.layers[0].lin.note = "compressed"  # type: ignore[assignment, union-attr]
    with torch.no_grad():
        expected = [call_model(model, batch) for batch in batches()]
    assert all(map(torch.equal, outputs(plan), expected))
    assert "planned anew" not in plan.report()


@pytest.mark.parametrize("engine", ["graph", "suspend"])
def test_forwards_run_without_gradients_whatever_the_mode_when_a_run_begins(engine: Engine) -> None:
    model = Model().eval()
    with torch.no_grad():
        plan = trace(model, batches(), ["Layer"], engine=engine)
    with torch.enable_grad():
        assert not any(output.requires_grad for output in outputs(plan))
        assert torch.is_grad_enabled()
    assert "planned anew" not in plan.report()
