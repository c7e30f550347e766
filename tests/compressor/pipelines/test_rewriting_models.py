"""Models whose own forward rewrites weights, as RWKV does: what is saved is made of the weights that were loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, RwkvConfig, RwkvForCausalLM

from compressor import oneshot
from compressor.errors import CalibrationError, TracingError
from compressor.nn import QuantizedLayer, float_layer

WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "graph": {"engine": "graph"},
    "suspend": {"engine": "suspend"},
    "unpropagated": {"engine": "suspend", "propagate_error": False},
    "basic": {"pipeline": "basic"},
}


def rwkv() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "attention_hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
    return RwkvForCausalLM(RwkvConfig(vocab_size=64, context_length=32, rescale_every=2, use_cache=False, **sizes)).eval()


def rows() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randint(0, 64, (length,)) for length in (9, 12, 9)]


def recipe(*ignore: str) -> dict[str, Any]:
    scheme = {"weights": {"num_bits": 4, "group_size": 16, "strategy": "group"}, "targets": ["Linear"]}
    return {"GPTQModifier": {"config_groups": {"group_0": scheme}, "ignore": list(ignore)}}


@pytest.mark.parametrize("way", WAYS)
def test_rwkv_keeps_what_is_ignored(way: str) -> None:
    model = rwkv()
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    oneshot(model, recipe=recipe("head", "re:.*feed_forward.*", "re:.*attention.output"), dataset=rows(), **WAYS[way])
    found = model.state_dict()
    ignored = [name for name in base if name in found]
    assert "rwkv.blocks.3.feed_forward.value.weight" in ignored and "rwkv.blocks.3.attention.output.weight" in ignored
    assert all(torch.equal(base[name], found[name]) for name in ignored)
    assert not model.rwkv.layers_are_rescaled


@pytest.mark.parametrize("way", ["unpropagated", "basic"])
def test_rwkv_compresses_what_was_loaded(way: str) -> None:
    model, base = rwkv(), rwkv()
    result = oneshot(model, recipe=recipe("head"), dataset=rows(), **WAYS[way])
    assert any("4 layers (rwkv.blocks.2.attention.output," in note and "is lost on the compressed" in note for note in result.report.notes)
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLayer):
            weight = base.get_submodule(name).weight
            assert (float_layer(layer).weight - weight).norm() < 0.2 * weight.norm(), name  # a quarter of the weight would be 0.75 away


@pytest.mark.parametrize("way", ["auto", "graph", "suspend"])
def test_rwkv_is_refused_where_layers_behind_would_meet_other_values(way: str) -> None:
    model, base = rwkv(), rwkv()
    with pytest.raises(CalibrationError, match=r"^rwkv.blocks.2.attention.output.weight.*own forward rewrites it.*propagate_error=False"):
        oneshot(model, recipe=recipe("head"), dataset=rows(), **WAYS[way])
    assert all(torch.equal(one, other) for one, other in zip(model.state_dict().values(), base.state_dict().values(), strict=True))


class Halving(nn.Module):
    """Divides a weight in every forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3))
        self.inputs: list[Tensor] = []

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        self.layers[0][0].weight.div_(2)
        for layer in self.layers:
            x = layer(x)
        return x


def test_basic_runs_each_batch_on_what_was_loaded() -> None:
    fed: list[Tensor] = []
    model = Halving().eval()
    model.layers[1].register_forward_pre_hook(lambda module, args: fed.append(args[0].clone()))
    with pytest.raises(CalibrationError, match=r"layers\.0\.0: a forward writes to its weight, and what it writes is lost on a compressed"):
        oneshot(model, recipe=recipe(), dataset=rows(), pipeline="basic", batch_size=1)
    for got, row in zip(fed[-4:-1], rows(), strict=True):  # the last one looks whether all is still called
        base = Halving().eval()
        with torch.no_grad():
            base.layers[0][0].weight.div_(2)
            assert torch.equal(got, base.layers[0](base.embed(row[None])))
    with pytest.raises(TracingError, match=r"layers\.0\.0\.weight"):
        oneshot(Halving().eval(), recipe=recipe(), dataset=rows())


class OnShort(nn.Module):
    """Changes something of its own for good, but for short batches only, as BigBird exchanges its attention."""

    def __init__(self, what: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 16)
        self.layers: Any = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2))
        self.what, self.factor, self.factors = what, 1.0, [1.0]
        self.register_buffer("scale", torch.ones(()))

    def forward(self, input_ids: Tensor) -> Tensor:
        if input_ids.shape[1] < 5:
            match self.what:
                case "module":
                    self.layers[0][1] = nn.Tanh()
                case "attribute":
                    self.factor = 2.0
                case "list":
                    self.factors.append(2.0)
                case "buffer":
                    self.get_buffer("scale").fill_(2.0)
        x = self.embed(input_ids) * self.factor * self.factors[-1] * self.get_buffer("scale")
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("what", ["module", "attribute", "list", "buffer"])
def test_basic_runs_each_batch_on_the_model_as_given_whatever_the_batch_before_changed(what: str) -> None:
    results = []
    for order in ([9, 3, 7], [9, 7, 3]):
        model = OnShort(what)
        oneshot(model, recipe=recipe(), dataset=[torch.arange(length) for length in order], pipeline="basic")
        assert isinstance(model.layers[0][1], nn.ReLU) and (model.factor, model.factors) == (1.0, [1.0])
        assert model.get_buffer("scale") == 1
        results.append(float_layer(model.layers[1][0]).weight)
    assert torch.allclose(*results), "the order of the batches does not count"


class Around(nn.Module):
    def __init__(self, query: nn.Module) -> None:
        super().__init__()
        self.query = query

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.query(x)
        return value


class Exchanging(nn.Module):
    """Puts another module around a layer for good, as BigBird does for short sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out, self.is_full = Around(nn.Linear(16, 16)), nn.Linear(16, 16), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_full:
            self.attention, self.is_full = Around(self.attention.query), True
        return x + self.out(self.attention(x))  # type: ignore[no-any-return]


class Exchanged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(64, 16), nn.ModuleList([Exchanging(), Exchanging()])

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("way", ["auto", "graph", "suspend", "basic"])
def test_what_a_forward_moves_to_another_place_is_compressed_where_it_was(way: str) -> None:
    torch.manual_seed(0)
    model = Exchanged().eval()
    result = oneshot(model, recipe=recipe(), dataset=rows(), **WAYS[way])
    assert len(result.report.modules) == 4
    assert all(isinstance(model.get_submodule(name), QuantizedLayer) for name in result.report.modules)
    assert not any(layer.is_full for layer in model.layers)  # type: ignore[union-attr]
