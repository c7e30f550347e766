"""A Python value that a forward reads off its data and hands on outside of arguments: right in every batch, or refused before any stage.

All batches have one length, and the first ones agree in the value, so that a proof by a few batches would show nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor import oneshot
from compressor.data.collate import Batch, call_model
from compressor.errors import TracingError
from compressor.tracing import Engine, trace
from tests import tiny

WIDTH = 4
ENGINES: tuple[Engine, ...] = ("graph", "suspend", "auto")
STORE: dict[str, Any] = {}
VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("VARIABLE", default=0)


class Holder:
    """A class that keeps a value."""

    value: Any = 0


def remembering() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    """Two functions that share a variable."""
    kept: Any = 0

    def put(value: Any) -> None:
        nonlocal kept
        kept = value

    return put, lambda: kept


REMEMBER, RECALL = remembering()

# where the value is left, and how it is found there: of the module that reads the data
PLACES: dict[str, tuple[Callable[[Any, Any], object], Callable[[Any], Any]]] = {
    "an attribute": (lambda module, value: setattr(module, "loud", value), lambda module: module.loud),
    "a list of the module": (lambda module, value: module.kept.__setitem__(0, value), lambda module: module.kept[0]),
    "a dict of the module": (lambda module, value: module.notes.update(loud=value), lambda module: module.notes["loud"]),
    "a number of a submodule": (lambda module, value: setattr(module.drop, "p", float(value)), lambda module: module.drop.p),
    "the training flag": (lambda module, value: setattr(module.drop, "training", bool(value)), lambda module: module.drop.training),
    "a global": (lambda module, value: STORE.update(loud=value), lambda module: STORE["loud"]),
    "a class": (lambda module, value: setattr(Holder, "value", value), lambda module: Holder.value),
    "a context variable": (lambda module, value: VARIABLE.set(value), lambda module: VARIABLE.get()),
    "the environment": (lambda module, value: os.environ.__setitem__("LOUD", str(int(value))), lambda module: int(os.environ["LOUD"])),
    "a closure": (lambda module, value: REMEMBER(value), lambda module: RECALL()),
    "a weight": (lambda module, value: setattr(module.lin.weight, "loud", value), lambda module: module.lin.weight.loud),
}

READS: dict[str, Callable[[Tensor], Any]] = {
    "bool": lambda x: bool(x.abs().max() > 2),
    "item": lambda x: (x.abs().max() > 2).long().item(),
    "tolist": lambda x: (x.abs() > 2).any().tolist(),
    "numpy": lambda x: int(x.abs().max().numpy() > 2),
    "index": lambda x: [0, 1][(x.abs().max() > 2).long()],
    "equal": lambda x: not torch.equal(x, x.clamp(-2, 2)),
    "a size": lambda x: min(1, x[x.abs() > 2].shape[0]),
    "nonzero": lambda x: min(1, len((x.abs() > 2).nonzero())),
    "a number of classes": lambda x: nn.functional.one_hot((x.abs() > 2).any(-1).long()).shape[-1] - 1,
    "an operator": lambda x: torch.ops.aten._local_scalar_dense((x.abs().max() > 2).long()),
    "a count": lambda x: min(1, x.clamp(2)[0].sub(2).to_sparse()._nnz()),
    "text": lambda x: int(f"{(x.abs().max() > 2).long()}"),
}


class Reader(nn.Module):
    """Adds a linear layer, and leaves a Python value somewhere."""

    def __init__(self, read: Callable[[Tensor], Any], put: Callable[[Any, Any], object]) -> None:
        super().__init__()
        self.lin, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)
        self.loud: Any = 0
        vars(self).update(read=read, put=put, kept=[0], notes={"loud": 0})

    def forward(self, x: Tensor) -> Tensor:
        self.put(self, self.read(x))
        return x + torch.tanh(self.lin(x)) * 0.1


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.lin(x)) * 0.1


class ReadInLayers(nn.Module):
    """Every layer leaves a value, and the model takes it behind the layer."""

    def __init__(self, read: str, place: str) -> None:
        super().__init__()
        put, get = PLACES[place]
        self.layers = nn.ModuleList(Reader(READS[read], put) for _ in range(3))
        vars(self).update(get=get)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x * (1 - 0.5 * self.get(layer))
        return x


class ReadInGlue(nn.Module):
    """A module before the layers leaves a value, which the model takes behind each of them."""

    def __init__(self, read: str, place: str) -> None:
        super().__init__()
        put, get = PLACES[place]
        self.gate = Reader(READS[read], put)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        vars(self).update(get=get)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(x)
        for layer in self.layers:
            x = layer(x) * (1 - 0.5 * self.get(self.gate))
        return x


def batches() -> list[Batch]:
    """Quiet ones, and two loud ones behind the first four."""
    generator = torch.Generator().manual_seed(0)
    quiet = [torch.rand(1, 3, WIDTH, generator=generator) for _ in range(7)]
    return [(x * 3 + 2 if place in (4, 6) else x,) for place, x in enumerate(quiet)]


def reset() -> None:
    STORE.update(loud=0)
    Holder.value = 0
    VARIABLE.set(0)
    os.environ["LOUD"] = "0"
    REMEMBER(0)


def check(make: Callable[[], nn.Module], engine: Engine, may_refuse: bool, given: list[Batch] | None = None) -> str:
    """Run stage by stage, or be refused before the first stage; return the engine."""
    torch.manual_seed(0)
    model, given = make().eval(), given or batches()
    reset()
    with torch.no_grad():
        expected = [call_model(model, batch) for batch in given]
    reset()
    try:
        plan = trace(model, given, ["re:layers[.][0-9]$"], engine=engine)
    except TracingError:
        assert may_refuse
        return "refused"
    reset()
    with plan.run(given, keep_outputs=True) as run:
        for stage in run:
            stage.rehearse()
            stage.propagate()
    assert all(map(torch.equal, run.outputs, expected)), plan.report()
    return plan.engine


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [ReadInLayers, ReadInGlue])
def test_a_value_left_anywhere_is_right_or_refused(kind: type[nn.Module], place: str, engine: Engine) -> None:
    check(lambda: kind("bool", place), engine, may_refuse=True)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("read", READS)
def test_a_value_read_in_any_way_is_right_or_refused(read: str, engine: Engine) -> None:
    check(lambda: ReadInLayers(read, "an attribute"), engine, may_refuse=engine == "graph")
    check(lambda: ReadInLayers(read, "a global"), engine, may_refuse=True)


@pytest.mark.nightly
def test_samples_that_would_share_a_global_are_refused_wherever_the_odd_ones_stand() -> None:
    for odd in ({1}, {4}, {6}, {0, 2, 4, 6}, {1, 3, 5}, {3, 4, 5, 6}):
        given: list[Batch] = [(torch.full((1, 3, WIDTH), 3.0 if place in odd else 0.5 + place / 20),) for place in range(7)]
        for engine in ENGINES:
            check(lambda: ReadInGlue("bool", "a global"), engine, may_refuse=True, given=given)
            check(lambda: PassedFromLayerToLayer(), engine, may_refuse=True, given=given)


class PassedFromLayerToLayer(nn.Module):
    """The first layer leaves a value in a global, the last one takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Reader(READS["bool"], PLACES["a global"][0]), Layer(), Taker()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Taker(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 - 0.5 * STORE["loud"])


