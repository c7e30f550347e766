"""A paired metric is judged by its sequences: one night is enough, and only the same sequences are compared."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from harness.nightly.judging.judge import judge
from harness.nightly.measurement import Acceptance, Measurement
from harness.reporting.verdict import Verdict

BASE = np.random.default_rng(0).lognormal(0, 1, 128)


def nights(*factors: float, spread: float = 0.02, better: str = "lower") -> list[Measurement]:
    rng = np.random.default_rng(1)
    values = [BASE * factor * (np.exp(rng.normal(0, spread, len(BASE))) if factor != 1.0 else 1.0) for factor in factors]
    return [Measurement(f"2026-01-{n + 1:02}", f"e{n}", "", "kl", better, tuple(row), "paired") for n, row in enumerate(values)]  # type: ignore[arg-type]


def test_the_same_values_are_equal_to_the_baseline() -> None:
    found = judge(nights(1.0, 1.0))
    assert found.verdict is Verdict.PASS and "equal to 2026-01-01, the baseline, over 128 sequences" in found.summary


@pytest.mark.parametrize(("better", "factor"), [("lower", 1.03), ("higher", 0.97)])
def test_a_loss_is_seen_at_once_with_its_first_night(better: str, factor: float) -> None:
    found = judge(nights(1.0, 1.0, factor, factor, better=better))
    (change,) = found.changes
    assert found.verdict is Verdict.REGRESSION and change.night == "2026-01-03" and change.low < 0.03 < change.high


@pytest.mark.parametrize("factors", [(1.0, 0.9), (1.0, 1.002), (1.0, 1.2, 1.0)])
def test_what_is_better_or_too_small_or_over_is_none(factors: tuple[float, ...]) -> None:
    assert judge(nights(*factors)).verdict is Verdict.PASS


@pytest.mark.parametrize("last", ["here", "there"])
def test_of_machines_that_measure_beside_one_another_the_worse_one_counts(last: str) -> None:
    order = {"here": ("there", "here"), "there": ("here", "there")}[last]
    rows = [replace(one, environment=place) for one, *_ in [nights(1.0)] * 4 for place in order]
    rows = [replace(one, night=f"2026-01-{1 + at // 2:02}") for at, one in enumerate(rows)]
    worse = [
        replace(one, values=tuple(1.1 * x for x in one.values)) if at > 3 and one.environment == "here" else one
        for at, one in enumerate(rows)
    ]
    found = judge(worse)
    assert found.verdict is Verdict.REGRESSION and found.changes[0].night == "2026-01-03"
    assert found.summary.startswith("in environment here: worse by 10.0%" if last == "there" else "worse by 10.0%")
    accepted = [Acceptance("kl", "2026-01-03", "", "meant")]
    assert judge(worse, accepted).verdict is Verdict.PASS
    again = [*worse, *(replace(one, night="2026-01-05", values=tuple(1.1 * x for x in one.values)) for one in worse[-2:])]
    assert judge(again, accepted).verdict is Verdict.REGRESSION
    moved = [replace(one, environment="there" if at == 3 else "here") for at, one in enumerate(nights(1.0, 1.0, 1.1, 1.1))]
    assert judge(moved).changes[0].night == "2026-01-03"
    gone = [one for one in worse if one.environment == "here"] + [
        replace(one, night="2026-01-05") for one in rows[-2:] if one.environment == "there"
    ]
    assert judge(gone).verdict is Verdict.PASS


def test_a_loss_within_the_spread_of_sequences_is_not_known_and_the_power_is_said() -> None:
    found = judge(nights(1.0, 1.02, spread=1.0))
    assert found.verdict is Verdict.INCONCLUSIVE and found.detectable > 0.1


def test_one_sequence_that_explodes_does_not_pass() -> None:
    base, other = nights(1.0, 1.0)
    values = (*other.values[:5], 1000.0, *other.values[6:])
    found = judge([base, Measurement(other.night, other.environment, "", "kl", "lower", values, "paired")])
    assert found.verdict is Verdict.INCONCLUSIVE and "sequence 5 went from" in found.summary and "to 1000; too few" in found.summary


@pytest.mark.parametrize("factor", [1.0, 1e60, 1e-60])
def test_sequences_that_lost_nothing_and_the_farthest_readings_are_judged(factor: float) -> None:
    base = Measurement("1", "e", "", "kl", "lower", (factor, *[0.0] * 7), "paired")
    assert judge([base, replace(base, night="2")]).verdict is Verdict.PASS
    found = judge([base, replace(base, night="2", values=(factor, *[factor / 2] * 7))])
    assert found.verdict is Verdict.REGRESSION and found.summary.startswith("worse by 350.0% (")
    far = replace(base, values=(1e-60,) * 8)
    for one in (found, judge([far, replace(far, night="2", values=(1e60,) * 8)])):
        assert all(math.isfinite(value) for value in one.to_dict().values() if isinstance(value, float))
    assert one.verdict is Verdict.REGRESSION


def test_a_loss_behind_a_night_that_lost_nothing_is_seen_and_noise_is_none() -> None:
    base = Measurement("1", "e", "", "kl", "lower", (0.0,) * 8, "paired")
    assert judge([base, replace(base, night="2")]).summary.startswith("equal to 1, the baseline")
    assert judge([base, replace(base, night="2", values=(5e-13,) * 8)]).verdict is Verdict.PASS
    found = judge([base, replace(base, night="2", values=(4e-4, 5e-4) * 4)])
    assert found.verdict is Verdict.REGRESSION and found.summary.startswith("0.00045 a sequence where nothing was lost in 1, since 2")
    word = Acceptance("kl", "2", "", "on purpose")
    assert judge([base, replace(base, night="2", values=(4e-4, 5e-4) * 4)], [word]).verdict is Verdict.PASS


def test_an_acceptance_makes_its_night_the_baseline() -> None:
    word = Acceptance("kl", "2026-01-02", "2999-01-20", "fewer tokens, on purpose")
    series = nights(1.0, 1.1, 1.1, spread=0.0)
    found = judge(series, [word])
    assert found.verdict is Verdict.PASS and found.changes[0].acceptance == word and found.changes[0].effect == pytest.approx(0.1)
    assert judge(nights(1.0, 1.1, 1.2, spread=0.0), [word]).verdict is Verdict.REGRESSION
    late = Acceptance("kl", "2026-01-02", "2026-01-02", "for a day")
    assert judge(series, [late]).verdict is Verdict.REGRESSION


def test_other_sequences_are_not_compared() -> None:
    base, other = nights(1.0, 1.5)
    cut = Measurement(other.night, other.environment, "", "kl", "lower", other.values[:100], "paired")
    found = judge([base, cut])
    assert found.verdict is Verdict.INCONCLUSIVE and "100 sequences tonight and 128" in found.summary
    (accepted,) = judge([base, cut], [Acceptance("kl", cut.night, "", "other data")]).to_dict()["changes"]
    assert [accepted[name] for name in ("effect", "low", "high", "power")] == [None] * 4
