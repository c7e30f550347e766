"""A modifier that writes down its callbacks and misbehaves on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import PrivateAttr
from torch import nn

from compressor.lifecycle import Event, Modifier, State

CALLBACKS = (
    "on_event",
    "on_start",
    "on_update",
    "on_end",
    "on_calibration_start",
    "on_sequential_epoch_end",
    "on_calibration_end",
)


class Recorder(Modifier):
    """Logs (callback, index); runs what a test puts into `inside`; answers what a test puts into `answers`; hooks every child."""

    note: str = ""

    _log: list[tuple[str, float]] = PrivateAttr(default_factory=list)
    _inside: dict[str, Callable[[], Any]] = PrivateAttr(default_factory=dict)
    _answers: dict[str, Any] = PrivateAttr(default_factory=dict)
    _events: list[Event] = PrivateAttr(default_factory=list)

    @property
    def log(self) -> list[tuple[str, float]]:
        return self._log

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self._log]

    @property
    def events(self) -> list[Event]:
        return self._events

    @property
    def inside(self) -> dict[str, Callable[[], Any]]:
        return self._inside

    @property
    def answers(self) -> dict[str, Any]:
        return self._answers

    def _act(self, callback: str, event: Event | None) -> None:
        self._log.append((callback, 0.0 if event is None else event.index))
        if callback in self._inside:
            self._inside[callback]()

    def on_initialize(self, state: State) -> bool:
        for child in state.model.children():
            self.register_hook(child, lambda module, args, output: None, "forward")
        self._act("on_initialize", None)
        return self._answers.get("on_initialize", True)

    def on_finalize(self, state: State) -> bool:
        self._act("on_finalize", None)
        return self._answers.get("on_finalize", True)

    def on_event(self, state: State, event: Event) -> None:
        self._events.append(event)
        self._act("on_event", event)

    def on_start(self, state: State, event: Event) -> None:
        self._act("on_start", event)

    def on_update(self, state: State, event: Event) -> None:
        self._act("on_update", event)

    def on_end(self, state: State, event: Event) -> None:
        self._act("on_end", event)

    def on_calibration_start(self, state: State, event: Event) -> None:
        self._act("on_calibration_start", event)

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        self._act("on_sequential_epoch_end", event)

    def on_calibration_end(self, state: State, event: Event) -> None:
        self._act("on_calibration_end", event)


def _boom() -> None:
    raise ZeroDivisionError("planted")


def _num_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


@pytest.fixture(scope="session")
def recorder() -> type[Recorder]:
    """The class of the recording modifier."""
    return Recorder


@pytest.fixture(scope="session")
def callbacks() -> tuple[str, ...]:
    """Names of the event callbacks."""
    return CALLBACKS


@pytest.fixture(scope="session")
def boom() -> Callable[[], None]:
    """A callback body that raises ZeroDivisionError."""
    return _boom


@pytest.fixture(scope="session")
def num_hooks() -> Callable[[nn.Module], int]:
    """Counts all hooks on a model."""
    return _num_hooks


@pytest.fixture
def state() -> State:
    """The state of a run over two tiny layers."""
    return make_state()


def make_state() -> State:
    return State(model=nn.Sequential(nn.Linear(2, 2), nn.ReLU()), device=torch.device("cpu"))


@pytest.fixture(scope="session")
def new_state() -> Callable[[], State]:
    """Makes a fresh state: for tests that need several."""
    return make_state
