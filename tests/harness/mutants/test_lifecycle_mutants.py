"""Every planted bug of the lifecycle is seen, some by nothing but a state machine; and planting leaves nothing behind."""

from __future__ import annotations

import json

import pytest

import harness.lifecycle.driver
from compressor.errors import HarnessError, UserInputError
from compressor.lifecycle import Modifier, Session
from harness.cli import main
from harness.mutants.lifecycle import MACHINES, MUTANTS, chosen_mutants, fate_of, killers
from harness.mutants.patches import Edit, Mutant

# Bugs that no check sees: the machines are what they are for.
ONLY_MACHINES = (
    "drives_itself",
    "flags_after_error",
    "garbage_is_true",
    "hooks_after_failed_initialize",
    "calibrates_twice",
    "earlier_ones_stay_initialized",
    "callbacks_drive_the_session",
    "everybody_sleeps",
    "removes_all",
    "latest_original",
)
# The draws of a machine change with its code: with this many runs none of these is missed.
SHARE = 2.0


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_killed(name: str) -> None:
    mutant = MUTANTS[name]
    fate = fate_of(mutant, [mutant.killer], SHARE)
    assert mutant.killer in fate.killed_by, f"{mutant.killer} does not see that {mutant.wrong}"


@pytest.mark.parametrize("name", ONLY_MACHINES)
def test_a_bug_that_only_a_machine_sees(name: str) -> None:
    assert MUTANTS[name].killer in MACHINES
    checks = [check for check in killers() if check not in MACHINES]
    assert fate_of(MUTANTS[name], checks).killed_by == {}


def test_without_a_planted_bug_nothing_is_seen() -> None:
    assert {name: seen for name, see in killers(share=0.2).items() if (seen := see())} == {}


def test_there_are_enough_of_every_kind() -> None:
    assert len(MUTANTS) >= 25
    assert len(ONLY_MACHINES) >= 5
    assert {mutant.kind for mutant in MUTANTS.values()} == {"modifier", "session", "hooks", "state", "recipe"}
    assert len({mutant.wrong for mutant in MUTANTS.values()}) == len(MUTANTS)


def test_planting_leaves_nothing_behind() -> None:
    before = [dict(vars(owner)) for owner in (Modifier, Session, harness.lifecycle.driver)]
    for mutant in MUTANTS.values():
        with mutant.planted():
            pass
    assert [dict(vars(owner)) for owner in (Modifier, Session, harness.lifecycle.driver)] == before


def test_a_bug_that_no_longer_fits_the_code_is_an_error() -> None:
    where = "compressor.lifecycle.modifier:Modifier.should_start"
    mutant = Mutant("stale", "modifier", "it is stale", (Edit(where, "no such text", ""),), "lifecycle.completes")
    with pytest.raises(HarnessError, match="adapt the planted bug"), mutant.planted():
        pass


def test_the_command_prints_who_kills_whom(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    checks = {name: see for name, see in killers().items() if name in ("lifecycle.completes", "lifecycle.recipe")}
    monkeypatch.setattr("harness.mutants.lifecycle.killers", lambda share=1.0: checks)
    assert main(["mutants", "lifecycle", "--mutant", "one_of_a_type", "--mutant", "modules_are_lost"]) == 0
    out = capsys.readouterr().out
    assert "2 of 2 planted bugs were killed" in out
    assert main(["mutants", "lifecycle", "--mutant", "one_of_a_type", "--mutant", "drives_itself", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["num_mutants"], data["num_killed"]) == (2, 1)
    assert list(data["mutants"][0]["killed_by"]) == ["lifecycle.recipe"]


def test_a_bug_that_does_not_exist_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserInputError):
        chosen_mutants(["starts_lat"])
    assert main(["mutants", "lifecycle", "--mutant", "starts_lat"]) == 3
    assert "did you mean 'starts_late'" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTANTS)
def test_the_whole_matrix(name: str) -> None:
    assert fate_of(MUTANTS[name]).killed_by
