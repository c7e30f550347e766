"""Weights of a target that are used outside of it: right in every stage and at the end, or refused before anything is compressed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from compressor.data.collate import Batch, call_model
from compressor.errors import TracingError
from compressor.tracing import Engine, trace

WIDTH = 4
TARGETS = ["re:layers[.][0-9]$"]
ENGINES: tuple[Engine, ...] = ("graph", "suspend", "auto")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.peers: tuple[nn.ModuleList, ...] = ()
        self.reads, self.copies = -1, False

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        if self.copies:
            twin = copy.copy(self)
            twin.copies = False
            x = x + twin(x)
        x = torch.relu(self.lin(x)) + x
        if self.reads >= 0:
            x = functional.linear(x, self.peers[0][self.reads].lin.weight)  # type: ignore[union-attr, arg-type]
        return x + sum(one.mean() for one in more)


class Model(nn.Module):
    """Four layers, and a way around them."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.way = way
        for layer in self.layers:
            layer.peers = (self.layers,)  # type: ignore[assignment]
        self.layers[0].reads = 3 if way is first_reads_last else -1  # type: ignore[assignment]
        self.layers[3].reads = 0 if way is last_reads_first else -1  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)

    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def weight(model: Any, index: int = 2) -> Tensor:
    return model.layers[index].lin.weight


def held(model: Any, x: Tensor) -> Tensor:
    lin = model.layers[1].lin
    return model.through(x) + lin.weight.sum()


def in_between(model: Any, x: Tensor) -> Tensor:
    total: Any = 0
    for layer in model.layers:
        x = layer(x)
        total = total + layer.lin.weight.square().sum()
    return x + total


