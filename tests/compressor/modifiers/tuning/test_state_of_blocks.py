"""A block that keeps numbers on itself: calls that are made to learn begin with what it held, and leave that"""

from __future__ import annotations

from collections import deque
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from compressor import AutoRoundModifier, QuantizationModifier, oneshot
from compressor.tracing.targets.sample_state import values_kept

INT8 = {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}}, "ignore": ["head"]}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
        self.calls, self.longest, self.seen = 0, 0, ()

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.longest, self.seen = self.calls + 1, max(self.longest, x.shape[1]), (*self.seen, x.shape)
        self.last = x.detach()
        return x + self.down(torch.relu(self.up(x))) * (1.0 if self.calls == 1 else 0.5)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers, self.head = nn.Embedding(32, 16), nn.ModuleList(Block() for _ in range(2)), nn.Linear(16, 32)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(("target", "engine"), [("base", "graph"), ("propagated", "graph"), ("propagated", "suspend")])
def test_learning_leaves_what_a_block_keeps(target: Literal["base", "propagated"], engine: Literal["graph", "suspend"]) -> None:
    model, ids = Counting().eval(), torch.randint(32, (8, 12), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": ids[:4]}, {"input_ids": ids[4:]}]
    data: DataLoader[dict[str, Tensor]] = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    result = oneshot(model, recipe=AutoRoundModifier(iters=3, target=target, **INT8), dataset=data, engine=engine)  # type: ignore[arg-type]
    assert [(layer.calls, layer.longest, layer.seen, hasattr(layer, "last")) for layer in model.layers] == [(0, 0, (), False)] * 2  # type: ignore[union-attr]
    losses = [one.details["block_loss_before"] for name, one in result.report.modules.items() if name.endswith("up")]
    rounded = Counting().eval()
    oneshot(rounded, recipe=QuantizationModifier(**INT8))  # type: ignore[arg-type]
    with torch.no_grad():
        x, y = Counting().eval().layers[0](model.embed(ids)), rounded.layers[0](model.embed(ids))
    assert losses[0] == pytest.approx(float((x - y).square().sum()), rel=1e-3)  # of a first call, and not of one that comes later


class Filling(Block):
    """It begins anew with what it has filled."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, Any] = {"calls": [], "recent": deque(maxlen=3), "names": set(), "kept": ({"first": 0},)}

    def forward(self, x: Tensor) -> Tensor:
        self.held["calls"].append(len(x))
        self.held["recent"].append(x.detach())
        self.held["names"].add("x")
        self.held["kept"][0]["first"] += 1
        self.held["last"] = x.detach()
        return x + self.down(torch.relu(self.up(x))) * (1.0 if len(self.held["calls"]) == 1 else 0.5)


def test_calls_of_a_block_take_back_what_they_put_into_containers() -> None:
    block = Filling().eval()
    containers, x = dict(block.held), torch.randn(2, 3, 16)
    expected = Filling()
    expected.load_state_dict(block.state_dict())
    first = expected(x)
    for _ in range(2):
        with values_kept(block):
            assert torch.equal(block(x), first)
        assert block.held == {"calls": [], "recent": deque(), "names": set(), "kept": ({"first": 0},)}
    assert all(block.held[name] is container for name, container in containers.items())  # others may hold them, too


class Logging(Block):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(len(x))
        return x + self.down(torch.relu(self.up(x)))


def test_learning_leaves_what_forwards_put_into_containers() -> None:
    """However many calls are made to learn; forwards of the run itself are the model's own."""
    ids = torch.randint(32, (8, 12), generator=torch.Generator().manual_seed(0))
    counts = []
    for iters in (1, 5):
        model = Counting().eval()
        model.layers = nn.ModuleList(Logging() for _ in range(2)).eval()
        oneshot(model, recipe=AutoRoundModifier(iters=iters, target="base", **INT8), dataset=ids)  # type: ignore[arg-type]
        counts.append([len(layer.log) for layer in model.layers])  # type: ignore[arg-type]
    assert counts[0] == counts[1]
