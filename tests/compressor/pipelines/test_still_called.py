"""What compression put in a layer's place takes part in the model, with all that its owner asks of it; or the run ends with an error."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from compressor import GPTQModifier, QuantizationModifier, oneshot
from compressor.errors import CalibrationError, CompressorError, ModelError, TargetError, TracingError
from compressor.random_state import RandomState

SIZE = 8
KINDS: dict[str, dict[str, Any]] = {
    "graph": {"engine": "graph"},
    "suspend": {"engine": "suspend"},
    "single layers": {"sequential_targets": ["Linear"]},
    "basic": {"pipeline": "basic"},
}


class Block(nn.Module):
    """Two layers that are called in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), how
        self.steps: Any = [self.a, torch.relu, self.b]
        self.by_name: Any = {"up": self.a, "down": self.b}
        self.function: Any = lambda x, up=self.a, down=self.b: down(torch.relu(up(x)))
        self.bound = (self.a.forward, self.b.forward)
        if not how.startswith("list"):
            del self.steps
        if how != "function":
            del self.function
        own: Any = self.a
        own.scale, own.act = 1.5, nn.GELU()
        own.register_buffer("offset", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = WAYS[self.how](self, x)
        return x + y


def by_list(block: Any, x: Tensor) -> Tensor:
    for step in block.steps:
        x = step(x)
    return x


def by_class(block: Any, x: Tensor) -> Tensor:
    for child in block.children():
        x = torch.relu(child(x)) if isinstance(child, nn.Linear) else x
    return x


WAYS: dict[str, Any] = {
    "list": by_list,
    "dict": lambda block, x: block.by_name["down"](torch.relu(block.by_name["up"](x))),
    "function": lambda block, x: block.function(x),
    "bound method": lambda block, x: block.bound[1](torch.relu(block.bound[0](x))),
    "class": by_class,
    "plain": lambda block, x: block.b(torch.relu(block.a(x))),
    "attribute": lambda block, x: block.b(torch.relu(block.a(x) * block.a.scale)),
    "default": lambda block, x: block.b(torch.relu(block.a(x) * getattr(block.a, "scale", 1.0))),
    "buffer": lambda block, x: block.b(torch.relu(block.a(x) + block.a.offset)),
    "child": lambda block, x: block.b(block.a.act(block.a(x))),
}


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(32, SIZE), nn.ModuleList(Block(how) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def compressed(model: nn.Module, kind: str, lengths: Sequence[int] = ()) -> nn.Module:
    groups: Any = {"all": {"targets": ["Linear"], "weights": {"num_bits": 8, "group_size": SIZE}}}
    ids = torch.randint(0, 32, (16, 6), generator=torch.Generator().manual_seed(0))
    rows = [row[:length].tolist() for row, length in zip(ids, lengths, strict=False)]
    oneshot(model, recipe=GPTQModifier(config_groups=groups), dataset=rows or ids, **KINDS[kind])
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["list", "dict", "function", "bound method", "class"])
def test_a_layer_that_is_held_elsewhere_is_an_error_and_the_model_stays_as_it_was(how: str, kind: str) -> None:
    model, ids = Model(how).eval(), torch.arange(6)[None]
    before = model(ids)
    with pytest.raises(CompressorError, match=r"layers\.\d"):
        compressed(model, kind)
    assert torch.equal(model(ids), before)
    assert all(isinstance(block.a, nn.Linear) for block in model.layers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["plain", "attribute", "default", "buffer", "child"])
def test_what_an_owner_asks_of_its_layer_is_there_after_compression(how: str, kind: str) -> None:
    ids = torch.arange(6)[None]
    expected = Model(how).eval()(ids)
    got = compressed(Model(how).eval(), kind)(ids)
    assert 0 < float((got - expected).detach().abs().max()) < 0.05


def only(kind: str, how: str) -> str:
    """A way that some lengths alone take; others pass by."""
    takes = {"short ones pass by": lambda x: x.shape[1] >= 4, "one length": lambda x: x.shape[1] == 5}[kind]
    WAYS[f"{how}, {kind}"] = lambda block, x: WAYS[how](block, x) if takes(x) else 0 * x
    return f"{how}, {kind}"


@pytest.mark.parametrize("kind", ["graph", "suspend", "basic"])
@pytest.mark.parametrize("lengths", ["short ones pass by", "one length"])
def test_a_layer_that_the_smallest_batch_passes_by_is_looked_for_in_the_others(lengths: str, kind: str) -> None:
    model = compressed(Model(only(lengths, "plain")).eval(), kind, (6, 6, 3, 5, 6))
    assert not any(isinstance(block.a, nn.Linear) for block in model.layers)
    with pytest.raises(CompressorError, match=r"layers\.\d"):  # held in a list
        compressed(Model(only(lengths, "list")).eval(), kind, (6, 6, 3, 5, 6))


def _swapped(block: Any) -> None:
    block.b.weight.data = block.b.weight.data * 4


def _scaled_in_place(block: Any) -> None:
    block.b.weight.data.mul_(4)


def _copied_into(block: Any) -> None:
    with torch.no_grad():
        block.b.weight.copy_(block.b.weight * 4)


def _scaled_where_float(block: Any) -> None:
    for child in block.children():
        if isinstance(child, nn.Linear) and child is block.b:
            child.weight.data.mul_(4)


@pytest.mark.parametrize("write", [_swapped, _scaled_in_place, _copied_into, _scaled_where_float])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_forward_that_writes_to_the_weight_of_its_layer_is_an_error(write: Any, symmetric: bool) -> None:
    """And puts it back behind the call, so that the model itself is what it was; who only reads a weight may."""

    def rewrites(block: Any, x: Tensor) -> Tensor:
        old, kept = block.b.weight.data, block.b.weight.detach().clone()
        write(block)
        y: Tensor = block.b(torch.relu(block.a(x)))
        block.b.weight.data = old.copy_(kept)
        return y

    WAYS["writes"], WAYS["reads"] = rewrites, lambda block, x: block.b(torch.relu(block.a(x))) * block.b.weight.abs().max()
    inputs = {"num_bits": 8, "strategy": "token", "dynamic": True}
    groups: Any = {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "symmetric": symmetric, "strategy": "channel"}}}
    groups["g"] |= {"input_activations": inputs} if symmetric else {}  # codes of a byte each, and packed ones
    ids = torch.randint(0, 32, (4, 6))
    with pytest.raises(CalibrationError, match=r"layers\.0\.b: a forward writes to its weight"):
        oneshot(Model("writes").eval(), recipe=QuantizationModifier(config_groups=groups), dataset=ids, pipeline="basic")
    with pytest.raises(CompressorError, match=r"layers\.0\.b"):
        compressed(Model("writes").eval(), "suspend")
    oneshot(Model("reads").eval(), recipe=QuantizationModifier(config_groups=groups), dataset=ids, pipeline="basic")


