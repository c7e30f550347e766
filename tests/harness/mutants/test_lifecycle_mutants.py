"""Every planted bug of the lifecycle is seen, some by nothing but a state machine; and planting leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

import harness.lifecycle.driving.driver
from compressor.lifecycle import Modifier, Session
from harness.errors import HarnessError
from harness.lifecycle.checks.registry import CHECKS
from harness.mutants.hunt import fate_of
from harness.mutants.patches import Edit, Mutant
from tests.mutation.lifecycle.family import FAMILY, MACHINES, killers

MUTANTS = FAMILY.mutants
# Bugs that no check sees: the machines are what they are for. `harness mutants lifecycle` shows that they are more.
ONLY_MACHINES = (
    "drives_itself",
    "flags_after_error",
    "hooks_after_failed_initialize",
    "calibrates_twice",
    "earlier_ones_stay_initialized",
    "earlier_ones_keep_hooks",
)


# It takes a machine hundreds of runs to see these.
LONG_LOOKS = ("callbacks_drive_the_session", "earlier_ones_keep_flags")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.nightly) if name in LONG_LOOKS else name for name in MUTANTS])
def test_a_planted_bug_is_killed(name: str) -> None:
    mutant = MUTANTS[name]
    family = replace(FAMILY, killers=lambda one: [killer for killer in killers(one) if killer.name == mutant.killer])
    assert fate_of(family, mutant).killed_by, f"{mutant.killer} does not see that {mutant.wrong}"


@pytest.mark.nightly
@pytest.mark.parametrize("name", ONLY_MACHINES)
def test_a_bug_that_only_a_machine_sees(name: str) -> None:
    family = replace(FAMILY, killers=lambda one: [killer for killer in killers(one) if not killer.is_machine])
    fate = fate_of(family, MUTANTS[name], all_checks=True)
    assert fate.killed_by == {}
    assert {*fate.survived, "lifecycle.state_machine"} == set(CHECKS)
    assert MUTANTS[name].killer in MACHINES  # the test above has shown that it does see it


@pytest.mark.nightly
def test_without_a_planted_bug_nothing_is_seen() -> None:
    mutant = next(iter(MUTANTS.values()))
    looking = {killer.name: killer for killer in reversed(killers(mutant))}  # of each machine the shortest look
    assert {name: seen for name, killer in looking.items() if (seen := killer.look())} == {}


def test_there_are_enough_of_every_kind() -> None:
    assert len(MUTANTS) >= 25
    assert len(ONLY_MACHINES) >= 5
    assert {mutant.kind for mutant in MUTANTS.values()} == {"modifier", "session", "hooks", "state", "recipe"}
    assert len({mutant.wrong for mutant in MUTANTS.values()}) == len(MUTANTS)


def test_planting_leaves_nothing_behind() -> None:
    before = [dict(vars(owner)) for owner in (Modifier, Session, harness.lifecycle.driving.driver)]
    for mutant in MUTANTS.values():
        with mutant.planted():
            pass
    assert [dict(vars(owner)) for owner in (Modifier, Session, harness.lifecycle.driving.driver)] == before


def test_a_bug_that_no_longer_fits_the_code_is_an_error() -> None:
    where = "compressor.lifecycle.modifier:Modifier.should_start"
    mutant = Mutant("stale", "modifier", "it is stale", (Edit(where, "no such text", ""),), "lifecycle.completes")
    with pytest.raises(HarnessError, match="adapt the planted bug"), mutant.planted():
        pass


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTANTS)
def test_the_one_that_is_named_is_the_first_to_see_it(name: str) -> None:
    assert list(fate_of(FAMILY, MUTANTS[name]).killed_by) == [MUTANTS[name].killer]


@pytest.mark.nightly
def test_without_a_planted_bug_nothing_is_seen_however_long() -> None:
    assert fate_of(FAMILY, None, all_checks=True).killed_by == {}
