"""A forward may write to what it is given: data and blocks are given to it more than once, and each time they are what they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor import (
    AutoRoundModifier,
    AWQModifier,
    GPTQModifier,
    QuantizationModifier,
    ScaleTuningModifier,
    SmoothQuantModifier,
    WandaPruningModifier,
    oneshot,
)
from tests.compressor.modifiers.test_what_layers_are_handed import RUNS

GROUPED: dict[str, Any] = {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 8}}}}


class Layer(nn.Module):
    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.writes = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16), writes

    def forward(self, h: Tensor) -> Tensor:
        h = h.mul_(0.7) if self.writes else h * 0.7
        kept: Tensor = h.clone()
        return kept + self.down(torch.relu(self.up(self.norm(h))))


class Model(nn.Module):
    def __init__(self, writer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.head, self.writes = nn.Linear(8, 16), nn.Linear(16, 8), writer == "the model"
        self.layers = nn.ModuleList(Layer(writes=writer == "a layer") for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x.mul_(0.5) if self.writes else x * 0.5)
        for layer in self.layers:
            h = layer(h)
        found: Tensor = self.head(h)
        return found


RECIPES: dict[str, Callable[[], list[Any]]] = {
    "GPTQ": lambda: [GPTQModifier(**GROUPED)],
    "AutoRound": lambda: [AutoRoundModifier(**GROUPED, iters=8)],
    "SmoothQuant": lambda: [SmoothQuantModifier(), GPTQModifier(**GROUPED)],
    "AWQ": lambda: [AWQModifier(), QuantizationModifier(**GROUPED)],
    "ScaleTuning": lambda: [QuantizationModifier(**GROUPED), ScaleTuningModifier(steps=8)],
    "OWL": lambda: [WandaPruningModifier(sparsity=0.5, sparsity_profile="owl", owl_m=5, owl_lmbda=0.1)],
}


@pytest.mark.parametrize("run", [one for one in RUNS if one != {"engine": "auto"}] + [{}], ids=str)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_what_a_forward_writes_to_is_a_copy(recipe: Callable[[], list[Any]], run: dict[str, Any]) -> None:
    if run.get("engine") == "suspend" and not any(isinstance(one, GPTQModifier) for one in recipe()):
        run = {}
    found = {}
    for writer in ("nobody", "the model", "a layer"):
        torch.manual_seed(3)
        batches = [{"x": torch.randn(2, 7, 8)} for _ in range(4)]
        before = [batch["x"].clone() for batch in batches]
        loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
        found[writer] = oneshot(Model(writer).eval(), recipe=recipe(), dataset=loader, **run).model.state_dict()
        assert all(torch.equal(batch["x"], old) for batch, old in zip(batches, before, strict=True))
    wanted = found.pop("nobody")
    for got in found.values():
        assert [name for name, tensor in wanted.items() if not torch.equal(tensor, got[name])] == []
