"""The oracle says what the contract says, knows nothing of the code that it judges, and is exact."""

from __future__ import annotations

import ast
from fractions import Fraction
from pathlib import Path

import pytest

from harness.lifecycle.oracle import (
    EVENTS,
    MOMENTS,
    CallFailed,
    Deed,
    EventSeen,
    Flags,
    ModifierModel,
    Refused,
    Script,
    SessionModel,
    Settings,
    exact,
    upcoming,
)


def play(script: Script, deeds: dict[tuple[int, str], Deed] | None = None) -> list[str]:
    """Run a script with planned deeds, and return the callbacks that it asked for."""
    asked = []
    try:
        expected = next(script)
        while True:
            asked.append(f"{expected.modifier}.{expected.callback}")
            expected = script.send((deeds or {}).get((expected.modifier, expected.callback), Deed(answer=True)))
    except StopIteration:
        return asked


@pytest.mark.parametrize("name", ["oracle"])
def test_the_oracle_imports_nothing_of_what_it_judges(repo_root: Path, name: str) -> None:
    tree = ast.parse((repo_root / "harness" / "lifecycle" / f"{name}.py").read_text())
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    foreign = {module for module in modules if module.split(".")[0] in ("compressor", "torch", "pydantic")}
    assert not foreign
    assert {module for module in modules if module.startswith("harness")} <= {f"harness.lifecycle.{one}" for one in ("oracle",)}


def test_training_brings_start_update_and_end_at_their_indices() -> None:
    run = SessionModel([Settings(1.0, 2.0)])
    play(run.initialize())
    seen = {}
    for number in range(3):
        for event in ("BATCH_START", "BATCH_END"):
            seen[number, event] = [name.removeprefix("0.on_") for name in play(run.send(event))]
    assert seen == {
        (0, "BATCH_START"): ["event"],
        (0, "BATCH_END"): ["event"],
        (1, "BATCH_START"): ["event", "start", "update"],
        (1, "BATCH_END"): ["event", "end", "update"],
        (2, "BATCH_START"): ["event"],
        (2, "BATCH_END"): ["event"],
    }


def test_a_start_at_zero_comes_with_initialize() -> None:
    model = ModifierModel(Settings(start=0.0))
    assert play(model.initialize()) == ["0.on_initialize", "0.on_start"]
    assert model.flags == Flags(initialized=True, started=True)


def test_an_update_interval_is_counted_from_start_and_in_exact_numbers() -> None:
    run = SessionModel([Settings(start=0.1, update=0.2)], steps_per_epoch=10)
    play(run.initialize())
    updated = []
    for number in range(6):
        updated += [number] * ("0.on_update" in play(run.send("BATCH_START")))
        play(run.send("BATCH_END"))
    assert updated == [1, 3, 5]  # floats would put 0.3 into the interval before it


def test_exact_reads_floats_as_what_they_stand_for() -> None:
    assert exact(1 / 3) == Fraction(1, 3)
    assert exact(0.1) * 3 == exact(0.3)


def test_a_failing_callback_moves_no_flag() -> None:
    model = ModifierModel(Settings(start=0.0))
    with pytest.raises(CallFailed):
        play(model.initialize(), {(0, "on_start"): Deed("raised")})
    assert model.flags == Flags()
    for answer in (None, 1, "yes"):
        with pytest.raises(CallFailed):
            play(model.initialize(), {(0, "on_initialize"): Deed(answer=answer)})
    assert play(model.initialize(), {(0, "on_initialize"): Deed(answer=False)}) == ["0.on_initialize"]
    assert model.flags == Flags()


def test_an_event_that_fails_in_the_second_modifier_takes_back_the_flags_of_the_first_and_ends_the_run() -> None:
    run = SessionModel([Settings(), Settings()])
    play(run.initialize(), {(0, "on_initialize"): Deed(answer=True, hooks_added=("h",))})
    with pytest.raises(CallFailed) as failed:
        play(run.send("CALIBRATION_START"), {(1, "on_calibration_start"): Deed("raised")})
    assert failed.value.culprits == (1,)
    assert [modifier.flags for modifier in run.modifiers] == [Flags(initialized=True)] * 2
    assert run.modifiers[0].hooks == []
    assert (run.last, run.allowed()) == ("ABORT", [])


