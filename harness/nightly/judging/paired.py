"""Judges what was measured of the same sequences every night: tonight against the accepted baseline, by a paired bootstrap of sequences.

Nothing is assumed of nights, and environments need no bridge: the sequences are the same everywhere. One night is enough to tell, because
a model that is compressed anew by the same code is the same model.

S sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from statistics import NormalDist

import numpy as np

from harness.nightly.judging.bridging import LIVE_NIGHTS
from harness.nightly.judging.judgement import Change, Judgement, day_of_looking, find_acceptance
from harness.nightly.measurement import Acceptance, Measurement, in_time
from harness.reporting.verdict import Verdict
from harness.validation.behaviour.bootstrap import TARGET_POWER, Interval, percentile_interval, resample_sums

LEAST_EFFECT = 0.01
"""A change of the mean by less is none: other orders of summation move a KL by as much."""
LEAST_SEQUENCES = 8
NO_LOSS = 1e-9
"""Nats. Where the baseline lost nothing at all, of which no loss is relative, losses are held against so much."""
_LEVEL = 0.999  # two-sided, of the interval that decides: one false alarm in 2,000 nights whose code changed all predictions
_SHOWN = 0.95
_RESAMPLES = 20_000
_NORMAL = NormalDist()


def judge_paired(series: Sequence[Measurement], acceptances: Sequence[Acceptance] = (), today: date | None = None) -> Judgement:
    """Judge a metric of sequences.

    Args:
        series: all its measurements by night; a value a sequence.
        acceptances: what was accepted of it; the last that counts makes its night the baseline. Before there is one, the first night is.
        today: the day on which acceptances are looked at; by default today in UTC, or that of the last night where it is later.

    Returns:
        The judgement of the last night, or that of another machine that measured lately, where that one is worse.
    """
    today = day_of_looking(series[-1].night) if today is None else today
    place, word = _baseline(series, acceptances, today)
    live = [*dict.fromkeys(one.night for one in series)][-LIVE_NIGHTS:]
    places = [one.environment for one in series]
    begun = places.index(places[-1])  # a machine that has not measured since is gone
    beside = [one.environment for one in series[max(place, begun) :] if one.night in live]
    found = {}
    for environment in dict.fromkeys(reversed(beside)):
        # What was measured before a machine began says since when.
        nights = [
            one for at, one in enumerate(series[place + 1 :], place + 1) if places[at] == environment or at < places.index(environment)
        ]
        # What was accepted of a night is each machine's own.
        own = (one for one in nights if word is not None and (one.night, one.environment) == (series[place].night, environment))
        found[environment] = _judge_nights([next(own, series[place]), *nights], series[0], word)
    first = next(iter(found))
    worse = next((one for one in found if found[one].verdict is Verdict.REGRESSION), first)
    return found[first] if worse == first else replace(found[worse], summary=f"in environment {worse}: {found[worse].summary}")


def _judge_nights(nights: Sequence[Measurement], first_of_all: Measurement, word: Acceptance | None) -> Judgement:
    """Judge the last of the nights of one machine against the first of them, the baseline, wherever that one was."""
    base, last = nights[0], nights[-1]
    accepted = () if word is None else (_change(base, _compare(first_of_all, base), word),)
    if len(base.values) != len(last.values) or len(last.values) < LEAST_SEQUENCES:
        few = f"{len(last.values)} sequences tonight and {len(base.values)} in {base.night}, the baseline: a pair needs the same ones"
        summary = f"{few}, at least {LEAST_SEQUENCES}; give other data another name of the metric"
        return Judgement(last.metric, Verdict.INCONCLUSIVE, summary, len(nights), accepted, math.nan, math.nan)
    interval = _compare(base, last)
    power = (_NORMAL.inv_cdf((1 + _LEVEL) / 2) + _NORMAL.inv_cdf(TARGET_POWER)) * interval.standard_error
    seen = max(LEAST_EFFECT, power)
    if not _is_worse(base, last):
        if interval.estimate >= LEAST_EFFECT:  # on these sequences it is worse: equal code would have given equal values
            told = f"{interval.estimate:+.2%} ({interval.low:+.2%} to {interval.high:+.2%}) against {base.night}, the baseline"
            few = f"too few of {len(last.values)} sequences to tell whether others are worse, too"
            summary = f"{told}: {_worst(base, last)}; {few}: a loss of {seen:.1%} would show"
            return Judgement(last.metric, Verdict.INCONCLUSIVE, summary, len(nights), accepted, interval.standard_error, seen)
        same = base.values == last.values
        found = "equal to" if same else f"{interval.estimate:+.2%} ({interval.low:+.2%} to {interval.high:+.2%}) against"
        summary = f"{found} {base.night}, the baseline, over {len(last.values)} sequences; a loss of {seen:.1%} would show"
        return Judgement(last.metric, Verdict.PASS, summary, len(nights), accepted, interval.standard_error, seen)
    first = next(index for index in range(len(nights)) if all(_is_worse(base, one) for one in nights[index:]))
    change = _change(nights[first], interval, None)
    size = f"worse by {change.effect:.1%} ({change.low:.1%} to {change.high:.1%}) than"
    if not any(base.values):
        size = f"{sum(last.values) / len(last.values):.3g} a sequence where nothing was lost"
    summary = f"{size} in {base.night}, since {change.night}, power {change.power:.0%}"
    return Judgement(last.metric, Verdict.REGRESSION, summary, len(nights), (*accepted, change), interval.standard_error, seen)


def _baseline(series: Sequence[Measurement], acceptances: Sequence[Acceptance], today: date) -> tuple[int, Acceptance | None]:
    for place in range(len(series) - 1, 0, -1):
        word = find_acceptance(acceptances, series[place].night, series[place - 1].night, today)
        if word is not None and in_time(word.night) <= in_time(series[place].night):
            return place, word
    return 0, None


def _worst(base: Measurement, night: Measurement) -> str:
    """Name the sequence that lost most."""
    sign = 1.0 if night.better == "lower" else -1.0
    place = max(range(len(base.values)), key=lambda place: sign * (night.values[place] - base.values[place]))
    return f"sequence {place} went from {base.values[place]:.4g} to {night.values[place]:.4g}"


def _is_worse(base: Measurement, night: Measurement) -> bool:
    if len(base.values) != len(night.values):
        return False
    interval = _compare(base, night, _LEVEL)
    return interval.low > 0 and interval.estimate >= LEAST_EFFECT


def _compare(base: Measurement, night: Measurement, confidence: float = _SHOWN) -> Interval:
    """By how much the mean is worse, relative to the baseline's; of unlike sequences nothing is known."""
    if len(base.values) != len(night.values) or len(base.values) < 2:
        return Interval(math.nan, math.nan, math.nan, math.nan)
    sign = 1.0 if night.better == "lower" else -1.0
    values_S2 = np.array([base.values, night.values]).T
    totals, resampled = values_S2.sum(0), resample_sums(values_S2, _RESAMPLES, seed=0)
    if totals[0] == 0:
        totals, resampled = totals + NO_LOSS * len(values_S2), resampled + NO_LOSS * len(values_S2)
    resampled = resampled[resampled[:, 0] > 0]  # of sequences that lost nothing, no loss is relative
    effects = sign * (resampled[:, 1] / resampled[:, 0] - 1)
    return percentile_interval(sign * float(totals[1] / totals[0] - 1), effects, confidence, len(values_S2))


def _change(night: Measurement, interval: Interval, word: Acceptance | None) -> Change:
    sureness = interval.estimate / interval.standard_error if interval.standard_error else math.inf
    power = _NORMAL.cdf(sureness - _NORMAL.inv_cdf((1 + _LEVEL) / 2))
    return Change(night.night, interval.estimate, interval.low, interval.high, (1 - _LEVEL) / 2, power, word)
