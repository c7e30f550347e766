"""Every planted bug fits the code as it is now, those of whom a change runs only a sample, too."""

from __future__ import annotations

import pytest

from harness.mutants.family import find_family
from tests.mutation.families import FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_every_bug_can_be_planted(name: str) -> None:
    for mutant in find_family(name).mutants.values():
        with mutant.planted():  # raises where the text that it changes does not stand there once
            pass
