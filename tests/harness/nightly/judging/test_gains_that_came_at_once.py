"""What became better by less than a season gives is what later nights are held against, if it came at once or goes on with more."""

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
@pytest.mark.parametrize(("length", "noise"), [(80, 0.002), (120, SURE)])
def test_what_a_season_gives_it_may_take(length: int, noise: float, seed: int) -> None:
    """It goes down by 1.3 % and up again: two levels fit worse than the curve, and the line of its fall goes deeper than the dip."""
    nights = [0.0] * 60 + (-0.0065 * (1 - np.cos(np.linspace(0, 2 * np.pi, length)))).tolist() + [0.0] * 30
    for end in range(100, len(nights), 20):
        found = judged(nights[:end], seed, noise)
        assert found.verdict is Verdict.PASS, (end, found.summary)


def test_a_fall_of_twenty_nights_did_not_come_at_once() -> None:
    """Among hundreds it looks so: the nights near to it say how it came."""
    fall, back = np.linspace(0, -0.0125, 20).tolist(), np.linspace(-0.0125, 0, 20).tolist()
    found = judged([0.0] * 200 + fall + [-0.0125] * 60 + back + [0.0] * 40, 0, SURE)
    assert found.verdict is Verdict.PASS, found.summary


@pytest.mark.parametrize("seed", range(2))
def test_fast_nights_among_others_are_no_level(seed: int) -> None:
    """Two in five, at random: they are too many to be single ones."""
    rng = np.random.default_rng(seed)
    verdicts = {judged(np.where(rng.random(120) < 0.4, -0.013, 0.0).tolist(), seed, SURE).verdict for _ in range(4)}
    assert Verdict.REGRESSION not in verdicts


@pytest.mark.parametrize("wild", [20, 60])
def test_one_wild_night_hides_no_gain(wild: int) -> None:
    """Its squares are most of all, around levels and around a curve."""
    nights = [0.0] * 50 + [-0.013] * 40 + [0.0] * 30
    nights[wild] += 0.1
    found = judged(nights, 0, SURE)
    assert found.verdict is Verdict.REGRESSION and found.changes[-1].night == label(90), found.summary


def test_few_nights_are_no_level_that_was_won() -> None:
    verdicts = [judged([0.0] * 60 + [-0.013] * few + [0.0] * 30, 0, SURE).verdict for few in (6, 11)]
    assert verdicts == [Verdict.PASS, Verdict.REGRESSION]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("length", "loss"), [(60, 0.01), (90, 0.012)])
def test_all_of_a_slow_gain_is_kept(length: int, loss: float, seed: int) -> None:
    """It shows half way: what comes behind is less than a season gives, and goes on with it."""
    nights = [0.0] * 31 + np.linspace(0, -0.03, length).tolist() + [-0.03] * 20
    assert judged(nights, seed, SURE).verdict is Verdict.PASS
    found = judged(nights + [-0.03 + loss] * 30, seed, SURE)
    assert found.verdict is Verdict.REGRESSION and found.changes[-1].night == label(len(nights)), found.summary
