"""The table of moments says what the contract says, in other words than the table's own."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from compressor.lifecycle import FOLLOWS, Call, Event, EventType
from compressor.lifecycle.events import ONCE, allowed_moments

IN_BATCH = {EventType.BATCH_START, EventType.LOSS_CALCULATED, EventType.OPTIM_PRE_STEP, EventType.OPTIM_POST_STEP}
IN_CALIBRATION = {EventType.CALIBRATION_START, EventType.SEQUENTIAL_EPOCH_END}
OUTSIDE = {Call.INITIALIZE, EventType.BATCH_END, EventType.CALIBRATION_END}
EVERYTHING = [*Call, *EventType]
# (last moment, calibrated before?); a calibration that ended has started.
SITUATIONS = [(last, seen) for last, seen in itertools.product(EVERYTHING, [False, True]) if seen or last is not EventType.CALIBRATION_END]


def contract_allows(last: object, given: object, past: set[object]) -> bool:
    """The contract's sentences, one branch each."""
    match given:
        case Call.INITIALIZE:
            return last is Call.CREATE
        case EventType.BATCH_START | Call.FINALIZE:
            return last in OUTSIDE
        case EventType.LOSS_CALCULATED:
            return last is EventType.BATCH_START
        case EventType.OPTIM_PRE_STEP:
            return last is EventType.LOSS_CALCULATED
        case EventType.OPTIM_POST_STEP:
            return last is EventType.OPTIM_PRE_STEP
        case EventType.BATCH_END:
            return last in IN_BATCH - {EventType.OPTIM_PRE_STEP}
        case EventType.CALIBRATION_START:
            return last in OUTSIDE and EventType.CALIBRATION_START not in past
        case EventType.SEQUENTIAL_EPOCH_END | EventType.CALIBRATION_END:
            return last in IN_CALIBRATION
    return False


@pytest.mark.parametrize(("last", "calibrated"), SITUATIONS)
def test_the_table_says_what_the_contract_says(last: Call | EventType, calibrated: bool) -> None:
    past: set[Call | EventType] = {last} | ({EventType.CALIBRATION_START} if calibrated else set())
    assert set(allowed_moments(last, past)) == {given for given in EVERYTHING if contract_allows(last, given, past)}


@pytest.mark.parametrize("call", list(Call))
def test_calls_are_no_events(call: Call) -> None:
    assert call.value not in {event.value for event in EventType}


def test_every_event_can_happen_and_nothing_follows_the_end() -> None:
    assert set(FOLLOWS) == {*EventType, Call.INITIALIZE, Call.FINALIZE}
    assert all(before for before in FOLLOWS.values())
    assert not allowed_moments(Call.FINALIZE, {Call.FINALIZE})
    assert not allowed_moments(Call.ABORT, {Call.ABORT})


def test_the_tables_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        FOLLOWS[EventType.BATCH_START] = frozenset()  # type: ignore[index]
    assert isinstance(ONCE, frozenset)


def test_events_are_frozen_and_compare_without_their_loss() -> None:
    event = Event(EventType.LOSS_CALCULATED, 1.0, 1, torch.zeros(2))
    assert event == Event(EventType.LOSS_CALCULATED, 1.0, 1, torch.ones(2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.index = 2.0  # type: ignore[misc]
