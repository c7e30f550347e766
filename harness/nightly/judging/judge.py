"""Tells a change of a metric from noise: which night it began, how large it is, how sure that is, and what could not have been seen.

A night is one number, the Hodges-Lehmann mean of its repetitions in logarithms, so that effects are relative and one odd repetition counts
little. Where the level changed is found by least squares (`ruptures`). Whether it did is a t test whose variance knows three things about
nightly measurements: outliers (a Winsorized standard deviation), neighbours that resemble each other (an autoregressive correction of the
effective number of nights, with the estimate's own uncertainty on top), and that a single bad night is no change (the nights behind it must
agree). The level at which it decides is far below 5 %, because it is asked every night for every metric; `simulation` measures what comes
of it.

N nights, M nights before the change, K nights from it on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from harness.errors import HarnessError
from harness.nightly.history import Acceptance, Measurement
from harness.nightly.judging.judgement import Change, Judgement, day_of, find_acceptance
from harness.nightly.judging.paired import judge_paired
from harness.reporting.verdict import Verdict
from harness.validation.behaviour.bootstrap import TARGET_POWER, student_quantile

LEVEL = 1e-5
"""One-sided p below which a change is one; chosen so that 50 metrics give at most one false alarm in 100 nights (`simulation`)."""
LEAST_EFFECT = 0.007
"""A change by less is none, however sure: machines drift by as much between seasons."""
LEAST_BEFORE, LEAST_AFTER = 30, 2
"""Nights that there must be before and from the change on."""
WINDOW = 120
"""Nights that are looked at."""
NOTHING: NDArray[np.float64] = np.empty(0)
_CONFIDENCE = 0.95
_MAX_CORRELATION = 0.9
_LEAST_P = 1e-12  # below it the tail is not exact
_TEN = 10
_NORMAL = NormalDist()


@dataclass(frozen=True)
class _Test:
    """A step between two segments: effect, its standard error and effective degrees of freedom."""

    effect: float
    error: float
    degrees: float

    @property
    def p_value(self) -> float:
        return student_tail(self.effect / self.error, self.degrees)


def judge(series: Sequence[Measurement], acceptances: Sequence[Acceptance] = (), today: date | None = None) -> Judgement:
    """Judge a metric.

    Args:
        series: all its measurements, by night, as `History.series` gives them; at least one.
        acceptances: what was accepted of it.
        today: the day on which acceptances are looked at; by default that of the last night, where it is one.

    Returns:
        The judgement of the nights in the environment of the last one; of a paired metric, of the last night against its baseline.

    Raises:
        HarnessError: `ruptures` is not installed.
    """
    metric, last = series[-1].metric, series[-1]
    if last.kind == "paired":
        return judge_paired(series, acceptances, today)
    nights = [one for one in series if one.environment == last.environment]
    levels_N = np.array([level(one.values, one.better) for one in nights])
    today = day_of(last.night) if today is None else today
    start, open_changes, accepted, residuals_E = 0, list[Change](), list[Change](), NOTHING
    while (found := find_change(levels_N[start:], residuals_E)) is not None:
        place, test = found
        residuals_E = np.concatenate([residuals_E, centred(levels_N[start : start + place])])
        start += place
        word = find_acceptance(acceptances, nights[start].night, nights[start - 1].night, today)
        change = _change(test, nights[start].night, word)
        (open_changes if word is None else accepted).append(change)
        if word is None:
            break  # what follows is judged when this is settled
    residuals_E = np.concatenate([residuals_E, centred(levels_N[start:])])
    return _judgement(metric, levels_N[start:], residuals_E, tuple(open_changes), tuple(accepted))


def level(values: Sequence[float], better: str) -> float:
    """Return the level of a night: the Hodges-Lehmann mean of the logarithms of its repetitions; more is worse.

    Args:
        values: the repetitions, above 0.
        better: `lower` or `higher`.

    Returns:
        The median of the means of all pairs.
    """
    values_R = np.log(np.asarray(values, dtype=np.float64))
    first, second = np.triu_indices(len(values_R))
    mean = float(np.median((values_R[first] + values_R[second]) / 2))
    return mean if better == "lower" else -mean


def find_change(levels_N: NDArray[np.float64], residuals_E: NDArray[np.float64] = NOTHING) -> tuple[int, _Test] | None:
    """Find the change for the worse that a series shows.

    Args:
        levels_N: a level a night; more is worse. The last WINDOW nights are looked at.
        residuals_E: of the nights before the first of these, at levels that are settled: they know the noise, not the level.

    Returns:
        Place of the first night of the new level, and the test; None where there is none.

    Raises:
        HarnessError: `ruptures` is not installed.
    """
    skipped = max(0, len(levels_N) - WINDOW)
    levels_N, residuals_E = levels_N[skipped:], residuals_E[-WINDOW:]
    if len(levels_N) < 2 * LEAST_AFTER or len(levels_N) + len(residuals_E) < LEAST_BEFORE + LEAST_AFTER:
        return None
    place = _split(levels_N)
    if place + len(residuals_E) < LEAST_BEFORE:
        return None
    test = _test(levels_N[:place], levels_N[place:], residuals_E)
    return (skipped + place, test) if test.effect >= LEAST_EFFECT and test.p_value < LEVEL else None


def centred(levels_M: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the residuals of nights at one level."""
    return levels_M - _winsorized(levels_M)[0].mean()


