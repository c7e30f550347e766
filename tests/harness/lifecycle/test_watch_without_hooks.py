"""hooks_watch passes whoever hangs up no hook: caches, functions and objects of a forward, and weights that lie in another way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harness
from compressor import Event, Modifier, State
from harness.reporting.verdict import Outcome
from tests import tiny

CHECKS = ["lifecycle.hooks_watch", "lifecycle.hooks"]


class Nothing(Modifier):
    """Does nothing at all."""

    def on_initialize(self, state: State) -> bool:
        return True


class Cache:
    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.parent = self
        self.last = self.put

    def put(self, x: Tensor) -> Tensor:
        self.keys.append(x)
        return torch.stack(self.keys).sum(0)


class Slotted:
    __slots__ = ("keys",)

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def put(self, x: Tensor) -> Tensor:
        self.keys.append(x)
        return x


class Put(nn.Module):
    def forward(self, x: Tensor, cache: Any) -> tuple[Tensor, Any]:
        return cache.put(x), cache


class Apply(nn.Module):
    def forward(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Any]:
        return function(x), function


class Caching(nn.Module):
    """Hands an object of each forward to its layers, and out."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a, self.put, self.apply_ = nn.Linear(4, 4), Put(), Apply()
        self.a.weight.data = torch.rand(4, 4, generator=generator)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        made = self.make(x)
        x = self.a(x)
        y, made = self.apply_(x, made) if callable(made) else self.put(x, made)
        return {"y": y, "made": made, "all": {made} if type(made).__hash__ else None}


def closure(x: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda y: y + x


MADE: dict[str, Callable[[Tensor], Any]] = {
    "a cache": lambda x: Cache(),
    "slots": lambda x: Slotted(),
    "a closure": closure,
    "a partial": lambda x: functools.partial(torch.add, x),
    "a method": lambda x: Cache().put,
}
BATCHES = [torch.rand(2, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


@pytest.mark.parametrize("what", MADE)
def test_an_object_of_a_forward_is_no_hook(what: str) -> None:
    report = harness.verify(Nothing, Caching(MADE[what]), inputs=BATCHES, checks=CHECKS)
    assert report.passed, report.to_text()


class WritesIntoTheCache(Modifier):
    """Its hook changes what a cache, or whatever hangs on an object, holds."""

    def on_initialize(self, state: State) -> bool:
        return True

    def on_calibration_start(self, state: State, event: Event) -> None:
        self.register_hook(state.model.get_submodule("put"), self._write, "forward")

    def _write(self, module: nn.Module, args: Any, output: Any) -> None:
        output[1].keys[0] = output[1].keys[0] + 1

    def on_calibration_end(self, state: State, event: Event) -> None:
        self.remove_hooks()


@pytest.mark.parametrize("what", ["a cache", "slots"])
def test_a_hook_that_writes_into_an_object_of_a_forward_is_told(what: str) -> None:
    record = harness.verify(WritesIntoTheCache, Caching(MADE[what]), inputs=BATCHES, checks=["lifecycle.hooks_watch"]).records[-1]
    assert record.outcome is Outcome.FAIL and "the output of put" in record.summary


def test_the_cache_of_a_transformers_model_is_no_hook() -> None:
    batches = [torch.arange(8).reshape(1, 8), {"input_ids": torch.arange(16).reshape(2, 8)}]
    report = harness.verify(
        Nothing,
        tiny.llama(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2),
        inputs=batches,
        checks=["lifecycle.hooks_watch"],
    )
    assert report.passed, report.to_text()


def _offset(weight: Tensor) -> Tensor:
    return torch.cat([torch.zeros(3), weight.flatten()])[3:].view_as(weight)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda weight: weight.t().contiguous().t(),
    "off the beginning of its memory": _offset,
    "columns that lie apart": lambda weight: torch.stack([weight, weight], -1)[..., 0],
    "one number for all": lambda weight: torch.full((1, 1), 0.25).expand(weight.shape),
}


@pytest.mark.parametrize("size", [4, 8, 33])
@pytest.mark.parametrize("what", LAYOUTS)
def test_another_layout_of_a_weight_is_no_hook(what: str, size: int) -> None:
    class Strided(Modifier):
        """Gives a weight another layout, and no other values."""

        contract_tags = {"in_place"}  # noqa: RUF012

        def on_initialize(self, state: State) -> bool:
            state.touch(["0"])
            return True

        def on_calibration_end(self, state: State, event: Event) -> None:
            weight = state.model.get_parameter("0.weight")
            weight.data = LAYOUTS[what](weight.data)

    model = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.rand(parameter.shape, generator=generator) if what != "one number for all" else parameter.data.fill_(0.25)
    batches = [torch.randn(rows, size, generator=generator) for rows in (2, 3)]
    report = harness.verify(Strided, model, inputs=batches, checks=["lifecycle.hooks_watch"])
    assert report.passed, report.to_text()
