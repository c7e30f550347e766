"""Tells a change of a metric from noise: which night it began, how large it is, how sure that is, and what could not have been seen.

A night is one number, the Hodges-Lehmann mean of its repetitions in logarithms, so that effects are relative and one odd repetition counts
little. `shifts` follows these numbers. What is better than before is what later nights are held against; what is worse stands until it is
over, or somebody accepts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial

import numpy as np
from numpy.typing import NDArray

from harness.nightly.judging.bridging import LIVE_NIGHTS, BridgedSeries, bridged, effect_of_levels
from harness.nightly.judging.judgement import Change, Judgement, day_of_looking, find_acceptance
from harness.nightly.judging.paired import judge_paired
from harness.nightly.judging.power import detectable_step, noise_now, standard_error
from harness.nightly.judging.shifts import LEAST_AFTER, LEAST_EFFECT, LEAST_NOISE, Shift, Shifts, find_shifts, shift_in_all
from harness.nightly.judging.spread import chance_of, noise_of
from harness.nightly.measurement import Acceptance, Measurement
from harness.reporting.verdict import Verdict
from harness.validation.behaviour.bootstrap import TARGET_POWER, student_quantile

_CONFIDENCE = 0.95
_LEAST_P = 1e-12  # below it the tail is not exact
_TEN = 10
_SURE = 4.0  # errors of a difference across bridges: as sure as a shift has to be
_RESTLESS = 3.0
"""Times the noise of other nights: more is no chance in two nights that follow each other."""
_FAR = 6.0
"""Likewise, where no test shows it, as when the two differ much from one another."""
_LEAST_OFTEN, _BY_CHANCE, _OVER, _MOSTLY = 4, 3e-3, 0.05, 4
"""Nights that are no single ones any more; the chance that so many nights lie among the last; and that as many good ones follow. How many
times as many are worse as better."""


def judge(series: Sequence[Measurement], acceptances: Sequence[Acceptance] = (), today: date | None = None) -> Judgement:
    """Judge a metric.

    Args:
        series: all its measurements, by night, as `History.series` gives them; at least one.
        acceptances: what was accepted of it.
        today: the day on which acceptances are looked at; by default today in UTC, or that of the last night where it is later.

    Returns:
        Of a paired metric the judgement of the last night against its baseline. Else that of the nights in the environment of the last one,
        or of another that measured lately, where that one is worse or hides whether it is.

    Raises:
        HarnessError: `ruptures` is not installed.
    """
    last = series[-1]
    if last.kind == "paired":
        return judge_paired(series, acceptances, today)
    joined = _joined(series, _live(series))
    found = _judge_each(series, joined, acceptances, day_of_looking(last.night) if today is None else today)
    tonight = {one.environment for one in series if one.night == last.night}
    order = sorted(found, key=lambda place: (place not in tonight, _is_too_short(found[place])))
    worse = max(order, key=lambda place: _weight(found[place]))  # of equal ones one of the last night, and one that is long enough
    if found[worse].verdict is Verdict.PASS:  # in all of them: told is where least would show
        passed = [place for place in found if found[place].verdict is Verdict.PASS]
        worse = max(passed, key=lambda place: found[place].detectable)
    beside = f"in environment {worse}: " if worse != last.environment else ""
    judged = [place for place in joined if place == worse or not _is_too_short(found[place])]
    used = {*judged, *(one.environment for place in judged for one in joined[place].nights)}
    left = sum(one.environment not in used for one in series)
    nights = "1 night of other machines or versions does" if left == 1 else f"{left} nights of other machines or versions do"
    unseen = f"; {nights} not count" if left else ""
    if left and found[worse].verdict is Verdict.INCONCLUSIVE:
        unseen += ", unless one of their commits runs here, too (harness nightly run --at)"
    return replace(found[worse], summary=beside + found[worse].summary + unseen)


def changes_of(series: Sequence[Measurement], acceptances: Sequence[Acceptance], today: date | None = None) -> list[Change]:
    """Find the changes of a metric in every environment that measured lately; of a paired one those of the last night.

    Args:
        series: as for `judge`.
        acceptances: likewise.
        today: likewise.

    Returns:
        The changes, those of the environment of the last night first.
    """
    if series[-1].kind == "paired":
        return list(judge_paired(series, acceptances, today).changes)
    joined = _joined(series, _live(series))
    each = _judge_each(series, joined, acceptances, day_of_looking(series[-1].night) if today is None else today)
    return [change for one in each.values() for change in one.changes]


def _live(series: Sequence[Measurement]) -> Iterable[str]:
    """Every environment that measured lately, that of the last night first."""
    live = [*dict.fromkeys(one.night for one in series)][-LIVE_NIGHTS:]
    return dict.fromkeys([series[-1].environment, *(one.environment for one in series if one.night in live)])


def _joined(series: Sequence[Measurement], places: Iterable[str]) -> dict[str, BridgedSeries]:
    return {place: bridged(series, place) for place in places}


def _judge_each(
    series: Sequence[Measurement], joined: Mapping[str, BridgedSeries], acceptances: Sequence[Acceptance], today: date
) -> dict[str, Judgement]:
    """Judge each; what one machine accepted while another paused does not mean what was told there behind it."""
    told: list[str] = []
    places = dict.fromkeys(one.environment for one in series)
    if acceptances and len(places) > 1:
        each = [_judge_environment(one, acceptances, today) for one in _joined(series, places).values()]
        worse = [change for one in each if one.verdict is Verdict.REGRESSION for change in one.changes if change.acceptance is None]
        told = [change.night for change in worse]
    return {place: _judge_environment(one, acceptances, today, told) for place, one in joined.items()}


def _is_too_short(found: Judgement) -> bool:
    return found.verdict is Verdict.INCONCLUSIVE and math.isnan(found.noise)


def _weight(found: Judgement) -> int:
    """A series that is too short says nothing of the others; one that may hide what is worse does."""
    return 0 if _is_too_short(found) else {Verdict.REGRESSION: 2, Verdict.INCONCLUSIVE: 1, Verdict.PASS: 0}[found.verdict]


@dataclass(frozen=True)
class _Left:
    """What stays of what was worse, behind a change for the better.

    Attributes:
        above: by how much nights are worse than the level that counts.
        chance: by so much they may be by chance.
        surely: by more they are worse; between both nobody can tell, since a bridge stays off by as much as it is.
    """

    above: float
    chance: float
    surely: float


@dataclass
class _Standing:
    """Where a series stands after some of its shifts: the level that counts, and what is worse than it."""

    reference: float
    ranges: tuple[slice, ...]
    open: list[Change] = field(default_factory=list)
    worse: list[tuple[slice, ...]] = field(default_factory=list)
    settled: list[Change] = field(default_factory=list)
    since: str = ""
    start: int = 0
    unsure: float = 0.0

    def take(self, change: Change, now: float, nights: tuple[slice, ...], left: _Left, place: int) -> None:
        """Go on by a shift.

        Args:
            change: it.
            now: the level behind it.
            nights: of that level, those that surely are and all of them.
            left: beside the level that counts.
            place: of its first night.
        """
        if change.acceptance is not None:
            self.settled += [change]
            self._stand_at(now, nights, f"since {change.night}, which was accepted", place)
        elif change.effect > 0 and (self.open or now - self.reference >= LEAST_EFFECT):
            self.open.append(change)
            self.worse.append(nights)
        elif change.effect < 0 and left.above < left.surely:  # back where it was, or better, as far as anybody can tell
            level, where = (now, nights) if now < self.reference else (self.reference, self.ranges)
            unsure = left.above if self.open and left.above > left.chance else 0.0
            self._stand_at(level, where, f"since {change.night}, when it became better by {-change.effect:.1%}", place)
            self.unsure = unsure

    def _stand_at(self, now: float, nights: tuple[slice, ...], since: str, start: int) -> None:
        self.reference, self.ranges, self.since, self.start = now, nights, since, start
        self.open, self.worse, self.unsure = [], [], 0.0


def _judge_environment(series: BridgedSeries, acceptances: Sequence[Acceptance], today: date, told: Sequence[str] = ()) -> Judgement:
    shifts = find_shifts(series.levels_N, series.errors_N, bridges=series.bridges)
    find = partial(find_acceptance, acceptances, today=today, told=told)
    found = _judge_shifts(series, shifts, find)
    for number, bridge in enumerate(series.bridges):
        if found.verdict is Verdict.REGRESSION:
            break
        # Nothing showed across the bridge, which is only as sure as a night or two: held against one another, nights behind it are surer.
        behind, end = series.behind(number), bridge.place
        known_E = find_shifts(series.levels_N[:end], series.errors_N[:end], bridges=series.bridges[:number]).residuals_E
        apart = find_shifts(behind.levels_N, behind.errors_N, bridges=behind.bridges, known_E=known_E)
        alone = _judge_shifts(behind, apart, find)
        found = alone if alone.verdict is Verdict.REGRESSION else found
    return found


def _judge_shifts(series: BridgedSeries, shifts: Shifts, find: Callable[[str, str], Acceptance | None]) -> Judgement:
    nights, levels_N = series.nights, series.levels_N
    starts = [0, *(shift.start for shift in shifts.found)]
    ends = [*(shift.level_end or shift.start for shift in shifts.found), len(nights)]
    levels = [(slice(first, last), slice(first, then)) for first, last, then in zip(starts, ends, [*starts[1:], len(nights)], strict=True)]
    ends[1:] = [series.on_one_machine(first, last) for first, last in zip(starts[1:], ends[1:], strict=True)]
    means = [float(np.median(levels_N[first:last])) for first, last in zip(starts, ends, strict=True)]
    standing = _Standing(means[0], levels[0])
    for shift, now, end, level in zip(shifts.found, means[1:], ends[1:], levels[1:], strict=True):
        before = nights[max(0, shift.place - 1)].night
        word = find(nights[shift.place].night, before) if shift.effect > 0 else None
        own = standard_error(shifts.residuals_E, starts[1] - starts[0], end - shift.start)
        error = math.hypot(own, noise_of(shifts.residuals_E)[1] * series.error_until(end))
        across = _Left(now - standing.reference, max(LEAST_EFFECT, 2 * error), max(LEAST_EFFECT, _SURE * error))
        good = standing.reference + across.surely  # first nights of a machine may have been worse, which is known as surely as the bridge
        left = _left_on_one_machine(series, shifts.residuals_E, standing.ranges, level[0], good) or across
        if left is across and _is_as_bad(series, shifts.residuals_E, standing.worse[:-1], level[0]):
            left = replace(across, surely=-math.inf)
        standing.take(_change(shift, nights[shift.place], word), now, level, left, shift.place)
    if not standing.open and (added := _added_up(series, shifts, standing.ranges[0])) is not None and added.effect > 0:
        word = find(nights[added.place].night, nights[max(0, added.place - 1)].night)
        (standing.settled if word is not None else standing.open).append(_change(added, nights[added.place], word))
    count, metric = len(nights), nights[-1].metric
    if standing.open:
        changes = (*standing.settled, *standing.open)
        in_all = effect_of_levels(means[-1] - standing.reference, nights[-1].better)
        return Judgement(metric, Verdict.REGRESSION, _worse(standing.open, in_all), count, changes, math.nan, math.nan)
    told = f"{count} night{'' if count == 1 else 's'}{series.told}"
    told += f", {count - standing.start} of them {standing.since}" if standing.since else ""
    missing = max(LEAST_NOISE + LEAST_AFTER - count, 2 * LEAST_AFTER - (count - shifts.start))
    if missing > 0:
        summary = f"{told}: too few to tell noise from change; {missing} more in this environment {'is' if missing == 1 else 'are'} needed"
        return Judgement(metric, Verdict.INCONCLUSIVE, summary, count, tuple(standing.settled), math.nan, math.nan)
    if standing.unsure:
        summary = (
            f"{told}, but {effect_of_levels(standing.unsure, nights[-1].better):.1%} of what was worse may stay, which the bridge is too "
            "unsure to tell; run up to five of the earlier commits here (harness nightly run --at), or accept it"
        )
        return Judgement(metric, Verdict.INCONCLUSIVE, summary, count, tuple(standing.settled), math.nan, math.nan)
    held = series.levels_before(shifts.start)
    usual = detectable_step(shifts.residuals_E, held, _TEN, TARGET_POWER)[0]
    now, late = noise_now(levels_N[shifts.start :], usual)
    noise, seen = detectable_step(shifts.residuals_E, held, _TEN, TARGET_POWER, now)
    above_N = levels_N - standing.reference
    better = nights[-1].better
    if hidden := (
        _hidden(above_N, series.errors_N, usual, better)
        or _late(above_N[-late:], usual, now, better)
        or _recurring(above_N, standing.start, usual, better)
    ):
        return Judgement(metric, Verdict.INCONCLUSIVE, f"{told}: {hidden}", count, tuple(standing.settled), noise, math.nan)
    further = "further " if standing.since else ""
    noisier = f", {now:.1%} in the last {late}" if late else ""
    summary = f"no {further}change in {told}; noise {usual:.2%} a night{noisier}; ten more would show a step of {seen:.1%}"
    return Judgement(metric, Verdict.PASS, summary, count, tuple(standing.settled), noise, seen)


def _added_up(series: BridgedSeries, shifts: Shifts, reference: slice) -> Shift | None:
    """What the nights of the last level show beside those that count, though nothing showed as they came."""
    kept = np.r_[reference, max(reference.stop, shifts.start) : len(series.nights)]
    inside = [replace(one, place=int((kept < one.place).sum())) for one in series.bridges if kept[0] < one.place <= kept[-1]]
    known_E, own_N = np.split(shifts.residuals_E, [len(shifts.residuals_E) - len(series.nights)])
    others_E = np.concatenate([known_E, np.delete(own_N, kept)])  # those that are kept know the noise once
    found = shift_in_all(series.levels_N[kept], series.errors_N[kept], others_E, inside)
    return None if found is None else replace(found, place=int(kept[found.place]), start=int(kept[found.start]))


def _left_on_one_machine(
    series: BridgedSeries, residuals_E: NDArray[np.float64], references: Sequence[slice], now: slice, good: float = math.inf
) -> _Left | None:
    """What stays beside earlier nights of the same machine, none worse than a level, on that which tells it best; None without any."""
    for reference in references:
        known = []
        for place in {one.environment for one in series.nights[now]}:
            before, behind = (
                [level for night, level in zip(series.nights[part], series.levels_N[part], strict=True) if night.environment == place]
                for part in (reference, now)
            )
            if min(len(before), len(behind)) >= LEAST_AFTER and np.median(before) <= good:
                known.append((standard_error(residuals_E, len(before), len(behind)), float(np.median(behind) - np.median(before))))
        if known:
            error, above = min(known)
            return _Left(above, max(LEAST_EFFECT, 2 * error), max(LEAST_EFFECT, 2 * error))  # more nights mend what few say by chance
    return None


def _is_as_bad(series: BridgedSeries, residuals_E: NDArray[np.float64], worse: Sequence[tuple[slice, ...]], now: slice) -> bool:
    """Whether nights are at a level that was told as worse, as their own machine measured it, before it became worse still."""
    beside = (_left_on_one_machine(series, residuals_E, nights, now) for nights in worse)
    return any(one is not None and one.above > -one.chance for one in beside)


def _hidden(above_N: NDArray[np.float64], errors_N: NDArray[np.float64], noise: float, better: str) -> str:
    """Say where the last nights would count as worse, if they, or their repetitions, did not differ so much more than other nights."""
    last = float(above_N[-LEAST_AFTER:].min())
    times = float(np.median(errors_N[-LEAST_AFTER:]) / max(noise, np.median(errors_N)))
    worse = f"the last nights are worse by {effect_of_levels(last, better):.1%} or more"
    if times >= _RESTLESS and last >= max(LEAST_EFFECT, _RESTLESS * noise):
        return (
            f"{worse}, but their repetitions differ {times:.0f} times as much as those of others, so that it may be chance; "
            "ten such nights would tell, or more repetitions"
        )
    if last >= max(LEAST_EFFECT, _FAR * noise):
        return f"{worse}, but no test shows yet that this is no chance; the next ones will tell"
    return ""


def _late(above_K: NDArray[np.float64], usual: float, now: float, better: str) -> str:
    """Say where the last nights are worse, but differ so much more than others that it may be chance."""
    level, times = float(np.median(above_K)), now / usual
    if times < _RESTLESS or level < max(LEAST_EFFECT, 2 * now / math.sqrt(len(above_K))):
        return ""
    return (
        f"the last {len(above_K)} nights are worse by {effect_of_levels(level, better):.1%}, but they differ {times:.0f} times as much as "
        "others, so that it may be chance; more nights would tell"
    )


def _recurring(above_N: NDArray[np.float64], start: int, noise: float, better: str) -> str:
    """Say where single nights are far off, again and again, as none or few were before: to tests of a level they are outliers.

    What stood and was mended at `start` is over, as is what more good nights follow than chance leaves; nights before a `start` that is
    long ago do not count.
    """
    own_N = above_N[start if len(above_N) - start >= LEAST_NOISE else 0 :]
    far = max(LEAST_EFFECT, _FAR * noise)
    far_N = own_N >= far
    places, nights = np.flatnonzero(far_N), len(far_N)
    for number, first in enumerate(places.tolist()):  # the last nights, from one that is far off
        inside, late = len(places) - number, nights - first
        if inside < _LEAST_OFTEN or chance_of(inside, late, len(places), nights) >= _BY_CHANCE:
            continue
        if inside < _MOSTLY * int((own_N[first:] <= -far).sum()):  # nights that became noisy are as far off to both sides
            continue
        is_over = (1 - inside / (places[-1] + 1 - first)) ** (nights - 1 - places[-1]) < _OVER
        if not is_over and float(own_N[places[number:]].sum()) / late >= LEAST_EFFECT:
            level = effect_of_levels(float(np.median(own_N[places[number:]])), better)
            return (
                f"{inside} of the last {late} nights are worse by {level:.1%}, and {number} of the {first} before: something comes "
                "and goes; find what these nights share"
            )
    return ""


def _worse(changes: Sequence[Change], in_all: float) -> str:
    one = changes[0]
    p_value = f"p = {one.p_value:.1g}" if one.p_value > _LEAST_P else f"p < {_LEAST_P:g}"
    beyond = f"; again since {changes[-1].night}, by {in_all:.1%} in all" if len(changes) > 1 else ""
    return f"worse by {one.effect:.1%} ({one.low:.1%} to {one.high:.1%}) since {one.night}, {p_value}, power {one.power:.0%}{beyond}"


def _change(shift: Shift, first: Measurement, word: Acceptance | None) -> Change:
    width = student_quantile((1 + _CONFIDENCE) / 2, max(3, int(shift.degrees))) * shift.error
    effect, low, high = (effect_of_levels(value, first.better) for value in (shift.effect, shift.effect - width, shift.effect + width))
    return Change(first.night, effect, low, high, shift.p_value, shift.power, word)