def test_the_report_says_that_all_batches_were_proved_and_why() -> None:
    plan = trace(ReadInLayers("bool", "an attribute").eval(), batches()[:4], ["Reader"])
    assert plan.engine == "graph"
    assert "4 batches verified" in plan.report()
    where = r"proof: all batches, for test_values_read_off_data.py:\d+ \(inside layers.0\) reads a Python value off the data"
    assert re.search(where, plan.report())
    plan = trace(ReadInGlue("bool", "an attribute").eval(), batches(), ["Layer"], engine="suspend")
    assert "proof: all batches, for test_values_read_off_data.py:" in plan.report()


def test_new_batches_of_a_run_are_proved_before_its_first_stage() -> None:
    model = ReadInLayers("bool", "an attribute").eval()
    plan = trace(model, batches()[:4], ["Reader"])
    assert plan.engine == "graph"
    plan.run(batches())
    assert plan.engine == "suspend"


@pytest.mark.parametrize("engine", ENGINES)
def test_models_that_read_nothing_or_only_route_are_proved_by_a_few_batches(engine: Engine) -> None:
    models = (
        tiny.llama(vocab_size=32, hidden_size=16, intermediate_size=24, num_attention_heads=2, use_cache=False),
        tiny.mixtral(vocab_size=32, hidden_size=16, intermediate_size=24, num_attention_heads=2, use_cache=False),
    )
    given: list[Batch] = [{"input_ids": torch.full((1, 5), value)} for value in range(8)]
    for model in models:
        model.config.pad_token_id = None
        plan = trace(model.eval(), given, engine=engine)
        assert "proof:" not in plan.report()
        assert plan.engine != "graph" or "2 batches verified" in plan.report()


