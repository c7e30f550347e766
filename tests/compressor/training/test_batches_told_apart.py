"""What a batch is beside the values of its tensors: another class, container or scale is another step, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compressor.errors import BindError
from compressor.training import Trainer, TrainStep, adamw


class Doubled(Tensor):
    """Means twice its values to a linear layer."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is F.linear else result


class Labelled(Tensor):
    """An ordinary tensor under another name."""


class Wrapping(Tensor):
    """Keeps its values where torch does not look."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def values(number: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(number))


def attributed(number: int) -> Tensor:
    tensor = values(number).as_subclass(Labelled)
    tensor._unit = 2.0  # type: ignore[attr-defined]
    return tensor


def run(batch_at: Callable[[int], Any], mode: Any) -> tuple[list[float], Trainer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    factor = {list: 1.0, tuple: 3.0}

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"]).square().sub(1).square().mean() * factor[type(batch["kind"])]

    trainer = Trainer(TrainStep(model, loss_fn, adamw(model.parameters(), lr=1e-2)), mode, audit_every=0)
    return trainer.fit(batch_at, 20), trainer


APART: dict[str, Callable[[int], Any]] = {
    "class": lambda number: {"x": values(number).as_subclass(Doubled if number >= 8 else Tensor), "kind": [1]},
    "two classes": lambda number: {"x": values(number).as_subclass(Doubled if number % 2 else Labelled), "kind": [1]},
    "container": lambda number: {"x": values(number), "kind": [1] if number < 8 else (1,)},
}


@pytest.mark.parametrize("name", APART)
def test_batches_that_mean_something_else_get_a_plan_of_their_own(name: str) -> None:
    (eager, _), (replay, trainer) = run(APART[name], "eager"), run(APART[name], "replay")
    assert eager == replay and len(trainer.plans) == 2 and trainer.last_action == "replay"


REFUSED: dict[str, tuple[Callable[[int], Tensor], str]] = {
    "scale": (lambda number: torch.quantize_per_tensor(values(number), 0.1, 0, torch.qint8), "a quantized tensor brings its own scale"),
    "wrapping": (lambda number: values(number).as_subclass(Wrapping), "Wrapping keeps its values in its own way"),
    "attribute": (attributed, "it carries the attribute '_unit'"),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_buffer_would_not_hold_is_refused(name: str) -> None:
    make, match = REFUSED[name]
    with pytest.raises(BindError, match=rf"batch\['x'\]: {match}"):
        run(lambda number: {"x": make(number), "kind": [1]}, "replay")


def test_a_batch_in_the_memory_of_a_buffer_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"]).sub(1).square().mean() * (1 + batch["mean"].abs().mean())

    trainer = Trainer(TrainStep(model, loss_fn, adamw(model.parameters(), lr=1e-2)), "replay")
    with pytest.raises(BindError, match=r"batch\['mean'\]: it shares its memory with buffer:1.running_mean"):
        trainer.fit(lambda number: {"x": values(number), "mean": model[1].running_mean}, 6)
    trainer.fit(lambda number: {"x": values(number), "mean": model[1].running_mean.clone()}, 8)
    assert trainer.last_action in ("replay", "audit")