@pytest.mark.parametrize("kind", ["graph", "suspend", "basic"])
def test_an_owner_that_asks_for_what_a_compressed_layer_has_not_is_told_so(kind: str) -> None:
    """Whatever it raises then, and whenever."""

    def calls(block: Any, x: Tensor) -> Tensor:
        doubled: Tensor = torch.func.functional_call(block.b, {"weight": 1 * block.b.weight}, (torch.relu(block.a(x)),))
        return doubled

    WAYS["functional"] = calls
    with pytest.raises(
        CalibrationError,
        match=r"raises AttributeError: .*weight.* compressed .*; ignore those|compressed model raises",
    ):
        compressed(Model("functional").eval(), kind)


def test_a_forward_that_was_exchanged_on_the_object_is_refused() -> None:
    model = Model("plain").eval()
    layer: Any = model.layers[0].a
    plain = layer.forward
    layer.forward = lambda x: 1.5 * plain(x)
    with pytest.raises(TargetError, match=r"layers\.0\.a: the forward of 1 targets was exchanged on the object"):
        compressed(model, "graph")


def test_a_name_that_a_quantized_layer_has_for_itself_is_refused() -> None:
    model = Model("plain").eval()
    own: Any = model.layers[0].a
    own.scheme = "mine"
    with pytest.raises(CompressorError, match=r"layers\.0\.a: it has a 'scheme' of its own"):
        compressed(model, "graph")