def test_every_modifier_finalizes_and_all_failures_come_together() -> None:
    run = SessionModel([Settings(), Settings(), Settings()])
    play(run.initialize())
    with pytest.raises(CallFailed) as failed:
        play(run.finalize(), {(0, "on_finalize"): Deed("raised"), (2, "on_finalize"): Deed(answer=False)})
    assert (failed.value.culprits, failed.value.together) == ((0, 2), True)
    assert [modifier.flags.finalized for modifier in run.modifiers] == [False, True, False]


def test_an_interrupt_in_finalize_waits_for_nobody() -> None:
    run = SessionModel([Settings(), Settings()])
    play(run.initialize())
    with pytest.raises(CallFailed) as failed:
        play(run.finalize(), {(0, "on_finalize"): Deed("interrupted")})
    assert failed.value.interrupted
    assert not run.modifiers[1].flags.finalized


ORDER = {
    "CREATE": {"INITIALIZE"},
    "INITIALIZE": {"BATCH_START", "CALIBRATION_START", "FINALIZE"},
    "BATCH_START": {"LOSS_CALCULATED", "BATCH_END"},
    "LOSS_CALCULATED": {"OPTIM_PRE_STEP", "BATCH_END"},
    "OPTIM_PRE_STEP": {"OPTIM_POST_STEP"},
    "OPTIM_POST_STEP": {"BATCH_END"},
    "BATCH_END": {"BATCH_START", "CALIBRATION_START", "FINALIZE"},
    "CALIBRATION_START": {"SEQUENTIAL_EPOCH_END", "CALIBRATION_END"},
    "SEQUENTIAL_EPOCH_END": {"SEQUENTIAL_EPOCH_END", "CALIBRATION_END"},
    "CALIBRATION_END": {"BATCH_START", "FINALIZE"},
    "FINALIZE": set(),
    "ABORT": set(),
}


@pytest.mark.parametrize("last", ORDER)
def test_the_order_of_moments(last: str) -> None:
    run = SessionModel([Settings()])
    run.last = last
    run.calibrated = last == "CALIBRATION_END"
    assert set(run.allowed()) == ORDER[last]
    for moment in set(MOMENTS) - ORDER[last]:
        script = run.initialize() if moment == "INITIALIZE" else run.finalize() if moment == "FINALIZE" else run.send(moment)
        with pytest.raises(Refused):
            next(script)
    assert run.last == last


def test_a_payload_belongs_to_its_event_only() -> None:
    run = SessionModel([Settings()])
    play(run.initialize())
    play(run.send("BATCH_START"))
    for event, has_loss, modules in (("LOSS_CALCULATED", False, ()), ("BATCH_END", True, ()), ("BATCH_END", False, ("x",))):
        with pytest.raises(Refused):
            next(run.send(event, has_loss, modules))


def test_originals_come_back_only_where_they_are_kept() -> None:
    for keep in (False, True):
        run = SessionModel([Settings()], keep=keep)
        play(run.initialize(), {(0, "on_initialize"): Deed(answer=True, replaced=(("first", "new"), ("first", "newer")))})
        assert run.world.modules == {"first": "newer"}
        play(run.abort())
        assert run.world.modules == {"first": "original" if keep else "newer"}


def test_upcoming_tells_the_callbacks_without_moving_anything() -> None:
    run = SessionModel([Settings(0.0, 1.0), Settings()])
    assert run.upcoming("INITIALIZE") == ((0, "on_initialize"), (0, "on_start"), (1, "on_initialize"))
    assert run.upcoming("FINALIZE") == ()
    assert run.last == "CREATE"
    assert upcoming(ModifierModel(Settings()).update_event(EventSeen("BATCH_START", 0.0, 0), Fraction(0))) == ()


def test_the_words_are_those_of_the_code() -> None:
    from compressor.lifecycle import EventType

    assert set(EVENTS) == set(EventType.__members__)
