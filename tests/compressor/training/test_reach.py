"""What an object, a class or a module holds that a loss reaches on any way: whatever changes there is refused before the next replay."""

from __future__ import annotations

import functools
import itertools
import operator
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compressor.errors import GuardDriftError
from compressor.training import Trainer, TrainStep, sgd

FACTOR = 1.0


class Base:
    """Holds what is read of a base."""

    of_base = of_base_alone = by_property = by_helper = over = 1.0
    numbers = [1.0]  # noqa: RUF012 - exchanged in place, which is the point

    @property
    def read(self) -> float:
        return self.by_property

    def helper(self) -> float:
        return self.by_helper

    def factor(self) -> float:
        held = self.own * self.over * self.of_base * self.of_base_alone * self.numbers[0] * self.mine[0]  # type: ignore[attr-defined]
        return float(held * self.read * self.helper() * getattr(self, "option", 1.0) * FACTOR)


class Plain(Base):
    """An object that a loss asks."""

    def __init__(self) -> None:
        self.own, self.mine = 1.0, [1.0]

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return loss_of(model, batch) * self.factor()

    loss = __call__


class Criterion(Base, nn.Module):
    """A module beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.mine = 1.0, [1.0]

    def forward(self, loss: Tensor) -> Tensor:
        return loss * self.factor()


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch["x"]), batch["y"])


def asked(one: Any, model: nn.Module, batch: Any) -> Tensor:
    loss = loss_of(model, batch)
    return one(loss) if isinstance(one, nn.Module) else loss * one.factor()  # type: ignore[no-any-return]


def keeper(one: Any) -> Any:
    class Keeper:
        def __init__(self) -> None:
            self.kept = one

        def __call__(self, model: nn.Module, batch: Any) -> Tensor:
            return asked(self.kept, model, batch)

        loss = __call__

    return Keeper()


def closure(one: Any, way: Callable[[Any], Any] = lambda held: held) -> Any:
    return lambda model, batch: asked(way(one), model, batch)


def in_a(make: Callable[[Any], Any], way: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda one: closure(make(one), way)


def default(one: Any) -> Any:
    def loss_fn(model: nn.Module, batch: Any, held: Any = one) -> Tensor:
        return asked(held, model, batch)

    return loss_fn


WAYS: dict[str, Callable[[Any], Any]] = {
    "closure": closure,
    "list": in_a(lambda one: [one], lambda held: held[0]),
    "tuple": in_a(lambda one: (one,), lambda held: held[0]),
    "dict in a dict": in_a(lambda one: {"a": {"b": one}}, lambda held: held["a"]["b"]),
    "attribute": in_a(lambda one: types.SimpleNamespace(kept=one), lambda held: held.kept),
    "attribute of a class": in_a(lambda one: type("Kept", (), {"kept": one}), lambda held: held.kept),
    "attribute of a module of Python": in_a(lambda one: vars(m := types.ModuleType("mine")).update(kept=one) or m, lambda held: held.kept),
    "default": default,
    "argument of a partial": lambda one: functools.partial(asked, one),
    "keyword of a partial": lambda one: functools.partial(lambda model, batch, held: asked(held, model, batch), held=one),
    "attribute of the loss": keeper,
    "attribute of the object of the loss": lambda one: keeper(one).loss,
    "bound method": lambda one: (lambda ask: lambda model, batch: loss_of(model, batch) * ask())(one.factor),
}
ONLY_PLAIN: dict[str, Callable[[Any], Any]] = {
    "the loss": lambda one: one,
    "object of the loss": lambda one: one.loss,
    "partial of the loss": functools.partial,
    "partial of a method": lambda one: functools.partial(one.loss),
}
ONLY_CRITERION: dict[str, Callable[[Any], Any]] = {
    "submodule": in_a(lambda one: nn.ModuleList([one]), lambda held: held[0]),
    "bound forward": lambda one: (lambda ask: lambda model, batch: ask(loss_of(model, batch)))(one.forward),
}


def changes(one: Any) -> Iterator[tuple[Any, Any, Any]]:
    kind = type(one)
    yield from ((one, key, 2.0) for key in ("own", "over", "option", "of_base"))
    yield from ((kind, key, 2.0) for key in ("over", "by_property", "by_helper"))
    yield from ((Base, key, 2.0) for key in ("of_base_alone", "of_base"))
    yield from ((one.mine, 0, 2.0), (Base.numbers, 0, 2.0), (kind, "helper", lambda self: 2.0), (one, "helper", lambda: 2.0))
    yield one, "__class__", type("Heir", (kind,), {"of_base": 2.0})
    yield globals(), "FACTOR", 2.0


@contextmanager
def changed(holder: Any, key: Any, value: Any) -> Iterator[None]:
    """Set an item or an attribute, and leave nothing of it behind."""
    is_item = isinstance(holder, list | dict)
    setter, remove = (operator.setitem, operator.delitem) if is_item else (setattr, delattr)
    there = dict(enumerate(holder)) if isinstance(holder, list) else holder if is_item else getattr(holder, "__dict__", {})
    old = (
        type(holder) if key == "__class__" else getattr(holder, key) if key in getattr(holder, "__slots__", ()) else there.get(key, holder)
    )
    setter(holder, key, value)
    try:
        yield
    finally:
        remove(holder, key) if old is holder else setter(holder, key, old)


def trainer(loss_fn: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    return Trainer(TrainStep(model, loss_fn, sgd(model.parameters(), lr=1e-2)), "replay", audit_every=0)


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *itertools.product([Plain, Criterion], WAYS),
        *itertools.product([Plain], ONLY_PLAIN),
        *itertools.product([Criterion], ONLY_CRITERION),
    ],
)
def test_whatever_changes_is_refused_and_put_back_it_goes_on(kind: Any, way: str, batches: Callable[..., Any]) -> None:
    one = kind()
    run = trainer({**WAYS, **ONLY_PLAIN, **ONLY_CRITERION}[way](one))
    run.fit(batches, 5)
    for number, change in enumerate(changes(one)):
        with changed(*change), pytest.raises(GuardDriftError):
            run.train_step(batches(5 + number))
        run.train_step(batches(5 + number))
        assert run.last_action == "replay", change


def test_slots_and_keywords_that_come_are_seen(batches: Callable[..., Any]) -> None:
    class Slots:
        __slots__ = ("own",)

        def __call__(self, model: nn.Module, batch: Any, factor: float = 1.0) -> Tensor:
            return loss_of(model, batch) * self.own * factor

    slots = Slots()
    slots.own = 1.0
    bound = functools.partial(slots)
    for loss_fn in (bound, slots, slots.__call__, lambda model, batch, held={"one": [slots]}: held["one"][0](model, batch)):
        run = trainer(loss_fn)
        run.fit(batches, 5)
        with changed(slots, "own", 2.0), pytest.raises(GuardDriftError):
            run.train_step(batches(5))
    run = trainer(bound)
    run.fit(batches, 5)
    with changed(bound.keywords, "factor", 2.0), pytest.raises(GuardDriftError, match="keywords of loss_fn"):
        run.train_step(batches(5))


def test_what_a_bound_method_does_not_name_may_change(batches: Callable[..., Any]) -> None:
    class Loop(Plain):
        epochs = 0

        def train(self) -> int:
            return self.epochs

    loop = Loop()
    run = trainer(loop.loss)
    run.fit(batches, 5)
    loop.epochs, Loop.epochs, loop.log = 1, 2, [3]  # type: ignore[attr-defined]
    run.train_step(batches(5))
    assert run.last_action == "replay"


def test_a_refused_step_takes_back_what_it_set_anew(batches: Callable[..., Any]) -> None:
    class Counting(Plain):
        seen = 0

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            self.seen = self.seen + 1
            return loss_of(model, batch)

    counting, models = Counting(), nn.Linear(8, 4)
    counting.kept: list[Tensor] = []  # type: ignore[misc]
    run = Trainer(TrainStep(models, counting.loss, sgd(models.parameters(), lr=1e-2)), "capture")
    run.fit(batches, 2)
    assert counting.seen == 2
    with pytest.raises(GuardDriftError, match=r"attribute 'seen' of the object of loss_fn was \d and is now \d"):
        run.train_step(batches(2))
    assert vars(counting)["seen"] == 2
    del counting.seen
    with pytest.raises(GuardDriftError, match="'seen' of the object of loss_fn was"):
        run.train_step(batches(2))
    assert "seen" not in vars(counting)