def test_a_layer_that_no_batch_calls_may_stay_where_the_recipe_leaves_it_alone() -> None:
    model: Any = Model("plain").eval()
    model.unused = nn.Linear(SIZE, SIZE)
    groups: Any = {"all": {"targets": ["Linear"], "weights": {"num_bits": 8, "group_size": SIZE}}}
    modifier = GPTQModifier(config_groups=groups, ignore=["unused"])
    oneshot(model, recipe=modifier, dataset=torch.randint(0, 32, (8, 6)), sequential_targets=["Linear"])
    assert isinstance(model.unused, nn.Linear) and not isinstance(model.layers[0].a, nn.Linear)


def test_rows_of_a_nested_tensor_are_rows_and_a_packed_sequence_is_none() -> None:
    from compressor.data import load_dataset_source
    from compressor.errors import DatasetError

    rows = [torch.arange(3), torch.arange(5)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    assert load_dataset_source(nested).sha256 == load_dataset_source(rows).sha256
    with pytest.raises(DatasetError, match="PackedSequence is no source of calibration data"):
        load_dataset_source(nn.utils.rnn.pack_sequence(rows[::-1]))


class Shell(Tensor):
    """A tensor that only wraps another one."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bare = tree_map_only(cls, lambda one: one.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, func(*bare[0], **bare[1]))


class InShells(nn.Module):
    """Layers that hand each other tensors without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(SIZE, SIZE)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        given: Any = Shell(x)
        for layer in self.layers:
            given = layer(given)
        inner: Tensor = given.inner
        return inner


class Draws(nn.Module):
    """A model that draws on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(SIZE, SIZE)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x * (1 + random.random() + float(np.random.rand()) + torch.rand(())))
        return x


INPUTS = {"num_bits": 8, "strategy": "tensor", "dynamic": False}
STATIC = {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "channel"}, "input_activations": INPUTS}}


def quantized(model: nn.Module, pipeline: str) -> None:
    data = torch.utils.data.DataLoader([torch.randn(2, 5, SIZE) for _ in range(3)], batch_size=None)  # type: ignore[arg-type]
    oneshot(model, recipe=QuantizationModifier(config_groups=STATIC), dataset=data, pipeline=pipeline)


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
def test_tensors_without_memory_are_refused_by_name(pipeline: str) -> None:
    with pytest.raises(CompressorError, match=r"layers.0.*a Shell passes here, .* without memory of its own"):
        quantized(InShells().eval(), pipeline)


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
def test_random_generators_of_the_process_are_as_before(pipeline: str) -> None:
    before = RandomState.current(foreign=True)
    model, start = Draws().eval(), RandomState.current(foreign=True)
    quantized(model, pipeline)
    assert start.foreign == before.foreign == RandomState.current(foreign=True).foreign


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
def test_lazy_and_compiled_layers_are_refused_before_the_run(pipeline: str) -> None:
    with pytest.raises(ModelError, match=r"Sequential: 0.bias, 0.weight: a lazy layer has no shape yet"):
        quantized(nn.Sequential(nn.LazyLinear(SIZE), nn.Linear(SIZE, SIZE)), pipeline)
    model = Draws().eval()
    model.layers[0]._compiled_call_impl = lambda x: x  # what module.compile() sets
    with pytest.raises(TracingError, match=r"layers.0: is compiled, .* give the model as it was before torch.compile"):
        quantized(model, pipeline)
