"""Statistics of paired measurements: bootstrap intervals over sequences, power, McNemar. Numbers in, numbers out.

Tokens of one sequence depend on each other, so whole sequences are resampled, for both models at once (paired). A mean per token is a ratio
of two sums over sequences. The percentile interval of n sequences is too narrow by about sqrt((n-1)/n) and ignores that the variance is
estimated; both are mended by widening the percentiles (the expanded percentile interval of Hesterberg, arXiv:1411.5279).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_NORMAL = NormalDist()
BYTES_AT_ONCE = 64_000_000
TARGET_POWER = 0.8
"""The power at which the smallest detectable difference is stated."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its two-sided interval."""

    estimate: float
    low: float
    high: float
    standard_error: float

    def to_dict(self) -> dict[str, float]:
        """Return the interval as JSON types."""
        return {"estimate": self.estimate, "low": self.low, "high": self.high, "standard_error": self.standard_error}


@dataclass(frozen=True)
class Power:
    """What a sample of this size can tell.

    Attributes:
        margin: the difference that is allowed.
        probability: chance that a true difference of `margin` shows as significant; by symmetry also the chance that a model without any
            true difference is shown to be within the margin.
        smallest_detectable: the true difference that shows as significant with probability TARGET_POWER.
    """

    margin: float
    probability: float
    smallest_detectable: float

    def to_dict(self) -> dict[str, float]:
        """Return the power as JSON types."""
        return {"margin": self.margin, "power": self.probability, "smallest_detectable_difference": self.smallest_detectable}


def student_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution by its expansion around the normal quantile.

    Args:
        probability: in (0, 1).
        degrees: degrees of freedom; the error is below 0.5 % from 5 on for the usual levels.
    Returns:
        The quantile.
    Source: Abramowitz and Stegun 26.7.5.
    """
    z = _NORMAL.inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees ** (power + 1) for power, term in enumerate(terms))


def resample_sums(values_NK: np.ndarray, num_resamples: int, seed: int) -> np.ndarray:
    """Sum the rows of `num_resamples` bootstrap samples.

    Args:
        values_NK: [sequences, quantities], float64.
        num_resamples: number of samples, each of as many sequences as there are.
        seed: of PCG64; equal seeds draw equal samples, whatever the quantities.
    Returns:
        Sums [num_resamples, quantities].
    """
    count = len(values_NK)
    generator = np.random.Generator(np.random.PCG64(seed))
    step = max(1, BYTES_AT_ONCE // (8 * count))
    blocks = []
    for start in range(0, num_resamples, step):
        size = min(step, num_resamples - start)
        drawn = generator.integers(0, count, size=(size, count))
        flat = (drawn + np.arange(size)[:, None] * count).ravel()
        weights = np.bincount(flat, minlength=size * count).reshape(size, count)
        blocks.append(weights.astype(np.float64) @ values_NK)
    return np.concatenate(blocks)


def percentile_interval(estimate: float, resampled: np.ndarray, confidence: float, num_sequences: int) -> Interval:
    """Return the expanded percentile interval of a bootstrapped statistic.

    Args:
        estimate: the statistic of the sample itself.
        resampled: the statistic of each resample.
        confidence: two-sided.
        num_sequences: size of the sample, at least 2.
    Returns:
        The interval.
    """
    inflation = math.sqrt(num_sequences / (num_sequences - 1))
    tail = _NORMAL.cdf(-inflation * student_quantile((1 + confidence) / 2, num_sequences - 1))
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Interval(estimate, float(low), float(high), float(resampled.std() * inflation))


def power_of(standard_error: float, margin: float, confidence: float) -> Power:
    """Return what a test with this standard error can tell about a margin.

    Args:
        standard_error: of the difference.
        margin: allowed difference, > 0.
        confidence: of the two-sided interval that decides.
    Returns:
        The power, by the normal approximation.
    """
    quantile = _NORMAL.inv_cdf((1 + confidence) / 2)
    probability = _NORMAL.cdf(margin / standard_error - quantile) if standard_error > 0 else 1.0
    return Power(margin, probability, (quantile + _NORMAL.inv_cdf(TARGET_POWER)) * standard_error)


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value that two paired classifiers are equally often right.

    Args:
        only_first: number of cases that only the first got right.
        only_second: number of cases that only the second got right.
    Returns:
        The p-value of McNemar's test in its exact, binomial form.
    """
    total, least = only_first + only_second, min(only_first, only_second)
    if total == 0:
        return 1.0
    log_sizes = [math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1) for k in range(least + 1)]
    peak = max(log_sizes)
    tail = math.fsum(math.exp(size - peak) for size in log_sizes)
    return min(1.0, 2 * math.exp(peak + math.log(tail) - total * math.log(2)))
