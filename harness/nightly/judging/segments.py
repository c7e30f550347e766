"""Cuts nights into levels and lines, where one step or one line does not explain them. Numbers in, places out.

Of all cuttings into as many parts the one with the least squares is found by dynamic programming (Bellman 1961), and of these the one whose
every change, a cut or a line in place of a level, has lowered the squares at least three times: more than noise allows. Of more than
hundred nights less says as much, so that a history of many small changes is not taken for one level of much noise.

N nights, of which `start` to `end` are one part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.nightly.judging.spread import mean_of, median, noise_of, within

_STRUCTURE = 4.0  # by how much nights differ from all others more than from their neighbours; noise with a correlation of 0.6 gives 2.5
_GAIN, _KNOWN = 3.0, 100  # by how much each change must lower the squares; of more nights less says as much
_MOST_CHANGES = 8
LEAST_LEVEL, LEAST_LINE = 2, 5
"""Nights."""
_FLOOR = 1e-12  # squares of a night that are none
_NEAR = 40  # nights on each side of a step that say whether it came at once
_WIDTH = 3.0  # spreads beyond which a night counts no more where stairs are looked for, and whether a step came at once
_BENDS, _SHARPER = 5, 16.0  # degree of a curve that levels fit better than, and by how much in twice the logarithm of the likelihood


class Segment(NamedTuple):
    """Nights of one level, or on one line."""

    start: int
    end: int
    is_line: bool


def has_structure(levels_N: NDArray[np.float64]) -> bool:
    """Say whether nights differ from all others far more than from their neighbours.

    Args:
        levels_N: at least 2, in order.

    Returns:
        Whether von Neumann's ratio is so small that noise does not explain it.
    """
    steps_M, centred_N = np.diff(levels_N), levels_N - levels_N.mean()
    return float(centred_N @ centred_N) > _STRUCTURE * float(steps_M @ steps_M) / 2


def segments(levels_N: NDArray[np.float64]) -> list[Segment]:
    """Cut nights into levels and lines.

    Args:
        levels_N: at least 2, in order.

    Returns:
        The parts in order; one level where nothing else explains the nights.
    """
    flat_NN, line_NN = _squares(levels_N)
    count, none = len(levels_N), (math.inf, 0, False)
    best = [[none] * (count + 1) for _ in range(_MOST_CHANGES + 1)]  # by changes and end: squares, start of the last part, is it a line
    squares_CN = np.full((_MOST_CHANGES + 1, count + 1), math.inf)
    for end in range(LEAST_LEVEL, count + 1):
        best[0][end], best[1][end] = (float(flat_NN[0, end]), 0, False), (float(line_NN[0, end]), 0, True)
        for fits_NN, own in ((flat_NN, 1), (line_NN, 2)):
            sums_CM = squares_CN[: _MOST_CHANGES + 1 - own, :end] + fits_NN[:end, end]
            for changes, start in enumerate(sums_CM.argmin(axis=1).tolist(), own):
                best[changes][end] = min(best[changes][end], (float(sums_CM[changes - own, start]), start, own == 2))
        squares_CN[:, end] = [squares for squares, _, _ in (row[end] for row in best)]
    penalty = math.log(_GAIN) * min(1.0, _KNOWN / count)
    changes = min(range(_MOST_CHANGES + 1), key=lambda many: math.log(best[many][count][0] + count * _FLOOR) + many * penalty)
    found, end = list[Segment](), count
    while end:
        _, start, is_line = best[changes][end]
        found.insert(0, Segment(start, end, is_line))
        changes, end = changes - is_line - (start > 0), start
    return found


def stairs(levels_N: NDArray[np.float64], least: int) -> list[Segment]:
    """Cut nights into three levels, the second between the others, that fit better than a curve: where machines drift with the season.

    Args:
        levels_N: in order.
        least: nights of each level.

    Returns:
        The levels; none where one of both steps is most of it, so that a step says as much, or a curve does.
    """
    count = len(levels_N)
    if count < 3 * least:
        return []
    places = splits(clipped(levels_N, _WIDTH), 2, least)
    if not _are_sharp(levels_N, places):
        return []
    return [Segment(start, end, is_line=False) for start, end in pairwise([0, *places, count])]


def came_at_once(levels_N: NDArray[np.float64], place: int, least: int) -> bool:
    """Say of a step whether two levels fit the nights near to it far better than a curve: more nights may be those of several seasons.

    Args:
        levels_N: in order.
        place: of the first night behind it.
        least: nights that must be behind it.

    Returns:
        Whether they do; nights that are far off count as if they just were, for the squares of one would be most of all.
    """
    if len(levels_N) - place < least:
        return False
    first = max(0, place - _NEAR)
    near_M, place = levels_N[first : place + _NEAR], place - first
    own_M = np.concatenate([part - median(part) for part in np.split(near_M, [place])])
    beyond_M = own_M - within(own_M, 0.0, _WIDTH * noise_of(own_M)[1])
    return _are_sharp(near_M - beyond_M, [place])


def clipped(levels_N: NDArray[np.float64], width: float) -> NDArray[np.float64]:
    """Say of what is outside of so many spreads that it is just outside.

    Args:
        levels_N: at least 2.
        width: spreads.

    Returns:
        The levels.
    """
    return within(levels_N, median(levels_N), width * noise_of(levels_N)[1])


def split_by_sums(levels_N: NDArray[np.float64]) -> int:
    """Find where two levels fit best, as `splits` does but for ties.

    Args:
        levels_N: in order; odd ones clipped, or they pull it to where they lie.

    Returns:
        The place of the first night of the second.
    """
    before_M = np.arange(LEAST_LEVEL, len(levels_N) - LEAST_LEVEL + 1)
    sums_M = np.cumsum(levels_N - mean_of(levels_N))[before_M - 1]
    return int(before_M[np.argmax(sums_M * sums_M / (before_M * (len(levels_N) - before_M)))])


def splits(levels_N: NDArray[np.float64], many: int, least: int = LEAST_LEVEL) -> list[int]:
    """Find where so many steps between levels fit best, by least squares.

    Args:
        levels_N: in order; odd ones clipped, or they pull them to where they lie.
        many: steps.
        least: nights of each level.

    Returns:
        The place of the first night behind each.
    """
    import ruptures  # a second of imports, which most series never need

    return ruptures.KernelCPD(kernel="linear", min_size=least).fit(levels_N[:, None]).predict(n_bkps=many)[:-1]


def _squares(levels_N: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What is left of nights start to end around their level, and around a line, [N + 1, N + 1]; infinite where they are too few."""
    count = len(levels_N)
    values_N, nights_N = levels_N - levels_N.mean(), np.arange(count, dtype=np.float64)
    sums = [np.concatenate([[0.0], np.cumsum(one)]) for one in (values_N, values_N**2, nights_N * values_N)]
    total, square, moment = (one[None, :] - one[:, None] for one in sums)
    length = np.arange(count + 1)[None, :] - np.arange(count + 1)[:, None].astype(np.float64)
    middle = (np.arange(count + 1)[None, :] + np.arange(count + 1)[:, None] - 1) / 2
    held = np.maximum(length, 1.0)
    flat = np.maximum(square - total**2 / held, 0.0)
    line = np.maximum(flat - (moment - middle * total) ** 2 / np.maximum((held**3 - held) / 12, 1.0), 0.0)
    return np.where(length >= LEAST_LEVEL, flat, math.inf), np.where(length >= LEAST_LINE, line, math.inf)


def _are_sharp(levels_N: NDArray[np.float64], places: Sequence[int]) -> bool:
    """Whether levels fit far better than a curve, as a season makes it."""
    count = len(levels_N)
    nights_N = np.arange(count, dtype=np.float64)
    curve_N = np.polynomial.Polynomial.fit(nights_N, levels_N, _BENDS)(nights_N)
    residuals = (levels_N - curve_N, np.concatenate([part - mean_of(part) for part in np.split(levels_N, places)]))
    around_curve, around_parts = (math.log(float(one @ one) + count * _FLOOR) for one in residuals)
    return count * (around_curve - around_parts) >= _SHARPER
