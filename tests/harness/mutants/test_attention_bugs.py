"""Every bug planted into quantized attention falls to the look that it names, and to none before it; sound code is seen by none."""

from __future__ import annotations

import pytest

from harness.mutants.family import Family
from tests.mutation.attention import FAMILY

LOOKS = FAMILY.killers(None)


def test_sound_code_is_seen_by_none() -> None:
    assert isinstance(FAMILY, Family) and [killer.look() for killer in LOOKS] == [None] * 3


@pytest.mark.parametrize("name", FAMILY.mutants)
def test_a_bug_falls_to_the_look_that_it_names(name: str) -> None:
    mutant = FAMILY.mutants[name]
    with mutant.planted():
        seen = next(killer.name for killer in LOOKS if killer.look() is not None)
    assert seen == mutant.killer
