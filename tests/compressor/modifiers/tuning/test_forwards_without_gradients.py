"""Who trains on a forward that gives no gradients says so, and what else may be done."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compressor import AutoRoundModifier, GPTQModifier, QuantizationModifier, ScaleTuningModifier, oneshot
from compressor.errors import CalibrationError, UserInputError

IDS = torch.randint(32, (16, 9), generator=torch.Generator().manual_seed(0))
GROUPED: dict[str, Any] = {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 8}}}}


def _without_grad(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = layer(x).sigmoid()
    return found


CUT: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {  # what a layer gives, past all gradients
    "b under no_grad": _without_grad,
    "b detached": lambda layer, x: layer(x).sigmoid().detach(),
    "b rounded": lambda layer, x: layer(x).round(),
    "b compared": lambda layer, x: (layer(x) > 0).float(),
}


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.a, self.b = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, h: Tensor) -> Tensor:
        x = self.norm(h)
        if self.kind == "in place":
            before = self.a(x)
            return h + before + self.b(x.mul_(2))
        if self.kind == "no_grad":
            with torch.no_grad():
                return h + self.b(torch.relu(self.a(x)))
        if self.kind == "in place through data":
            before = self.a(x)
            after = self.b(before * before.sigmoid())
            before.data.fill_(3.0)
            return h + after
        if self.kind == "reentrant":
            return h + checkpoint(lambda one: self.b(torch.relu(self.a(one))), x, use_reentrant=True)
        if self.kind == "random":
            return h + nn.functional.dropout(self.b(torch.relu(self.a(x))), 0.3, training=True)
        if self.kind in CUT:
            return h + torch.relu(self.a(x)) * CUT[self.kind](self.b, x)
        if self.kind == "numpy":
            return h + torch.from_numpy(self.b(torch.relu(self.a(x))).detach().numpy())
        return h + self.b(torch.relu(self.a(x)))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList([Layer(kind) for _ in range(2)])

    def forward(self, input_ids: Tensor) -> Tensor:
        with torch.inference_mode() if self.kind == "inference_mode" else nullcontext():
            h = self.embed(input_ids)
            for layer in self.layers:
                h = layer(h)
            found: Tensor = self.head(h)
            return found


TRAINS: dict[str, Callable[[], Any]] = {
    "AutoRound": lambda: AutoRoundModifier(**GROUPED, iters=2),
    "mode best": lambda: GPTQModifier(**GROUPED, mode="best"),
    "ScaleTuning": lambda: [QuantizationModifier(**GROUPED), ScaleTuningModifier(steps=2)],
}
REFUSED = [
    ("AutoRound", "no_grad"),
    ("AutoRound", "numpy"),
    ("AutoRound", "reentrant"),
    *((name, kind) for name in TRAINS for kind in ("in place", "in place through data")),
]
REFUSED += [(name, "inference_mode") for name in TRAINS if name != "AutoRound"]  # which calls blocks by themselves


@pytest.mark.parametrize("name", TRAINS)
def test_a_forward_that_draws_random_numbers_is_told(name: str) -> None:
    where = "layers.0: the block" if name == "AutoRound" else r"ScaleTuningModifier\[1\]: the model"
    with pytest.raises(CalibrationError, match=f"{where} gives other outputs when it is run again .*what draws random numbers"):
        oneshot(Model("random"), recipe=TRAINS[name](), dataset=IDS)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize(("name", "kind"), REFUSED)
def test_forwards_without_gradients_are_told(name: str, kind: str) -> None:
    torch.manual_seed(0)
    said = "writes in place over what gradients need" if kind.startswith("in place") else r"keeps no gradients .*use_reentrant=False"
    with pytest.raises(
        CalibrationError, match=f"(layers.0|ScaleTuningModifier.*): its forward {said}.*; change the forward, or train nothing: "
    ):
        oneshot(Model(kind).eval(), recipe=TRAINS[name](), dataset=IDS)
    torch.manual_seed(0)
    assert oneshot(Model(kind).eval(), recipe=GPTQModifier(**GROUPED), dataset=IDS).report.modules  # the remedy


def told(kind: str, recipe: Any) -> tuple[str, Any]:
    torch.manual_seed(0)
    result = oneshot(Model(kind).eval(), recipe=recipe, dataset=IDS)
    return " ".join(note for note in result.report.notes if "no gradient came" in note), result


@pytest.mark.parametrize("kind", CUT)
@pytest.mark.parametrize("name", TRAINS)
def test_what_no_gradient_comes_to_is_named(name: str, kind: str) -> None:
    note, result = told(kind, TRAINS[name]())
    assert "to 2 of " in note
    assert "(layers.0.b, layers.1.b)" in note
    assert not told("", TRAINS[name]())[0]
    if name == "AutoRound":
        plain, codes = told(kind, QuantizationModifier(**GROUPED))[1].model, result.model
        assert torch.equal(codes.get_submodule("layers.0.b").codes(), plain.get_submodule("layers.0.b").codes())
        assert [name for name, record in result.report.modules.items() if "gradient" in record.details] == ["layers.0.b", "layers.1.b"]


def test_norms_that_no_gradient_comes_to_are_named_too() -> None:
    assert "to 8 of 9 that are trained (layers.0.a, layers.0.b, layers.0.norm.bias, ...)" in told("no_grad", TRAINS["ScaleTuning"]())[0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", TRAINS)
def test_a_caller_without_gradients_gets_the_same_bytes(name: str, mode: Any) -> None:
    torch.manual_seed(0)
    model, other = Model("").eval(), Model("").eval()
    other.load_state_dict(model.state_dict())
    plain = oneshot(model, recipe=TRAINS[name](), dataset=IDS).model.state_dict()
    with mode():
        found = oneshot(other, recipe=TRAINS[name](), dataset=IDS).model.state_dict()
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode) and not torch.is_grad_enabled()
    assert all(torch.equal(found[key], tensor) for key, tensor in plain.items())


@pytest.mark.parametrize("name", TRAINS)
def test_a_model_that_was_made_in_inference_mode_is_not_trained_and_its_copy_is(name: str) -> None:
    with torch.inference_mode():
        model = Model("").eval()
    with pytest.raises(UserInputError, match=r"(embed|layers.0).*: it was made under torch.inference_mode, .*give copy.deepcopy\(model\)"):
        oneshot(model, recipe=TRAINS[name](), dataset=IDS)
    assert oneshot(copy.deepcopy(model), recipe=TRAINS[name](), dataset=IDS).report.modules
    assert oneshot(model, recipe=GPTQModifier(**GROUPED), dataset=IDS).report.modules
