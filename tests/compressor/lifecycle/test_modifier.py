"""One modifier without a session: which calls are allowed, which callbacks come, and what an exception leaves behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from compressor.errors import LifecycleError, RecipeError
from compressor.lifecycle import CALLS, TRANSITIONS, Event, EventType, Flags, Modifier, State

Boom = Callable[[], None]


def event(kind: EventType, index: float = 0.0) -> Event:
    return Event(kind, index, int(index))


def run(modifier: Modifier, state: State, kind: EventType, index: float = 0.0) -> None:
    modifier.update_event(state, event(kind, index))


def test_only_on_initialize_is_required(state: State) -> None:
    class Least(Modifier):
        def on_initialize(self, state: State) -> bool:
            return True

    modifier = Least()
    assert modifier.initialize(state)
    for kind in EventType:
        run(modifier, state, kind)
    assert modifier.finalize(state)
    assert modifier.plan(state.model) == []
    assert modifier.calibration_need == "none"
    with pytest.raises(TypeError, match="on_initialize"):
        Modifier()  # type: ignore[abstract]


@pytest.mark.parametrize(
    "settings",
    [
        {"initialized": True},
        {"flags": Flags(initialized=True)},
        {"_lifecycle_flags": Flags(initialized=True)},
        {"typo": 1},
        {"start": math.nan},
        {"end": math.inf},
        {"start": 3, "end": 3},
        {"start": 4, "end": 3},
        {"update": -1},
        {"index": -1},
    ],
)
def test_settings_are_checked(recorder: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=rf"^{recorder.__name__}(\..+)?: .+; .+") as caught:
        recorder(**settings)
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize("flag", ["initialized", "started", "ended", "finalized"])
def test_flags_are_read_only(recorder: Any, flag: str) -> None:
    with pytest.raises(AttributeError):
        setattr(recorder(), flag, True)


def test_equality_is_equality_of_settings(recorder: Any, state: State) -> None:
    class Other(recorder):
        pass

    used, fresh = recorder(note="a"), recorder(note="a")
    used.initialize(state)
    assert used == fresh
    assert used != recorder(note="b")
    assert used != Other(note="a")
    assert used != "a"


@pytest.mark.parametrize("method", list(CALLS))
@pytest.mark.parametrize("stands", ["fresh", "initialized", "finalized"])
def test_calls_at_the_wrong_moment_are_refused_and_change_nothing(recorder: Any, state: State, method: str, stands: str) -> None:
    modifier = recorder(index=4)
    if stands != "fresh":
        modifier.initialize(state)
    if stands == "finalized":
        modifier.finalize(state)
    before, log = modifier.flags, list(modifier.log)
    args = (state, event(EventType.BATCH_START)) if method == "update_event" else (state,)
    if stands == ("fresh" if method == "initialize" else "initialized"):
        getattr(modifier, method)(*args)
        return
    is_now = "not initialized" if stands == "fresh" else stands
    with pytest.raises(LifecycleError, match=rf"Recorder\[4\]: {method}\(\) was called while the modifier is {is_now};"):
        getattr(modifier, method)(*args)
    assert modifier.flags == before
    assert modifier.log == log


@pytest.mark.parametrize("answer", [None, 1, 0, "True", [], 1.0])
@pytest.mark.parametrize("callback", ["on_initialize", "on_finalize"])
def test_an_answer_that_is_neither_true_nor_false_is_an_error(recorder: Any, state: State, callback: str, answer: Any) -> None:
    modifier = recorder()
    if callback == "on_finalize":
        modifier.initialize(state)
    modifier.answers[callback] = answer
    before = modifier.flags
    with pytest.raises(LifecycleError, match=rf"Recorder: {callback}\(\) returned .* return"):
        modifier.finalize(state) if callback == "on_finalize" else modifier.initialize(state)
    assert modifier.flags == before


def test_false_from_on_initialize_starts_nothing_and_leaves_no_hook(
    recorder: Any, state: State, num_hooks: Callable[[nn.Module], int]
) -> None:
    modifier = recorder(start=0)
    modifier.answers["on_initialize"] = False
    assert modifier.initialize(state) is False
    assert modifier.names == ["on_initialize"]
    assert modifier.flags == Flags()
    assert num_hooks(state.model) == 0


def test_false_from_on_finalize_is_not_finalized(recorder: Any, state: State) -> None:
    modifier = recorder()
    modifier.initialize(state)
    modifier.answers["on_finalize"] = False
    assert modifier.finalize(state) is False
    assert not modifier.finalized
    modifier.answers.clear()
    assert modifier.finalize(state) is True
    assert modifier.finalized


def test_finalize_removes_the_hooks(recorder: Any, state: State, num_hooks: Callable[[nn.Module], int]) -> None:
    modifier = recorder()
    modifier.initialize(state)
    assert num_hooks(state.model) == 2
    modifier.finalize(state)
    assert num_hooks(state.model) == 0


@pytest.mark.parametrize(
    ("start", "end", "started"), [(0, None, True), (0, 1, True), (-1, 0.5, True), (0.5, None, False), (None, None, False)]
)
def test_initialize_starts_what_starts_at_zero(recorder: Any, state: State, start: Any, end: Any, started: bool) -> None:
    modifier = recorder(start=start, end=end)
    modifier.initialize(state)
    assert modifier.started is started
    assert ("on_start" in modifier.names) is started


@pytest.mark.parametrize(("start", "end", "index", "expected"), [
    (None, None, 5, False), (None, 3, 1, False), (2, None, 1.99, False), (2, None, 2, True), (2, None, 99, True),
    (2, 4, 3.99, True), (2, 4, 4, False), (0.5, 0.75, 0.5, True),
])  # fmt: skip
def test_should_start_is_start_le_index_lt_end(recorder: Any, start: Any, end: Any, index: float, expected: bool) -> None:
    assert recorder(start=start, end=end).should_start(index) is expected


@pytest.mark.parametrize(("end", "index", "expected"), [(None, 9, False), (3, 2.99, False), (3, 3, True), (3, 4, True), (0, 0, True)])
def test_should_end_is_index_ge_end(recorder: Any, end: Any, index: float, expected: bool) -> None:
    assert recorder(end=end).should_end(index) is expected


@pytest.mark.parametrize("kind", list(EventType))
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("reached", ["nothing", "start", "end"])
def test_each_event_brings_the_callbacks_of_its_row(
    recorder: Any, state: State, kind: EventType, started: bool, ended: bool, reached: str
) -> None:
    """The second table of the contract, written out as branches."""
    modifier = recorder(start=10, end=20)
    modifier.initialize(state)
    modifier.restore_flags(modifier.flags._replace(started=started, ended=ended))
    before = modifier.flags
    modifier.log.clear()
    run(modifier, state, kind, {"nothing": 5, "start": 12, "end": 25}[reached])
    expected, flags = [], before
    if kind is EventType.CALIBRATION_START:
        expected, flags = ["on_calibration_start"], before._replace(started=True)
    elif kind is EventType.SEQUENTIAL_EPOCH_END:
        expected = ["on_sequential_epoch_end"]
    elif kind is EventType.CALIBRATION_END:
        expected, flags = ["on_calibration_end"], before._replace(ended=True)
    elif kind is EventType.BATCH_START and not started and reached == "start":
        expected, flags = ["on_start", "on_update"], before._replace(started=True)
    elif kind is EventType.BATCH_END and started and not ended and reached == "end":
        expected, flags = ["on_end", "on_update"], before._replace(ended=True)
    elif started and not ended:
        expected = ["on_update"]
    assert modifier.names == ["on_event", *expected]
    assert modifier.flags == flags


def test_flags_change_between_the_first_callback_and_the_second(recorder: Any, state: State) -> None:
    modifier, seen = recorder(start=1, end=2), []
    for callback in ("on_start", "on_update", "on_end"):
        modifier.inside[callback] = lambda callback=callback: seen.append((callback, modifier.started, modifier.ended))
    modifier.initialize(state)
    run(modifier, state, EventType.BATCH_START, 1)
    run(modifier, state, EventType.BATCH_END, 2)
    assert seen == [("on_start", False, False), ("on_update", True, False), ("on_end", True, False), ("on_update", True, True)]


@pytest.mark.parametrize("kind", list(EventType))
def test_an_exception_in_any_callback_leaves_the_flags(
    recorder: Any, state: State, callbacks: tuple[str, ...], boom: Boom, kind: EventType
) -> None:
    for started in (False, True):
        for callback in callbacks:
            modifier = recorder(start=1, end=2, update=1)
            modifier.initialize(state)
            modifier.restore_flags(modifier.flags._replace(started=started))
            before = modifier.flags
            modifier.inside[callback] = boom
            try:
                run(modifier, state, kind, 2 if started else 1)
            except ZeroDivisionError:
                assert modifier.flags == before
                del modifier.inside[callback]
                run(modifier, state, kind, 2 if started else 1)  # the call can be repeated
            else:
                assert callback not in modifier.names
            modifier.finalize(state)


@pytest.mark.parametrize("callback", ["on_initialize", "on_start"])
def test_an_exception_in_initialize_leaves_flags_and_no_hook(
    recorder: Any, state: State, boom: Boom, callback: str, num_hooks: Callable[[nn.Module], int]
) -> None:
    modifier = recorder(start=0)
    modifier.inside[callback] = boom
    with pytest.raises(ZeroDivisionError):
        modifier.initialize(state)
    assert modifier.flags == Flags()
    assert num_hooks(state.model) == 0
    modifier.inside.clear()
    assert modifier.initialize(state)


def test_an_exception_in_finalize_leaves_flags_and_hooks(
    recorder: Any, state: State, boom: Boom, num_hooks: Callable[[nn.Module], int]
) -> None:
    modifier = recorder()
    modifier.initialize(state)
    modifier.inside["on_finalize"] = boom
    with pytest.raises(ZeroDivisionError):
        modifier.finalize(state)
    assert modifier.flags == Flags(initialized=True)
    assert num_hooks(state.model) == 2


@pytest.mark.parametrize("callback", ["on_initialize", "on_update", "on_finalize"])
@pytest.mark.parametrize("method", list(CALLS))
def test_a_callback_must_not_drive_its_own_lifecycle(recorder: Any, state: State, callback: str, method: str) -> None:
    modifier, errors = recorder(start=0), []

    def reenter() -> None:
        args = (state, event(EventType.LOSS_CALCULATED)) if method == "update_event" else (state,)
        with pytest.raises(LifecycleError, match="from inside") as caught:
            getattr(modifier, method)(*args)
        errors.append(caught.value)

    modifier.inside[callback] = reenter
    modifier.initialize(state)
    run(modifier, state, EventType.BATCH_START)
    modifier.finalize(state)
    assert len(errors) == 1
    assert modifier.flags == Flags(initialized=True, started=True, finalized=True)
    assert modifier.names == ["on_initialize", "on_start", "on_event", "on_update", "on_finalize"]


BATCH = (EventType.BATCH_START, EventType.LOSS_CALCULATED, EventType.OPTIM_PRE_STEP, EventType.OPTIM_POST_STEP, EventType.BATCH_END)


def updated_batches(modifier: Any, state: State, num_batches: int, steps_per_epoch: int | None = None) -> dict[int, int]:
    """Number of on_update calls in each batch that has some."""
    found: dict[int, int] = {}
    for batch in range(num_batches):
        before = modifier.names.count("on_update")
        for kind in BATCH:
            step = batch + (kind is EventType.BATCH_END)
            modifier.update_event(state, Event(kind, step / (steps_per_epoch or 1), step))
        calls = modifier.names.count("on_update") - before
        if calls:
            found[batch] = calls
    return found


@given(start=st.integers(0, 6), length=st.integers(1, 6), update=st.integers(0, 4))
def test_updates_come_in_the_first_batch_of_each_interval(
    recorder: Any, new_state: Callable[[], State], start: int, length: int, update: int
) -> None:
    state, modifier = new_state(), recorder(start=start, end=start + length, update=update)
    modifier.initialize(state)
    batches = updated_batches(modifier, state, start + length + 3)
    last = start + length - 1
    expected = {batch: 5 for batch in range(start, last + 1) if update == 0 or (batch - start) % update == 0}
    assert batches == {**expected, last: expected.get(last, 1)}  # the last update, beside on_end, is never left out
    assert (modifier.log.count(("on_end", start + length)), modifier.names.count("on_end")) == (1, 1)


@pytest.mark.parametrize("steps_per_epoch", [3, 7, 10, 100])
def test_fractional_intervals_do_not_lose_batches_to_rounding(recorder: Any, state: State, steps_per_epoch: int) -> None:
    modifier = recorder(start=0, update=1 / steps_per_epoch)
    modifier.initialize(state)
    assert updated_batches(modifier, state, 3 * steps_per_epoch, steps_per_epoch) == dict.fromkeys(range(3 * steps_per_epoch), 5)


def test_an_interval_longer_than_one_batch_in_epochs(recorder: Any, state: State) -> None:
    modifier = recorder(start=0.5, update=0.3)
    modifier.initialize(state)
    # Multiples of 0.3 after 0.5: 0.5, 0.8, 1.1, 1.4, in batches of a tenth of an epoch.
    assert list(updated_batches(modifier, state, 16, 10)) == [5, 8, 11, 14]


def test_a_started_calibration_is_updated_by_intervals_from_zero(recorder: Any, state: State) -> None:
    modifier = recorder(update=2)
    modifier.initialize(state)
    run(modifier, state, EventType.CALIBRATION_START)
    assert list(updated_batches(modifier, state, 5)) == [0, 2, 4]


def test_tables_are_data() -> None:
    assert isinstance(TRANSITIONS, tuple)
    for row in TRANSITIONS:
        assert all(callable(getattr(Modifier, callback)) for callback in row.callbacks)
        assert row.condition is None or callable(getattr(Modifier, row.condition))
    with pytest.raises(TypeError):
        CALLS["initialize"] = (True, True)  # type: ignore[index]


@pytest.mark.parametrize("name", ["start", "end", "update"])
def test_a_method_cannot_have_the_name_of_a_setting(name: str) -> None:
    cls = type("Names", (Modifier,), {"__module__": __name__, "on_initialize": lambda self, state: True, name: lambda self: None})
    with pytest.raises(RecipeError, match=rf"^Names: {name} is a setting of every modifier, and a method has its name; give it another$"):
        cls()
