"""A whole session: order of events, an index that advances, everything or nothing, and no trace after a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from compressor.errors import FinalizeError, LifecycleError
from compressor.lifecycle import Call, EventType, Flags, Report, Session, State

Boom = Callable[[], None]
Count = Callable[[nn.Module], int]
LOSS = torch.zeros(())
BATCH = (EventType.BATCH_START, EventType.LOSS_CALCULATED, EventType.OPTIM_PRE_STEP, EventType.OPTIM_POST_STEP, EventType.BATCH_END)


def send(session: Session, kind: EventType) -> None:
    session.send(
        kind, loss=LOSS if kind is EventType.LOSS_CALCULATED else None, modules=("0",) if kind is EventType.SEQUENTIAL_EPOCH_END else ()
    )


def batch(session: Session) -> None:
    send(session, EventType.BATCH_START)
    send(session, EventType.BATCH_END)


def snapshot(session: Session) -> tuple[Any, ...]:
    return (session.last, session.step, [(m.flags, list(m.log)) for m in session.modifiers], dict(session.state.model.named_modules()))


# --- order of events


@given(st.lists(st.sampled_from([*EventType, Call.INITIALIZE, Call.FINALIZE]), max_size=25))
def test_illegal_moments_raise_and_change_nothing_legal_ones_go_through(
    recorder: Any, new_state: Callable[[], State], moments: list[EventType | Call]
) -> None:
    session = Session(new_state(), [recorder(start=1, end=3), recorder()])
    phase, finished, calibrated, stage = "created", 0, False, ""
    inside = dict(zip(BATCH, ["start", "loss", "pre", "post", "end"], strict=True))
    for moment in moments:
        # An independent account of the order: where we are, and the last event inside a batch.
        if moment is Call.INITIALIZE:
            legal = phase == "created"
        elif moment is Call.FINALIZE or moment is EventType.BATCH_START:
            legal = phase == "idle"
        elif moment is EventType.CALIBRATION_START:
            legal = phase == "idle" and not calibrated
        elif moment in (EventType.SEQUENTIAL_EPOCH_END, EventType.CALIBRATION_END):
            legal = phase == "calibration"
        else:
            before = {
                EventType.LOSS_CALCULATED: {"start"},
                EventType.OPTIM_PRE_STEP: {"loss"},
                EventType.OPTIM_POST_STEP: {"pre"},
                EventType.BATCH_END: {"start", "loss", "post"},
            }[moment]
            legal = phase == "batch" and stage in before
        call: Callable[[], None] = {Call.INITIALIZE: session.initialize, Call.FINALIZE: session.finalize}.get(
            moment, lambda m=moment: send(session, m)
        )  # type: ignore[call-overload]
        if not legal:
            found = snapshot(session)
            with pytest.raises(LifecycleError):
                call()
            assert snapshot(session) == found
            continue
        call()
        assert session.last is moment
        finished += moment is EventType.BATCH_END
        assert session.step == finished
        calibrated |= moment is EventType.CALIBRATION_START
        phase = {
            Call.INITIALIZE: "idle", Call.FINALIZE: "done", EventType.BATCH_START: "batch", EventType.BATCH_END: "idle",
            EventType.CALIBRATION_START: "calibration", EventType.CALIBRATION_END: "idle",
        }.get(moment, phase)  # fmt: skip
        stage = inside.get(moment, stage)


def test_the_error_shows_the_last_event_the_given_one_and_those_allowed(recorder: Any, state: State) -> None:
    session = Session(state, [recorder()])
    session.initialize()
    batch(session)
    with pytest.raises(LifecycleError) as caught:
        send(session, EventType.BATCH_END)
    assert str(caught.value) == "session: BATCH_END is not allowed after BATCH_END; allowed now: BATCH_START, CALIBRATION_START, finalize()"
    session.finalize()
    with pytest.raises(
        LifecycleError, match=r"initialize\(\) is not allowed after finalize\(\); allowed now: nothing: create a new session"
    ):
        session.initialize()


def test_a_second_calibration_is_refused_also_after_a_batch(recorder: Any, state: State) -> None:
    session = Session(state, [recorder()])
    session.initialize()
    send(session, EventType.CALIBRATION_START)
    send(session, EventType.CALIBRATION_END)
    batch(session)
    with pytest.raises(LifecycleError, match="allowed now: BATCH_START, finalize"):
        send(session, EventType.CALIBRATION_START)


@pytest.mark.parametrize("moment", ["initialize", "finalize", "batch_start", Call.INITIALIZE, Call.FINALIZE, Call.ABORT, None])
def test_only_event_types_can_be_sent(recorder: Any, state: State, moment: Any) -> None:
    session = Session(state, [recorder()])
    session.initialize()
    found = snapshot(session)
    with pytest.raises(LifecycleError, match="no event"):
        session.send(moment)
    assert snapshot(session) == found


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (EventType.LOSS_CALCULATED, {}),
        (EventType.LOSS_CALCULATED, {"loss": 0.5}),
        (EventType.BATCH_END, {"loss": LOSS}),
        (EventType.BATCH_END, {"modules": ("0",)}),
    ],
)
def test_a_loss_and_modules_come_with_their_event_only(recorder: Any, state: State, kind: EventType, payload: dict[str, Any]) -> None:
    session = Session(state, [recorder()])
    session.initialize()
    send(session, EventType.BATCH_START)
    found = snapshot(session)
    with pytest.raises(LifecycleError, match=kind.name):
        session.send(kind, **payload)
    assert snapshot(session) == found


def test_one_string_is_no_tuple_of_modules(recorder: Any, state: State) -> None:
    session = Session(state, [recorder()])
    session.initialize()
    send(session, EventType.CALIBRATION_START)
    with pytest.raises(LifecycleError, match="one string"):
        session.send(EventType.SEQUENTIAL_EPOCH_END, modules="model.layers.0")


def test_events_carry_loss_and_modules(recorder: Any, state: State) -> None:
    session = Session(state, [recorder()])
    session.initialize()
    send(session, EventType.BATCH_START)
    session.send(EventType.LOSS_CALCULATED, loss=LOSS)
    send(session, EventType.BATCH_END)
    send(session, EventType.CALIBRATION_START)
    session.send(EventType.SEQUENTIAL_EPOCH_END, modules=["a", "b"])
    events = session.modifiers[0].events
    assert events[1].loss is LOSS
    assert events[-1].modules == ("a", "b")
    assert [event.loss for event in events if event.type is not EventType.LOSS_CALCULATED] == [None] * 4


@pytest.mark.parametrize(("modifiers", "given"), [([], "an empty list"), (["GPTQModifier", None], "str, NoneType"), ([State], "type")])
def test_a_session_needs_modifiers(state: State, modifiers: list[Any], given: str) -> None:
    with pytest.raises(LifecycleError, match=f"session: {given} was given as modifiers"):
        Session(state, modifiers)


@pytest.mark.parametrize("steps", [0, -3])
def test_steps_per_epoch_must_be_positive(recorder: Any, state: State, steps: int) -> None:
    with pytest.raises(LifecycleError, match="steps_per_epoch"):
        Session(state, [recorder()], steps_per_epoch=steps)


def test_one_modifier_cannot_stand_twice_or_in_two_sessions(recorder: Any, new_state: Callable[[], State], num_hooks: Count) -> None:
    modifier, state = recorder(), new_state()
    with pytest.raises(LifecycleError, match="while the modifier is initialized"):
        Session(state, [modifier, modifier]).initialize()
    assert modifier.flags == Flags()
    assert num_hooks(state.model) == 0
    Session(new_state(), [modifier]).initialize()
    with pytest.raises(LifecycleError, match="while the modifier is initialized"):
        Session(new_state(), [modifier]).initialize()


# --- the index


def test_the_index_counts_finished_batches(recorder: Any, state: State) -> None:
    session = Session(state, [recorder()])
    session.initialize()
    for _ in range(3):
        send(session, EventType.BATCH_START)
        send(session, EventType.LOSS_CALCULATED)
        send(session, EventType.OPTIM_PRE_STEP)
        send(session, EventType.OPTIM_POST_STEP)
        send(session, EventType.BATCH_END)
    events = session.modifiers[0].events
    assert [event.step for event in events] == [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3]
    assert [event.index for event in events] == [float(event.step) for event in events]
    assert (session.step, session.index) == (3, 3.0)


@given(start=st.integers(0, 5), length=st.integers(1, 5), steps_per_epoch=st.sampled_from([None, 1, 3, 4, 10]))
def test_start_and_end_come_exactly_where_they_should(
    recorder: Any, new_state: Callable[[], State], start: int, length: int, steps_per_epoch: int | None
) -> None:
    unit = steps_per_epoch or 1
    end = start + length
    session = Session(new_state(), [recorder(start=start / unit, end=end / unit)], steps_per_epoch=steps_per_epoch)
    session.initialize()
    started_in, ended_in = [], []
    (modifier,) = session.modifiers
    for number in range(end + 2):
        send(session, EventType.BATCH_START)
        started_in += [number] * modifier.started
        send(session, EventType.BATCH_END)
        ended_in += [number] * modifier.ended
    assert started_in[0] == start
    assert ended_in[0] == end - 1  # `end` batches have ended then
    assert [entry for entry in modifier.log if entry[0] in ("on_start", "on_end")] == [("on_start", start / unit), ("on_end", end / unit)]


def test_a_fractional_start_waits_for_the_batch_that_reaches_it(recorder: Any, state: State) -> None:
    session = Session(state, [recorder(start=0.3, end=0.6)], steps_per_epoch=4)
    session.initialize()
    for _ in range(4):
        batch(session)
    log = [entry for entry in session.modifiers[0].log if entry[0] in ("on_start", "on_end")]
    assert log == [("on_start", 0.5), ("on_end", 0.75)]


def test_an_end_at_the_end_of_training_fires(recorder: Any, state: State) -> None:
    session = Session(state, [recorder(start=0, end=2)], steps_per_epoch=2)
    session.initialize()
    for _ in range(4):
        batch(session)
    assert session.modifiers[0].ended


def test_on_end_never_comes_without_on_start(recorder: Any, state: State) -> None:
    session = Session(state, [recorder(end=1)])
    session.initialize()
    for _ in range(3):
        batch(session)
    assert "on_end" not in session.modifiers[0].names


# --- everything or nothing


class Replaces(nn.Module):
    """Stands in for a compressed layer."""


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("failure", ["raises", "False", "None", "interrupt", "on_start"])
def test_a_failed_initialize_rolls_everything_back(
    recorder: Any, state: State, boom: Boom, num_hooks: Count, failure: str, keep: bool
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    state.keep_originals = keep
    before = dict(state.model.named_modules())
    first, second, third = recorder(start=0, note="first"), recorder(start=0, index=1), recorder()
    state.claim(["1"], "somebody")

    def work() -> None:
        state.replace_module("0", Replaces())
        state.claim(["0"], "first")
        state.report.add_fallback("0", "rtn", "dead")

    first.inside["on_initialize"] = work
    if failure in ("raises", "interrupt", "on_start"):
        second.inside["on_start" if failure == "on_start" else "on_initialize"] = interrupt if failure == "interrupt" else boom
    else:
        second.answers["on_initialize"] = {"False": False, "None": None}[failure]
    session = Session(state, [first, second, third])
    expected = {"raises": ZeroDivisionError, "on_start": ZeroDivisionError, "interrupt": KeyboardInterrupt}.get(failure, LifecycleError)
    with pytest.raises(expected) as caught:
        session.initialize()
    if expected is LifecycleError:
        assert "Recorder[1]" in str(caught.value)
    assert [m.flags for m in session.modifiers] == [Flags()] * 3
    assert third.log == []
    assert dict(state.model.named_modules()) == before
    assert state.originals == {}
    assert state.keep_originals is keep
    assert state.claims == {"1": "somebody"}
    assert state.report == Report()
    assert num_hooks(state.model) == 0
    second.inside.clear()
    second.answers.clear()
    session.initialize()  # as if it had never been tried
    assert all(m.initialized for m in session.modifiers)


@pytest.mark.parametrize("keep", [False, True])
def test_initialize_keeps_originals_only_when_asked(recorder: Any, state: State, keep: bool) -> None:
    state.keep_originals = keep
    modifier = recorder()
    modifier.inside["on_initialize"] = lambda: state.replace_module("0", Replaces())
    Session(state, [modifier]).initialize()
    assert list(state.originals) == ["0"] * keep


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_a_failed_send_aborts_the_session_and_leaves_no_trace(
    recorder: Any, state: State, num_hooks: Count, error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error

    state.keep_originals = True
    before = dict(state.model.named_modules())
    first, second, third = recorder(), recorder(), recorder()
    first.inside["on_calibration_start"] = lambda: state.replace_module("0", Replaces())
    second.inside["on_calibration_start"] = fail
    session = Session(state, [first, second, third])
    session.initialize()
    with pytest.raises(error):
        send(session, EventType.CALIBRATION_START)
    assert [m.flags for m in session.modifiers] == [Flags(initialized=True)] * 3
    assert "on_event" not in third.names
    assert dict(state.model.named_modules()) == before
    assert num_hooks(state.model) == 0
    assert session.last is Call.ABORT
    with pytest.raises(LifecycleError, match=r"after abort\(\); allowed now: nothing"):
        session.finalize()


def test_a_failed_batch_end_does_not_advance_the_step(recorder: Any, state: State, boom: Boom) -> None:
    session = Session(state, [recorder()])
    session.initialize()
    send(session, EventType.BATCH_START)
    session.modifiers[0].inside["on_event"] = boom
    with pytest.raises(ZeroDivisionError):
        send(session, EventType.BATCH_END)
    assert session.step == 0


def test_all_modifiers_finalize_and_all_errors_are_raised_together(recorder: Any, state: State, boom: Boom, num_hooks: Count) -> None:
    state.keep_originals = True
    before = dict(state.model.named_modules())
    modifiers = [recorder(index=number) for number in range(5)]
    modifiers[0].inside["on_finalize"] = lambda: state.replace_module("0", Replaces())
    modifiers[1].inside["on_finalize"] = boom
    modifiers[2].answers["on_finalize"] = False
    modifiers[3].answers["on_finalize"] = None
    session = Session(state, modifiers)
    session.initialize()
    with pytest.raises(FinalizeError, match="3 of 5 modifiers failed to finalize") as caught:
        session.finalize()
    first, second, third = caught.value.exceptions
    assert isinstance(first, ZeroDivisionError)
    assert isinstance(second, LifecycleError) and "Recorder[2]" in str(second) and "False" in str(second)
    assert isinstance(third, LifecycleError) and "Recorder[3]" in str(third) and "None" in str(third)
    assert [m.finalized for m in modifiers] == [True, False, False, False, True]
    assert num_hooks(state.model) == 0
    assert dict(state.model.named_modules()) == before
    assert session.last is Call.ABORT


def test_an_interrupt_in_finalize_is_not_collected(recorder: Any, state: State, num_hooks: Count) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    modifiers = [recorder(), recorder()]
    modifiers[0].inside["on_finalize"] = interrupt
    session = Session(state, modifiers)
    session.initialize()
    with pytest.raises(KeyboardInterrupt):
        session.finalize()
    assert not modifiers[1].finalized
    assert num_hooks(state.model) == 0
    assert session.last is Call.ABORT


@pytest.mark.parametrize("moment", ["created", "initialized", "batch", "calibration", "finalized", "aborted"])
def test_abort_works_at_any_moment(recorder: Any, state: State, num_hooks: Count, moment: str) -> None:
    state.keep_originals = True
    before = dict(state.model.named_modules())
    session = Session(state, [recorder()])
    if moment != "created":
        session.initialize()
        state.replace_module("0", Replaces())
    if moment == "batch":
        send(session, EventType.BATCH_START)
    if moment == "calibration":
        send(session, EventType.CALIBRATION_START)
    if moment == "finalized":
        session.finalize()
    if moment == "aborted":
        session.abort()
    session.abort()
    assert num_hooks(state.model) == 0
    assert dict(state.model.named_modules()) == before
    assert session.last is Call.ABORT


# --- the block


def test_leaving_the_block_by_an_exception_aborts(recorder: Any, state: State, num_hooks: Count) -> None:
    with pytest.raises(KeyboardInterrupt), Session(state, [recorder()]) as session:
        session.initialize()
        raise KeyboardInterrupt
    assert session.last is Call.ABORT
    assert num_hooks(state.model) == 0


def test_an_exception_after_finalize_still_puts_originals_back(recorder: Any, state: State) -> None:
    state.keep_originals = True
    before = dict(state.model.named_modules())
    with pytest.raises(OSError, match="disk"), Session(state, [recorder()]) as session:
        session.initialize()
        state.replace_module("0", Replaces())
        session.finalize()
        raise OSError("disk full")
    assert dict(state.model.named_modules()) == before


def test_leaving_the_block_in_the_middle_of_a_run_is_an_error(recorder: Any, state: State, num_hooks: Count) -> None:
    with pytest.raises(LifecycleError, match="left after BATCH_START, without finalize"), Session(state, [recorder()]) as session:
        session.initialize()
        send(session, EventType.BATCH_START)
    assert num_hooks(state.model) == 0
    assert session.last is Call.ABORT


def test_a_finished_block_forgets_originals(recorder: Any, state: State) -> None:
    state.keep_originals = True
    with Session(state, [recorder()]) as session:
        session.initialize()
        state.replace_module("0", Replaces())
        session.finalize()
        assert list(state.originals) == ["0"]
    assert state.originals == {}
    assert isinstance(state.model[0], Replaces)  # type: ignore[index]


@pytest.mark.parametrize("action", ["nothing", "abort"])
def test_a_block_without_a_run_ends_quietly(recorder: Any, state: State, action: str) -> None:
    with Session(state, [recorder()]) as session:
        if action == "abort":
            session.initialize()
            session.abort()
    assert session.last is (Call.ABORT if action == "abort" else Call.CREATE)


# --- re-entrancy and threads


@pytest.mark.parametrize("act", ["send", "finalize", "initialize", "abort"])
def test_a_callback_must_not_drive_its_session(recorder: Any, state: State, act: str, num_hooks: Count) -> None:
    modifier, errors = recorder(), []
    session = Session(state, [modifier, recorder()])
    calls = {
        "send": lambda: send(session, EventType.LOSS_CALCULATED),
        "finalize": session.finalize,
        "initialize": session.initialize,
        "abort": session.abort,
    }

    def reenter() -> None:
        with pytest.raises(LifecycleError, match="must not drive") as caught:
            calls[act]()
        errors.append(caught.value)

    modifier.inside.update(on_initialize=reenter, on_event=reenter, on_finalize=reenter)
    session.initialize()
    batch(session)
    assert num_hooks(state.model) == 4
    session.finalize()
    assert len(errors) == 4
    assert session.last is Call.FINALIZE


def test_a_re_entrant_call_that_is_not_caught_aborts(recorder: Any, state: State) -> None:
    modifier = recorder()
    session = Session(state, [modifier])
    modifier.inside["on_event"] = lambda: send(session, EventType.LOSS_CALCULATED)
    session.initialize()
    with pytest.raises(LifecycleError, match="must not drive"):
        send(session, EventType.BATCH_START)
    assert session.last is Call.ABORT


def test_a_session_can_be_used_again_after_a_refused_call(recorder: Any, state: State) -> None:
    session = Session(state, [recorder()])
    with pytest.raises(LifecycleError):
        session.finalize()
    session.initialize()
    session.finalize()


def test_sessions_in_threads_do_not_see_each_other(recorder: Any, new_state: Callable[[], State]) -> None:
    barrier, results = threading.Barrier(2, timeout=30), {}

    def work(number: int) -> None:
        session = Session(new_state(), [recorder(start=number, end=3 + number)])
        session.initialize()
        for _ in range(5):
            barrier.wait()
            with session.hooks_disabled():
                barrier.wait()
                batch(session)
        session.finalize()
        results[number] = session.modifiers[0].log

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        assert [entry for entry in results[number] if entry[0] in ("on_start", "on_end")] == [("on_start", number), ("on_end", 3 + number)]


def test_hooks_disabled_nests_over_all_modifiers(recorder: Any, state: State) -> None:
    modifiers, calls = [recorder(), recorder()], []
    session = Session(state, modifiers)
    session.initialize()
    for modifier in modifiers:
        modifier.register_hook(state.model[0], lambda m, args, out: calls.append(1), "forward")  # type: ignore[index]
    x = torch.ones(1, 2)
    with session.hooks_disabled():
        with session.hooks_disabled():
            state.model(x)
        state.model(x)
        assert calls == []
    state.model(x)
    assert len(calls) == 2


def test_a_session_changes_neither_rng_nor_flags_of_the_model(recorder: Any, state: State) -> None:
    state.model.eval()
    state.model[0].weight.requires_grad_(False)  # type: ignore[index]
    before = torch.get_rng_state()
    with Session(state, [recorder()]) as session:
        session.initialize()
        batch(session)
        session.finalize()
    assert torch.equal(torch.get_rng_state(), before)
    assert not state.model.training
    assert [p.requires_grad for p in state.model.parameters()] == [False, True]
