"""What a session knows of a modifier: its interface, and two tables.

CALLS says when a method may be called, TRANSITIONS which callbacks an event brings. `modifier.py` only obeys them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

from compressor.lifecycle.events import Event, EventType
from compressor.lifecycle.state import Detail, State

# `own`: data for forwards that the modifier runs by itself when calibration starts; nothing has to flow for it afterwards.
CalibrationNeed = Literal["none", "own", "basic", "sequential"]
BaseStream = Literal["unused", "wanted", "required"]
# In a run that several processes share: `sums` of what each sees of its own samples; or all of the work, on all samples, in each of them.
AcrossRanks = Literal["sums", "repeats"]


class Flags(NamedTuple):
    """Where a modifier stands. `period` and `due` follow the `update` interval: its number, and whether this batch is the first in it."""

    initialized: bool = False
    started: bool = False
    ended: bool = False
    finalized: bool = False
    period: int | None = None
    due: bool = False


# Each method of the session's side, and the (initialized, finalized) that it needs.
CALLS: Mapping[str, tuple[bool, bool]] = MappingProxyType(
    {"initialize": (False, False), "update_event": (True, False), "finalize": (True, False)}
)


class Transition(NamedTuple):
    """One row: an event (None: any), what must hold, the callbacks in order, and the flag that is set as soon as the first has returned."""

    event: EventType | None
    started: bool | None
    ended: bool | None
    condition: Literal["should_start", "should_end", "should_update"] | None
    callbacks: tuple[str, ...]
    sets: Literal["started", "ended"] | None


# `on_event` comes first for every event; then the first row that fits.
TRANSITIONS: tuple[Transition, ...] = (
    Transition(EventType.CALIBRATION_START, None, None, None, ("on_calibration_start",), "started"),
    Transition(EventType.SEQUENTIAL_EPOCH_END, None, None, None, ("on_sequential_epoch_end",), None),
    Transition(EventType.CALIBRATION_END, None, None, None, ("on_calibration_end",), "ended"),
    Transition(EventType.BATCH_START, False, None, "should_start", ("on_start", "on_update"), "started"),
    Transition(EventType.BATCH_END, True, False, "should_end", ("on_end", "on_update"), "ended"),
    Transition(None, True, False, "should_update", ("on_update",), None),
)

# What the batches of a training bring; `on_event` to a modifier without `start`, too.
TRAINING_CALLBACKS = ("on_event", "on_start", "on_update", "on_end")


@dataclass(frozen=True)
class PlannedModule:
    """What a modifier would do to one module.

    Attributes:
        name: dotted module name.
        modifier: class name of the modifier.
        scheme: the scheme in words; None where the module stays as it is.
        reason: why it stays as it is; None where it does not.
        details: estimates and settings for the table, for example `bytes_before`, `bytes_after`, `statistics_bytes`.
    """

    name: str
    modifier: str
    scheme: str | None
    reason: str | None = None
    details: Mapping[str, Detail] = field(default_factory=lambda: MappingProxyType({}))


class ModifierInterface(ABC):
    """What a session needs of a modifier."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The name in messages."""

    @property
    @abstractmethod
    def flags(self) -> Flags:
        """Where the modifier stands."""

    @abstractmethod
    def restore_flags(self, flags: Flags) -> None:
        """Go back to earlier flags, after a call of the session that failed as a whole."""

    @abstractmethod
    def initialize(self, state: State) -> bool:
        """Prepare for a model; False means that the modifier cannot work on it."""

    @abstractmethod
    def update_event(self, state: State, event: Event) -> None:
        """Take one event."""

    @abstractmethod
    def finalize(self, state: State) -> bool:
        """End the work; False means that it could not be completed."""
