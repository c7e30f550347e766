"""What nights say: a change is found with its night and size, noise is none, and what is accepted is settled."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta

import numpy as np
import pytest
from ruptures import KernelCPD

from harness.errors import HarnessError
from harness.nightly.judging.bridging import effect_of_levels, level
from harness.nightly.judging.judge import judge
from harness.nightly.judging.judgement import Judgement, day_of_looking
from harness.nightly.judging.shifts import LEAST_AFTER, LEAST_NOISE, Bridge, Shift, find_shifts
from harness.nightly.judging.spread import student_tail
from harness.nightly.measurement import Acceptance, Measurement
from harness.reporting.verdict import Verdict


def night_label(number: int) -> str:
    return (date(2026, 1, 1) + timedelta(number)).isoformat()


def series(sizes: list[float], seed: int = 0, better: str = "lower", environment: str = "here") -> list[Measurement]:
    """Nights of ten readings, each of its size with a noise of 1 %."""
    rng = np.random.default_rng(seed)
    rows = [size * np.exp(rng.normal(0, 0.01, 10)) for size in sizes]
    return [Measurement(night_label(n), environment, "", "m", better, tuple(row)) for n, row in enumerate(rows)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("better", "factor"), [("lower", 1.05), ("higher", 1 / 1.05)])
def test_a_step_is_found_with_its_first_night_and_its_size(better: str, factor: float) -> None:
    found = judge(series([100.0] * 40 + [100.0 * factor] * 3, better=better))
    (change,) = found.changes
    assert found.verdict is Verdict.REGRESSION and change.night == night_label(40)
    assert change.low < 0.05 < change.high and abs(change.effect - 0.05) < 0.01
    assert f"since {night_label(40)}" in found.summary and 0.99 < change.power <= 1.0


@pytest.mark.parametrize(("better", "size", "share"), [("lower", 2.0, "100.0%"), ("higher", 0.5, "50.0%"), ("higher", 0.8, "20.0%")])
def test_an_effect_is_the_share_by_which_readings_are_worse(better: str, size: float, share: str) -> None:
    nights = [Measurement(night_label(n), "here", "", "m", better, (100.0 * (size if n >= 40 else 1),)) for n in range(44)]  # type: ignore[arg-type]
    assert f"worse by {share} (" in judge(nights).summary
    assert effect_of_levels(-math.log(1.1), "higher") == pytest.approx(-0.1)


def test_a_step_that_hardly_shows_has_little_power() -> None:
    sure, hardly = (Shift(40, 42, 40, effect, 0.002, 60.0) for effect in (0.05, 0.0088))
    assert sure.power > 0.999 and hardly.shows is False and hardly.power == pytest.approx(0.55, abs=0.02)


def test_a_change_for_the_better_is_no_regression() -> None:
    assert judge(series([100.0] * 40 + [95.0] * 10)).verdict is Verdict.PASS


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_change_and_the_power_is_said(seed: int) -> None:
    found = judge(series([100.0] * 60, seed))
    assert found.verdict is Verdict.PASS and found.changes == ()
    assert 0.001 < found.noise < 0.01 and found.noise < found.detectable < 0.05


def test_one_bad_night_is_no_change_and_the_second_is() -> None:
    bad = [100.0] * 50 + [110.0]
    assert judge(series(bad)).verdict is Verdict.PASS
    assert judge(series([*bad, 110.0])).verdict is Verdict.REGRESSION
    assert judge(series([*bad, 100.0, 100.0])).verdict is Verdict.PASS


@pytest.mark.parametrize("count", [1, 3, LEAST_NOISE + LEAST_AFTER - 1])
def test_too_few_nights_give_no_verdict_and_say_how_many_are_missing(count: int) -> None:
    found = judge(series([100.0] * (count - 1) + [200.0]))
    assert found.verdict is Verdict.INCONCLUSIVE and math.isnan(found.noise)
    missing = LEAST_NOISE + LEAST_AFTER - count
    assert f"{missing} more in this environment {'is' if missing == 1 else 'are'} needed" in found.summary
    assert found.to_dict()["noise"] is None


def test_nights_of_another_environment_are_another_series() -> None:
    old, new = series([100.0] * 50, environment="there"), series([130.0] * 60)[50:]
    found = judge(old + new)
    assert found.verdict is Verdict.INCONCLUSIVE and found.num_nights == 10


def test_a_machine_that_measured_lately_counts_and_one_that_is_gone_does_not() -> None:
    here, there = series([100.0] * 40), series([100.0] * 37 + [110.0] * 3, seed=1, environment="there")
    found = judge(sorted([*there, *here], key=lambda one: one.night))
    assert found.verdict is Verdict.REGRESSION and found.summary.startswith("in environment there: worse by")
    resting = judge(sorted([*there, *series([100.0] * 45)], key=lambda one: one.night))
    assert resting.verdict is Verdict.REGRESSION and resting.summary.startswith("in environment there: worse by")
    moved = judge([*there, *series([100.0] * 80)[40:]])
    assert moved.verdict is Verdict.PASS and moved.summary.endswith("; 40 nights of other machines or versions do not count")


def at(nights: list[Measurement], revision: str) -> list[Measurement]:
    return [replace(one, revision=revision) for one in nights]


def test_a_commit_that_ran_in_both_environments_bridges_them() -> None:
    old = at(series([100.0] * 40, environment="there"), "a")
    here = series([200.0] * 46, seed=1)
    bridge, same, worse = at(here[40:42], "a"), at(here[42:46], "b"), at(series([200.0] * 42 + [212.0] * 4, seed=1)[42:], "b")
    found = judge([*old, *bridge, *same])
    assert found.verdict is Verdict.PASS and "44 nights (40 of environment there, bridged by commit a)" in found.summary
    bad = judge([*old, *bridge, *worse])
    assert bad.verdict is Verdict.REGRESSION and bad.changes[0].night == night_label(42) and abs(bad.changes[0].effect - 0.06) < 0.02
    assert bad.changes[0].high - bad.changes[0].low > 0.01  # two bridging nights are not sure of more
    assert judge([*old, *at(bridge, "c"), *worse]).verdict is Verdict.INCONCLUSIVE
    assert judge([*at(old, "a-dirty"), *at(bridge, "a-dirty"), *worse]).verdict is Verdict.INCONCLUSIVE  # dirty in two ways


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_nights_of_the_bridging_commit_far_from_the_bridge_do_not_tell_the_factor(factor: float) -> None:
    """The machine itself became another one half way, at one commit."""
    old = at(series([100.0] * 21 + [100.0 * factor] * 21, environment="there"), "a")
    here = series([200.0] * 46, seed=1)
    same, worse = at(here[43:46], "b"), at(series([212.0] * 46, seed=1)[43:], "b")
    change = judge([*old, *at(here[42:43], "a"), *worse]).changes[-1]
    assert change.night == night_label(43) and change.low < 0.06 < change.high and abs(change.effect - 0.06) < 0.02
    unchanged = judge([*old, *at(here[42:43], "a"), *same])
    assert all(one.night < night_label(42) for one in unchanged.changes), unchanged.summary


def beside(theirs: list[float], own: list[float], lag: int = 0) -> Judgement:
    """Two machines that measured the same commits from one night on, the other some nights later; the first is gone for long."""
    old = [replace(one, revision=f"commit{n}") for n, one in enumerate(series(theirs, seed=1, environment="there"))]
    new = [replace(one, revision=f"commit{n - lag}") for n, one in enumerate(series(own, seed=2))][lag:]
    return judge(sorted([*old, *new], key=lambda one: one.night))


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("end", [42, 50, 70])
def test_what_changed_on_one_of_two_machines_says_nothing_of_the_other(end: int, lag: int) -> None:
    assert beside([100.0] * 40 + [110.0] * (end - 40), [200.0] * 80, lag).verdict is Verdict.PASS
    found = beside([100.0] * end, [200.0] * 40 + [220.0] * 40, lag)
    (change,) = found.changes
    assert found.verdict is Verdict.REGRESSION and change.night == night_label(40) and change.low < 0.1 < change.high
    (change,) = beside([100.0] * 40 + [70.0] * (end - 40), [200.0] * 40 + [220.0] * 40, lag).changes
    assert change.night == night_label(40) and change.low < 0.1 < change.high


def test_nights_before_the_other_machine_began_are_carried_over_and_those_beside_it_are_not() -> None:
    def found(now: float) -> Judgement:
        old = [replace(one, revision=f"c{n}") for n, one in enumerate(series([100.0] * 40 + [150.0] * 10, seed=1, environment="there"))]
        new = [replace(one, revision=f"c{n}") for n, one in enumerate(series([200.0] * 52 + [now] * 8, seed=2))]
        return judge(sorted([*old, *at(new[20:21], "c2"), *new[34:]], key=lambda one: one.night))  # the 20th night ran the second again

    assert found(200.0).verdict is Verdict.PASS and "60 nights (34 of environment there" in found(200.0).summary
    (change,) = found(212.0).changes
    assert change.night == night_label(52) and change.low < 0.06 < change.high


def test_two_nights_far_off_that_no_test_shows_are_inconclusive() -> None:
    nights = series([100.0] * 40 + [119.0, 124.0])
    nights[-2:] = [replace(one, values=tuple([size] * 10)) for one, size in zip(nights[-2:], (115.0, 130.0), strict=True)]
    found = judge(nights)
    assert found.verdict is Verdict.INCONCLUSIVE and "worse by 15.0% or more, but no test shows yet that this is no chance" in found.summary
    assert judge(nights[:-1]).verdict is Verdict.PASS  # one bad night is no change


def test_what_is_compared_across_a_bridge_is_as_unsure_as_the_bridge() -> None:
    levels_N = np.array([level(one.values, one.better) for one in series([1.0] * 40 + [1.02] * 10)])
    (shift,) = find_shifts(levels_N, bridges=[Bridge(40, 0.5)]).found
    (alone,) = find_shifts(levels_N).found
    assert shift.error > alone.error and find_shifts(levels_N, bridges=[Bridge(40, 5.0)]).found == ()


@pytest.mark.parametrize("last", ["here", "there"])
def test_a_machine_that_may_hide_what_is_worse_counts_whoever_measured_last(last: str) -> None:
    hiding = series([100.0] * 42, environment="there")
    hiding[-2:] = [replace(one, values=tuple([size] * 10)) for one, size in zip(hiding[-2:], (115.0, 130.0), strict=True)]
    fine = series([100.0] * (43 if last == "here" else 41), seed=1)
    found = judge(sorted([*hiding, *fine], key=lambda one: one.night))
    assert judge(hiding).verdict is Verdict.INCONCLUSIVE and judge(fine).verdict is Verdict.PASS
    assert found.verdict is Verdict.INCONCLUSIVE and found.summary.startswith("in environment there: " if last == "here" else "42 nights")


def test_nights_of_a_machine_that_are_too_few_are_told_beside_anothers() -> None:
    found = judge([*series([100.0] * 30 + [150.0] * 7, environment="there")[7:], *series([100.0] * 46, seed=1)])
    assert found.verdict is Verdict.PASS and found.summary.endswith("; 30 nights of other machines or versions do not count")


@pytest.mark.parametrize("number", [5, 7])
def test_nights_behind_a_bridge_are_held_against_one_another_too(number: int) -> None:
    """A step of 5 % in the last six of 46 nights on another machine: across the bridge, which one night makes, it does not show."""
    rng = np.random.default_rng([11, 40, number])
    rows = []
    for at in range(91):
        place, size = ("there", 100.0) if at < 45 else ("here", 70.0)
        again = [(size, f"{at - 1}")] if at == 45 else []
        for level_, revision in (*again, (size * (1.05 if at > 84 else 1.0), f"{at}")):
            values = level_ * np.exp(rng.normal(0, 0.004) + rng.normal(0, 0.01, 5))
            rows.append(Measurement(night_label(at), place, revision, "m", "lower", tuple(values)))
    found = judge(rows)
    assert found.verdict is Verdict.REGRESSION and abs(found.changes[0].effect - 0.05) < 0.02
    before = [one for one in rows if one.night < night_label(85)]
    assert judge(before).verdict is Verdict.PASS


CHAINS = {  # nights on B behind the bridge from A, the first of which at the level of before, and the size of what came then
    "at once": (15, 0, 0.5),
    "small": (28, 0, 0.05),
    "later": (15, 5, 0.05),
    "none": (15, 0, 0.0),
}


@pytest.mark.parametrize("name", CHAINS)
def test_what_is_worse_stays_so_behind_a_second_bridge(name: str) -> None:
    """60 nights on A, some on B, 30 on C, each bridged by the last commit of the machine before."""
    nights, good, size = CHAINS[name]
    rng, rows = np.random.default_rng(0), []
    for night in range(60 + nights + 30):
        place = "A" if night < 60 else "B" if night < 60 + nights else "C"
        factor = {"A": 1.0, "B": 1.4, "C": 0.7}[place]
        again = [night - 1] if night in (60, 60 + nights) else []
        for revision in (*again, night):
            level_ = factor * (1 + size * (revision >= 60 + good))
            values = level_ * np.exp(rng.normal(0, 0.004) + rng.normal(0, 0.005, 5))
            rows.append(Measurement(night_label(night), place, f"r{revision}", "m", "lower", tuple(values)))
    for end in (2, 10, 31):
        found = judge([one for one in rows if one.night < night_label(60 + nights + end)])
        assert found.verdict is (Verdict.REGRESSION if size else Verdict.PASS), (end, found.summary)
    if size:
        assert found.changes[0].night == night_label(60 + good) and abs(found.changes[0].effect - size) < 0.03
    else:
        assert f"{60 + nights + 30} nights (60 of environment A, bridged by commit r59; {nights} of environment B" in found.summary


@pytest.mark.parametrize("first", ["old", "young"])
def test_a_young_machine_beside_an_old_one_does_not_count_whoever_wrote_first(first: str) -> None:
    old = {one.night: one for one in at(series([1.0] * 50, environment="old"), "a")}
    young = {one.night: one for one in at(series([1.3] * 50, seed=1, environment="young")[40:], "b")}
    both = (old, young) if first == "old" else (young, old)
    rows = [one[night] for night in old for one in both if night in one]
    found = judge(rows)
    assert found.verdict is Verdict.PASS and "10 nights of other machines or versions do not count" in found.summary, found.summary
    switched = [one for one in rows if one.environment == "young" or one.night < night_label(48)]
    assert judge(switched).verdict is Verdict.INCONCLUSIVE  # nobody knows what the last nights mean


@pytest.mark.parametrize("behind", [1, 3, 6])
def test_what_would_show_behind_a_bridge_takes_in_how_sure_it_is(behind: int) -> None:
    """Ten more nights mostly show a step of what is said; what nights without a bridge would show they never do behind a single one."""
    told = []
    for number in range(10):
        rng = np.random.default_rng([number, behind])
        rows, sizes = [], np.where(np.arange(70 + behind) < 60, 1.0, 1.3)

        def add(night: int, place: str, revision: int, size: float, rows: list[Measurement] = rows, rng: np.random.Generator = rng) -> None:
            values = size * np.exp(rng.normal(0, 0.01) + rng.normal(0, 0.005, 5))
            rows.append(Measurement(night_label(night), place, f"r{revision}", "m", "lower", tuple(values)))

        for night, size in enumerate(sizes[: 60 + behind]):
            if night == 60:
                add(night, "here", 59, size)
            add(night, "there" if night < 60 else "here", night, size)
        before = judge(rows)
        assert before.verdict is Verdict.PASS and before.detectable > (0.06 if behind == 1 else 0.03), before.summary
        for night in range(60 + behind, 70 + behind):
            add(night, "here", night, 1.3 * (1 + before.detectable))
        told.append(judge(rows).verdict is Verdict.REGRESSION)
    assert sum(told) >= 6, told


@pytest.mark.parametrize("behind", [5, 10])
def test_how_far_off_a_bridge_is_hides_no_step_behind_it(behind: int) -> None:
    """The night that tells the factor of two machines was off by two spreads: a level of its own, and no noise."""
    levels_N = np.random.default_rng(2).normal(0, 0.0045, 60) - 0.01 * (np.arange(60) >= 40) + 0.05 * (np.arange(60) >= 60 - behind)
    (shift,) = find_shifts(levels_N, bridges=[Bridge(40, math.sqrt(2))]).found
    assert shift.place == 60 - behind and shift.effect > 0.03
    still = levels_N - 0.05 * (np.arange(60) >= 60 - behind)
    assert find_shifts(still, bridges=[Bridge(40, math.sqrt(2))]).found == ()


@pytest.mark.parametrize("noise", [0.0, 0.002, 0.01])
def test_places_of_steps_are_those_of_ruptures(noise: float) -> None:
    rng = np.random.default_rng(0)
    for place in range(LEAST_NOISE, 60, 4):
        levels_N = rng.normal(0, noise, 80) + np.where(np.arange(80) < place, 0.0, 0.04)
        (expected, _) = KernelCPD(kernel="linear", min_size=LEAST_AFTER).fit(levels_N[:, None]).predict(n_bkps=1)
        assert [shift.place for shift in find_shifts(levels_N).found] == [expected]


def test_without_ruptures_nothing_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ruptures", None)
    with pytest.raises(HarnessError, match=r"ruptures is not installed; pip install 'compressor-harness\[nightly\]'"):
        judge(series([100.0] * 40))


STORIES = {
    "a step after few nights": ([1.0] * 12 + [1.05] * 40, 12),
    "a step behind a change for the better": ([2.0] * 60 + [1.0] * 40 + [1.1] * 3, 100),
    "the better level lasts for some nights": ([1.0] * 40 + [0.9] * 10 + [1.0] * 10, 50),
    "back to a level of long ago": ([1.0] * 40 + [0.9] * 45 + [1.0] * 15, 85),
    "a second time": ([1.0] * 40 + [1.05] * 4 + [1.0] * 40 + [1.05] * 3, 84),
    "worse and never mended for a year": ([1.0] * 40 + [1.05] * 325, 40),
}


@pytest.mark.parametrize("name", STORIES)
def test_a_level_that_is_worse_than_the_best_before_is_found_wherever_it_stands(name: str) -> None:
    sizes, night = STORIES[name]
    found = judge(series(sizes))
    assert found.verdict is Verdict.REGRESSION and found.changes[0].night == night_label(night), found.summary


def quiet(*levels: tuple[float, int], seed: int = 0) -> list[Measurement]:
    """Nights that differ by 0.07 %, so many at each level."""
    rng = np.random.default_rng(seed)
    sizes = np.repeat([size for size, _ in levels], [many for _, many in levels])
    rows = sizes[:, None] * np.exp(rng.normal(0, 0.0005, (len(sizes), 1)) + rng.normal(0, 0.001, (len(sizes), 5)))
    return [Measurement(night_label(n), "here", "", "m", "lower", tuple(row)) for n, row in enumerate(rows.tolist())]


SMALL_STEPS = {
    "two of 0.6 %": (((1.0, 35), (1.006, 20), (1.012, 20)), 55, 0.012),
    "more nights at the second level": (((1.0, 35), (1.006, 60), (1.012, 20)), 95, 0.012),
    "three of 0.45 %": (((1.0, 35), (1.0045, 20), (1.009, 20), (1.0135, 20)), 55, 0.009),
    "behind a change for the better": (((1.1, 40), (1.0, 40), (1.006, 20), (1.012, 20)), 100, 0.012),
    "a large one behind a small one": (((1.0, 35), (1.006, 20), (1.05, 4)), 55, 0.05),
}


@pytest.mark.parametrize("name", SMALL_STEPS)
def test_steps_that_are_none_each_are_held_together_against_the_best_level(name: str) -> None:
    levels, night, effect = SMALL_STEPS[name]
    for seed in range(4):
        nights = quiet(*levels, seed=seed)
        found = judge(nights)
        (change,) = found.changes
        assert found.verdict is Verdict.REGRESSION and change.night == night_label(night), found.summary
        assert change.effect == pytest.approx(effect, abs=0.001)
        assert judge(nights, [Acceptance("m", change.night, "", "meant")]).verdict is Verdict.PASS


def test_a_step_that_is_none_is_no_noise() -> None:
    for seed in range(4):
        found = judge(quiet((1.0, 40), (1.006, 40), seed=seed))
        assert found.verdict is Verdict.PASS and found.noise < 0.001, found.summary
        assert judge(quiet((1.0, 35), (1.006, 20), (1.0, 20), (1.006, 20), seed=seed)).verdict is Verdict.PASS


@pytest.mark.parametrize(("rate", "nights"), [(0.002, 40), (0.002, 120), (0.0007, 200)])
def test_a_drift_that_began_on_the_first_night_is_found(rate: float, nights: int) -> None:
    found = judge(series([1 + rate * night for night in range(nights)]))
    assert found.verdict is Verdict.REGRESSION and found.changes[0].night < night_label(20), found.summary
    assert judge(series([1 - rate * night for night in range(nights)])).changes == ()


@pytest.mark.parametrize(("rate", "bend"), [(0.004, 10), (0.004, 20), (0.01, 15), (0.01, 20), (0.01, 25)])
@pytest.mark.parametrize("nights", [45, 70])
def test_a_drift_that_begins_before_the_noise_is_known_is_found(rate: float, bend: int, nights: int) -> None:
    found = judge(series([1 + rate * max(0, night - bend) for night in range(nights)]))
    assert found.verdict is Verdict.REGRESSION and night_label(bend) <= found.changes[0].night < night_label(bend + 8), found.summary
    assert judge(series([1 - rate * max(0, night - bend) for night in range(nights)])).changes == ()


@pytest.mark.parametrize("bend", [4, 8, 12, 16, 20, 24])
def test_a_drift_behind_few_quiet_nights_is_told_from_noise(bend: int) -> None:
    """No change lowers the squares three times here: the line behind the best bend has a test of its own."""
    for seed in range(4):
        noise_N = np.random.default_rng(seed).normal(0, 0.0045, bend + 28)
        shift = find_shifts(noise_N + 0.002 * np.maximum(np.arange(bend + 28) - bend, 0)).found[0]
        assert shift.effect > 0.015 and abs(shift.place - bend) <= 8, shift
        assert find_shifts(noise_N).found == ()


@pytest.mark.parametrize("size", [0.06, 0.15, 0.3, 0.5])
def test_a_large_step_behind_a_rise_that_has_ended_is_found(size: float) -> None:
    """33 nights on one line are no level, and ten behind them are too few alone to know the noise: 30 % had not shown where 15 % had."""
    for seed in range(4):
        nights = np.arange(43)
        levels_N = np.random.default_rng(seed).normal(0, 0.0045, 43) + 0.0045 * np.clip(nights - 8, 0, 12) + size * (nights >= 33)
        found = find_shifts(levels_N).found
        assert sum(shift.effect for shift in found) > size / 2, found


def test_nights_that_become_noisy_behind_few_quiet_ones_are_no_drift() -> None:
    """A line fits them, as each of 25 lines may; they count by their own noise, and each bend is a test of its own."""
    for seed in (48, 111, 115, 148, 583):
        rng = np.random.default_rng(seed)
        levels_N = np.concatenate([rng.normal(0, 0.004, 25), rng.normal(0, 0.04, 30)])
        assert find_shifts(levels_N, densely=True).found == ()


@pytest.mark.parametrize("places", [(8, 16), (10, 20), (15, 25), (7, 14, 21), (2, 4), (3, 6), (3, 9), (5, 8, 11)])
def test_several_steps_before_the_noise_is_known_are_found_each_where_it_is(places: tuple[int, ...]) -> None:
    for nights in (LEAST_NOISE + 10, 60):
        found = judge(series([1.1 ** sum(night >= place for place in places) for night in range(nights)]))
        assert [change.night for change in found.changes] == [night_label(place) for place in places], found.summary


@pytest.mark.parametrize("seed", range(3))
def test_steps_and_drifts_together_are_told_apart_from_noise(seed: int) -> None:
    stories = {
        "a step and a drift behind it": lambda night: 1.0 if night < 12 else 1.05 + 0.005 * (night - 12),
        "a better level that drifts away": lambda night: 1.0 if night < 12 else 0.9 + 0.005 * (night - 12),
        "a drift that ends in a step": lambda night: (1 + 0.005 * min(night, 20)) * (1.1 if night >= 20 else 1),
        "a drift in between": lambda night: 1 + 0.008 * min(max(0, night - 10), 15),
        "a rise that settles": lambda night: 1.2 - 0.2 * math.exp(-max(0, night - 12) / 6),
    }
    for story, size in stories.items():
        found = judge(series([size(night) for night in range(60)], seed))
        assert found.verdict is Verdict.REGRESSION and found.changes[0].night <= night_label(25), (story, found.summary)


CURVES = {
    "settles slowly": lambda night: 1.2 - 0.2 * math.exp(-max(0, night - 15) / 15),
    "settles from the first night": lambda night: 1.2 - 0.2 * math.exp(-night / 8),
    "a logarithm": lambda night: 1 + 0.05 * math.log1p(night),
    "a parabola": lambda night: 1 + 1e-4 * night**2,
}


@pytest.mark.parametrize(("name", "least"), [(name, 8 if "first" in name else 11) for name in CURVES])
def test_a_curve_that_no_line_follows_is_found(name: str, least: int) -> None:
    found = [judge(series([CURVES[name](night) for night in range(70)], seed)).verdict for seed in range(12)]
    assert found.count(Verdict.REGRESSION) >= least, found


def test_behind_what_was_found_the_same_nights_show_more() -> None:
    found = judge(series([1.0] * 8 + [0.9] * 12 + [1.0] * (LEAST_NOISE + LEAST_AFTER - 20)))
    assert [change.night for change in found.changes] == [night_label(20)], found.summary


@pytest.mark.parametrize("bad", [(20, 21), (5, 6), (20, 25), (20, 21, 22)])
def test_bad_nights_do_not_hide_a_later_step(bad: tuple[int, ...]) -> None:
    found = judge(series([10.0 if night in bad else 1.1 if night >= 45 else 1.0 for night in range(70)]))
    assert found.verdict is Verdict.REGRESSION and found.changes[-1].night == night_label(45), found.summary


@pytest.mark.parametrize("size", [1.2, 10.0])
@pytest.mark.parametrize("every", [2, 3, 4])
def test_single_nights_that_are_bad_again_and_again_are_told(every: int, size: float) -> None:
    found = judge(series([size if night >= 40 and night % every == 0 else 1.0 for night in range(60)]))
    bad = sum(night % every == 0 for night in range(40, 60))
    if every == 2:  # as often as not is a level of its own
        assert found.verdict is Verdict.REGRESSION, found.summary
        return
    assert found.verdict is Verdict.INCONCLUSIVE and not found.changes, found.summary
    assert f"{bad} of the last {60 - 40 - (-40) % every} nights are worse by " in found.summary
    assert "something comes and goes" in found.summary


def test_bad_nights_that_have_stopped_are_over() -> None:
    found = [judge(series([1.5 if night in range(60, 76, 3) else 1.0 for night in range(78 + good)])) for good in (0, 14)]
    assert ["comes and goes" in one.summary for one in found] == [True, False], [one.summary for one in found]


def test_slow_weekends_are_no_change_and_are_told_where_they_begin() -> None:
    all_along, begun = ([1.1 if night % 7 > 4 and night >= first else 1.0 for night in range(110)] for first in (0, 60))
    assert {judge(series(all_along[:nights])).verdict for nights in range(40, 110) if nights % 7} == {Verdict.PASS}
    assert {judge(series(begun[:nights])).verdict for nights in range(70, 110)} == {Verdict.INCONCLUSIVE}


@pytest.mark.parametrize("spikes", [1, 3, 6])
def test_a_few_nights_that_were_far_off_hide_no_step_behind_them(spikes: int) -> None:
    """They decide where two levels fit best, unless what is far off counts little."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        levels_N = rng.normal(0, 0.003, 100) + 0.02 * (np.arange(100) >= 60)
        levels_N[rng.choice(60, spikes, replace=False)] += 0.7
        assert [shift.place for shift in find_shifts(levels_N).found if 55 <= shift.place <= 65 and shift.effect > 0.01]


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 0.3, 0.4])
@pytest.mark.parametrize("size", [0.01, 0.05, -0.05])
def test_a_share_of_slow_nights_all_along_is_no_change(share: float, size: float) -> None:
    """Two or three that follow each other look like a step to a spread that outliers do not carry away; they are as many as ever."""
    alarms = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        levels_N = rng.normal(0, 0.002, 120) + size * (rng.random(120) < share)
        alarms += bool(find_shifts(levels_N, densely=True).found)
        stepped_N = levels_N + 3 * abs(size) * (np.arange(120) >= 100)
        found = [shift.place for shift in find_shifts(stepped_N, densely=True).found if shift.effect > 0]
        assert found and 95 <= found[-1] < 120, found
    assert alarms <= 1


