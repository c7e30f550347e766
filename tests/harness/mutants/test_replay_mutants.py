"""Each planted bug in captured training steps is seen by the hazard that it names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harness.mutants.family import find_family
from harness.mutants.hunt import fate_of

FAMILY = find_family("replay")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("bug", FAMILY.mutants)
def test_a_planted_bug_is_killed(bug: str) -> None:
    mutant = FAMILY.mutants[bug]
    only = replace(FAMILY, killers=lambda one: [killer for killer in FAMILY.killers(one) if killer.name == mutant.killer])
    assert fate_of(only, mutant).killed_by, f"{mutant.killer} does not see that {mutant.wrong}"


def test_without_a_planted_bug_nothing_is_seen() -> None:
    cheap = replace(FAMILY, killers=lambda one: FAMILY.killers(one)[:8])  # test_hazards.py runs all of them
    assert fate_of(cheap, None, all_checks=True).killed_by == {}