# Exceptions that a layer raises in later batches only.


class LoudError(Exception):
    """Raised by a layer."""


class Raising(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 2:
            raise LoudError
        return super().forward(x)


class Factoring(Layer):
    """Raises without a look at the data: torch does."""

    def forward(self, x: Tensor) -> Tensor:
        torch.linalg.cholesky(torch.diag((2 - x.abs()).flatten()))
        return super().forward(x)


def catching(layer: nn.Module, x: Tensor) -> Tensor:
    try:
        return layer(x)
    except (LoudError, RuntimeError):
        return x * 0.5


def catching_all(layer: nn.Module, x: Tensor) -> Tensor:
    try:
        x = layer(x)
    except:  # noqa: E722 - as people write it
        x = x * 0.5
    return x


def suppressing(layer: nn.Module, x: Tensor) -> Tensor:
    with contextlib.suppress(LoudError, RuntimeError):
        x = layer(x)
    return x


class Caught(nn.Module):
    def __init__(self, layer: type[nn.Module], call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))
        vars(self).update(call=call)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return x


@pytest.mark.parametrize("call", [catching, catching_all, suppressing])
@pytest.mark.parametrize("layer", [Raising, Factoring])
def test_exceptions_of_later_batches_are_met_before_the_first_stage(layer: type[nn.Module], call: Callable[..., Tensor]) -> None:
    assert check(lambda: Caught(layer, call), "auto", may_refuse=False) == "suspend"
    assert check(lambda: Caught(layer, call), "graph", may_refuse=True) == "refused"


# What a module gives back differs in later batches only.


