"""What no step shows alone is told where the nights now lie worse than those that count: stairs, drifts, and what stays of them."""

from __future__ import annotations

from datetime import date, timedelta

import numpy as np
import pytest

from harness.nightly.judging.judge import judge
from harness.nightly.judging.judgement import Judgement
from harness.nightly.measurement import Acceptance, Measurement
from harness.reporting.verdict import Verdict


def label(night: int) -> str:
    return (date(2026, 1, 1) + timedelta(night)).isoformat()


def judged(levels: list[float], seed: int, noise: float = 0.002, accepted: str = "") -> Judgement:
    """Nights of three repetitions at levels, with a noise from night to night."""
    rng = np.random.default_rng(seed)
    rows = [
        Measurement(label(night), "here", f"c{night}", "m", "lower", tuple(np.exp(at + rng.normal(0, noise) + rng.normal(0, noise / 2, 3))))
        for night, at in enumerate(levels)
    ]
    accepted_M = [Acceptance("m", accepted, "", "meant")] if accepted else []
    return judge(rows, accepted_M, date.fromisoformat(rows[-1].night))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("middle", [40, 80, 150])
def test_stairs_that_add_up_are_told(middle: int, seed: int) -> None:
    """A middle stair that is longer than the first level hides both steps."""
    levels = [0.0] * 60 + [0.006] * middle + [0.012] * 46
    found = judged(levels, seed)
    assert found.verdict is Verdict.REGRESSION and found.changes[-1].night >= label(60), found.summary
    assert judged(levels[: 60 + middle], seed).verdict is Verdict.PASS


def test_stairs_that_were_accepted_are_settled() -> None:
    levels = [0.0] * 60 + [0.006] * 150 + [0.012] * 46
    told = judged(levels, 0)
    found = judged(levels, 0, accepted=told.changes[-1].night)
    assert found.verdict is Verdict.PASS and found.changes[-1].acceptance is not None, found.summary


@pytest.mark.parametrize("seed", range(4))
def test_a_season_is_no_stairs(seed: int) -> None:
    """A line of 1.2 % is none that counts, and levels fit it worse."""
    assert judged(np.linspace(0, 0.012, 150).tolist(), seed, 0.001).verdict is Verdict.PASS


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("quiet", [0, 10, 30])
def test_what_stays_of_a_drift_is_held_against_where_it_began(quiet: int, seed: int) -> None:
    """Not against the nights until it showed, half of whose rise lies in them."""
    rise = [0.0] * quiet + np.linspace(0, 0.04, 40).tolist()
    assert judged([*rise, *[0.02] * 40], seed).verdict is Verdict.REGRESSION
    assert judged([*rise, *[0.0] * 40], seed).verdict is Verdict.PASS


def test_a_drift_that_showed_as_it_ended_is_told() -> None:
    verdicts = [judged([*np.linspace(0, 0.0155, 100), *[0.0155] * 40], seed).verdict for seed in range(4)]
    assert verdicts == [Verdict.REGRESSION] * 4


@pytest.mark.parametrize("seed", range(4))
def test_stairs_add_up_across_a_bridge(seed: int) -> None:
    """The first step came on A, the second on B, which five of A's commits bridge."""
    rng, rows = np.random.default_rng(seed), list[Measurement]()

    def add(night: int, machine: str, commit: int, level: float) -> None:
        values = np.exp(level + 0.3 * (machine == "B") + rng.normal(0, 0.001) + rng.normal(0, 0.0005, 3))
        rows.append(Measurement(label(night), machine, f"c{commit}", "m", "lower", tuple(values)))

    for night in range(141):
        if night == 95:
            for commit in range(90, 95):
                add(night, "B", commit, 0.006)
        add(night, "A" if night < 95 else "B", night, 0.0 if night < 60 else 0.006 if night < 95 else 0.012)
    found = judge(rows, (), date.fromisoformat(rows[-1].night))
    assert found.verdict is Verdict.REGRESSION, found.summary


@pytest.mark.parametrize("seed", [9018, 9028, 9036, 9055, 9065, 9096])
def test_a_season_between_two_of_its_turns_is_no_stairs(seed: int) -> None:
    """From its lowest to its highest night it is like three levels, which a curve fits better."""
    rng = np.random.default_rng(seed)
    season_N = 0.004 * np.sin(np.arange(140) / 120 * 2 * np.pi + rng.uniform(0, 6.28))
    levels = season_N + rng.normal(0, 0.002, 140)
    rows = [Measurement(label(n), "here", "", "m", "lower", tuple(np.exp(at + rng.normal(0, 0.003, 5)))) for n, at in enumerate(levels)]
    for last in range(60, 141, 20):
        assert judge(rows[:last], (), date.fromisoformat(rows[last - 1].night)).verdict is Verdict.PASS


