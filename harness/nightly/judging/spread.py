"""How much numbers of nights differ: standard deviations that outliers do not carry away, neighbours that resemble each other, and tails.

N numbers, of nights or of their residuals.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

MAX_CORRELATION = 0.9
_NORMAL = NormalDist()


def noise_of(values_N: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """The Winsorized values, and their standard deviation."""
    kept_N, robust = winsorized(values_N)
    centred_N = kept_N - mean_of(kept_N)
    return kept_N, max(math.sqrt(float(centred_N @ centred_N) / max(1, len(kept_N) - 1)), robust, 1e-9)


def winsorized(values_N: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """The values, those beyond three robust standard deviations moved there, and that deviation."""
    middle = median(values_N)
    robust = 1.4826 * median(np.abs(values_N - middle))
    return within(values_N, middle, 3 * robust) if robust > 0 else values_N, robust


def within(values_N: NDArray[np.float64], middle: float, width: float) -> NDArray[np.float64]:
    """The values, those farther from the middle than the width moved there."""
    return np.minimum(np.maximum(values_N, middle - width), middle + width)


def median(values_N: NDArray[np.float64]) -> float:
    """Return the median of some numbers, a tenth of numpy's time for as few as nights are."""
    ordered_N, half = in_order(values_N), len(values_N) // 2
    return float(ordered_N[half] if len(values_N) % 2 else (ordered_N[half - 1] + ordered_N[half]) / 2)


def mean_of(values_N: NDArray[np.float64]) -> float:
    """Likewise, the mean."""
    return float(np.add.reduce(values_N)) / len(values_N)


def in_order(values_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """A sorted copy."""
    ordered_N = values_N.copy()
    ordered_N.sort()
    return ordered_N


def correlation_of(values_M: NDArray[np.float64]) -> float:
    """How alike neighbours are: the first autocorrelation without its bias (Kendall 1954), and 0.7 standard errors for its uncertainty."""
    centred_M = values_M - mean_of(values_M)
    power = float(centred_M @ centred_M)
    found = float(centred_M[1:] @ centred_M[:-1]) / power if power > 0 else 0.0
    found += (1 + 3 * found) / len(values_M) + 0.7 / math.sqrt(len(values_M))
    return min(max(found, 0.0), MAX_CORRELATION)


def inflation(correlation: float, count: int) -> float:
    """By how much the variance of a mean of `count` nights grows where neighbours are alike, for an autoregression of order one."""
    rest = 2 * correlation * (1 - correlation**count) / (count * (1 - correlation) ** 2)
    return (1 + correlation) / (1 - correlation) - rest


def degrees_of(count: int, correlation: float) -> float:
    """How many degrees of freedom so many numbers have where neighbours are alike."""
    return max(3.0, (count - 1) * (1 - correlation) / (1 + correlation))


def chance_of(inside: int, late: int, total: int, nights: int) -> float:
    """The chance that so many or more of all the nights that are far off lie among the last ones (Fisher's exact test, one-sided)."""
    ways = sum(math.comb(late, one) * math.comb(nights - late, total - one) for one in range(inside, min(late, total) + 1))
    return ways / math.comb(nights, total)


def student_tail(t: float, degrees: float) -> float:
    """Return the chance that Student's t exceeds a value, by Hill's expansion.

    Args:
        t: the value.
        degrees: degrees of freedom, at least 3; need not be whole.

    Returns:
        The upper tail, within 2 % of the exact one down to 1e-7.

    Source: Hill 1970, Algorithm 395 (the normal deviate of a t value).
    """
    if t < 0:
        return 1 - student_tail(-t, degrees)
    a, b = degrees - 0.5, 48 * (degrees - 0.5) ** 2
    z2 = a * math.log1p(t * t / degrees)
    z = math.sqrt(z2)
    z += z * (z2 + 3) / b - z * (4 * z2**3 + 33 * z2**2 + 240 * z2 + 855) / (10 * b * (b + 0.8 * z2**2 + 100))
    return _NORMAL.cdf(-z)


def nights_since(bend: int, count: int) -> NDArray[np.float64]:
    """How many nights each is behind a bend, none before it, around their mean."""
    nights_N = np.maximum(np.arange(count, dtype=np.float64) - bend, 0)
    return nights_N - nights_N.mean()


def line_of(levels_N: NDArray[np.float64], bend: int) -> tuple[float, NDArray[np.float64]]:
    """Slope a night by least squares, and what is left; an odd night pulls no harder than one at three spreads."""
    nights_N = nights_since(bend, len(levels_N))
    _, line_N = _fitted(levels_N, nights_N)
    slope, line_N = _fitted(line_N + winsorized(levels_N - line_N)[0], nights_N)
    return slope, levels_N - line_N


def _fitted(levels_N: NDArray[np.float64], nights_N: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    middle = mean_of(levels_N)
    slope = float(nights_N @ (levels_N - middle) / (nights_N @ nights_N))
    return slope, middle + slope * nights_N
