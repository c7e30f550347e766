"""The hazard catalogue: each one equal or refused by the named error, never silent; and a hazard that is silent is red."""

from __future__ import annotations

import json
import re

import pytest
import torch

from compressor.errors import CompressorError, HostReadError, ReplayError, UserInputError
from harness.cli import main
from harness.profiles import active_profile
from harness.replay.hazards.building_blocks import stage
from harness.replay.hazards.registry import THEMES, Hazard, HazardOutcome, all_hazards, chosen_hazards, run_hazard

HAZARDS = all_hazards()


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.check(63)
@pytest.mark.parametrize("name", HAZARDS)
def test_hazard_is_equal_or_refused_by_name(name):
    modes = ("capture", "replay") if active_profile().name in ("nightly", "release") else ("replay",)
    result = run_hazard(*HAZARDS[name], modes=modes)
    assert result.is_well, f"{result.outcome.value}: {result.detail}"


def test_the_table_is_wide_and_every_row_has_a_source_and_an_expectation():
    assert len(HAZARDS) >= 200 and {theme for theme, _ in HAZARDS.values()} == set(THEMES)
    errors = {hazard.expected for _, hazard in HAZARDS.values() if hazard.expected}
    assert len(errors) >= 8 and all(issubclass(error, CompressorError) for error in errors)
    for _, hazard in HAZARDS.values():
        assert hazard.source and hazard.what and not hazard.what.endswith("."), hazard.name
        assert hazard.expected is None or hazard.match, hazard.name
        assert re.fullmatch(r"[a-z0-9_]+", hazard.name)


def test_the_ten_errors_each_stand_in_the_table_or_need_more_than_a_step():
    named = {hazard.expected for _, hazard in HAZARDS.values()}
    assert {error.__name__ for error in ReplayError.__subclasses__()} - {error.__name__ for error in named if error} <= set()


def _judged(**changes):
    known = {"name": "x", "what": "x", "stage": stage(), "steps": 8} | changes
    return run_hazard("facts", Hazard(**known))


def _wrong_from_replay_on(monkeypatch):
    from compressor.training.replay.plan import Plan

    true_call = Plan.__call__
    monkeypatch.setattr(Plan, "__call__", lambda plan, batch: true_call(plan, batch).mul_(1.0001))


def test_a_silent_difference_is_red(monkeypatch):
    assert _judged().outcome is HazardOutcome.EQUAL
    _wrong_from_replay_on(monkeypatch)
    result = _judged()
    assert result.outcome is HazardOutcome.SILENT and not result.is_well and "step 4 (replay: replay): loss" in result.detail


def test_equal_bits_where_an_error_was_expected_are_red():
    result = _judged(expected=HostReadError)
    assert result.outcome is HazardOutcome.UNEXPECTED and "equal, but HostReadError was expected" in result.detail


def test_another_error_and_another_message_are_red():
    reads = stage(lambda module, h: h * h.mean().item())
    assert _judged(stage=reads, expected=HostReadError, match="reads a tensor").outcome is HazardOutcome.REFUSED
    assert _judged(stage=reads, expected=HostReadError, match="something else").outcome is HazardOutcome.UNEXPECTED
    assert _judged(stage=reads, expected=ReplayError).outcome is HazardOutcome.UNEXPECTED
    assert _judged(stage=reads).outcome is HazardOutcome.UNEXPECTED


def test_an_error_without_a_name_is_red(monkeypatch):
    monkeypatch.setattr("compressor.training.replay.plan.Plan.__call__", lambda plan, batch: plan.no_such_thing)
    result = _judged()
    assert result.outcome is HazardOutcome.UNNAMED and "AttributeError" in result.detail


def test_a_refusal_that_leaves_a_changed_state_is_red(monkeypatch):
    monkeypatch.setattr("compressor.training.step.snapshot.Snapshot.put_back", lambda *given: None)
    result = _judged(stage=stage(lambda module, h: h * torch.tensor([h.sum().item()]), before=None), expected=HostReadError)
    assert result.outcome in (HazardOutcome.LEFT, HazardOutcome.REFUSED)  # the forward pass has moved nothing yet
    late = stage(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    result = _judged(stage=late, expected=HostReadError, match="(optimizer)")
    assert result.outcome is HazardOutcome.LEFT and "grad:" in result.detail


def test_a_hazard_that_never_comes_to_a_replay_is_red():
    assert _judged(steps=3).outcome is HazardOutcome.VACUOUS


GUARDS = {
    "addresses": ("compressor.training.replay.plan:_addresses", "parameter_replaced", HazardOutcome.SILENT),
    "facts": ("compressor.training.replay.plan:difference", "weight_decay", HazardOutcome.SILENT),
    "identities": ("compressor.training.guards.host_facts:Identities.unchanged", "eval_of_a_part", HazardOutcome.SILENT),
}


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_that_is_switched_off_turns_its_hazard_red(monkeypatch, name):
    where, hazard, expected = GUARDS[name]
    path = where.replace(":", ".")
    off = {"addresses": lambda tensors: {}, "facts": lambda before, after: None, "identities": lambda identities: True}[name]
    assert run_hazard(*HAZARDS[hazard]).is_well
    monkeypatch.setattr(path, off)
    result = run_hazard(*HAZARDS[hazard])
    assert not result.is_well
    assert result.outcome in (expected, HazardOutcome.UNEXPECTED)


def test_hazards_are_chosen_by_name_and_by_theme():
    assert list(chosen_hazards(["item"])) == ["item"]
    assert {theme for theme, _ in chosen_hazards(["host", "betas"]).values()} == {"host", "facts"}
    with pytest.raises(UserInputError, match=r"there is no hazard 'itm'; .*item"):
        chosen_hazards(["itm"])


def test_the_command_prints_one_table_and_its_exit_code_is_the_verdict(capsys, monkeypatch):
    assert main(["replay", "hazards", "--only", "item", "--only", "betas"]) == 0
    out = capsys.readouterr().out
    assert "GuardDriftError" in out and re.search(r"2 hazards in \d+ s: 2 refused; 0 red", out)
    assert main(["replay", "hazards", "--only", "sgd", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["counts"] == {"equal": 1} and data["hazards"][0]["source"] == "tracel-ai/burn#5779"
    _wrong_from_replay_on(monkeypatch)
    assert main(["replay", "hazards", "--only", "sgd"]) == 1
    assert "SILENT" in capsys.readouterr().out
    assert main(["replay", "hazards", "--only", "nonsense"]) == 3


def test_the_list_runs_nothing(capsys, monkeypatch):
    monkeypatch.setattr("harness.replay.hazards.registry.run_hazard", None)
    assert main(["replay", "hazards", "--list", "--only", "randomness"]) == 0
    assert "checkpointed_dropout" in capsys.readouterr().out
    assert main(["replay", "hazards", "--list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["hazards"]) == len(HAZARDS)
