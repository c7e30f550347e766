"""The loss of a block is that of all floats of its output that its weights change, wherever they lie in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from compressor import AutoRoundModifier, QuantizationModifier, oneshot
from compressor.errors import CalibrationError

IDS = torch.randint(64, (12, 16), generator=torch.Generator().manual_seed(0))
SCHEME: dict[str, Any] = {
    "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 3, "group_size": 8, "strategy": "group"}}},
    "ignore": ["head"],
}
READ = {"more": 4, "bias first": 1}  # place of the hidden states


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.c = kind, nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("table", torch.randn(1, 2, 16, 16))

    def forward(self, x: Any) -> Any:
        if isinstance(x, Mapping):
            return {"x": x["x"] + self.a(x["x"]).relu(), "skip": x["skip"] + self.c(x["x"])}
        if self.kind == "nested":
            return x[0], {"new": [x[1]["new"][0] + self.a(x[0]), self.c(x[0]).relu()]}
        if self.kind in ("tuple", "list"):
            return type(x)([*x, x[-1] + self.c(torch.relu(self.a(x[-1])))])
        own = x[READ[self.kind]] if isinstance(x, tuple) else x
        new = own + self.c(torch.relu(self.a(own)))
        if self.kind == "bias first":
            return self.table.exp(), new
        scores = (self.a(own) @ own.mT).softmax(-1)[:, None]
        # Numbers that are no floats, a scalar, which is no sequence's, what is handed through, and what no weight changes.
        return (new.argmax(-1), new.mean(), own, self.table.exp(), new, scores) if self.kind == "more" else new


BEGUN: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda x: (x,),
    "list": lambda x: [x],
    "dict": lambda x: {"x": x, "skip": torch.zeros_like(x)},
    "nested": lambda x: (x, {"new": [x, x]}),
    "plain": lambda x: x,
    "more": lambda x: x,
    "bias first": lambda x: x,
}


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embed, self.head = kind, nn.Embedding(64, 16), nn.Linear(16, 64)
        self.layers = nn.ModuleList([Block(kind) for _ in range(2)])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = BEGUN[self.kind](self.embed(input_ids))
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(x[READ[self.kind]] if self.kind in READ else torch.stack(tree_leaves(x)).sum(0))
        return found


def net(kind: str) -> Net:
    torch.manual_seed(0)
    return Net(kind).eval()


@pytest.mark.parametrize("target", ["propagated", "base"])
@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "nested"])
def test_all_that_the_weights_change_is_learnt_and_judged(kind: str, target: Any) -> None:
    result = oneshot(net(kind), recipe=AutoRoundModifier(**SCHEME, iters=20, target=target), dataset=IDS)
    assert not any("no gradient" in note for note in result.report.notes)
    assert all(one.details["block_loss"] < 0.97 * one.details["block_loss_before"] for one in result.report.modules.values())
    rounded = oneshot(net(kind), recipe=QuantizationModifier(**SCHEME), dataset=IDS).model
    same = [
        torch.equal(layer.codes(), rounded.get_submodule(name).codes())
        for name, layer in result.model.named_modules()
        if name[-2:] in (".a", ".c")
    ]
    assert same == [False] * 4


@pytest.mark.parametrize("kind", BEGUN)
def test_the_loss_is_the_squared_error_of_all_of_them(kind: str) -> None:
    result = oneshot(net(kind), recipe=AutoRoundModifier(**SCHEME, iters=1, target="propagated"), dataset=IDS)
    rounded = oneshot(net(kind), recipe=QuantizationModifier(**SCHEME), dataset=IDS).model
    with torch.no_grad():
        both = [tree_leaves(one.layers[0](BEGUN[kind](one.embed(IDS)))) for one in (net(kind), rounded)]
    judged = [READ[kind]] if kind in READ else range(len(both[0]))
    loss = sum(float((both[0][place] - both[1][place]).square().sum()) for place in judged)
    assert result.report.modules["layers.0.a"].details["block_loss_before"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("target", ["propagated", "base"])
def test_what_no_weight_changes_and_scores_change_no_bit(target: Any) -> None:
    """Beside the hidden states they are not judged, wherever these stand."""
    plain, more = (
        oneshot(net(kind), recipe=AutoRoundModifier(**SCHEME, iters=10, target=target), dataset=IDS) for kind in ("plain", "more")
    )
    found, wanted = ({name: one.details for name, one in result.report.modules.items()} for result in (more, plain))
    assert found == wanted
    assert all(torch.equal(value, more.model.state_dict()[key]) for key, value in plain.model.state_dict().items())


def test_what_was_not_kept_of_the_uncompressed_model_is_said() -> None:
    """Behind a first tensor of another shape."""
    recipe = AutoRoundModifier(**SCHEME, iters=10)
    with pytest.raises(CalibrationError, match=r"layers.0: its weights change none of what was kept .*; use target='propagated'"):
        oneshot(net("bias first"), recipe=recipe, dataset=IDS)
    plain, found = (
        oneshot(net(kind), recipe=AutoRoundModifier(**SCHEME, iters=10, target="propagated"), dataset=IDS).model.state_dict()
        for kind in ("plain", "bias first")
    )
    assert all(torch.equal(value, found[key]) for key, value in plain.items())
