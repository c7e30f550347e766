"""Values that pass from target to target elsewhere than in arguments: each way is right bit for bit, or refused before the first stage."""

from __future__ import annotations

import contextvars
import functools
import queue
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor.data.collate import Batch, call_model
from compressor.errors import TracingError
from compressor.pipelines.offload.activation_store import ActivationStore
from compressor.tracing import Engine, Verify, trace

WIDTH = 4
TARGETS = ["re:layers[.][0-9]$"]
Put, Get = Callable[[nn.Module, Tensor], object], Callable[[nn.Module], Tensor]


class Layer(nn.Module):
    """The first one leaves a value somewhere, the third one takes it: keys and values that layers of attention share."""

    peers: tuple[nn.ModuleList]
    shared: Any
    kv: Any
    put: Any
    get: Any

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x)
        if self.index == 0:
            self.put(torch.tanh(inner) * 2)
        if self.index == 2:
            inner = inner + self.get()
        return self.second(torch.relu(inner)) + x


class Model(nn.Module):
    """Four layers whose first and third one share a value."""

    def __init__(self, put: Put, get: Get) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index) for index in range(4))
        shared = types.SimpleNamespace(kv=None, store={}, several=[], array=torch.zeros(WIDTH).numpy())
        for layer in self.layers:
            vars(layer).update(peers=(self.layers,), shared=shared, kv=torch.zeros(WIDTH))
            vars(layer).update(put=types.MethodType(put, layer), get=types.MethodType(get, layer))

    def forward(self, x: Tensor) -> Tensor:
        LOCAL.several = []
        for layer in self.layers:
            x = layer(x)
        return x


class Slots:
    __slots__ = ("kv",)


GLOBAL: dict[str, Any] = {}
SEVERAL: list[Any] = []
SLOTS, LOCAL, QUEUE = Slots(), threading.local(), queue.SimpleQueue[Tensor]()
VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("VARIABLE")
HELD: contextvars.ContextVar[dict[str, Any]] = contextvars.ContextVar("HELD", default={})  # noqa: B039 - the very mistake


@functools.lru_cache
def cached() -> dict[str, Any]:
    return {}


def defaulted(value: Any = None, store: dict[str, Any] = {}) -> Any:  # noqa: B006 - the very mistake
    store["kv"] = store.get("kv") if value is None else value
    return store["kv"]


def generated() -> Iterator[Any]:
    value = None
    while True:
        given = yield value
        value = value if given is None else given


GENERATOR: Any = generated()
next(GENERATOR)


def first(layer: nn.Module) -> Any:
    return layer.peers[0][0]  # type: ignore[index, union-attr]


# way: put, get, and the engines that get it right; where none is named, all of them refuse
WAYS: dict[str, tuple[Any, Any, str]] = {
    "a global dict": (lambda self, v: GLOBAL.update(kv=v), lambda self: GLOBAL["kv"], ""),
    "a dict that is emptied": (lambda self, v: GLOBAL.update(kv=v), lambda self: GLOBAL.pop("kv", torch.zeros(())), ""),
    "a number": (lambda self, v: GLOBAL.update(kv=float(v.sum())), lambda self: GLOBAL["kv"], ""),
    "a global list": (lambda self, v: SEVERAL.append(v), lambda self: SEVERAL[-1], ""),
    "a queue": (lambda self, v: QUEUE.put(v), lambda self: QUEUE.get(timeout=0.02), ""),
    "an object that layers share": (lambda self, v: setattr(self.shared, "kv", v), lambda self: self.shared.kv, ""),
    "a dict that layers share": (lambda self, v: self.shared.store.update(kv=v), lambda self: self.shared.store["kv"], ""),
    "a list that grows": (lambda self, v: self.shared.several.append(v), lambda self: self.shared.several[-1], ""),
    "a list that is counted": (lambda self, v: LOCAL.several.append(v), lambda self: LOCAL.several[-1] * len(LOCAL.several), ""),
    "a numpy array": (
        lambda self, v: self.shared.array.__setitem__(slice(None), v.mean(0).numpy()),
        lambda self: torch.from_numpy(self.shared.array.copy()),
        "",
    ),
    "slots": (lambda self, v: setattr(SLOTS, "kv", v), lambda self: SLOTS.kv, ""),
    "a class": (lambda self, v: setattr(Slots, "other", v), lambda self: Slots.other, ""),  # type: ignore[attr-defined]
    "the class of the layers": (lambda self, v: setattr(Layer, "kv", v), lambda self: Layer.kv, ""),
    "a function": (lambda self, v: setattr(cached, "kv", v), lambda self: cached.kv, ""),  # type: ignore[attr-defined]
    "a thread": (lambda self, v: setattr(LOCAL, "kv", v), lambda self: LOCAL.kv, ""),
    "a cached function": (lambda self, v: cached().update(kv=v), lambda self: cached()["kv"], ""),
    "a default argument": (lambda self, v: defaulted(v), lambda self: defaulted(), ""),
    "a generator": (lambda self, v: GENERATOR.send(v), lambda self: next(GENERATOR), ""),
    "object.__setattr__": (lambda self, v: object.__setattr__(self, "other", v), lambda self: first(self).other, ""),
    "the dict of a module": (lambda self, v: vars(self).update(other=v), lambda self: first(self).other, ""),
    "the dict of buffers": (lambda self, v: self._buffers.update(other=v), lambda self: first(self).other, ""),
    "a tensor that is no buffer": (lambda self, v: self.kv.copy_(v.mean(0)), lambda self: first(self).kv, ""),
    "the default of a context variable": (lambda self, v: HELD.get().update(kv=v), lambda self: HELD.get()["kv"], ""),
    "a context variable": (lambda self, v: VARIABLE.set(v), lambda self: VARIABLE.get(), "suspend auto"),
    "an attribute of a module": (lambda self, v: setattr(self, "other", v), lambda self: first(self).other, "graph suspend auto"),
}


