"""The words that the oracle, the recorder and the machines share: names of moments, and what is seen of a callback. Imports nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BATCH_EVENTS = ("BATCH_START", "LOSS_CALCULATED", "OPTIM_PRE_STEP", "OPTIM_POST_STEP", "BATCH_END")
CALIBRATION_EVENTS = ("CALIBRATION_START", "SEQUENTIAL_EPOCH_END", "CALIBRATION_END")
EVENTS = (*BATCH_EVENTS, *CALIBRATION_EVENTS)
MOMENTS = ("INITIALIZE", *EVENTS, "FINALIZE")
CALLBACKS = (
    "on_initialize",
    "on_event",
    "on_start",
    "on_update",
    "on_end",
    "on_calibration_start",
    "on_sequential_epoch_end",
    "on_calibration_end",
    "on_finalize",
)
ANSWERING = ("on_initialize", "on_finalize")

# What a callback did: came back, raised an Exception, or raised something that ends programs (KeyboardInterrupt).
Ending = Literal["returned", "raised", "interrupted"]


@dataclass(frozen=True)
class Settings:
    """What the recipe says of one modifier about time."""

    start: float | None = None
    end: float | None = None
    update: float | None = None


@dataclass(frozen=True)
class Flags:
    """The four flags of a modifier that everybody may read."""

    initialized: bool = False
    started: bool = False
    ended: bool = False
    finalized: bool = False


@dataclass(frozen=True)
class EventSeen:
    """What a callback is told about an event."""

    type: str
    index: float
    step: int
    has_loss: bool = False
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Expected:
    """A callback that has to come next; without an event where it is given none."""

    modifier: int
    callback: str
    event: EventSeen | None = None


@dataclass(frozen=True)
class Deed:
    """What happened inside a callback: its end and answer, the hooks it made and removed, the modules it replaced."""

    ending: Ending = "returned"
    answer: object = None
    hooks_added: tuple[str, ...] = ()
    hooks_removed: tuple[str, ...] = ()
    replaced: tuple[tuple[str, str], ...] = ()
