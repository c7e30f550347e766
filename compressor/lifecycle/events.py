"""What can happen to a session, and in which order: the FOLLOWS table is the whole rule, the session only obeys it.

The index of an event says how far training has come. `step` counts the batches that have ended: every event of the first batch up to
OPTIM_POST_STEP has step 0, its BATCH_END has step 1, the next BATCH_START has step 1 again. Without `steps_per_epoch` the index is
the step; with it the index is the epoch as a fraction, step / steps_per_epoch. So `start=3, end=5` covers exactly the fourth and the
fifth batch, and `end` equal to the length of the run does fire, at the last BATCH_END.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

import torch


class EventType(StrEnum):
    """Every event that can be sent to a session."""

    BATCH_START = "batch_start"
    LOSS_CALCULATED = "loss_calculated"
    OPTIM_PRE_STEP = "optim_pre_step"
    OPTIM_POST_STEP = "optim_post_step"
    BATCH_END = "batch_end"
    CALIBRATION_START = "calibration_start"
    SEQUENTIAL_EPOCH_END = "sequential_epoch_end"
    CALIBRATION_END = "calibration_end"


class Call(StrEnum):
    """The moments of a session that are methods (or its creation), never events to send."""

    CREATE = "create"
    INITIALIZE = "initialize"
    FINALIZE = "finalize"
    ABORT = "abort"


Moment = EventType | Call

# Each moment, and the last moments that it may follow. ABORT may follow anything, and nothing follows FINALIZE or ABORT.
FOLLOWS: Mapping[Moment, Set[Moment]] = MappingProxyType(
    {
        Call.INITIALIZE: frozenset({Call.CREATE}),
        EventType.BATCH_START: frozenset({Call.INITIALIZE, EventType.BATCH_END, EventType.CALIBRATION_END}),
        EventType.LOSS_CALCULATED: frozenset({EventType.BATCH_START}),
        EventType.OPTIM_PRE_STEP: frozenset({EventType.LOSS_CALCULATED}),
        EventType.OPTIM_POST_STEP: frozenset({EventType.OPTIM_PRE_STEP}),
        EventType.BATCH_END: frozenset({EventType.BATCH_START, EventType.LOSS_CALCULATED, EventType.OPTIM_POST_STEP}),
        EventType.CALIBRATION_START: frozenset({Call.INITIALIZE, EventType.BATCH_END}),
        EventType.SEQUENTIAL_EPOCH_END: frozenset({EventType.CALIBRATION_START, EventType.SEQUENTIAL_EPOCH_END}),
        EventType.CALIBRATION_END: frozenset({EventType.CALIBRATION_START, EventType.SEQUENTIAL_EPOCH_END}),
        Call.FINALIZE: frozenset({Call.INITIALIZE, EventType.BATCH_END, EventType.CALIBRATION_END}),
    }
)

# Moments that a session takes at most once, whatever lies between.
ONCE: Set[Moment] = frozenset({EventType.CALIBRATION_START})


def allowed_moments(last: Moment, past: Set[Moment]) -> list[Moment]:
    """List what may come next.

    Args:
        last: the last moment of the session.
        past: every moment that the session has seen.

    Returns:
        The allowed moments, in the order of the FOLLOWS table.
    """
    return [moment for moment, before in FOLLOWS.items() if last in before and not (moment in ONCE and moment in past)]


@dataclass(frozen=True)
class Event:
    """One event as the modifiers see it.

    Attributes:
        type: what happened.
        index: how far training has come: the step, or the fractional epoch where steps_per_epoch is known.
        step: number of batches that have ended.
        loss: the loss of the batch; only LOSS_CALCULATED carries one.
        modules: dotted names of the subgraph's modules; only SEQUENTIAL_EPOCH_END carries them.
    """

    type: EventType
    index: float = 0.0
    step: int = 0
    loss: torch.Tensor | None = field(default=None, compare=False)
    modules: tuple[str, ...] = ()
