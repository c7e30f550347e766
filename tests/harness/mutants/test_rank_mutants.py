"""Each planted bug in what several processes share is seen by the look that it names; sound code by none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.mutants.family import find_family
from harness.mutants.hunt import fate_of

FAMILY = find_family("ranks")


@pytest.mark.parametrize("bug", FAMILY.mutants)
def test_a_planted_bug_is_killed(bug: str) -> None:
    mutant = FAMILY.mutants[bug]
    only = replace(FAMILY, killers=lambda one: [killer for killer in FAMILY.killers(one) if killer.name == mutant.killer])
    assert fate_of(only, mutant).killed_by, f"{mutant.killer} does not see that {mutant.wrong}"


def test_without_a_planted_bug_nothing_is_seen() -> None:
    control = fate_of(FAMILY, None, all_checks=True)
    assert control.killed_by == {} and not control.broken
    assert {killer.name for killer in FAMILY.killers(None)} == {mutant.killer for mutant in FAMILY.mutants.values()}
