"""The golden store keeps every statement, and each store with a planted bug breaks the one that is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.mutants.family import find_family
from harness.mutants.hunt import fate_of
from tests.mutation.golden_statements import STATEMENTS, Shelf

FAMILY = find_family("goldens")


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda statement: statement.__name__)
def test_the_store_keeps_the_statement(shelf: Shelf, statement: Callable[[Shelf], bool]) -> None:
    assert statement(shelf)


@pytest.mark.parametrize("bug", FAMILY.mutants)
def test_a_planted_bug_is_seen(bug: str) -> None:
    mutant = FAMILY.mutants[bug]
    only = replace(FAMILY, killers=lambda one: [killer for killer in FAMILY.killers(one) if killer.name == mutant.killer])
    assert fate_of(only, mutant).killed_by, f"{mutant.killer} does not see a store that {mutant.wrong}"


def test_each_bug_names_a_statement_and_there_are_enough() -> None:
    assert {mutant.killer for mutant in FAMILY.mutants.values()} <= {statement.__name__ for statement in STATEMENTS}
    assert len(FAMILY.mutants) >= 27