@pytest.mark.parametrize("bad", [(42, 47, 53), (3, 14, 27, 36, 44, 50, 55), (3, 9, 14, 20)])
def test_a_few_bad_nights_or_some_as_ever_are_outliers(bad: tuple[int, ...]) -> None:
    found = judge(series([1.5 if night in bad else 1.0 for night in range(60)]))
    assert found.verdict is Verdict.PASS, found.summary


@pytest.mark.parametrize("cold", [2.0, 9.0])
def test_repetitions_that_differ_alike_in_all_nights_hide_no_step(cold: float) -> None:
    """The first one of each night is slow, as before caches are warm; their spread says nothing of how nights differ."""
    steps = [1.0] * 50 + [1.1] * 10
    nights = series(steps, seed=1)
    found = judge([replace(one, values=(cold * one.values[0], *one.values[1:])) for one in nights])
    assert found.verdict is Verdict.REGRESSION and found.changes[0].night == night_label(50), found.summary


@pytest.mark.parametrize("repetitions", [1, 5])
def test_nights_that_become_noisy_are_no_change_of_their_mean(repetitions: int) -> None:
    rng, alarms = np.random.default_rng(0), 0
    for _ in range(40):
        spread_NR = np.where(np.arange(60) < 30, 0.005, 0.05)[:, None]
        readings = np.exp(spread_NR * rng.standard_normal((60, repetitions)))
        alarms += judge([replace(one, values=tuple(row)) for one, row in zip(series([1.0] * 60), readings, strict=True)]).changes != ()
    assert alarms <= (2 if repetitions > 1 else 6)  # of single readings two nights that agree by chance look like a step


