"""Intervals cover, power is what simulation says, McNemar is the binomial sum; planted mistakes in each would show."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.validation.behaviour.bootstrap import mcnemar, percentile_interval, power_of, resample_sums, student_quantile


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [(0.975, 5, 2.5706), (0.975, 7, 2.3646), (0.975, 19, 2.0930), (0.95, 10, 1.8125), (0.995, 30, 2.7500), (0.975, 1000, 1.9623)],
)
def test_student_quantiles_are_those_of_the_tables(probability, degrees, expected):
    assert student_quantile(probability, degrees) == pytest.approx(expected, rel=5e-3)


def test_resampling_draws_whole_rows_with_replacement_and_by_the_seed_alone():
    values = np.stack([np.arange(50.0), np.ones(50)], axis=1)
    sums = resample_sums(values, 10_000, seed=7)
    assert sums.shape == (10_000, 2)
    assert (sums[:, 1] == 50).all()
    assert sums[:, 0].mean() == pytest.approx(values[:, 0].sum(), rel=2e-3)
    assert sums[:, 0].var() == pytest.approx(50 * np.arange(50.0).var(), rel=0.05)
    np.testing.assert_array_equal(sums, resample_sums(values, 10_000, seed=7))
    np.testing.assert_array_equal(sums[:, :1], resample_sums(values[:, :1], 10_000, seed=7))
    assert not np.array_equal(sums, resample_sums(values, 10_000, seed=8))


def test_blocks_of_resamples_do_not_change_the_draw(monkeypatch):
    values = np.arange(20.0)[:, None]
    whole = resample_sums(values, 500, seed=0)
    monkeypatch.setattr("harness.validation.behaviour.bootstrap.BYTES_AT_ONCE", 8 * 20 * 7)
    np.testing.assert_array_equal(whole, resample_sums(values, 500, seed=0))


@pytest.mark.parametrize("num_sequences", [8, 20, 100])
def test_a_95_percent_interval_covers_the_truth_about_95_times_in_100(num_sequences):
    generator = np.random.default_rng(0)
    hits = 0
    trials = 300
    for trial in range(trials):
        sample = generator.normal(1.0, 2.0, (num_sequences, 1))
        drawn = resample_sums(sample, 1000, seed=trial)[:, 0] / num_sequences
        interval = percentile_interval(float(sample.mean()), drawn, 0.95, num_sequences)
        hits += interval.low <= 1.0 <= interval.high
    assert 0.915 <= hits / trials <= 0.985


def test_power_is_the_share_of_runs_that_find_a_loss_as_large_as_the_margin():
    generator = np.random.default_rng(1)
    error, margin = 0.02, 0.05
    estimates = generator.normal(margin, error, 100_000)
    found = (estimates - 1.959964 * error > 0).mean()
    power = power_of(error, margin, 0.95)
    assert power.probability == pytest.approx(found, abs=0.005)
    shown = (generator.normal(power.smallest_detectable, error, 100_000) - 1.959964 * error > 0).mean()
    assert shown == pytest.approx(0.8, abs=0.005)
    assert power_of(0.0, margin, 0.95).probability == 1.0


@pytest.mark.parametrize(("first", "second"), [(0, 0), (3, 3), (0, 10), (7, 15), (40, 11), (300, 350)])
def test_mcnemar_is_the_exact_binomial_test(first, second):
    total = first + second
    tail = sum(math.comb(total, k) for k in range(min(first, second) + 1))
    assert mcnemar(first, second) == pytest.approx(min(1.0, 2 * tail / 2**total), rel=1e-9)
    assert mcnemar(first, second) == mcnemar(second, first)


def test_mcnemar_does_not_overflow_on_many_tokens():
    assert mcnemar(200_000, 200_000) == 1.0
    assert 0 <= mcnemar(100_000, 110_000) < 1e-6
