"""Finds where a series of nights shifted: steps and drifts, for the worse and for the better. Levels in, shifts out; knows no metric.

Nights are taken one after another, as they came: what is behind a shift is another level, and is held against that one alone. Where the
level changed is found by least squares (`ruptures`). Whether it did is a t test whose variance knows three things about nightly
measurements: outliers (a Winsorized standard deviation), neighbours that resemble each other (an autoregressive correction of the effective
number of nights, with the estimate's own uncertainty on top), and that a single odd night is no shift (the nights behind it must agree).
Nights that are noisier than those before, by themselves or by their repetitions, count by their own noise. A drift is a line through all
nights of a level, with the same variance around it. The level at which both decide is far below 5 %, because they are asked every night for
every metric; `simulation` measures what comes of it. Where neither shows and still neighbours resemble each other far more than noise does,
several changes have come before the noise was known: then it is that around several levels and lines (`segments`).

N nights, M nights before a step, K nights from it on, E nights that know the noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from harness.errors import HarnessError
from harness.nightly.judging.segments import (
    LEAST_LINE,
    Segment,
    came_at_once,
    clipped,
    has_structure,
    segments,
    split_by_sums,
    splits,
    stairs,
)
from harness.nightly.judging.spread import (
    MAX_CORRELATION,
    chance_of,
    correlation_of,
    degrees_of,
    in_order,
    inflation,
    line_of,
    mean_of,
    median,
    nights_since,
    noise_of,
    student_tail,
    winsorized,
    within,
)

LEVEL = 1e-5
"""One-sided p below which a shift is one; chosen so that 50 metrics give at most one false alarm in 100 nights (`simulation`)."""
LEAST_EFFECT = 0.008
"""A shift by less is none, however sure: machines drift by as much between seasons."""
LEAST_GAIN = 0.015
"""Likewise for a drift, and for the better where it did not come at once: what a season gives, it takes, and a level that follows its dips
cries wolf behind each."""
LEVEL_BACK = 1e-3
"""Likewise LEVEL, where the level from before a worse one is there again: that one alone is expected, so less is enough."""
LEAST_NOISE, LEAST_AFTER = 30, 2
"""Nights that must know the noise, and nights on each side of a step."""
_KNOWN_AFTER = 10  # nights from a step on that know the noise, too: of fewer the spread is not to be trusted
RECENT = 6
"""Nights before a step that, as all behind it, may be noisier than the others."""
NOISIER, OTHER_NOISE = 2.0, 3.0
"""By how much, so that they count by their own noise, and so that they alone know it."""
_TAIL, _BY_CHANCE = 3.0, 1e-4  # spreads from which on nights are no noise around a level, and the chance that they come so often
_WIDTHS = 20.0, 3.0  # spreads beyond which a night counts no more where a step is looked for
_LEAST_DRIFT = 10
_DENSE = 25  # nights of a level, of which every one is looked at; then one in as many
_NOTHING: NDArray[np.float64] = np.empty(0)
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Shift:
    """A change of level.

    Attributes:
        place: of the first night that is other.
        seen: number of nights after which it showed.
        start: of the first night of the level that is behind it.
        effect: difference of logarithms; above 0 is worse.
        error: its standard error.
        degrees: effective degrees of freedom.
        bend: place of the last night before a drift, which came night by night; None for a step.
        level_end: place of the first night behind the level that it is held against; None where that lasts until `start`.
        back: whether it ends what was worse, so that the level is the one from before.
        small: whether less is enough of it, since it came at once, as no season does, or goes on with a drift for the better.
    """

    place: int
    seen: int
    start: int
    effect: float
    error: float
    degrees: float
    bend: int | None = None
    level_end: int | None = None
    back: bool = False
    small: bool = False

    @property
    def p_value(self) -> float:
        """One-sided, that noise alone gives so much."""
        return student_tail(abs(self.effect) / self.error, self.degrees)

    @property
    def power(self) -> float:
        """Chance that as many nights show a shift of this size."""
        return _NORMAL.cdf(abs(self.effect) / self.error + _NORMAL.inv_cdf(LEVEL))

    @property
    def shows(self) -> bool:
        """Whether it is large and sure enough to be one."""
        least = LEAST_EFFECT if self.back or self.small or (self.effect > 0 and self.bend is None) else LEAST_GAIN
        return abs(self.effect) >= least and self.p_value < (LEVEL_BACK if self.back else LEVEL)

    def behind(self, start: int) -> Shift:
        """Return it in a series that has `start` nights more before it."""
        bend, level_end = (None if one is None else one + start for one in (self.bend, self.level_end))
        place, seen, first = self.place + start, self.seen + start, self.start + start
        return replace(self, place=place, seen=seen, start=first, bend=bend, level_end=level_end)


@dataclass(frozen=True)
class Shifts:
    """What became of a series.

    Attributes:
        found: in order.
        residuals_E: of all nights, around the level, or line, that they belong to.
    """

    found: tuple[Shift, ...]
    residuals_E: NDArray[np.float64]

    @property
    def start(self) -> int:
        """Place of the first night of the last level."""
        return self.found[-1].start if self.found else 0


@dataclass(frozen=True)
class Bridge:
    """Where a series goes on in another environment.

    Attributes:
        place: of the first night there.
        error: of the difference between both environments, in standard deviations of a night.
    """

    place: int
    error: float


@dataclass(frozen=True)
class _Nights:
    """Nights of one level, and what knows the noise beside them.

    Attributes:
        levels_N: in logarithms; more is worse.
        errors_N: standard error of each by its own repetitions.
        residuals_E: of other nights.
        across: error of the bridges among them, in standard deviations of a night.
        earlier: the level from before, where theirs is worse.
        joints: place of the first night behind each bridge.
        is_won_slowly: they are behind a drift for the better, which may go on.
    """

    levels_N: NDArray[np.float64]
    errors_N: NDArray[np.float64]
    residuals_E: NDArray[np.float64]
    across: float
    earlier: float | None = None
    joints: tuple[int, ...] = ()
    is_won_slowly: bool = False

    def until(self, end: int, known: Sequence[NDArray[np.float64]]) -> _Nights:
        """The first nights, where others know the noise, too."""
        return replace(
            self, levels_N=self.levels_N[:end], errors_N=self.errors_N[:end], residuals_E=np.concatenate([self.residuals_E, *known])
        )


def find_shifts(
    levels_N: NDArray[np.float64],
    errors_N: NDArray[np.float64] | None = None,
    *,
    bridges: Sequence[Bridge] = (),
    known_E: NDArray[np.float64] = _NOTHING,
    densely: bool = False,
) -> Shifts:
    """Follow a series night by night.

    Args:
        levels_N: a level a night, in logarithms; more is worse.
        errors_N: standard error of each by its own repetitions, 0 where there is one; None: all have one.
        bridges: where it goes on in another environment; what is compared across is less sure.
        known_E: residuals of other nights that know the noise, too.
        densely: look after every night, as was done when they came; else of a long level after some, and after the last.

    Returns:
        The shifts.

    Raises:
        HarnessError: `ruptures` is not installed.
    """
    if find_spec("ruptures") is None:
        raise HarnessError("harness nightly: ruptures is not installed; pip install 'compressor-harness[nightly]'")
    errors_N = np.zeros(len(levels_N)) if errors_N is None else errors_N
    found, residuals_E, start = list[Shift](), known_E, 0
    for end in _looks(len(levels_N), found, densely):
        inside = [one for one in bridges if start < one.place < end]
        across, joints = math.hypot(*(one.error for one in inside)), tuple(one.place - start for one in inside)
        slowly = bool(found) and found[-1].bend is not None and found[-1].effect < 0
        earlier = _earlier(levels_N[:end], found)
        shift = _look(_Nights(levels_N[start:end], errors_N[start:end], residuals_E, across, earlier, joints, slowly))
        if shift is None:
            continue
        residuals_E = np.concatenate([residuals_E, _around(levels_N[start : start + shift.start], shift)])
        found.append(shift.behind(start))
        start = found[-1].start
    return Shifts(tuple(found), np.concatenate([residuals_E, _rest(levels_N[start:])]))


def shift_in_all(
    levels_N: NDArray[np.float64], errors_N: NDArray[np.float64], known_E: NDArray[np.float64], bridges: Sequence[Bridge]
) -> Shift | None:
    """Find what nights show beside those that they are held against, where nothing showed as they came: small steps add up.

    Args:
        levels_N: those that are held against, and behind them those of the last level.
        errors_N: standard error of each by its own repetitions.
        known_E: residuals of other nights that know the noise, too.
        bridges: among them.

    Returns:
        The shift, if one shows.
    """
    nights = _Nights(levels_N, errors_N, known_E, math.hypot(*(one.error for one in bridges)), None, tuple(one.place for one in bridges))
    return _look(nights)


def _stairs(nights: _Nights) -> Shift | None:
    """The last of three levels beside the first, where no single step is most of it."""
    parts = stairs(nights.levels_N, _KNOWN_AFTER)
    return _to_a_level(nights, parts) if parts else None


def _earlier(levels_N: NDArray[np.float64], found: Sequence[Shift]) -> float | None:
    """The level before what is worse, until it is there again; None where nothing is."""
    earlier, starts = None, [0, *(one.start for one in found), len(levels_N)]
    for shift, before, behind in zip(found, starts, starts[2:], strict=False):
        if shift.effect > 0:
            level = median(levels_N[before : shift.start if shift.level_end is None else shift.level_end])
            earlier = level if earlier is None else min(level, earlier)
        # Half of the least: the first nights of the next level lie among these.
        elif earlier is not None and median(levels_N[shift.start : behind]) < earlier + LEAST_EFFECT / 2:
            earlier = None
    return earlier


def _looks(nights: int, found: list[Shift], densely: bool) -> Iterator[int]:
    end, known = 0, 0
    while end < nights or len(found) > known:  # behind what was found the same nights may show more
        long = end - (found[-1].start if found else 0)
        if len(found) == known:
            end = min(nights, end + (1 if densely else max(1, long // _DENSE)))
        known = len(found)
        yield end


def _look(nights: _Nights) -> Shift | None:
    """The shift that the nights of one level show, the step or the drift, whichever lies closer to them."""
    count = len(nights.levels_N)
    if count < 2 * LEAST_AFTER or count + len(nights.residuals_E) < LEAST_NOISE + LEAST_AFTER:
        return None
    candidates = [one for one in (_step(nights), _drift(nights, 0), _bent(nights)) if one is not None and one[0].shows]
    simple = min(candidates, key=lambda one: one[1])[0] if candidates else None
    first = _first_of_many(nights) if simple is not None or has_structure(nights.levels_N) else None
    found = (first if first is not None and first.shows else simple) or _stairs(nights)
    return None if found is None else replace(found, seen=count)


def _step(nights: _Nights) -> tuple[Shift, float] | None:
    """Where two levels fit best: the test of it, and the squares that are left. Mostly, running sums say at once that none shows.

    A few nights that are far off pull the place to where they lie, unless they count little; so does a step that is as far off itself.
    """
    for width in _WIDTHS:
        found = _step_at(split_by_sums(clipped(nights.levels_N, width)), nights)
        if found is None or not (found[0].shows or replace(found[0], small=True).shows):
            continue
        found = _step_at(splits(clipped(nights.levels_N, width), 1)[0], nights)
        if found is None or found[0].shows:
            return found
        shift, squares = found
        if replace(shift, small=True).shows and came_at_once(nights.levels_N, shift.place, _KNOWN_AFTER):
            return replace(shift, small=True), squares
    return None


def _step_at(place: int, nights: _Nights, known_after: int = _KNOWN_AFTER) -> tuple[Shift, float] | None:
    """The test of a place, and the squares that are left. Welch's idea; the spread is that of all who know it, or a side's own."""
    before_M, after_K = nights.levels_N[:place], nights.levels_N[place:]
    # How far off a bridge is counts in `across`; it is no noise.
    sides = [before_M, *([after_K] if len(after_K) >= known_after else [])]
    known = [nights.residuals_E, *(_centred(part) for part in _apart(sides, nights.joints))]
    if sum(map(len, known)) < LEAST_NOISE:
        return None
    kept_E, spread = noise_of(np.concatenate(known))
    sign = 1.0 if median(after_K) > median(before_M) else -1.0
    level = -_location(-sign * before_M, spread)
    effect = max(0.0, _location(sign * after_K, spread) - level)
    if effect < LEAST_EFFECT:
        return None
    correlation = correlation_of(kept_E)
    # Repetitions that differ alike in all nights, as where the first is cold, say nothing of the nights: what is more than before counts.
    usual = max(spread, median(nights.errors_N[:place]))
    own, degrees = max(spread, noise_of(after_K)[1]), degrees_of(len(kept_E), correlation)
    if len(after_K) < _KNOWN_AFTER:  # from so many on, nights themselves say how much they differ
        own = max(own, median(nights.errors_N[place:]) * spread / usual)
    for noise, count in ((noise_of(after_K)[1], len(after_K)), (winsorized(before_M[-RECENT:])[1], RECENT)):
        own = max(own, noise) if noise > NOISIER * spread else own
        degrees = min(degrees, max(3.0, count - 1.0)) if noise > OTHER_NOISE * spread else degrees
    parts = [spread**2 * inflation(correlation, place) / place, own**2 * inflation(correlation, len(after_K)) / len(after_K)]
    error = math.sqrt((spread * nights.across) ** 2 + sum(parts))
    back = sign < 0 and nights.earlier is not None and median(after_K) - nights.earlier < max(LEAST_EFFECT, error)
    others_E = np.concatenate([nights.residuals_E, *(_centred(part) for part in _apart([before_M], nights.joints))])
    if not back and _is_usual(sign * others_E / effect, (sign * after_K - level) / effect, winsorized(others_E)[1] / effect):
        return None
    return Shift(place, len(nights.levels_N), place, sign * effect, error, degrees, back=back), _squares([before_M, after_K])


def _is_usual(others_E: NDArray[np.float64], after_K: NDArray[np.float64], spread: float) -> bool:
    """Whether nights on both sides of a step, in shares of it, are so mixed that they may lie as they do by chance.

    A spread says how often where it is that of one level. Some nights far outside of it, or at a level of their own with few between both,
    say it by their number.
    """
    before, after = int((others_E >= 1 / 2).sum()), int((after_K >= 1 / 2).sum())
    if not before and after == len(after_K):
        return False
    between, beyond = (int(((others_E >= low) & (others_E < high)).sum()) for low, high in ((1 / 4, 3 / 4), (3 / 4, math.inf)))
    if _TAIL * spread >= 1 and 2 * between >= beyond:
        return False
    return chance_of(after, len(after_K), before + after, len(others_E) + len(after_K)) > _BY_CHANCE


def _apart(sides: Sequence[NDArray[np.float64]], joints: Sequence[int]) -> Iterator[NDArray[np.float64]]:
    """Nights of each side of a step, those of each machine apart."""
    for side in sides:
        # Two bridges have one place where the nights between them are left out.
        yield from np.split(side, sorted({joint for joint in joints if 0 < joint < len(side)}))
        joints = [joint - len(side) for joint in joints]


def _first_of_many(nights: _Nights) -> Shift | None:
    """The first change of several: nights of later levels and lines know the noise, too."""
    levels_N = nights.levels_N.copy()
    first, *later = parts = segments(levels_N)
    known = [_around_part(levels_N, one) for one in later]
    if first.is_line:
        drift = _shift(_drift(nights.until(first.end, known), 0, LEAST_LINE))
        return drift if drift is not None and drift.shows else _to_a_level(nights, parts)
    if not later or not later[0].is_line:
        return _to_a_level(nights, parts)
    second = later[0]
    # Where the line begins is as sure as the mean of a quarter of its nights would be.
    shown = second.start + _quarter(second)
    slope = line_of(levels_N[second.start : second.end], 0)[0]
    levels_N[second.start : second.end] -= slope * np.arange(second.end - second.start)
    jump = _shift(_step_at(first.end, replace(nights, levels_N=levels_N).until(shown, known)))
    drift = _shift(_drift(nights.until(second.end, known[1:]), second.start, LEAST_LINE))
    return next((one for one in (jump, drift) if one is not None and one.shows), _to_a_level(nights, parts))


def _to_a_level(nights: _Nights, parts: Sequence[Segment]) -> Shift | None:
    """The first later level that the first one shows to be another: steps that are none each add up, and lines may be a curve in truth."""
    first, curved = parts[0], False
    place = _quarter(first) if first.is_line else first.end
    for number, behind in enumerate(parts):
        curved = curved or behind.is_line
        if number == 0 or behind.is_line:
            continue
        kept = np.r_[:place, behind.start : behind.end]
        joints = tuple(int((kept < joint).sum()) for joint in nights.joints)
        levels = replace(nights, levels_N=nights.levels_N[kept], errors_N=nights.errors_N[kept], joints=joints)
        others = [one for one in (parts if first.is_line else parts[1:]) if one is not behind]
        # Around the line of a curve nights say more than the noise: they are asked only where levels alone are too few to know it.
        flat = [one for one in others if not one.is_line] if curved else others
        for some in (flat, others):
            known = [_around_part(nights.levels_N, one) for one in some]
            found = _shift(_step_at(place, levels.until(len(kept), known), LEAST_AFTER))
            if found is not None:
                break
        if found is not None:
            bend = max(0, place - 1) if curved else None
            found = replace(found, place=place if curved else behind.start, start=behind.start, bend=bend, level_end=place)
            if found.shows:
                return found
    return None


def _around_part(levels_N: NDArray[np.float64], part: Segment) -> NDArray[np.float64]:
    own_M = levels_N[part.start : part.end]
    return line_of(own_M, 0)[1] if part.is_line else _centred(own_M)


def _quarter(part: Segment) -> int:
    return max(LEAST_AFTER, (part.end - part.start) // 4)


def _shift(found: tuple[Shift, float] | None) -> Shift | None:
    return None if found is None else found[0]


def _squares(parts: Sequence[NDArray[np.float64]]) -> float:
    """What is left of nights around the means of their levels."""
    return sum(float(rest @ rest) for rest in (part - mean_of(part) for part in parts))


def _bent(nights: _Nights) -> tuple[Shift, float] | None:
    """The line behind the bend that fits best, where too few nights lie before it to know the noise. Each bend is a test of its own."""
    bends = np.arange(LEAST_AFTER, min(LEAST_NOISE, len(nights.levels_N) - _LEAST_DRIFT + 1))
    if not len(bends) or len(nights.residuals_E) >= LEAST_NOISE:
        return None
    signal_N = clipped(nights.levels_N, _WIDTHS[0])
    since_BN = np.maximum(np.arange(len(signal_N)) - bends[:, None], 0.0)
    since_BN -= since_BN.mean(axis=1, keepdims=True)
    gains_B = np.square(since_BN @ (signal_N - mean_of(signal_N))) / np.square(since_BN).sum(axis=1)
    found = _drift(nights, int(bends[gains_B.argmax()]))
    return found if found is not None and found[0].p_value * len(bends) < LEVEL else None


def _drift(nights: _Nights, bend: int, least: int = _LEAST_DRIFT) -> tuple[Shift, float] | None:
    """A line through all nights from a bend on: the test of its rise to the last, and the squares that are left."""
    count = len(nights.levels_N)
    if count - bend < least:
        return None
    slope, own_N = line_of(nights.levels_N, bend)
    rise = slope * (count - 1 - bend)
    won = median(nights.levels_N[:LEAST_LINE]) - median(nights.levels_N[-LEAST_LINE:])
    is_more = nights.is_won_slowly and rise < 0
    enough = LEAST_EFFECT if is_more else LEAST_GAIN
    if abs(rise) < enough or (rise < 0 and won < enough):  # the line of a dip goes deeper than the dip
        return None
    squares = float(np.square(own_N).sum())
    if squares > _squares(np.split(nights.levels_N, [split_by_sums(clipped(nights.levels_N, _WIDTHS[0]))])):  # a step unknown yet
        return None
    kept_E, spread = noise_of(np.concatenate([nights.residuals_E, own_N]))
    correlation = correlation_of(kept_E)
    own = behind if (behind := noise_of(own_N[bend:])[1]) > NOISIER * spread else spread
    # A curve is not noise around its line: neighbours bound the noise, if they are as alike as they may be at most.
    near = noise_of(np.diff(nights.levels_N))[1] / math.sqrt(2 * (1 - MAX_CORRELATION))
    lever = (count - 1 - bend) / math.sqrt(float(np.square(nights_since(bend, count)).sum()))
    begun = min(count - 1, bend + math.ceil(LEAST_EFFECT / abs(slope)))
    known = ((own, correlation, degrees_of(len(kept_E), correlation)), (near, MAX_CORRELATION, count - 2.0))
    errors = ((noise * math.hypot(nights.across, lever * math.sqrt((1 + alike) / (1 - alike))), degrees) for noise, alike, degrees in known)
    level_end = max(LEAST_AFTER, bend + 1, (bend + begun) // 2)  # until then it is as good as nothing
    drifts = (Shift(begun, count, count - LEAST_AFTER, rise, error, degrees, bend, level_end, small=is_more) for error, degrees in errors)
    return min(drifts, key=lambda one: one.p_value), squares


def _around(levels_M: NDArray[np.float64], shift: Shift) -> NDArray[np.float64]:
    """What is left of the nights before the level behind a shift."""
    around = _rest(levels_M)
    if shift.bend is None or len(levels_M) <= shift.bend + 1:
        return around
    return min(line_of(levels_M, shift.bend)[1], around, key=lambda own_M: float(np.square(own_M).sum()))  # a curve is no line


def _rest(levels_M: NDArray[np.float64]) -> NDArray[np.float64]:
    """What is left of nights without a shift: steps and lines that are too small to be one are no noise, either."""
    parts = segments(levels_M) if has_structure(levels_M) else [Segment(0, len(levels_M), is_line=False)]
    return np.concatenate([_around_part(levels_M, one) for one in parts])


def _centred(levels_M: NDArray[np.float64]) -> NDArray[np.float64]:
    """The residuals of nights at one level."""
    return levels_M - mean_of(winsorized(levels_M)[0])


def _location(levels_K: NDArray[np.float64], spread: float) -> float:
    """The level of some nights, of two the one that says less: one odd night is no shift. Odd ones count no more than two spreads."""
    middle = in_order(levels_K)[(len(levels_K) - 1) // 2]
    return mean_of(within(levels_K, middle, 2 * spread))