@pytest.mark.parametrize(
    ("bad", "verdict"), [(1, Verdict.PASS), (2, Verdict.INCONCLUSIVE), (9, Verdict.INCONCLUSIVE), (10, Verdict.REGRESSION)]
)
def test_one_of_two_repetitions_that_is_slow_from_some_night_on_is_told(bad: int, verdict: Verdict) -> None:
    nights = [
        replace(one, values=(one.values[0], one.values[1] * (1.3 if at >= 40 - bad else 1))) for at, one in enumerate(series([1.0] * 40))
    ]
    found = judge(nights)
    assert found.verdict is verdict and ("repetitions differ" in found.summary) is (verdict is Verdict.INCONCLUSIVE), found.summary


def noisy_late(count: int, factor: float = 1.0, seed: int = 0) -> list[Measurement]:
    """60 quiet nights, `count` whose repetitions differ by 30 %, and ten more of those, worse by `factor`."""
    draw = np.random.default_rng(seed)
    spreads = [0.01] * 60 + [0.3] * count + ([0.3] * 10 if factor != 1 else [])
    readings = np.abs(1 + np.array(spreads)[:, None] * draw.standard_normal((len(spreads), 10)))
    readings[60 + count :] *= factor
    nights = series([1.0] * len(spreads))
    return [replace(one, values=tuple(row.tolist())) for one, row in zip(nights, readings, strict=True)]


