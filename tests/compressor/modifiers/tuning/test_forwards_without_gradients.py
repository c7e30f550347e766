"""Who trains on a forward that gives no gradients says so, and what else may be done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor import AutoRoundModifier, GPTQModifier, QuantizationModifier, ScaleTuningModifier, oneshot
from compressor.errors import CalibrationError

IDS = torch.randint(32, (16, 9), generator=torch.Generator().manual_seed(0))
GROUPED: dict[str, Any] = {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 8}}}}


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
        with torch.inference_mode(self.kind == "inference_mode"):
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
REFUSED = [("AutoRound", "no_grad"), ("AutoRound", "numpy"), *((name, "in place") for name in TRAINS)]
REFUSED += [(name, "inference_mode") for name in TRAINS if name != "AutoRound"]  # which calls blocks by themselves


@pytest.mark.parametrize(("name", "kind"), REFUSED)
def test_forwards_without_gradients_are_told(name: str, kind: str) -> None:
    torch.manual_seed(0)
    said = "writes in place over what gradients need" if kind == "in place" else "keeps no gradients"
    with pytest.raises(CalibrationError, match=f"(layers.0|ScaleTuningModifier.*): its forward {said}.*; change the forward, or take"):
        oneshot(Model(kind).eval(), recipe=TRAINS[name](), dataset=IDS)
    torch.manual_seed(0)
    assert oneshot(Model(kind).eval(), recipe=GPTQModifier(**GROUPED), dataset=IDS).report.modules  # the remedy


def test_what_gives_gradients_in_part_is_trained_in_part() -> None:
    torch.manual_seed(0)
    notes = oneshot(Model("no_grad").eval(), recipe=TRAINS["ScaleTuning"](), dataset=IDS).report.notes
    assert "squared error of the output" in notes[-1]
