"""What a series of nights could show: how noisy they are now, and which step more of them would tell.

N nights, E nights that know the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from harness.nightly.judging.shifts import LEAST_AFTER, LEAST_EFFECT, LEVEL, NOISIER, OTHER_NOISE, RECENT
from harness.nightly.judging.spread import correlation_of, degrees_of, inflation, noise_of, student_tail

_LATE = ((20, NOISIER), (10, NOISIER), (5, OTHER_NOISE))  # last nights that may be noisier than others, and by how much to count
_MOST = 0.7  # of the noise of fewer nights: more nights that have as much know it better
_OF_A_MEDIAN = math.sqrt(math.pi / 2)  # times the standard error of a mean
_NORMAL = NormalDist()


def noise_now(levels_N: NDArray[np.float64], usual: float) -> tuple[float, int]:
    """Return how noisy the last nights are, where they are noisier than others.

    Args:
        levels_N: of the nights of a level.
        usual: standard deviation between all nights that know the noise.

    Returns:
        Their standard deviation, and how many they are; that of all and 0 where they are as the others.
    """
    found = [(noise_of(levels_N[-count:])[1], count, least) for count, least in _LATE if count < len(levels_N)]
    noisier = [(own, count) for own, count, least in found if own > least * usual]
    largest = max(noisier, default=(usual, 0))[0]
    return next((one for one in noisier if one[0] >= _MOST * largest), (usual, 0))


def detectable_step(
    residuals_E: NDArray[np.float64], before: Sequence[tuple[int, float]], after: int, power: float, now: float = 0.0
) -> tuple[float, float]:
    """Return how noisy nights are, and the step that would show.

    Args:
        residuals_E: that know the noise.
        before: numbers of nights before the step that those behind it are held against, and the error of bridges among them, in standard
            deviations of a night; the one that tells most counts.
        after: number of nights from it on.
        power: chance with which it shows.
        now: standard deviation between the last nights, where they are noisier: those that come are expected to be so, too.

    Returns:
        Standard deviation between nights, and the step, always above LEAST_EFFECT; both relative.
    """
    kept_E, noise = noise_of(residuals_E)
    seen = [(count, across) for count, across in before if count >= LEAST_AFTER] or before[:1]
    error = min(math.hypot(standard_error(residuals_E, count, after), noise * across) for count, across in seen)
    degrees = degrees_of(len(kept_E), correlation_of(kept_E))
    if now > noise:
        error = math.hypot(error, _OF_A_MEDIAN * now / math.sqrt(after))  # `_location` of nights that differ so much is one
        degrees = min(degrees, RECENT - 1.0) if now > OTHER_NOISE * noise else degrees
    return max(noise, now), max(LEAST_EFFECT, _quantile(LEVEL, degrees) * error) + _NORMAL.inv_cdf(power) * error


def _quantile(level: float, degrees: float) -> float:
    """The value that Student's t exceeds with this chance."""
    low, high = 0.0, 1e3
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, degrees) > level else (low, middle)
    return high


def standard_error(residuals_E: NDArray[np.float64], before: int, after: int) -> float:
    """Return how far two equal levels of so many nights lie apart by noise.

    Args:
        residuals_E: that know the noise.
        before: number of nights of the one.
        after: number of nights of the other.

    Returns:
        The standard error of their difference, in logarithms.
    """
    kept_E, noise = noise_of(residuals_E)
    correlation = correlation_of(kept_E)
    return noise * math.sqrt(sum(inflation(correlation, count) / count for count in (before, after)))