@pytest.mark.parametrize("count", [6, 10, 20, 40])
def test_nights_that_became_noisy_say_how_noisy_they_are_and_what_would_show(count: int) -> None:
    found = [judge(noisy_late(count, seed=seed)) for seed in range(12)]
    passed = [one for one in found if one.verdict is Verdict.PASS]
    assert len(passed) >= 8 and all(one.verdict is not Verdict.REGRESSION for one in found)
    assert all(one.noise > 0.02 and one.detectable > 0.1 and "in the last " in one.summary for one in passed)
    after = [judge(noisy_late(count, factor=math.exp(one.detectable), seed=seed)) for seed, one in enumerate(found) if one in passed]
    assert sum(one.verdict is Verdict.REGRESSION for one in after) >= len(after) / 3
    assert sum(one.verdict is Verdict.PASS for one in after) <= len(after) / 6


def test_what_noisy_nights_may_hide_is_inconclusive() -> None:
    found = [judge(noisy_late(20, factor=1.2, seed=seed)) for seed in range(12)]
    assert sum(one.verdict is Verdict.INCONCLUSIVE and "so that it may be chance" in one.summary for one in found) >= 8
    assert sum(one.verdict is Verdict.PASS for one in found) <= 3
    two_are_good = judge(noisy_late(20, factor=1.1, seed=17))  # the last two nights, of which the repetitions would tell
    assert two_are_good.verdict is Verdict.INCONCLUSIVE and "more nights would tell" in two_are_good.summary


