"""From nights to levels, across a change of machine or versions where both ran the same commit.

Another environment shifts every reading by some factor. A commit that was measured in both tells the factor, to within the noise of those
nights; with it the earlier nights go on in the new environment, and a change of code is seen there at once instead of after a month.
Nights on which both measured are each one's own: what changed on one machine says nothing of the other. Bridges make a chain, and a machine
that comes back goes on with its own nights.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from harness.nightly.judging.shifts import Bridge
from harness.nightly.measurement import Measurement, in_time

LIVE_NIGHTS = 7
"""An environment that measured in one of the last so many nights still counts."""
_NEAR = 5
"""Nights of commits that ran in both, next to where one series goes on as the other, that tell the factor."""
_PAIRS = 1 << 20
"""Of repetitions that are held at once."""
_ENOUGH = 10
"""Nights that tell a level by themselves, without those behind a bridge."""
_LARGEST = 700.0
"""Logarithm of the largest share that is told: the interval of absurd noise may reach beyond what a number holds."""

_Time = tuple[list[str | int], str]


@dataclass(frozen=True)
class BridgedSeries:
    """The nights of an environment, behind those of earlier ones where there are bridges.

    Attributes:
        nights: in order.
        levels_N: a level each, as the last environment would have given it.
        errors_N: standard error of each by its own repetitions.
        bridges: between environments, in order.
        links: for each of them what leads across, in words.
        beginning: where they begin, in words for a summary.
    """

    nights: tuple[Measurement, ...]
    levels_N: NDArray[np.float64]
    errors_N: NDArray[np.float64]
    bridges: tuple[Bridge, ...] = ()
    links: tuple[str, ...] = ()
    beginning: str = ""

    @property
    def told(self) -> str:
        """Which nights they are, in words."""
        return self.beginning + (f" ({'; '.join(self.links)})" if self.links else "")

    def levels_before(self, start: int) -> list[tuple[int, float]]:
        """Return what nights to come are held against: all since a night, and those behind each bridge.

        Args:
            start: place of the night.

        Returns:
            Numbers of nights, and the error of the bridges among them in standard deviations of a night.
        """
        begins = [start, *(one.place for one in self.bridges if one.place > start)]
        return [(len(self.nights) - begin, math.hypot(*(one.error for one in self.bridges if one.place > begin))) for begin in begins]

    def on_one_machine(self, first: int, last: int) -> int:
        """Return where a level ends on the machine on which it began: a bridge behind nights enough says nothing of the level.

        Args:
            first: place of its first night.
            last: place of the first night behind it.

        Returns:
            The place of the first bridge behind ten of its nights; `last` where there is none.
        """
        return min((one.place for one in self.bridges if first + _ENOUGH <= one.place < last), default=last)

    def error_until(self, end: int) -> float:
        """Return how unsure bridges make a level that ends at a place beside the first one, in standard deviations of a night."""
        return math.hypot(*(one.error for one in self.bridges if one.place < end))

    def until(self, end: int) -> BridgedSeries:
        """Return the nights before a place; a bridge to it stays."""
        bridges = tuple(one for one in self.bridges if one.place <= end)
        return replace(self, nights=self.nights[:end], levels_N=self.levels_N[:end], errors_N=self.errors_N[:end], bridges=bridges)

    def behind(self, number: int) -> BridgedSeries:
        """Return the nights behind a bridge alone.

        Args:
            number: of the bridge.

        Returns:
            The series.
        """
        place, later = self.bridges[number].place, number + 1
        bridges = tuple(Bridge(one.place - place, one.error) for one in self.bridges[later:])
        beginning = f" behind the bridge from environment {self.nights[place - 1].environment}"
        return BridgedSeries(self.nights[place:], self.levels_N[place:], self.errors_N[place:], bridges, self.links[later:], beginning)


def level(values: Sequence[float], better: str) -> float:
    """Return the level of a night: the Hodges-Lehmann mean of the logarithms of its repetitions; more is worse.

    Args:
        values: the repetitions, above 0.
        better: `lower` or `higher`.

    Returns:
        The median of the means of all pairs.
    """
    mean = float(hodges_lehmann(np.log([values]))[0])
    return mean if better == "lower" else -mean


def effect_of_levels(difference: float, better: str) -> float:
    """Return by which share readings are worse: a throughput that fell to half is worse by 50 %, a time that doubled by 100 %.

    Args:
        difference: of two levels; above 0 is worse.
        better: `lower` or `higher`.

    Returns:
        The share; below 0 is better.
    """
    sign = 1.0 if better == "lower" else -1.0
    return sign * math.expm1(min(sign * difference, _LARGEST))


def hodges_lehmann(values_MR: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median of the means of all pairs of the repetitions of each night.

    Args:
        values_MR: the nights [nights, repetitions].

    Returns:
        The medians [nights].

    Source: Hodges and Lehmann 1963.
    """
    first, second = np.triu_indices(values_MR.shape[1])
    parts = np.array_split(values_MR, -(-len(values_MR) * len(first) // _PAIRS))
    return np.concatenate([np.median((part[:, first] + part[:, second]) / 2, axis=1) for part in parts])


def standard_errors(values_MR: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how sure each night is of its level, by its own repetitions.

    Args:
        values_MR: the nights [nights, repetitions].

    Returns:
        Standard errors of their means [nights]; 0 of one repetition, which says nothing.
    """
    count = values_MR.shape[1]
    return values_MR.std(axis=1, ddof=1) / math.sqrt(count) if count > 1 else np.zeros(len(values_MR))


def bridged(series: Sequence[Measurement], environment: str) -> BridgedSeries:
    """Return the series of an environment.

    Args:
        series: all measurements of a metric, by night.
        environment: digest.

    Returns:
        Its nights; behind those of the last earlier environment that ran a commit which ran here, too, up to the night from which on
        this one measured beside it; and so on, behind those of the one before.
    """
    rows = [one for one in series if one.environment == environment]
    first = _first_nights(series)
    own = _of_now(rows, first) or rows
    last = in_time(own[-1].night)
    earlier = dict.fromkeys(one.environment for one in reversed(series) if in_time(one.night) < last and one.environment != environment)
    began = {one.environment: in_time(one.night) for one in reversed(series)}
    for place in sorted(earlier, key=lambda one: began[one] >= began[environment]):  # a later one measured while this one was away
        all_theirs = [one for one in series if one.environment == place and in_time(one.night) < last]
        theirs = _of_now(all_theirs, first) or all_theirs
        joint = _joint(theirs, own)
        again = {one.revision for one in theirs[:joint] if _is_commit(one.revision)}
        after = _behind_bridge(own, again)
        if not after:
            continue
        begun = in_time(after[0].night)
        joint = min(joint, sum(in_time(one.night) <= begun for one in theirs))
        beside = set(map(id, theirs[joint:]))
        end = next((number for number, one in enumerate(all_theirs) if id(one) in beside), len(all_theirs))
        common = _near(all_theirs, {one.revision for one in rows if _is_commit(one.revision)}, end)
        here = [one for one in rows if one.revision in {one.revision for one in common}][:_NEAR]
        before = _before(series, environment, place, begun, beside)
        if before is not None and common:
            return _joined(before, after, here, common)
    return BridgedSeries(tuple(own), *_levels(own))


def _before(series: Sequence[Measurement], environment: str, place: str, begun: _Time, beside: set[int]) -> BridgedSeries | None:
    """The series of an earlier environment, up to the night on which this one began, or from which on it measured beside it."""
    rows = [one for one in series if one.environment != environment and in_time(one.night) <= begun]
    if not any(one.environment == place for one in rows):
        return None
    found = bridged(rows, place)
    end = next((number for number, one in enumerate(found.nights) if id(one) in beside), len(found.nights))
    return found.until(end) if end else None


def _first_nights(series: Sequence[Measurement]) -> dict[str, _Time]:
    """The night that each revision came with, on whatever machine: how new it is."""
    first: dict[str, _Time] = {}
    for one in series:
        first.setdefault(one.revision, in_time(one.night))
    return first


def _of_now(rows: Sequence[Measurement], first: Mapping[str, _Time]) -> list[Measurement]:
    """What was measured of the code of now: of each night the newest commit, and no single night at an older one, as `run --at` looks at.

    Where the code went back to an older commit, it stays there for more than a night.
    """
    rank = {one.revision: (not one.revision.endswith("-dirty"), first[one.revision]) for one in rows}
    newest: dict[str, tuple[bool, _Time]] = {}
    for one in rows:
        newest[one.night] = max(newest.get(one.night, rank[one.revision]), rank[one.revision])
    kept = [one for one in rows if not one.revision or rank[one.revision] == newest[one.night]]
    came = sorted(night for revision, night in first.items() if _is_commit(revision))
    nights = {one.night: one for one in kept}
    is_older = [_is_commit(one.revision) and _latest(came, night) > first[one.revision] for night, one in nights.items()]
    alone = {
        night
        for place, night in enumerate(nights)
        if is_older[place] and not any(is_older[max(0, place - 1) : place]) and not any(is_older[place + 1 : place + 2])
    }
    return [one for one in kept if one.night not in alone]


def _latest(came: Sequence[_Time], night: str) -> _Time:
    """When the newest commit came that a night knew."""
    return came[bisect_right(came, in_time(night)) - 1]


def _behind_bridge(own: Sequence[Measurement], again: Collection[str]) -> list[Measurement]:
    """Nights without the first ones that ran an earlier commit again, which the bridge is made of; the code may stay there for long."""
    nights = list(dict.fromkeys(one.night for one in own))
    others = [one.night for one in own if one.revision not in again]
    made_of = nights[: min(nights.index(others[0]), _NEAR)] if others else nights[:1]
    return [one for one in own if one.night not in made_of or one.revision not in again]


def _joint(theirs: Sequence[Measurement], own: Sequence[Measurement]) -> int:
    """Place of the first of their nights from which on this environment measured beside them, without a long pause; else their number."""
    times, joint = [in_time(one.night) for one in own], len(theirs)
    until = [0, *(bisect_right(times, in_time(one.night)) for one in theirs)]
    for place in reversed(range(len(theirs))):
        if joint - place > LIVE_NIGHTS + 1:
            break
        joint = place if until[place + 1] > until[place] else joint
    return joint


def _near(theirs: Sequence[Measurement], own: set[str], joint: int) -> list[Measurement]:
    """Those nights of theirs next to a place whose commit ran in both: far from it, one machine alone may have changed."""
    places = sorted((place for place, one in enumerate(theirs) if one.revision in own), key=lambda place: abs(place - joint))
    return [theirs[place] for place in places[:_NEAR]]


def _joined(before: BridgedSeries, after: list[Measurement], ours: list[Measurement], theirs: list[Measurement]) -> BridgedSeries:
    factor, error = _factor(ours, theirs)
    levels_A, errors_A = _levels(after)
    levels_N = np.concatenate([before.levels_N + factor, levels_A])
    place = len(before.nights)
    bridges = tuple(one for one in before.bridges if one.place < place)  # one that leads here goes on in the next one
    across = math.hypot(error, *(one.error for one in before.bridges if one.place == place))
    own = sum(one.environment == theirs[0].environment for one in before.nights)
    link = f"{own} of environment {theirs[0].environment}, bridged by commit {min(one.revision for one in theirs)[:12]}"
    errors_N = np.concatenate([before.errors_N, errors_A])
    return BridgedSeries((*before.nights, *after), levels_N, errors_N, (*bridges, Bridge(place, across)), (*before.links, link))


def _factor(ours: Sequence[Measurement], theirs: Sequence[Measurement]) -> tuple[float, float]:
    """By how much levels differ here, commit by commit, and the error in standard deviations of a night: each counts by its own nights."""
    levels = [dict(zip(map(id, side), _levels(side)[0].tolist(), strict=True)) for side in (ours, theirs)]
    differences, weights = [], []
    for revision in dict.fromkeys(one.revision for one in ours):
        here, there = ([levels[at][id(one)] for one in side if one.revision == revision] for at, side in enumerate((ours, theirs)))
        differences.append(fmean(here) - fmean(there))
        weights.append(1 / (1 / len(here) + 1 / len(there)))
    return float(np.average(differences, weights=weights)), 1 / math.sqrt(sum(weights))


def _levels(nights: Sequence[Measurement]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The level and the error of each night; those with as many repetitions at once."""
    counts_M = np.array([len(one.values) for one in nights])
    levels_M, errors_M = np.empty(len(nights)), np.empty(len(nights))
    for count in set(counts_M.tolist()):
        alike = np.flatnonzero(counts_M == count)
        logs_MR = np.log([nights[place].values for place in alike.tolist()])
        levels_M[alike], errors_M[alike] = hodges_lehmann(logs_MR), standard_errors(logs_MR)
    return (levels_M if nights[-1].better == "lower" else -levels_M), errors_M


def _is_commit(revision: str) -> bool:
    return bool(revision) and not revision.endswith("-dirty")
