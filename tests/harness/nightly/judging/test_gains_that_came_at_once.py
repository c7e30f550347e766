"""A level that became better by less than a season gives, but at once, is what later nights are held against."""

from __future__ import annotations

import numpy as np
import pytest

from harness.reporting.verdict import Verdict
from tests.harness.nightly.judging.test_small_steps_that_add_up import judged, label

SURE = 0.0006


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "levels",
    [
        [(60, 0.0), (200, -0.014), (30, 0.0)],
        [(60, 0.0), (25, -0.013), (30, 0.006)],
        [(50, 0.0), (25, -0.03), (25, -0.044), (30, -0.024)],
    ],
)
def test_what_was_won_at_once_and_is_lost_is_told(levels: list[tuple[int, float]], seed: int) -> None:
    nights = [level for count, level in levels for _ in range(count)]
    lost = len(nights) - levels[-1][0]
    for behind in (5, 30):
        found = judged(nights[: lost + behind], seed, SURE)
        assert found.verdict is Verdict.REGRESSION and found.changes[-1].night == label(lost), found.summary
    assert judged(nights[:lost], seed, SURE).verdict is Verdict.PASS


@pytest.mark.parametrize("seed", range(4))
def test_what_a_season_gives_it_may_take(seed: int) -> None:
    """It goes down by 1.3 % and up again, within eighty nights."""
    nights = [0.0] * 60 + (-0.0065 * (1 - np.cos(np.linspace(0, 2 * np.pi, 80)))).tolist() + [0.0] * 30
    for end in range(100, len(nights), 20):
        found = judged(nights[:end], seed, 0.002)
        assert found.verdict is Verdict.PASS, (end, found.summary)


def test_few_nights_are_no_level_that_was_won() -> None:
    verdicts = [judged([0.0] * 60 + [-0.013] * few + [0.0] * 30, 0, SURE).verdict for few in (8, 11)]
    assert verdicts == [Verdict.PASS, Verdict.REGRESSION]
