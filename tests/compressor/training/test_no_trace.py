"""An evaluation leaves no trace: generators, buffers and flags are as before, and the run goes on as without it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compressor.errors import UserInputError
from compressor.training import Trainer, TrainStep, adamw

OUTSIDE = torch.Generator().manual_seed(3)
OF_PYTHON = random.Random(3)


class Drawing(nn.Module):
    """Draws, counts in a buffer and exchanges another one, also in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)
        self.own, self.of_numpy, self.of_system = torch.Generator().manual_seed(0), np.random.default_rng(0), random.SystemRandom()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if not self.training:
            self.seen = self.seen + 1
            self.of_numpy.random()
        return self.norm(self.last(x)) + torch.randn(x.shape[0], 4, generator=self.own)


def generators(model: Drawing) -> list[Any]:
    states = [torch.get_rng_state(), model.own.get_state(), OUTSIDE.get_state()]
    return [
        *map(Tensor.tolist, states),
        random.getstate(),
        OF_PYTHON.getstate(),
        str(np.random.get_state()),
        str(model.of_numpy.bit_generator.state),
    ]


def made(mode: Any, teacher: Any) -> Trainer:
    torch.manual_seed(7)
    model = Drawing()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        noise = torch.randn((), generator=OUTSIDE) + torch.rand(())
        if not model.training:
            teacher[1].running_mean.add_(1)
            noise = noise + random.random() + OF_PYTHON.random() + np.random.rand()
        return cross_entropy(model(batch["x"]) + teacher(batch["x"]).detach(), batch["y"]) + 0 * noise

    return Trainer(TrainStep(model, loss_fn, adamw(model.parameters(), lr=1e-2)), mode)


@pytest.mark.parametrize("mode", ["eager", "replay"])
def test_an_evaluation_leaves_no_trace(batches: Any, mode: Any) -> None:
    ends = []
    for evaluates in (False, True):
        OUTSIDE.manual_seed(3)
        torch.manual_seed(3)
        teacher = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).eval()
        trainer = made(mode, teacher)
        losses = []
        for number in range(10):
            losses.append(trainer.train_step(batches(number)).item())
            if evaluates:
                model: Any = trainer.step.model
                before, buffers = generators(model), {**dict(model.named_buffers()), **dict(teacher.named_buffers())}
                values = {name: value.tolist() for name, value in buffers.items()}
                trainer.evaluate([batches(50), batches(51)])
                assert generators(model) == before
                now = {**dict(model.named_buffers()), **dict(teacher.named_buffers())}
                assert all(now[name] is buffer and now[name].tolist() == values[name] for name, buffer in buffers.items())
                assert model.training
        ends.append(losses)
    assert ends[0] == ends[1]


@pytest.mark.parametrize("mode", ["eager", "replay"])
def test_memory_that_a_loss_uses_can_still_be_resized(mode: Any) -> None:
    held, model = torch.ones(2), nn.Linear(8, 4)
    step = TrainStep(model, lambda module, batch: module(batch["x"]).square().mean() * held.sum(), adamw(model.parameters(), lr=1e-2))
    trainer = Trainer(step, mode)
    for _ in range(4):
        trainer.train_step({"x": torch.ones(2, 8)})
    assert held.untyped_storage().resizable()


def test_weights_that_are_no_shares_are_refused(batches: Any) -> None:
    trainer = made("eager", nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).eval())
    for weights in ([0, 0], [1, -1], [float("nan"), 1], [3, -1], [float("inf"), 1]):
        with pytest.raises(UserInputError, match=r"evaluate: the weights \[.*\] are no shares; give numbers of 0 or more"):
            trainer.evaluate([batches(0), batches(1)], weights)


def test_the_dtype_of_autocast_is_the_programs(batches: Any) -> None:
    found: dict[str, list[float]] = {}

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu"):
            return cross_entropy(model(batch["x"]).float(), batch["y"])

    usual = torch.get_autocast_dtype("cpu")
    try:
        torch.set_autocast_dtype("cpu", torch.float16)
        for mode in ("plain", "eager", "capture", "replay"):
            torch.manual_seed(0)
            model = nn.Linear(8, 4)
            if mode == "plain":
                found[mode] = [loss_fn(model, batches(0)).item()]
                continue
            trainer: Any = Trainer(TrainStep(model, loss_fn, adamw(model.parameters(), lr=1e-2)), mode, audit_every=0)
            found[mode] = trainer.fit(batches, 6)
        assert found["eager"] == found["capture"] == found["replay"] and found["eager"][0] == found["plain"][0]
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        with pytest.raises(Exception, match=r"autocast was \(False, torch.float16\) and is now \(False, torch.bfloat16\)"):
            trainer.train_step(batches(6))
    finally:
        torch.set_autocast_dtype("cpu", usual)
