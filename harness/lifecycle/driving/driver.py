"""What the checks and machines drive: one run of a library over one model, in words that no library owns.

`Run` is the interface; an adapter for another library implements it with recorded modifiers of that library. `CompressorRun` is ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from compressor.data import CalibrationData
from compressor.lifecycle import Event, EventType, Modifier, Session, State
from harness.lifecycle.driving.callback_recorder import Recorder, record
from harness.lifecycle.driving.torch_settings import modes_aside
from harness.lifecycle.oracle import Deed, Flags, Settings

# Parts of the contract that a library may not have at all; a machine draws only what the run offers.
FEATURES = frozenset(
    {"update", "abort", "leave", "keep_originals", "payload", "reentry", "neighbours", "messages", "single_hooks", "standing"}
)


class Run(Protocol):
    """One run of several modifiers over one model.

    Attributes:
        model: the model; replaced modules are reached through it.
        recorder: notes the callbacks of all modifiers.
        features: the parts of the contract that the library has; see FEATURES.
    """

    model: nn.Module
    recorder: Recorder
    features: frozenset[str]

    def initialize(self) -> object:
        """Begin."""

    def send(self, event: str, has_loss: bool, modules: tuple[str, ...]) -> object:
        """Send an event by its name."""

    def finalize(self) -> object:
        """End."""

    def abort(self) -> object:
        """Give up."""

    def leave(self, error: BaseException | None) -> bool | None:
        """Leave the `with` block of the run, by an exception or without; True swallows the exception."""

    def call_modifier(self, number: int, method: str) -> None:
        """Call `initialize`, `update_event` or `finalize` of one modifier, past the session."""

    def hooks_disabled(self, number: int | None) -> AbstractContextManager[None]:
        """Put the hooks of one modifier, or of all, to sleep."""

    def flags(self) -> list[Flags]:
        """Return where every modifier stands."""

    def standing(self) -> tuple[str, int, float]:
        """Return the last moment, the step and the index."""

    def shared(self) -> Mapping[str, object]:
        """Return what the modifiers share apart from the model, by kind, for a snapshot."""


@runtime_checkable
class ActingRun(Protocol):
    """A run whose modifiers do what they are told, outside of callbacks too."""

    def act(self, number: int, step: str) -> Deed:
        """Have one modifier carry out a step outside of any callback."""


class Loss:
    """The loss of a batch as a training sends it: the way to a weight's gradient leads through it."""

    def __init__(self) -> None:
        """Compute 0.5 from a weight."""
        with modes_aside(), torch.inference_mode(False), torch.enable_grad():
            self._weight = torch.tensor(0.25, requires_grad=True)
            self.value = self._weight * 2

    def remarks(self) -> list[str]:
        """Go the way, and say whether callbacks have been on it."""
        is_whole = self.value.requires_grad and self._weight.grad is None
        with modes_aside():
            if is_whole and torch.autograd.grad(self.value, self._weight, allow_unused=True)[0] == 2:
                return []
        return ["a callback has cut, changed or gone the way from event.loss to the gradients, which the step goes; leave it as it is"]