class Parts(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        is_loud = bool(x.abs().max() > 2)
        kinds: dict[str, Any] = {
            "tuple": (x, x * 0.5) if is_loud else (x,),
            "none": (x, x if is_loud else None),
            "dict": {"x": x, "more": x} if is_loud else {"x": x},
            "list": [x] * (1 + is_loud),
            "unique": (*torch.unique((x.abs() > 2).float()).unbind(), x),
        }
        return kinds[self.kind]


class InParts(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.parts = Parts(kind)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            parts = self.parts(layer(x))
            given = list(parts.values()) if isinstance(parts, dict) else [part for part in parts if part is not None]
            x = given[-1] / len(given)
        return x


@pytest.mark.parametrize("kind", ["tuple", "none", "dict", "list", "unique"])
def test_results_that_are_built_otherwise_in_later_batches_are_met_before_the_first_stage(kind: str) -> None:
    assert check(lambda: InParts(kind), "auto", may_refuse=False) == "suspend"
    check(lambda: InParts(kind), "graph", may_refuse=True)


class Peak(Layer):
    """Leaves a tensor on itself: in a buffer, or in an attribute."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.register_buffer("buffer", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        setattr(self, self.name, x.abs().max())
        return super().forward(x)


class ByPeak(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Peak(name) for _ in range(3))
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if getattr(layer, self.name).item() > 2:
                x = x * 0.5
        return x


@pytest.mark.parametrize("name", ["buffer", "attribute"])
def test_what_python_decides_by_a_tensor_that_a_layer_leaves_on_itself_is_decided_before_the_first_stage(name: str) -> None:
    assert check(lambda: ByPeak(name), "auto", may_refuse=False) == "suspend"
    assert check(lambda: ByPeak(name), "graph", may_refuse=True) == "refused"


class TokenModel(nn.Module):
    """Halves what is loud behind each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.inner = ReadInLayers("bool", "an attribute")
        with torch.no_grad():
            self.emb.weight.copy_(torch.linspace(0, 4, 32)[:, None].expand(32, WIDTH))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.inner(self.emb(input_ids)))  # type: ignore[no-any-return]


def test_static_input_ranges_are_those_of_all_samples() -> None:
    ids = [torch.full((1, 4), value) for value in (1, 2, 3, 4, 5, 6, 30, 31)]
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    recipe = {"quant_stage": {"quant_modifiers": {"QuantizationModifier": {"ignore": ["head"], "config_groups": {"group": group}}}}}
    scales = []
    for options in ({"pipeline": "basic"}, {"pipeline": "sequential", "sequential_targets": ["Reader"], "propagate_error": False}):
        torch.manual_seed(0)
        model = TokenModel().eval()
        result = oneshot(model, recipe=recipe, dataset=ids, batch_size=1, **options)
        scales.append({name: value for name, value in model.state_dict().items() if name.endswith("input_scale")})
    assert len(scales[0]) == 3
    assert scales[0] == scales[1]
    assert any("reads a Python value off the data" in note for note in result.report.notes)


# Batches that all agree in a value before compression, and not behind it.


def compressed(model: nn.Module) -> None:
    """Far coarser numbers in the first layer than compression gives; the sign of a weight decides whether its output is loud."""
    with torch.no_grad():
        model.layers[0].lin.weight.mul_(50)  # type: ignore[operator, index, union-attr]
        model.layers[0].lin.bias.mul_(50)  # type: ignore[operator, index, union-attr]


class Linear(nn.Module):
    """Gives what its linear layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) + x.mean()  # type: ignore[no-any-return]


class ReadBehindLayers(nn.Module):
    """The second layer reads what the first one computes, and the model takes the value behind the second and the third."""

    def __init__(self, place: str) -> None:
        super().__init__()
        put, get = PLACES[place]
        self.layers = nn.ModuleList([Linear(), Reader(READS["bool"], put), Linear()])
        vars(self).update(get=get)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        return self.layers[2](x) * (1 - 0.5 * self.get(self.layers[1]))  # type: ignore[no-any-return]


@pytest.mark.parametrize("place", ["an attribute", "a list of the module", "a global", "a class", "the training flag"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_value_that_compression_changes_is_right_or_refused(place: str, engine: Engine) -> None:
    torch.manual_seed(0)
    model, given = ReadBehindLayers(place).eval(), [(torch.randn(1, 3, WIDTH) * 0.1 * (1 + number),) for number in range(5)]
    reset()
    try:
        plan = trace(model, given, ["re:layers[.][0-9]$"], engine=engine)
    except TracingError:
        assert engine == "graph" or place in ("a list of the module", "a global", "a class")  # samples would share it
        return
    with plan.run(given, keep_outputs=True) as run:
        for stage in run:
            stage.calibrate()
            if stage.index == 0:
                compressed(model)
            stage.propagate()
    with torch.no_grad():
        expected = [call_model(model, batch) for batch in given]
    assert all(map(torch.equal, run.outputs, expected))


class PartsFirst(nn.Module):
    """Results of several parts before each layer, so that the first one alone could be decided by the batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear() for _ in range(3))
        self.parts = nn.ModuleList(Parts(kind) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer, parts in zip(self.layers, self.parts, strict=True):
            given = parts(x)
            x = layer(next(iter(given.values())) if isinstance(given, dict) else given[0])
        return x


@pytest.mark.parametrize("kind", ["tuple", "dict", "list"])
def test_results_that_compression_builds_otherwise_are_followed(kind: str) -> None:
    torch.manual_seed(0)
    model, given = PartsFirst(kind).eval(), [(torch.full((1, 3, WIDTH), value),) for value in (0.5, 3.0, 4.0, -3.0, 0.1)]
    plan = trace(model, given, ["re:layers[.][0-9]$"])
    assert plan.engine == "suspend"
    with plan.run(given, keep_outputs=True) as run:
        for stage in run:
            stage.calibrate()
            if stage.index == 0:
                compressed(model)
            stage.propagate()
    with torch.no_grad():
        expected = [call_model(model, batch) for batch in given]
    assert all(map(torch.equal, run.outputs, expected))