def batches(*rows: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(number, WIDTH, generator=generator),) for number in rows]


class Inputs:
    """What the linear layers of a model are handed, batch by batch, as long as it looks."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {name: False for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        self.batch, self.looks, self.seen = 0, True, dict[tuple[int, str], Tensor]()
        for name in self.names:
            model.get_submodule(name).register_forward_pre_hook(functools.partial(self._note, name))

    def _note(self, name: str, module: nn.Module, args: tuple[Tensor]) -> None:
        if self.looks:
            self.seen[self.batch, name] = args[0].clone()

    def begin(self, batch: int) -> None:
        self.batch = batch


def plainly(model: nn.Module, given: list[Batch]) -> dict[tuple[int, str], Tensor]:
    inputs = Inputs(model)
    for batch in range(len(given)):
        inputs.begin(batch)
        with torch.no_grad():
            call_model(model, given[batch])
    return inputs.seen


def in_stages(model: nn.Module, given: list[Batch], engine: Engine, verify: Verify = "first") -> dict[tuple[int, str], Tensor]:
    plan = trace(model, given, TARGETS, engine=engine, verify=verify)
    inputs = Inputs(model)
    with ActivationStore(torch.device("cpu"), 1 << 20) as store:
        chosen = store if plan.engine == "graph" else None
        with plan.run(given, chosen, watched=lambda: inputs.names, on_sample=inputs.begin) as running:
            for stage in running:
                inputs.looks = True
                stage.calibrate()
                inputs.looks = False
                stage.propagate()
    return inputs.seen


def made(way: str) -> nn.Module:
    while not QUEUE.empty():
        QUEUE.get()
    torch.manual_seed(0)
    return Model(*WAYS[way][:2]).eval()


@pytest.mark.parametrize("rows", [(2, 2, 2), (2, 3, 1)], ids=["equal shapes", "other shapes"])
@pytest.mark.parametrize("way", WAYS)
def test_what_passes_outside_of_arguments_is_right_or_refused(way: str, rows: tuple[int, ...]) -> None:
    engines: tuple[Engine, ...] = ("graph", "suspend", "auto")
    for engine in engines:
        given = batches(*rows)
        if engine not in WAYS[way][2].split():
            with pytest.raises(TracingError, match=r"graph|suspend|verify|the model itself raises"):
                in_stages(made(way), given, engine)
            continue
        expected, seen = plainly(made(way), given), in_stages(made(way), given, engine)
        assert seen.keys() == expected.keys()
        assert all(torch.equal(seen[key], expected[key]) for key in expected), f"{way}: {engine}"


def test_one_batch_meets_what_its_own_trial_calls_left_behind() -> None:
    with pytest.raises(TracingError, match="suspend: forwards that take turns"):
        in_stages(made("a queue"), batches(2), "auto")
    assert in_stages(made("a global dict"), batches(2), "graph").keys() == plainly(made("a global dict"), batches(2)).keys()


def test_all_batches_are_proved_in_turns_where_all_are_to_be_verified() -> None:
    with pytest.raises(TracingError, match=r"verify: batch [0-9]: output of layers.2 differs"):
        in_stages(made("a global dict"), batches(2, 2, 2, 2, 2), "graph", "all")
    plan = trace(made("an attribute of a module"), batches(2, 2, 2, 2, 2), TARGETS, engine="graph", verify="all")
    assert "5 batches verified" in plan.report()


def test_batches_that_are_alike_take_turns_as_well() -> None:
    with pytest.raises(TracingError, match="verify: batch"):
        in_stages(made("a list that is counted"), batches(2) * 3, "graph")
