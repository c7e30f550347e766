"""Every planted bug in pruning, scales, ranges, experts and rotations is seen by the golden that it names; sound code by none."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from harness.mutants.family import find_family
from harness.mutants.hunt import fate_of
from tests.reference_model.algorithm_cases import ALGORITHMS

FAMILY = find_family("algorithms")


@pytest.mark.parametrize("name", FAMILY.mutants)
def test_a_planted_bug_is_killed(name: str) -> None:
    mutant = FAMILY.mutants[name]
    only = replace(FAMILY, killers=lambda one: [killer for killer in FAMILY.killers(one) if killer.name == mutant.killer])
    assert fate_of(only, mutant).killed_by, f"{mutant.killer} does not see that {mutant.wrong}"


def test_without_a_planted_bug_nothing_is_seen() -> None:
    assert fate_of(FAMILY, None, all_checks=True).killed_by == {}


def test_every_golden_of_an_algorithm_sees_some() -> None:
    killed = Counter(mutant.killer.removeprefix("golden ") for mutant in FAMILY.mutants.values())
    assert set(killed) == set(ALGORITHMS)
    said = [mutant.wrong for mutant in FAMILY.mutants.values()]
    assert len(set(said)) == len(said) and all(len(text) < 110 and text[-1] != "." for text in said)
