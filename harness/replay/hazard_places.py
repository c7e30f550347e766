"""Where a step may keep a number that it reads: a step for each such place, for the hazards of what guards see and do not see."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from compressor.training import Trainer, TrainStep
from harness.replay.hazard_parts import Net, at, classify, default_optimizer
from harness.replay.runs import Subject

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
