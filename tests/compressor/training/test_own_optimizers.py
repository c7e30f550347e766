"""Optimizers that do what torch allows: exchange gradients in their update, change what they promise, hold what has no state."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy

from compressor.errors import GuardDriftError
from compressor.training import Trainer, TrainStep, adamw, sgd

MODES = ("eager", "capture", "replay")


def classify(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch["x"]), batch["y"])


class Sign(optim.SGD):
    """Takes the sign of each gradient, as a new tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.sign()
        super().step()


class Centred(optim.Adam):
    """Takes the mean off each gradient, with other strides."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None and parameter.dim() > 1:
                parameter.grad = (parameter.grad - parameter.grad.mean(1, keepdim=True)).t().contiguous().t()
        super().step()


class Forgetting(optim.SGD):
    """Lets all gradients go in the end."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.zero_grad()


def in_a_hook(params: Any) -> optim.Optimizer:
    optimizer = optim.SGD(params, lr=0.1, momentum=0.9)

    def halve(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 0.5

    optimizer.register_step_pre_hook(halve)
    return optimizer


EXCHANGING = {
    "sign": lambda params: Sign(params, lr=0.01),
    "sign, captured": lambda params: Sign(params, lr=0.01, fused=True),
    "centred": lambda params: Centred(params, lr=0.01),
    "a hook": in_a_hook,
    "none": lambda params: Forgetting(params, lr=0.1),
}


def ended(mode: str, make: Any, batches: Any, between: Any = lambda number, at: None, num_steps: int = 20) -> list[Any]:
    """Train by a plain loop, or in some mode; give losses, weights, and the gradients that are there after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    model.unused = nn.Linear(2, 2)
    model.forward = lambda x: model[2](model[1](model[0](x)))  # type: ignore[method-assign]
    optimizer = make(model.parameters())
    trainer: Any = None if mode == "plain" else Trainer(TrainStep(model, classify, optimizer), mode)  # type: ignore[arg-type]
    forget = trainer.forget_plans if trainer else lambda: None
    seen: list[Any] = []
    for number in range(num_steps):
        between(number, SimpleNamespace(model=model, optimizer=optimizer, forget=forget))
        if trainer is None:
            optimizer.zero_grad()
            loss = classify(model, batches(number))
            loss.backward()
            optimizer.step()
        else:
            loss = trainer.train_step(batches(number))
        gradients = [None if p.grad is None else p.grad.tolist() for p in [*model.parameters()][:4]]
        seen.append([loss.item(), gradients, *(p.tolist() for p in model.parameters())])
    assert mode != "replay" or trainer.plans
    return seen


@pytest.mark.parametrize("name", EXCHANGING)
def test_an_update_may_exchange_gradients(batches: Any, name: str) -> None:
    expected = ended("plain", EXCHANGING[name], batches)
    for mode in MODES:
        assert ended(mode, EXCHANGING[name], batches) == expected, mode


PROMISES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd to foreach": (lambda params: sgd(params, lr=0.1, momentum=0.9), {"fused": None, "foreach": True}),
    "sgd to plain": (lambda params: sgd(params, lr=0.1), {"fused": None}),
    "adamw to plain": (lambda params: adamw(params, lr=0.01), {"fused": None, "capturable": False}),
    "adamw to fused": (lambda params: optim.AdamW(params, lr=0.01, capturable=False), {"fused": True}),
}


@pytest.mark.parametrize("name", PROMISES)
def test_groups_may_promise_something_else_after_forget_plans(batches: Any, name: str) -> None:
    make, settings = PROMISES[name]

    def change(number: int, at: SimpleNamespace) -> None:
        if number == 9:
            at.optimizer.param_groups[0].update(settings)
            at.forget()

    expected = ended("plain", make, batches, change)
    for mode in MODES:
        assert ended(mode, make, batches, change) == expected, mode


def test_another_promise_of_a_captured_update_is_told_at_once(batches: Any) -> None:
    def change(number: int, at: SimpleNamespace) -> None:
        if number == 9:
            at.optimizer.param_groups[0]["fused"] = None

    with pytest.raises(GuardDriftError, match="optimizer group 0: fused was True and is now None"):
        ended("replay", lambda params: sgd(params, lr=0.1), batches, change)


def test_parameters_that_were_exchanged_are_told_from_those_before(batches: Any) -> None:
    def change(number: int, at: SimpleNamespace) -> None:
        if number == 9:
            at.optimizer.param_groups[0]["params"][2:] = reversed(at.optimizer.param_groups[0]["params"][2:])

    with pytest.raises(GuardDriftError, match=r"optimizer group 0: parameters was \(Parameter, .*\) and is now another of the same kind"):
        ended("replay", lambda params: sgd(params, lr=0.1), batches, change)


class Stateless(random.Random):
    """A generator whose state nobody can ask for."""

    def getstate(self) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("generator", [random.SystemRandom, Stateless])
def test_a_generator_without_a_state_may_be_held(batches: Any, tmp_path: Any, generator: Any) -> None:
    losses = []
    for mode in MODES:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        model.own = generator()
        trainer = Trainer(TrainStep(model, classify, adamw(model.parameters())), mode)  # type: ignore[arg-type]
        losses.append(trainer.fit(batches, 6))
        trainer.evaluate([batches(0)])
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sgd_trains_parameters_of_16_bits(dtype: torch.dtype, momentum: float) -> None:
    """torch's fused kernel for them on the CPU leaves full vectors as they are."""
    for given in (lambda one: one.parameters(), lambda one: [{"params": one.parameters()}], lambda one: one.named_parameters()):
        ends = []
        for make in (partial(torch.optim.SGD, foreach=False, fused=False), sgd):
            torch.manual_seed(0)
            layer = nn.Linear(16, 8).to(dtype)
            optimizer = make(given(layer), lr=0.1, momentum=momentum)
            for _ in range(3):
                optimizer.zero_grad()
                layer(torch.ones(2, 16, dtype=dtype)).sum().backward()
                optimizer.step()
            ends.append(layer.weight.detach())
        assert torch.equal(*ends)


def test_sgd_of_float32_is_captured() -> None:
    assert all(group["fused"] for group in sgd(nn.Linear(4, 4).parameters()).param_groups)


def test_a_number_that_is_kept_on_a_tensor_is_guarded(batches: Any) -> None:
    held = torch.ones(1)
    held.count = 0  # type: ignore[attr-defined]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        held.count += 1  # type: ignore[attr-defined]
        return cross_entropy(model(batch["x"]), batch["y"])

    model = nn.Linear(8, 4)
    trainer = Trainer(TrainStep(model, loss_fn, sgd(model.parameters())), "replay")
    with pytest.raises(GuardDriftError, match="count"):
        trainer.fit(batches, 8)