def test_a_step_that_is_said_to_show_mostly_does() -> None:
    found = 0
    for seed in range(30):
        before = judge(series([1.0] * 60, seed=seed))
        assert before.verdict is Verdict.PASS and "in the last " not in before.summary
        step = float(np.exp(before.detectable))
        found += judge(series([1.0] * 60 + [step] * 10, seed=seed)).verdict is Verdict.REGRESSION
    assert found >= 18


def test_single_readings_that_become_ten_times_as_noisy_seldom_look_like_a_step() -> None:
    rng, alarms = np.random.default_rng(0), 0
    spread_N = np.where(np.arange(60) < 30, 0.005, 0.05)
    for _ in range(100):
        found = find_shifts(spread_N * rng.standard_normal(60), densely=True).found
        alarms += any(shift.effect > 0 for shift in found)
    assert alarms <= 33  # 28; were such nights to count by the noise of those before, 38


def test_a_random_walk_seldom_looks_like_a_curve() -> None:
    walks = np.cumsum(0.005 * np.random.default_rng(0).standard_normal((100, 80)), axis=1)
    alarms = sum(any(shift.effect > 0 for shift in find_shifts(walk_N).found) for walk_N in walks)
    assert alarms <= 22  # 14; were neighbours' differences all of the noise, 31


