"""What the captured part of a step moves on the optimizer in Python is refused by name, wherever it sits: the update reads it later."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy

from compressor.errors import GuardDriftError
from compressor.training import Snapshot, Trainer, TrainStep, adamw

ROUNDS: list[int] = []


class Held(optim.SGD):
    """Has a rate that follows all that it keeps."""

    of_class = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.number, self.numbers, self.nested, self.weight = 0, [], SimpleNamespace(deep={"n": 0}), 1.0
        self.inner = optim.SGD([torch.zeros(1)], lr=0.1)
        self.inner.number = 0  # type: ignore[attr-defined]
        self.param_groups[0]["seen"] = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        moved = self.number + len(self.numbers) + self.nested.deep["n"] + self.param_groups[0]["seen"] + Held.of_class + len(ROUNDS)
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + moved + self.inner.number)  # type: ignore[attr-defined]
        super().step()


def of_class(optimizer: Any) -> None:
    Held.of_class += 1


def deep(optimizer: Any) -> None:
    optimizer.nested.deep["n"] += 1


def in_group(optimizer: Any) -> None:
    optimizer.param_groups[0]["seen"] += 1


def in_state(optimizer: Any) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][0]]["n"] = len(ROUNDS) + torch.initial_seed()
    optimizer.state["global"] = optimizer.state.get("global", 0) + 1


def attribute(optimizer: Any) -> None:
    optimizer.number += 1


def inner(optimizer: Any) -> None:
    optimizer.inner.number += 1


MOVES: dict[str, Callable[[Any], Any]] = {
    "attribute": attribute,
    "list": lambda optimizer: optimizer.numbers.append(1),
    "dict of an object": deep,
    "entry of a group": in_group,
    "state": in_state,
    "attribute of the class": of_class,
    "optimizer within": inner,
}


def classify(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch["x"]), batch["y"])


def made(place: str, move: Callable[[Any], Any]) -> tuple[nn.Module, Any, Held]:
    """A model, a loss and an optimizer that is moved at some place of the step."""

    class Zeroing(Held):
        def zero_grad(self, set_to_none: bool = True) -> None:
            move(self)
            super().zero_grad(set_to_none)

    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = (Zeroing if place == "zero_grad" else Held)(model.parameters())

    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            move(optimizer)
            return gradient

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        if place == "loss":
            move(optimizer)
        return classify(Passing.apply if place == "backward" else nn.Identity(), {**batch, "x": model(batch["x"])})

    if place == "patched zero_grad":
        usual = optimizer.zero_grad
        optimizer.zero_grad = lambda set_to_none=True: (move(optimizer), usual(set_to_none))[1]  # type: ignore[method-assign]
    elif place == "forward hook":
        model[0].register_forward_hook(lambda module, args, result: move(optimizer) and None)
    elif place == "gradient hook":
        model[0].weight.register_hook(lambda gradient: move(optimizer) and None)
    elif place == "accumulation hook":
        model[0].weight.register_post_accumulate_grad_hook(lambda parameter: move(optimizer) and None)
    return model, loss_fn, optimizer


def held(optimizer: Held) -> list[Any]:
    groups = [(group["lr"], group["seen"]) for group in optimizer.param_groups]
    return [optimizer.number, [*optimizer.numbers], dict(optimizer.nested.deep), groups, Held.of_class, optimizer.state.get("global")]


@pytest.mark.parametrize(
    "place", ["zero_grad", "patched zero_grad", "loss", "forward hook", "gradient hook", "accumulation hook", "backward"]
)
@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("mode", ["capture", "replay"])
def test_what_is_moved_before_the_update_is_refused_and_put_back(batches: Any, mode: Any, name: str, place: str) -> None:
    Held.of_class = 0
    model, loss_fn, optimizer = made(place, MOVES[name])
    trainer = Trainer(TrainStep(model, loss_fn, optimizer), mode)
    trainer.fit(batches, 2)
    before, python = Snapshot.take(trainer.step), held(optimizer)
    with pytest.raises(GuardDriftError, match=r"changes the (optimizer|host)"):
        trainer.train_step(batches(2))
    assert before.differences(Snapshot.take(trainer.step)) == [] and held(optimizer) == python


def test_a_captured_update_that_counts_is_told_how_to_go_on(batches: Any) -> None:
    class Counting(Held):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            optim.SGD.step(self)
            self.nested.deep["n"] += 1

    model = nn.Linear(8, 4)
    optimizer = Counting(model.parameters())
    optimizer.param_groups[0]["fused"] = True
    trainer = Trainer(TrainStep(model, classify, optimizer), "replay")
    with pytest.raises(GuardDriftError, match=r"in Python: .*deep was n=3 and is now 4, .*; leave fused=True and capturable=True out"):
        trainer.fit(batches, 6)


@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
def test_what_torch_s_scaler_gives_a_fused_update_is_guarded(batches: Any, name: str) -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    optimizer: Any = adamw(model.parameters())
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    trainer = Trainer(TrainStep(model, classify, optimizer), "replay", audit_every=0)
    for number in range(5):
        trainer.train_step(batches(number))
    before = Snapshot.take(trainer.step)
    setattr(optimizer, name, torch.tensor(1.0))
    with pytest.raises(GuardDriftError, match=f"optimizer: {name} was Tensor and is now another"):
        trainer.train_step(batches(5))
    assert before.differences(Snapshot.take(trainer.step)) == []


def test_the_update_may_move_what_it_likes(batches: Any) -> None:
    class Counting(Held):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for move in (*MOVES.values(),):
                move(self)

    ends = []
    for mode in ("eager", "capture", "replay"):
        Held.of_class = 0
        torch.manual_seed(7)
        model = nn.Linear(8, 4)
        trainer = Trainer(TrainStep(model, classify, Counting(model.parameters())), mode)
        ends.append((trainer.fit(batches, 12), held(trainer.step.optimizer)))
    assert ends[0] == ends[1] == ends[2] and ends[0][1][0] == 12


def test_a_global_that_zero_grad_moves_or_reads_is_guarded(batches: Any) -> None:
    scales = [1.0]

    class Scaled(Held):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(scales[0] + self.weight)

    model = nn.Linear(8, 4)
    optimizer = Scaled(model.parameters())
    trainer = Trainer(TrainStep(model, classify, optimizer), "replay", audit_every=0)
    trainer.fit(batches, 6)
    scales[0] = 2.0
    with pytest.raises(GuardDriftError, match="scales"):
        trainer.train_step(batches(6))
    scales[0], optimizer.weight = 1.0, 2.0
    with pytest.raises(GuardDriftError, match=r"attribute 'weight' .* was 1\.0 and is now 2\.0"):
        trainer.train_step(batches(6))

    class Counted(Held):
        def zero_grad(self, set_to_none: bool = True) -> None:
            ROUNDS.append(1)
            super().zero_grad(set_to_none)

    ROUNDS.clear()
    trainer = Trainer(TrainStep(model, classify, Counted(model.parameters())), "replay")
    trainer.fit(batches, 2)
    with pytest.raises(GuardDriftError, match="ROUNDS"):
        trainer.train_step(batches(2))
    assert len(ROUNDS) == 2


def test_what_the_loss_reads_of_an_optimizer_is_guarded(batches: Any) -> None:
    model = nn.Linear(8, 4)
    for optimizer in (Held(model.parameters()), optim.SGD(model.parameters(), lr=0.1)):
        optimizer.weight = 1.0  # type: ignore[union-attr]

        def loss_fn(model: nn.Module, batch: Any, optimizer: Any = optimizer) -> Tensor:
            return classify(model, batch) * optimizer.weight

        trainer = Trainer(TrainStep(model, loss_fn, optimizer), "replay", audit_every=0)
        trainer.fit(batches, 6)
        optimizer.weight = 2.0  # type: ignore[union-attr]
        with pytest.raises(GuardDriftError, match=r"attribute 'weight' .* was 1\.0 and is now 2\.0"):
            trainer.train_step(batches(6))


def test_what_begins_to_move_later_is_found_by_the_audit(batches: Any) -> None:
    model = nn.Linear(8, 4)
    optimizer = Held(model.parameters())
    hidden = memoryview(bytearray(1))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        if hidden[0]:
            optimizer.number += 1
        return classify(model, batch)

    trainer = Trainer(TrainStep(model, loss_fn, optimizer), "replay", audit_every=4)
    trainer.fit(batches, 6)
    hidden[0] = 1
    with pytest.raises(GuardDriftError, match="number=0 and is now 1"):
        for number in range(6, 12):
            trainer.train_step(batches(number))
    assert optimizer.number == 0 and trainer.agreed_steps is not None and trainer.agreed_steps <= 6
