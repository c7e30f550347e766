"""What crosses between stages is what the targets are handed: names, sizes, where it was made, and how much of it is alive at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compressor.tracing import trace
from compressor.tracing.flow import BEFORE, measure_flow
from tests import tiny


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, hidden: Tensor, shared: tuple[Tensor, Tensor], *, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden = self.inner(hidden) + shared[0]
        return (hidden if scale is None else hidden * scale), shared[1]


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(_Layer() for _ in range(3))
        self.bridge = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden, shared = self.embed(x), (torch.ones(4), torch.zeros(2, 1))
        hidden, _ = self.layers[0](hidden, shared)
        first = hidden
        hidden, _ = self.layers[1](self.bridge(hidden), shared)
        hidden, _ = self.layers[2](hidden, shared, scale=first)
        return self.head(hidden)


def test_values_have_names_sizes_and_origins() -> None:
    model, batch = _Model().eval(), (torch.randn(2, 4),)
    stops, after = measure_flow(model, trace(model, [batch], engine="suspend").stages, batch)
    first, second, third = stops
    assert [(value.name, value.shape, value.num_bytes) for value in first.inputs] == [
        ("hidden", (2, 4), 32), ("shared[0]", (4,), 16), ("shared[1]", (2, 1), 8)
    ]  # fmt: skip
    assert {value.source for value in first.inputs} == {BEFORE}
    assert [(value.name, value.since) for value in second.inputs] == [("hidden", 1), ("shared[0]", 0), ("shared[1]", 0)]
    assert {value.name: value.source for value in third.inputs} == {"hidden": 1, "shared[0]": BEFORE, "shared[1]": BEFORE, "scale": 0}
    assert first.between == ("embed",) and second.between == ("bridge",) and third.between == ()
    assert after == ("head",)
    assert first.classes == ("_Layer",) and first.num_linears == 1 and first.num_parameters == 20


def test_linear_layers_of_gpt2_count() -> None:
    model, batch = tiny.gpt2(), {"input_ids": torch.ones(1, 4, dtype=torch.int64)}
    stops, _ = measure_flow(model, trace(model, [batch], engine="suspend").stages, batch)
    assert {stop.num_linears for stop in stops} == {4}


def test_live_bytes_count_what_a_later_stage_still_needs_once() -> None:
    model, batch = _Model().eval(), (torch.randn(2, 4),)
    stops, _ = measure_flow(model, trace(model, [batch], engine="suspend").stages, batch)
    # hidden 32, shared 16 and 8; from the second stage on also the first one's output, for the third
    assert [stop.live_bytes for stop in stops] == [56, 88, 88]


def test_targets_that_share_a_stage_hand_nothing_over() -> None:
    model, batch = _Model().eval(), (torch.randn(2, 4),)
    plan = trace(model, [batch], engine="graph", targets_per_stage=3)
    stops, _ = measure_flow(model, plan.stages, batch)
    assert len(stops) == 1 and stops[0].targets == ("layers.0", "layers.1", "layers.2")
    assert "scale" not in {value.name for value in stops[0].inputs}


def test_no_hook_stays_behind() -> None:
    model, batch = _Model().eval(), (torch.randn(2, 4),)
    measure_flow(model, trace(model, [batch], engine="suspend").stages, batch)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