@pytest.mark.parametrize("seed", range(4))
def test_stairs_that_were_mended_and_come_back_at_once_are_told(seed: int) -> None:
    """They are a shift of the series, so that what ends them is one, too, and the nights of their levels are no noise."""
    levels = [0.0] * 60 + [0.006] * 50 + [0.012] * 30 + [0.0] * 20
    assert judged(levels, seed, 0.0015).verdict is Verdict.PASS
    assert judged([*levels, *[0.012] * 60], seed, 0.0015).verdict is Verdict.REGRESSION


@pytest.mark.parametrize("rest", [0.009, 0.012])
@pytest.mark.parametrize("nights", [8, 45])
def test_what_is_mended_in_two_parts_is_mended(nights: int, rest: float) -> None:
    """The second part is too small for a change for the better, and need be none: the level from before is there again."""
    levels = [0.0] * 60 + [0.036] * 30 + [rest] * nights
    assert judged(levels, 0, 0.0008).verdict is Verdict.REGRESSION
    assert judged([*levels, *[0.0] * 50], 0, 0.0008).verdict is Verdict.PASS


@pytest.mark.parametrize("seed", range(5))
def test_what_stays_of_a_drift_from_the_first_night_on_is_told(seed: int) -> None:
    found = judged([*np.linspace(0, 0.017, 60), *[0.01] * 40], seed)
    assert found.verdict is Verdict.REGRESSION, found.summary


def test_what_became_worse_twice_is_mended_at_the_level_before_both() -> None:
    levels = [0.0] * 60 + [0.036] * 30 + [0.06] * 30 + [0.012] * 30
    assert judged(levels, 0, 0.0008).verdict is Verdict.REGRESSION
    assert judged([*levels, *[0.0] * 30], 0, 0.0008).verdict is Verdict.PASS


@pytest.mark.parametrize("seed", range(4))
def test_small_changes_and_curves_before_a_step_are_no_noise(seed: int) -> None:
    """A stair, a drift for the better behind it, ten nights there, and a step back."""
    levels = [0.0] * 50 + [0.005] * 20 + np.linspace(0.005, -0.018, 15).tolist() + [-0.018] * 10
    assert judged(levels, seed, 0.0008).verdict is Verdict.PASS
    assert judged([*levels, *[0.002] * 45], seed, 0.0008).verdict is Verdict.REGRESSION


@pytest.mark.parametrize("seed", range(3))
def test_many_small_changes_are_no_noise(seed: int) -> None:
    """None of them is one by itself, and each lowers the squares less than three times."""
    levels = [0.0] * 50 + [0.005] * 40 + np.linspace(0.005, -0.013, 30).tolist() + [-0.013] * 10 + [0.007] * 46
    found = judged(levels, seed, 0.0008)
    assert found.noise < 0.0015, found.summary


@pytest.mark.parametrize("seed", range(4))
def test_a_curve_before_a_step_is_no_noise_around_its_line(seed: int) -> None:
    """A stair and a drift behind it are told as one drift, around whose line the stair is no noise: the step shows within some nights."""
    levels = [0.0] * 50 + [0.005] * 20 + np.linspace(0.005, -0.025, 30).tolist() + [-0.025] * 10 + [0.0] * 12
    assert judged(levels, seed, 0.0008).verdict is Verdict.REGRESSION


@pytest.mark.parametrize("seed", [24, 27, 33])
def test_the_second_part_of_the_way_back_shows_where_the_first_ended_just_above(seed: int) -> None:
    """Its first nights lie among those of the level that they leave, which are not taken for good ones for that."""
    levels = [0.0] * 120 + [0.024] * 30 + [0.01] * 30
    assert judged([*levels, *[0.0] * 60], seed, 0.0025).verdict is Verdict.PASS


def test_too_few_nights_are_not_counted_twice() -> None:
    """A step among the first twenty nights is as little known as noise is."""
    for seed in range(6):
        assert judged([0.0] * 10 + [0.05] * 10, seed).verdict is Verdict.INCONCLUSIVE