def test_what_is_worse_is_never_called_better() -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        sizes = [1.2 if night >= 40 and night % 3 == 0 else 1.0 for night in range(60)]
        readings = np.array(sizes)[:, None] + 0.006 * rng.standard_normal((60, 5))
        found = judge([replace(one, values=tuple(row)) for one, row in zip(series(sizes), readings, strict=True)])
        assert "better by -" not in found.summary, found.summary
        assert "better by -" not in judge(series([1.0] * 40 + [1.008] * 30, seed)).summary


def test_what_is_mended_is_over() -> None:
    found = judge(series([1.0] * 40 + [1.05] * 20 + [1.0] * 20))
    assert found.verdict is Verdict.PASS and f"80 nights, 20 of them since {night_label(60)}, when it became better by" in found.summary
    half = judge(series([1.0] * 40 + [1.1] * 20 + [1.05] * 20))
    assert half.verdict is Verdict.REGRESSION and half.changes[0].night == night_label(40)


def noisy(rng: np.random.Generator, *levels: tuple[float, int]) -> list[Measurement]:
    """Nights of five readings around levels that last for so many nights; a night is off by 1 %."""
    sizes = np.concatenate([np.full(nights, size) for size, nights in levels])
    readings = sizes[:, None] * np.exp(0.003 * rng.standard_normal((len(sizes), 1)) + 0.02 * rng.standard_normal((len(sizes), 5)))
    return [replace(one, values=tuple(row)) for one, row in zip(series(list(sizes)), readings, strict=True)]


