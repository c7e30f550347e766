"""All modes against the loop that everybody writes: `zero_grad()` to None, forward, backward, clipping, update; bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy

from compressor.errors import (
    BindError,
    EscapedTensorError,
    GuardDriftError,
    HostReadError,
    PlanStormError,
    PointerDriftError,
    UserInputError,
)
from compressor.training import Trainer, TrainStep, adamw, sgd

MODES = ("eager", "capture", "replay")
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "captured adamw": lambda params: adamw(params, lr=1e-2, weight_decay=0.1),
    "captured sgd": lambda params: sgd(params, lr=0.1, weight_decay=0.1),
    "stock adamw": lambda params: optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "stock sgd": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
}


class Heads(nn.Module):
    """Two heads on one trunk, of which a batch asks for one, and a layer that nobody asks."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b, self.unused = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(2, 2)

    def forward(self, x: Tensor, head: str = "a") -> Tensor:
        return getattr(self, head)(torch.relu(self.trunk(x)))


def classify(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch["x"], batch.get("head", "a")), batch["y"])


def batch_at(number: int) -> dict[str, Any]:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(number))
    return {"x": x, "y": (x.sum(1) > 0).long()}


def ordinary(model: nn.Module, optimizer: optim.Optimizer, loss_fn: Any, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = loss_fn(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach()


def trained(mode: str, make: Any, batches: Any, between: Any = None, loss_fn: Any = classify) -> list[Any]:
    torch.manual_seed(0)
    model = Heads()
    optimizer = make(model.parameters())
    trainer = None if mode == "ordinary" else Trainer(TrainStep(model, loss_fn, optimizer, clip_norm=0.5), mode)
    seen: list[Any] = []
    for number in range(24):
        if between is not None:
            between(number, SimpleNamespace(model=model, optimizer=optimizer, forget=trainer.forget_plans if trainer else lambda: None))
        batch = batches(number)
        loss = ordinary(model, optimizer, loss_fn, batch) if trainer is None else trainer.train_step(batch)
        seen.append([loss.item(), *(p.detach().clone() for p in model.parameters())])
    assert mode != "replay" or trainer.plans
    return seen


def same(one: list[Any], other: list[Any]) -> bool:
    return all(
        a == b if isinstance(a, float) else torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


def freeze(number: int, at: SimpleNamespace) -> None:
    if number in (8, 16):
        at.model.trunk.requires_grad_(number == 16)
        at.forget()


def drop_gradients(number: int, at: SimpleNamespace) -> None:
    at.optimizer.zero_grad()


def unfreeze_late(number: int, at: SimpleNamespace) -> None:
    if number in (0, 8):
        at.model.a.requires_grad_(number == 8)
        at.forget()


def empty_groups(number: int, at: SimpleNamespace) -> None:
    if number == 8:
        for group in at.optimizer.param_groups:
            group["params"] = []
        at.forget()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(
    ("batches", "between"),
    [
        (batch_at, None),
        (lambda number: {**batch_at(number), "head": "ab"[number % 3 == 0]}, None),
        (batch_at, freeze),
        (batch_at, unfreeze_late),
        (batch_at, drop_gradients),
        (batch_at, empty_groups),
    ],
    ids=["unused layer", "heads in turns", "freeze and thaw", "thaw", "zero_grad between steps", "emptied groups"],
)
def test_what_the_loss_does_not_reach_stays(make: Any, batches: Any, between: Any) -> None:
    expected = trained("ordinary", make, batches, between)
    for mode in MODES:
        assert same(trained(mode, make, batches, between), expected), mode


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_was_frozen_whole_is_refused_as_an_ordinary_loop_does(mode: str) -> None:
    model = Heads()
    trainer = Trainer(TrainStep(model, classify, optim.SGD(model.parameters(), lr=0.1)), mode)
    trainer.train_step(batch_at(0))
    model.requires_grad_(False)
    with pytest.raises(UserInputError, match="its loss has no gradient"):
        trainer.train_step(batch_at(1))


def order(number: int) -> dict[str, Any]:
    batch = batch_at(number)
    return batch if number % 2 else dict(reversed(batch.items()))


def twins(number: int) -> dict[str, Any]:
    batch = batch_at(number)
    return {**batch, "z": batch["x"] if number % 2 else batch["x"].clone()}


@pytest.mark.parametrize(
    ("batches", "factor"),
    [(order, lambda batch: 1.0 + (next(iter(batch)) == "x")), (twins, lambda batch: 1.0 + (batch["x"] is batch["z"]))],
    ids=["order of the keys", "one tensor under two names"],
)
def test_a_batch_is_more_than_its_tensors(batches: Any, factor: Any) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return classify(model, batch) * factor(batch)

    make = OPTIMIZERS["stock adamw"]
    expected = trained("ordinary", make, batches, loss_fn=loss_fn)
    assert same(trained("replay", make, batches, loss_fn=loss_fn), expected)


def weighted(number: int) -> dict[str, Any]:
    batch = batch_at(number)
    batch["x"].weight = 2.0
    return batch


@pytest.mark.parametrize(
    ("batches", "error", "text"),
    [
        (weighted, BindError, "carries the attribute 'weight'"),
        (lambda number: {"x": nn.Parameter(batch_at(number)["x"], requires_grad=False)}, BindError, "give its .detach()"),
        (lambda number: {**batch_at(number), "scale": float(number)}, PlanStormError, r"make a tensor of batch\['scale'\]"),
    ],
)
def test_what_a_buffer_would_not_have_is_refused(batches: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        trained("replay", OPTIMIZERS["stock sgd"], batches)


def test_autocast_around_the_trainer_is_refused() -> None:
    model = Heads()
    trainer = Trainer(TrainStep(model, classify, optim.SGD(model.parameters())))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UserInputError, match=r"autocast=torch.bfloat16"):
        trainer.train_step(batch_at(0))


def test_a_loss_without_a_gradient_is_refused() -> None:
    with pytest.raises(UserInputError, match="has no gradient"):
        trained("replay", OPTIMIZERS["stock sgd"], batch_at, loss_fn=lambda model, batch: classify(model, batch).detach())


def test_a_refused_step_has_written_to_no_tensor_of_somebody_else() -> None:
    total, model = torch.zeros(()), Heads()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        loss = classify(model, batch)
        total.add_(loss.detach())
        return loss

    trainer = Trainer(TrainStep(model, loss_fn, optim.SGD(model.parameters())), "replay")
    for number in range(2):
        trainer.train_step(batch_at(number))
    before = total.item()
    with pytest.raises(EscapedTensorError, match="writes to a tensor"):
        trainer.train_step(batch_at(2))
    assert total.item() == before


def test_another_thread_may_run_a_model_while_a_step_is_recorded() -> None:
    other, stop, failed = Heads(), threading.Event(), []

    def run() -> None:
        try:
            while not stop.is_set():
                other(batch_at(0)["x"])
        except IndexError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        trained("capture", OPTIMIZERS["stock sgd"], batch_at)
    finally:
        stop.set()
        thread.join()
    assert not failed


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.saved_tensors[0], None


def with_teacher() -> tuple[Any, Any]:
    teacher = nn.Linear(8, 4)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            target = teacher(batch["x"])
        return classify(model, batch) + (model(batch["x"]) - target).square().mean()

    def follow(number: int, at: SimpleNamespace) -> None:
        with torch.no_grad():
            teacher.weight.lerp_(at.model.a.weight[:, :8], 0.1)

    return loss_fn, follow


def with_factor() -> tuple[Any, Any]:
    factor = torch.tensor(0.0)
    return (lambda model, batch: classify(model, batch) * factor), (lambda number, at: factor.fill_(1 + number / 10))


def with_factor_behind() -> tuple[Any, Any]:
    factor = torch.tensor(0.0)
    return (lambda model, batch: Scale.apply(classify(model, batch), factor)), (lambda number, at: factor.fill_(1 + number / 10))


@pytest.mark.parametrize("make", [with_teacher, with_factor, with_factor_behind])
def test_what_lies_outside_may_change_between_any_two_steps(make: Any) -> None:
    def run(mode: str) -> list[Any]:
        torch.manual_seed(1)
        loss_fn, between = make()
        return trained(mode, OPTIMIZERS["stock adamw"], batch_at, between, loss_fn)

    expected = run("ordinary")
    for mode in MODES:
        assert same(run(mode), expected), mode


def test_trainers_in_two_threads_take_turns() -> None:
    def train(seed: int, mode: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5 * (seed == 0)), nn.Linear(8, 4))
        optimizer = OPTIMIZERS["stock adamw"](model.parameters())
        trainer = Trainer(TrainStep(model, lambda model, batch: cross_entropy(model(batch["x"]), batch["y"]), optimizer), mode)
        start.wait()
        trainer.fit(batch_at, 30, each=lambda number, loss: trainer.evaluate([batch_at(99)]))
        return [p.detach() for p in model.parameters()]

    start, done = threading.Barrier(1), {}
    expected = train(1, "eager")
    start = threading.Barrier(2)
    threads = [threading.Thread(target=lambda seed=seed: done.update({seed: train(seed, "replay")})) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [0, 1]  # none was refused
    assert [p.shape for p in done[1]] == [p.shape for p in expected]


def look_for_nan(number: int, at: SimpleNamespace) -> None:
    torch.autograd.set_detect_anomaly(number >= 9)


def own_backward(number: int, at: SimpleNamespace) -> None:
    if number == 9:
        at.optimizer.zero_grad()
        classify(at.model, batch_at(50)).backward()


@pytest.mark.parametrize(
    ("between", "error", "text"),
    [
        (look_for_nan, GuardDriftError, "anomaly detection was False and is now True"),
        (lambda number, at: torch.autograd.set_detect_anomaly(True), HostReadError, "set_detect_anomaly is on"),
        (own_backward, PointerDriftError, "end a backward pass of your own, or what else has set it, with optimizer.zero_grad()"),
    ],
)
def test_what_others_do_between_steps_is_refused_in_its_own_words(between: Any, error: Any, text: str) -> None:
    try:
        with pytest.raises(error, match=text):
            trained("replay", OPTIMIZERS["stock sgd"], batch_at, between)
    finally:
        torch.autograd.set_detect_anomaly(False)