def around(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = torch.func.functional_call(layer, {name: value * 2 for name, value in layer.named_parameters()}, (x,))
    return x


def first_reads_last(model: Any, x: Tensor) -> Tensor:
    return model.through(x)


def last_reads_first(model: Any, x: Tensor) -> Tensor:
    return model.through(x)


def with_early(make: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def way(model: Any, x: Tensor) -> Tensor:
        made = make(model, x)
        return model.through(x) + made

    return way


def early_variable(model: Any, x: Tensor) -> Tensor:
    early = weight(model)
    return functional.linear(model.through(x), early)


def early_guard(model: Any, x: Tensor) -> Tensor:
    return model.through(x + 1 if weight(model).sum() > -100 else x)


def late_guard(model: Any, x: Tensor) -> Tensor:
    x = model.through(x)
    return x + 1 if weight(model).frac().abs().max() > 0 else x


# way: the model's forward, and the engines that follow it
WAYS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "a product": (with_early(lambda model, x: functional.linear(x, weight(model))), ""),
    "a sum": (with_early(lambda model, x: weight(model).sum()), ""),
    "an alias": (with_early(lambda model, x: weight(model).data.abs().max()), ""),
    "a number": (with_early(lambda model, x: x * weight(model).max().item()), ""),
    "numpy": (with_early(lambda model, x: x * float(weight(model).detach().numpy().sum())), ""),
    "all parameters": (with_early(lambda model, x: x * sum(one.sum() for one in model.layers[2].parameters())), ""),
    "the state dict": (with_early(lambda model, x: model.state_dict()["layers.2.lin.weight"].sum()), ""),
    "a list of weights": (with_early(lambda model, x: torch.stack([weight(model, 1), weight(model, 2)]).sum()), ""),
    "the module inside": (with_early(lambda model, x: model.layers[2].lin(x)), ""),
    "an argument": (lambda model, x: model.layers[1](model.through(model.layers[0](x, weight(model, 3)))), ""),
    "another layer, early": (first_reads_last, ""),
    "around the call": (around, ""),
    "a guard before": (early_guard, ""),
    "a guard behind": (late_guard, ""),
    "a variable": (early_variable, "graph auto"),
    "a module in a variable": (held, "graph auto"),
    "behind its own layer": (in_between, "graph auto"),
    "another layer, late": (last_reads_first, "graph suspend auto"),
    "shape and type": (
        with_early(
            lambda model, x: x.to(weight(model).dtype).type_as(weight(model)) * weight(model).shape[0] + torch.zeros_like(weight(model))[0]
        ),
        "graph suspend auto",
    ),
}


class Rounded(nn.Module):
    """What a modifier puts in the place of a linear layer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.round(linear.weight.detach() * 4) / 4), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class Wrapped(nn.Module):
    """What a modifier puts around a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner(*args) * 0.5


def write(model: nn.Module, name: str) -> None:
    model.get_submodule(name).lin.weight.detach().mul_(0.5)  # type: ignore[union-attr, operator]


def swap_inside(model: nn.Module, name: str) -> None:
    layer: Any = model.get_submodule(name)
    layer.lin = Rounded(layer.lin)


def replace(model: Any, name: str) -> None:
    made: Any = copy.deepcopy(model.get_submodule(name))
    made.lin = Rounded(made.lin)
    model.layers[int(name[-1])] = made


def wrap(model: Any, name: str) -> None:
    model.layers[int(name[-1])] = Wrapped(model.get_submodule(name))


def check_stages(model: nn.Module, engine: Engine, compress: Callable[[Any, str], None]) -> None:
    """Compress stage by stage: targets are handed what plain forwards of the model as it then is hand them; the end is the plain end."""
    generator = torch.Generator().manual_seed(0)
    given: list[Batch] = [(torch.randn(rows, WIDTH, generator=generator),) for rows in (2, 3, 1)]
    with trace(model, given, TARGETS, engine=engine).run(given, keep_outputs=True) as run:
        for stage in run:
            plain, seen = copy.deepcopy(model), dict[str, list[Tensor]](plain=[], staged=[])
            for which, one in (("plain", plain), ("staged", model)):
                handle = one.get_submodule(stage.name).register_forward_pre_hook(
                    lambda module, args, to=seen[which]: to.append(args[0].clone())
                )
                with torch.no_grad():
                    for batch in given if which == "plain" else ():
                        call_model(plain, batch)
                    if which == "staged":
                        stage.rehearse()
                handle.remove()
            assert len(seen["plain"]) == len(seen["staged"]) > 0
            assert all(map(torch.equal, seen["plain"], seen["staged"])), stage.name
            compress(model, stage.name)
            stage.propagate()
    with torch.no_grad():
        assert all(torch.equal(got, call_model(model, batch)) for got, batch in zip(run.outputs, given, strict=True))


def made(way: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Model(way).eval()


@pytest.mark.parametrize("compress", [write, swap_inside, replace])
@pytest.mark.parametrize("way", WAYS)
def test_weights_outside_of_their_target_are_followed_or_refused(way: str, compress: Callable[[Any, str], None]) -> None:
    forward, right = WAYS[way]
    for engine in ENGINES:
        if engine in right.split():
            check_stages(made(forward), engine, compress)
        else:
            with pytest.raises(TracingError, match=r"is used outside of layers|numpy round trip|by a weight of a"):
                check_stages(made(forward), engine, compress)


def test_the_suspend_engine_says_of_an_earlier_weight_why_it_is_refused() -> None:
    with pytest.raises(
        TracingError, match=r"weight is used outside of layers.*a forward that pauses may still hold it .* engine=\"graph\""
    ):
        check_stages(made(WAYS["behind its own layer"][0]), "suspend", write)


def test_the_error_names_line_weight_and_target() -> None:
    told = r"^test_foreign_weights.py:[0-9]+: layers.2.lin.weight is used outside of layers.2, the sequential target that it belongs to"
    with pytest.raises(TracingError, match=told):
        check_stages(made(WAYS["a sum"][0]), "auto", write)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_shallow_copy_of_a_layer_is_not_the_layer_and_has_its_weights(engine: Engine) -> None:
    for kept in (False, True):
        model: Any = made(with_early(lambda model, x: (model.twins or [copy.copy(model.layers[2])])[0](x)))
        model.twins = [copy.copy(model.layers[2])] if kept else []
        with pytest.raises(TracingError, match=r"layers.2.lin.weight is used outside of layers.2, .* before layers.2 is compressed"):
            check_stages(model, engine, write)
    inside: Any = made(Model.through)
    inside.layers[1].copies = True
    check_stages(inside, engine, swap_inside)


def parts_of_one(model: Any, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    x = model.layers[1](x) if len(x) > 1 else model.layers[1].lin(x)
    return model.layers[2](x)


class Reading(Layer):
    """Uses the next layer's weight for a single row."""

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        x = super().forward(x, *more)
        return functional.linear(x, self.peers[0][1].lin.weight) if len(x) == 1 else x  # type: ignore[arg-type, union-attr]


def in_another_target(model: Any, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    return model.layers[2](model.layers[1](x) if len(x) > 1 else x)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", [parts_of_one, in_another_target])
def test_a_weight_that_one_batch_uses_of_a_target_that_only_another_calls_is_refused(way: Any, engine: Engine) -> None:
    """That batch would run on before the stage of the target, to layers that should see it compressed."""
    model = Model(way).eval()
    if way is in_another_target:
        model.layers[0] = Reading()
        model.layers[0].peers = (model.layers,)  # type: ignore[assignment]
    many, one = {"x": torch.ones(2, WIDTH)}, {"x": torch.ones(1, WIDTH)}
    for order in ([many, one], [one, many]):
        told = "layers.1.lin.weight is used outside of layers.1, the sequential target that it belongs to, by a batch that does not call it"
        with pytest.raises(TracingError, match=told):
            trace(model, order, TARGETS, engine=engine)
    if way is parts_of_one:  # of a target that nobody calls there is no stage
        assert trace(model, [one], TARGETS, engine=engine).uncalled == ("layers.1", "layers.3")


class Tied(Model):
    """A weight that is also a module's outside of the layers."""

    def __init__(self) -> None:
        super().__init__(lambda model, x: model.through(x @ model.table.weight))
        self.table = nn.Linear(WIDTH, WIDTH)
        self.layers[3].lin.weight = self.table.weight  # type: ignore[union-attr]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_weight_that_is_tied_to_a_module_outside_may_be_used_there(engine: Engine) -> None:
    torch.manual_seed(0)
    check_stages(Tied().eval(), engine, swap_inside)


def again(order: tuple[int, ...]) -> Callable[[Any, Tensor], Tensor]:
    def way(model: Any, x: Tensor) -> Tensor:
        for index in order:
            x = model.layers[index](x)
        return x

    return way


def listed(model: Any, x: Tensor) -> Tensor:
    for layer in [*model.layers, *model.layers]:
        x = layer(x)
    return x


@pytest.mark.parametrize("compress", [write, swap_inside, replace, wrap])
@pytest.mark.parametrize("way", [again((0, 1, 0, 2, 3)), again((0, 0, 1, 2, 3, 1)), again((0, 1, 2, 3, 0, 1, 2, 3)), listed])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_target_that_is_replaced_and_called_again_is_called_as_it_is_now(engine: Engine, way: Any, compress: Any) -> None:
    model = made(way)
    generator = torch.Generator().manual_seed(0)
    given: list[Batch] = [(torch.randn(rows, WIDTH, generator=generator),) for rows in (2, 3)]
    with trace(model, given, TARGETS, engine=engine).run(given, keep_outputs=True) as run:
        for stage in run:
            compress(model, stage.name)
            stage.propagate()
    with torch.no_grad():
        assert all(torch.equal(got, call_model(model, batch)) for got, batch in zip(run.outputs, given, strict=True))


class Caching(Layer):
    """Its norm is made of its weight and kept on it; the code around it asks for that."""

    once: Tensor | None = None

    @functools.cached_property
    def norm(self) -> Tensor:
        return self.lin.weight.norm()

    @functools.cached_property
    def number(self) -> float:
        return self.lin.weight.norm().item()

    def kept(self) -> Tensor:
        if self.once is None:
            self.once = self.lin.weight.norm()
        return self.once

    def registered(self) -> Any:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", self.lin.weight.norm())
        return self.scale

    def hidden(self) -> Any:
        return vars(self).setdefault("made", self.lin.weight.norm())


def caching(ask: Callable[[Any], Any], place: int) -> nn.Module:
    def way(model: Any, x: Tensor) -> Tensor:
        for index, layer in enumerate(model.layers):
            x = layer(x + ask(model.layers[place]) if index <= place else x)
        return x

    torch.manual_seed(0)
    model = Model(way)
    model.layers = nn.ModuleList(Caching() for _ in range(4))
    return model.eval()


KEEPERS: dict[str, Callable[[Any], Any]] = {
    "a cached property": lambda layer: layer.norm,
    "a cached number": lambda layer: layer.number,
    "an attribute": Caching.kept,
    "a buffer": Caching.registered,
    "past setattr": Caching.hidden,
}


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("keeper", KEEPERS)
def test_what_is_kept_of_a_later_weight_is_refused_as_the_weight_is(keeper: str, place: int) -> None:
    for engine in ENGINES:
        with pytest.raises(
            TracingError, match=rf"weight is used outside of layers.{place}|forward makes something of it once and keeps it"
        ):
            check_stages(caching(KEEPERS[keeper], place), engine, write)


# what a model keeps of layer 2's weight: how it is made, and how the code around the layers gets it
VIEWS: dict[str, tuple[Callable[[Any, Tensor], object], Callable[[Any], Tensor]]] = {
    "a buffer": (lambda model, weight: model.register_buffer("view", weight[:2]), lambda model: model.view),
    "the whole, detached": (lambda model, weight: model.register_buffer("view", weight), lambda model: model.view),
    "transposed": (lambda model, weight: model.register_buffer("view", weight.T), lambda model: model.view),
    "one number": (lambda model, weight: model.register_buffer("view", weight[-1, -1]), lambda model: model.view),
    "an attribute": (lambda model, weight: vars(model).update(view=weight[1:]), lambda model: model.view),
    "a list": (lambda model, weight: vars(model).update(views=[weight[1:]]), lambda model: model.views[0]),
    "a dict": (lambda model, weight: vars(model).update(views={"a": weight[1:]}), lambda model: model.views["a"]),
    "in another layer": (lambda model, weight: model.layers[0].register_buffer("view", weight[:2]), lambda model: model.layers[0].view),
    "in its own layer": (lambda model, weight: model.layers[2].register_buffer("view", weight[:2]), lambda model: model.layers[2].view),
}


def viewing(view: str) -> nn.Module:
    make, get = VIEWS[view]
    model: Any = made(with_early(lambda model, x: get(model).sum()))
    make(model, model.layers[2].lin.weight.data)
    return model


@pytest.mark.parametrize("view", VIEWS)
def test_a_tensor_in_the_memory_of_a_later_weight_counts_as_the_weight(view: str) -> None:
    told = r"views?, in the memory of layers.2.lin.weight, is used outside of layers.2"
    for engine in ENGINES:  # a graph knows no tensor in a container
        with pytest.raises(TracingError, match=told if engine != "graph" else f"{told}|was not made by a recorded call"):
            check_stages(viewing(view), engine, write)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tensor_beside_a_weight_in_one_block_of_memory_is_none(engine: Engine) -> None:
    model: Any = made(with_early(lambda model, x: model.view.sum()))
    block = torch.randn(2 * WIDTH, WIDTH)
    model.layers[2].lin.weight.data = block[WIDTH:]
    model.register_buffer("view", block[:WIDTH])
    check_stages(model, engine, write)