def _split(levels_N: NDArray[np.float64]) -> int:
    """Where two levels fit best, by least squares; what is far outside counts no more than what is just outside."""
    try:
        import ruptures
    except ModuleNotFoundError as error:
        raise HarnessError("harness nightly: ruptures is not installed; pip install 'compressor-harness[nightly]'") from error
    middle, spread = float(np.median(levels_N)), _winsorized(levels_N)[1]
    signal = np.clip(levels_N, middle - 20 * spread, middle + 20 * spread)[:, None]
    return int(ruptures.KernelCPD(kernel="linear", min_size=LEAST_AFTER).fit(signal).predict(n_bkps=1)[0])


def _test(before_M: NDArray[np.float64], after_K: NDArray[np.float64], residuals_E: NDArray[np.float64]) -> _Test:
    """Welch's idea with one spread, that of all nights before: those after are too few to tell."""
    kept_M, _ = _winsorized(before_M)
    kept_E, spread = _winsorized(np.concatenate([residuals_E, centred(before_M)]))
    middle = np.sort(after_K)[(len(after_K) - 1) // 2]  # of two nights the better one: one bad night is no change
    effect = float(np.clip(after_K, middle - 2 * spread, middle + 2 * spread).mean() - kept_M.mean())
    correlation = _correlation(kept_E)
    variance = sum(_inflation(correlation, count) / count for count in (len(before_M), len(after_K)))
    degrees = max(3.0, (len(kept_E) - 1) * (1 - correlation) / (1 + correlation))
    return _Test(effect, spread * math.sqrt(variance), degrees)


def _winsorized(values_N: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """The values, those beyond three robust standard deviations moved there, and their standard deviation."""
    middle = float(np.median(values_N))
    robust = 1.4826 * float(np.median(np.abs(values_N - middle)))
    kept_N = np.clip(values_N, middle - 3 * robust, middle + 3 * robust) if robust > 0 else values_N
    return kept_N, max(float(kept_N.std(ddof=min(1, len(kept_N) - 1))), robust, 1e-9)


def _correlation(values_M: NDArray[np.float64]) -> float:
    """How alike neighbours are: the first autocorrelation without its bias (Kendall 1954), and 0.7 standard errors for its uncertainty."""
    centred_M = values_M - values_M.mean()
    power = float(centred_M @ centred_M)
    found = float(centred_M[1:] @ centred_M[:-1]) / power if power > 0 else 0.0
    found += (1 + 3 * found) / len(values_M) + 0.7 / math.sqrt(len(values_M))
    return min(max(found, 0.0), _MAX_CORRELATION)


def _inflation(correlation: float, count: int) -> float:
    """By how much the variance of a mean of `count` nights grows where neighbours are alike, for an autoregression of order one."""
    rest = 2 * correlation * (1 - correlation**count) / (count * (1 - correlation) ** 2)
    return (1 + correlation) / (1 - correlation) - rest


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


def _change(test: _Test, night: str, word: Acceptance | None) -> Change:
    width = student_quantile((1 + _CONFIDENCE) / 2, max(3, int(test.degrees))) * test.error
    effect, low, high = (math.expm1(value) for value in (test.effect, test.effect - width, test.effect + width))
    return Change(night, effect, low, high, test.p_value, word)


def _judgement(
    metric: str,
    levels_N: NDArray[np.float64],
    residuals_E: NDArray[np.float64],
    changes: tuple[Change, ...],
    accepted: tuple[Change, ...],
) -> Judgement:
    """Say what was found; the residuals are those of all nights."""
    if changes:
        one = changes[0]
        p_value = f"p = {one.p_value:.1g}" if one.p_value > _LEAST_P else f"p < {_LEAST_P:g}"
        summary = f"worse by {one.effect:.1%} ({one.low:.1%} to {one.high:.1%}) since {one.night}, {p_value}"
        return Judgement(metric, Verdict.REGRESSION, summary, len(levels_N), accepted + changes, math.nan, math.nan)
    since = f" since {accepted[-1].night}, which was accepted" if accepted else ""
    nights = f"{len(levels_N)} night{'' if len(levels_N) == 1 else 's'}"
    missing = max(LEAST_BEFORE + LEAST_AFTER - len(residuals_E), 2 * LEAST_AFTER - len(levels_N))
    if missing > 0:
        summary = f"{nights}{since}: too few to tell noise from change; {missing} more in this environment are needed"
        return Judgement(metric, Verdict.INCONCLUSIVE, summary, len(levels_N), accepted, math.nan, math.nan)
    kept_E, noise = _winsorized(residuals_E)
    seen = detectable_step(noise, _correlation(kept_E), len(levels_N), _TEN)
    summary = f"no change in {nights}{since}; noise {noise:.2%} a night; ten more would show a step of {seen:.1%}"
    return Judgement(metric, Verdict.PASS, summary, len(levels_N), accepted, noise, seen)


def detectable_step(noise: float, correlation: float, before: int, after: int) -> float:
    """Return the step that shows with a power of 80 %.

    Args:
        noise: standard deviation between nights, relative.
        correlation: of neighbouring nights.
        before: number of nights before the step.
        after: number of nights from it on.

    Returns:
        The step, relative; never below LEAST_EFFECT.
    """
    error = noise * math.sqrt(sum(_inflation(correlation, count) / count for count in (before, after)))
    return max(LEAST_EFFECT, (-_NORMAL.inv_cdf(LEVEL) + _NORMAL.inv_cdf(TARGET_POWER)) * error)
