"""What hazards are made of: a small network with a hole in its middle, a loss, batches, and a table's way to a fresh step."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compressor.training import Trainer, TrainStep, adamw
from harness.replay.equivalence.run import Between, Subject

Middle = Callable[[Any, Tensor], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Net(nn.Module):
    """Two linear layers and something between them."""

    def __init__(self) -> None:
        """Draw the weights."""
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits."""
        result: Tensor = self.last(self.middle(self.drop(torch.relu(self.first(x)))))
        return result

    def middle(self, h: Tensor) -> Tensor:
        """Do what the hazard does, on [rows, 16]."""
        return h


def classify(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy of the classes."""
    return cross_entropy(model(batch["x"]), batch["y"])


def vectors(number: int, rows: int = 6) -> dict[str, Tensor]:
    """Draw the batch of a step: 8 numbers a row, 4 classes."""
    generator = torch.Generator().manual_seed(1000 + number)
    return {"x": torch.randn(rows, 8, generator=generator, dtype=torch.float32), "y": torch.randint(0, 4, (rows,), generator=generator)}


def tokens(number: int, rows: int = 2, length: int = 9) -> dict[str, Tensor]:
    """Draw token ids."""
    generator = torch.Generator().manual_seed(2000 + number)
    return {"input_ids": torch.randint(0, 32, (rows, length), generator=generator)}


def default_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with decay, as a capture can hold it."""
    return adamw(list(parameters), lr=1e-2, weight_decay=0.1)


def net(middle: Middle | None = None, prepare: Callable[[Any], object] | None = None) -> Net:
    """Make a network.

    Args:
        middle: the method that stands in the hole; it is part of the class, as in code that people write.
        prepare: called with the new network, to give it attributes and buffers.

    Returns:
        The network, in training mode.
    """
    made: Net = Net() if middle is None else type("Net", (Net,), {"middle": middle})()
    if prepare is not None:
        prepare(made)
    return made


def stage(
    middle: Middle | None = None,
    *,
    prepare: Callable[[Any], object] | None = None,
    model: Callable[[], nn.Module] | None = None,
    loss_fn: Callable[[nn.Module, Any], Tensor] = classify,
    optimizer: MakeOptimizer = default_optimizer,
    before: Between | None = None,
    finish: Callable[[Trainer], object] | None = None,
    trainer: dict[str, Any] | None = None,
    step: dict[str, Any] | None = None,
) -> Callable[[], Subject]:
    """Describe a step; each call of what is returned makes it afresh.

    Args:
        middle: as of `net`.
        prepare: as of `net`.
        model: makes another model instead.
        loss_fn: of the step.
        optimizer: of the step.
        before: what happens between steps.
        finish: called with the new trainer.
        trainer: settings of the trainer; without audits by default, so that the guards stand alone.
        step: settings of the step.

    Returns:
        A stage of a Hazard.
    """

    def make() -> Subject:
        module = net(middle, prepare) if model is None else model().train()
        made = Trainer(TrainStep(module, loss_fn, optimizer(module.parameters()), **(step or {})), **{"audit_every": 0, **(trainer or {})})
        if finish is not None:
            finish(made)
        return Subject(made, before)

    return make


def at(number: int, act: Callable[[Trainer], object]) -> Between:
    """Do something once, before one step.

    Args:
        number: of the step; from 5 on a plan is in use.
        act: what is done.

    Returns:
        What happens between steps.
    """

    def before(now: int, trainer: Trainer) -> None:
        if now == number:
            act(trainer)

    return before


# Where a step may keep a number that it reads: a step for each such place, for the hazards of what guards see and do not see.

Kept = tuple[Callable[[], Any], Callable[[Any], object]]

MODULE = "harness_replay_hazards_settings_of_a_run"

NUMBERS: dict[str, Any] = {}


def put(values: Any, place: Any, value: Any) -> None:
    """Write into a container."""
    values[place] = value


def kept_in(make: Callable[[], Kept]) -> Callable[[], Subject]:
    """Describe a step whose loss is multiplied by a factor that is kept somewhere, and is another from step 6 on.

    Args:
        make: gives a function that reads the factor, and one that writes it.

    Returns:
        A stage of a Hazard.
    """

    def stage() -> Subject:
        read, write = make()
        write(1.0)
        model = Net()

        def loss_fn(module: nn.Module, batch: Any) -> Tensor:
            return classify(module, batch) * read()

        step = TrainStep(model, loss_fn, default_optimizer(model.parameters()))
        return Subject(Trainer(step), at(6, lambda trainer: write(2.0)))

    return stage


def settings_module() -> Any:
    """Return a module that no file holds."""
    return sys.modules.setdefault(MODULE, types.ModuleType(MODULE))


def write_module(value: Any) -> None:
    """Write the factor into that module."""
    settings_module().factor = value


def nested(depth: int) -> Callable[[], Kept]:
    """Keep the factor in a dict within dicts.

    Args:
        depth: how many lie around it.

    Returns:
        Makes what `kept_in` takes.
    """

    def make() -> Kept:
        inner: dict[str, Any] = {}
        outer = functools.reduce(lambda held, _: {"inner": held}, range(depth), inner)

        def read() -> Any:
            held = outer
            while "factor" not in held:
                held = held["inner"]
            return held["factor"]

        return read, lambda value: inner.update(factor=value)

    return make


Row = tuple[str, str, Callable[[], Subject]]
