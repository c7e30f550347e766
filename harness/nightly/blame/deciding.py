"""Whether a commit is as the good one or as the bad one: by the statistic of the nights, on runs that took turns with the good one.

A run is one level, as a night is (`judging.judge.level`); a round is a run of the commit and one of the good commit, back to back, so that
a slow hour slows both. All commits share one spread, so that few rounds of each are enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.nightly.blame.repository import Mark
from harness.nightly.judging.bridging import effect_of_levels
from harness.nightly.judging.shifts import LEAST_EFFECT
from harness.nightly.judging.spread import student_tail
from harness.nightly.measurement import Better
from harness.validation.behaviour.bootstrap import student_quantile

LEAST_ROUNDS = 3
_LEVEL = 0.005
"""One-sided, of each decision: ten commits are all decided rightly in 95 of 100 searches."""
_REPRODUCED = 0.001
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Effect:
    """How much worse a commit is than the good one, relative.

    Attributes:
        estimate: above 0 is worse.
        low: end of its 95 % interval.
        high: likewise.
        num_rounds: that it comes from.
    """

    estimate: float
    low: float
    high: float
    num_rounds: int

    def __str__(self) -> str:
        """In per cent; the same sequences give the same again, and no interval."""
        return f"{self.estimate:+.1%}" + (f" ({self.low:+.1%} to {self.high:+.1%})" if self.low < self.high else "")


def effect_of(revision: str, rounds: Mapping[str, Sequence[float]], better: Better) -> Effect:
    """Return the effect of a commit.

    Args:
        revision: the commit.
        rounds: commit to differences of levels from the good one; all commits give the spread.
        better: which way readings are better.

    Returns:
        The effect.
    """
    mean, error, degrees = _estimate(revision, rounds)
    width = student_quantile((1 + _CONFIDENCE) / 2, degrees) * error
    estimate, low, high = (effect_of_levels(value, better) for value in (mean, mean - width, mean + width))
    return Effect(estimate, low, high, len(rounds[revision]))


def is_reproduced(bad: str, rounds: Mapping[str, Sequence[float]]) -> bool:
    """Return whether the bad commit is worse than the good one on this machine."""
    mean, error, degrees = _estimate(bad, rounds)
    return mean >= LEAST_EFFECT and (error == 0 or student_tail(mean / error, degrees) < _REPRODUCED)


def decide(revision: str, bad: str, rounds: Mapping[str, Sequence[float]]) -> Mark:
    """Hold a commit against half of the whole effect.

    Args:
        revision: the commit.
        bad: the bad one.
        rounds: as in `effect_of`.

    Returns:
        Which end it is like; `skip` where these rounds cannot tell.
    """
    mean, error, degrees = _estimate(revision, rounds)
    beyond = mean - float(np.mean(rounds[bad])) / 2
    if error > 0 and student_tail(abs(beyond) / error, degrees) >= _LEVEL:
        return "skip"
    return "bad" if beyond > 0 else "good"


def _estimate(revision: str, rounds: Mapping[str, Sequence[float]]) -> tuple[float, float, int]:
    """Mean of a commit's differences, its standard error from the spread of all, and the degrees of freedom."""
    degrees = max(1, sum(len(found) - 1 for found in rounds.values()))
    squares = sum(float(np.square(np.asarray(found) - np.mean(found)).sum()) for found in rounds.values())
    own = rounds[revision]
    return float(np.mean(own)), math.sqrt(squares / degrees / len(own)), max(LEAST_ROUNDS, degrees)