@pytest.mark.parametrize(
    ("levels", "least", "most"),
    [
        (((1.0, 36), (1.05, 5), (1.0, 5)), 0, 4),  # 3; were that level no more expected than others, 6
        (((1.0, 36), (1.05, 5), (1.0, 3)), 0, 4),  # 2; likewise 9
        (((1.0, 36), (1.02, 20), (1.0, 10)), 0, 4),  # 3; likewise 15
        (((1.0, 36), (1.05, 10), (1.015, 30)), 37, 40),  # not wholly over
        (((1.0, 36), (1.05, 40)), 40, 40),
    ],
)
def test_a_few_nights_at_the_level_of_before_end_what_was_worse(levels: tuple[tuple[float, int], ...], least: int, most: int) -> None:
    rng = np.random.default_rng(0)
    worse = sum(judge(noisy(rng, *levels)).verdict is Verdict.REGRESSION for _ in range(40))
    assert least <= worse <= most


def test_what_is_accepted_is_settled_until_it_expires_and_what_follows_is_judged() -> None:
    nights = [100.0] * 40 + [105.0] * 40
    word = Acceptance("m", night_label(41), "", "a slower, better kernel")
    found = judge(series(nights), [word])
    assert found.verdict is Verdict.PASS and found.changes[0].acceptance == word
    assert f"no further change in 80 nights, 40 of them since {night_label(40)}, which was accepted" in found.summary
    again = judge(series([*nights, 110.0, 110.0, 110.0]), [word])
    assert again.verdict is Verdict.REGRESSION and again.changes[-1].night == night_label(80)
    last_day = night_label(len(nights) + 5)
    brief = Acceptance("m", night_label(41), last_day, "for a while")
    assert judge(series(nights), [brief], today=date.fromisoformat(last_day)).verdict is Verdict.PASS
    assert judge(series(nights), [brief], today=date.fromisoformat(last_day) + timedelta(1)).verdict is Verdict.REGRESSION
    for words, verdict in (([word, brief], Verdict.REGRESSION), ([brief, word], Verdict.PASS)):  # of one night the last word counts
        assert judge(series(nights), words, today=date.fromisoformat(last_day) + timedelta(1)).verdict is verdict
    for night in ("2019-01-01", "build 17"):  # where nothing has been measured since, the day passes all the same
        assert day_of_looking(night) == datetime.now(UTC).date()
    assert day_of_looking("2999-02-18 again") == date(2999, 2, 18)