class CompressorRun:
    """A run of this library.

    Args:
        model: the model; it will change.
        modifiers: fresh, in order; they become recorded.
        steps_per_epoch: as of the session.
        keep_originals: as of the state.
        session_class: the session to drive; a wrong one, when the harness itself is tested.
        data: calibration data, for modifiers that run forwards of their own.

    Attributes:
        way: what decides how it goes; None where nobody compares it with another run.
    """

    features = FEATURES
    way: tuple[object, ...] | None = None

    def __init__(
        self,
        model: nn.Module,
        modifiers: Sequence[Modifier],
        steps_per_epoch: int | None = None,
        keep_originals: bool = False,
        session_class: type[Session] | None = None,
        data: CalibrationData | None = None,
    ) -> None:
        self.model = model
        self.recorder = Recorder()
        self.modifiers = [record(modifier, self.recorder, number) for number, modifier in enumerate(modifiers)]
        self.state = State(model=model, data=data, keep_originals=keep_originals, has_steps=data is None)
        self.state.has_base_stream = data is not None and any(modifier.base_stream != "unused" for modifier in modifiers)
        self.session = (session_class or Session)(self.state, self.modifiers, steps_per_epoch)

    def initialize(self) -> None:
        """Begin."""
        self.session.initialize()

    def send(self, event: str, has_loss: bool = False, modules: tuple[str, ...] = ()) -> None:
        """Send an event.

        Args:
            event: its name.
            has_loss: send a loss with it.
            modules: names of modules to send with it.
        """
        sent, before = Loss() if has_loss else None, self.recorder.loss
        self.recorder.loss = loss = sent.value if sent is not None else None
        try:
            self.session.send(EventType[event], loss=loss, modules=modules)
            self.recorder.remarks += sent.remarks() if sent is not None else []
        finally:
            self.recorder.loss = before

    def finalize(self) -> None:
        """End."""
        self.session.finalize()

    def abort(self) -> None:
        """Give up."""
        self.session.abort()

    def leave(self, error: BaseException | None) -> bool | None:
        """Leave the `with` block.

        Args:
            error: the exception by which it is left, or None.

        Returns:
            What says whether the exception is swallowed.
        """
        leave: Callable[..., bool | None] = self.session.__exit__
        return leave(type(error) if error else None, error, None)

    def call_modifier(self, number: int, method: str) -> None:
        """Call a method of one modifier, past the session.

        Args:
            number: of the modifier.
            method: initialize, update_event or finalize.
        """
        call_modifier(self.modifiers[number], method, self.state)

    def act(self, number: int, step: str) -> Deed:
        """Have one modifier carry out a step outside of any callback.

        Args:
            number: of the modifier.
            step: as in an act.

        Returns:
            What was done.
        """
        return self.recorder.outside(number, step, self.modifiers[number], self.state)

    def hooks_disabled(self, number: int | None = None) -> AbstractContextManager[None]:
        """Put hooks to sleep.

        Args:
            number: of the modifier; all modifiers where None.

        Returns:
            The context.
        """
        return self.session.hooks_disabled() if number is None else self.modifiers[number].disable_hooks()

    def flags(self) -> list[Flags]:
        """Return where every modifier stands."""
        return [flags_of(modifier) for modifier in self.modifiers]

    def standing(self) -> tuple[str, int, float]:
        """Return the last moment, the step and the index."""
        return self.session.last.name, self.session.step, self.session.index

    def shared(self) -> Mapping[str, object]:
        """Return the shared state and the settings of every modifier, by kind."""
        state = {name: value for name, value in vars(self.state).items() if name != "model"}
        settings = {f"{modifier.label}.{name}": value for modifier in self.modifiers for name, value in settings_of(modifier).items()}
        return {"state": state, "settings": settings, "session": list(self.standing())}


def settings_of(modifier: Modifier) -> dict[str, object]:
    """Return the fields of a modifier, without what it keeps under private names, and what a cached property has made of them."""
    own = vars(modifier).items()
    return {name: value for name, value in own if not name.startswith("_") and not isinstance(_of_class(modifier, name), cached_property)}


def _of_class(modifier: Modifier, name: str) -> object:
    return inspect.getattr_static(type(modifier), name, None)


def flags_of(modifier: Modifier) -> Flags:
    """Return the four flags that a modifier shows."""
    return Flags(modifier.initialized, modifier.started, modifier.ended, modifier.finalized)


def call_modifier(modifier: Modifier, method: str, state: State) -> Any:
    """Call one method of the lifecycle on a modifier.

    Args:
        modifier: as it stands.
        method: initialize, update_event or finalize.
        state: the argument.

    Returns:
        What the method answers.
    """
    if method == "update_event":
        return modifier.update_event(state, Event(EventType.BATCH_START))
    return getattr(modifier, method)(state)


def apply_settings(modifier: Modifier, settings: Settings) -> Modifier:
    """Return a fresh copy of a modifier with other times.

    Args:
        modifier: not modified.
        settings: the times.

    Returns:
        The copy.
    """
    return set_times(modifier.model_copy(deep=True), settings)


def set_times(modifier: Modifier, settings: Settings) -> Modifier:
    """Give a fresh modifier other times, past its validators: what cannot be is not asked for. Changes the modifier.

    Args:
        modifier: fresh.
        settings: the times.

    Returns:
        The modifier.
    """
    times = {"start": settings.start, "end": settings.end, "update": settings.update}
    modifier.__dict__.update(times)
    modifier.__pydantic_fields_set__.update(times)
    return modifier