def test_an_acceptance_of_an_earlier_change_covers_no_later_one() -> None:
    word = Acceptance("m", night_label(5), "", "another one")
    assert judge(series([100.0] * 40 + [105.0] * 5), [word]).verdict is Verdict.REGRESSION


def test_readings_that_are_all_equal_are_judged() -> None:
    exact = [Measurement(night_label(n), "here", "", "bytes", "lower", (1000.0,)) for n in range(40)]
    assert judge(exact).verdict is Verdict.PASS
    grown = [Measurement(night_label(40 + n), "here", "", "bytes", "lower", (1020.0,)) for n in range(2)]
    assert judge(exact + grown).verdict is Verdict.REGRESSION


@pytest.mark.parametrize(("before", "after"), [(1e-60, 1e60), (1e60, 1e-60)])
def test_the_farthest_readings_that_a_history_takes_are_judged(before: float, after: float) -> None:
    worse, factor = "lower" if after > before else "higher", after / before
    nights = [Measurement(night_label(n), "here", "", "m", worse, (after if n >= 40 else before,)) for n in range(44)]  # type: ignore[arg-type]
    found = judge(nights)
    assert found.verdict is Verdict.REGRESSION
    assert found.changes[0].effect == pytest.approx(factor - 1 if factor > 1 else 1 - factor)
    wild = [replace(one, values=((before, after)[n % 2],)) for n, one in enumerate(nights)]
    told = judge(wild).to_dict()
    assert told["verdict"] == "pass" and math.isfinite(told["noise"]) and math.isfinite(told["detectable"])
    assert all(map(math.isfinite, (effect_of_levels(sign * 1e4, way) for sign in (1, -1) for way in ("lower", "higher"))))


def test_the_level_of_a_night_is_relative_and_one_odd_reading_counts_little() -> None:
    assert level([2.0], "lower") == -level([2.0], "higher") == math.log(2.0)
    assert abs(level([1.0] * 19 + [1000.0], "lower")) < 0.01
    assert level([1.0, 4.0], "lower") == pytest.approx(math.log(2.0))


@pytest.mark.parametrize(
    ("t", "degrees", "exact"),  # scipy.stats.t.sf
    [(1.0, 5, 0.18160873382456125), (4.0, 10, 0.0012591655046744217), (5.0, 40, 5.9200328348e-06), (8.0, 100, 1.13643240e-12)],
)
def test_the_tail_of_students_t_is_the_known_one(t: float, degrees: float, exact: float) -> None:
    assert student_tail(t, degrees) == pytest.approx(exact, rel=0.05)
    assert student_tail(-t, degrees) == pytest.approx(1 - exact)
