"""What is said of a metric: its verdict, the changes for the worse, and what was accepted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from typing import Any

from harness.nightly.measurement import Acceptance, in_time
from harness.reporting.verdict import Verdict


@dataclass(frozen=True)
class Change:
    """A change of level.

    Attributes:
        night: the first one of the new level.
        effect: relative; above 0 is worse.
        low: end of its 95 % interval.
        high: likewise.
        p_value: one-sided, that noise alone gives so much; of a paired metric an upper bound.
        power: chance that a change of this size shows in such noise, as it did; near a half, it is likely smaller than it seems.
        acceptance: somebody's word that it is meant; None where there is none, or it has expired.
    """

    night: str
    effect: float
    low: float
    high: float
    p_value: float
    power: float
    acceptance: Acceptance | None = None


@dataclass(frozen=True)
class Judgement:
    """What the nights of a metric say.

    Attributes:
        metric: its name.
        verdict: REGRESSION where an unaccepted change for the worse stands, INCONCLUSIVE where they cannot tell.
        summary: in a line.
        num_nights: in the series that was judged, which is that of one environment.
        changes: for the worse, oldest first.
        noise: standard deviation between nights, of a paired metric between samples of sequences, relative; nan where there are too few.
        detectable: the smallest step that ten further nights, of a paired metric one, show with a power of 80 %, relative; nan likewise,
            and where repetitions hide what nights would tell.
    """

    metric: str
    verdict: Verdict
    summary: str
    num_nights: int
    changes: tuple[Change, ...]
    noise: float
    detectable: float

    @property
    def is_long(self) -> bool:
        """Whether there are nights enough: one that cannot tell all the same may hide a loss."""
        return not math.isnan(self.noise)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types; what is unknown is None."""
        changes = [_known(asdict(change)) for change in self.changes]
        return _known(vars(self)) | {"verdict": self.verdict.value, "changes": changes}


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, None for each number that is none."""
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}


def find_acceptance(acceptances: Sequence[Acceptance], night: str, before: str, today: date, told: Sequence[str] = ()) -> Acceptance | None:
    """Find the acceptance that means a change: of its first night, or of a later one on which it was seen.

    Args:
        acceptances: of the metric.
        night: the first one of the new level.
        before: the one before it.
        today: an acceptance whose last day is before it has expired.
        told: nights from which on another machine told of what is worse: a word of before them, on a night between these two, does not mean
            that.

    Returns:
        The acceptance that was written last; None where there is none. Of one night the last word counts, also where it ends earlier.
    """
    first = in_time(night)
    last_words = {one.night: number for number, one in enumerate(acceptances)}
    for number, one in reversed([*enumerate(acceptances)]):
        expired = bool(one.until) and today > date.fromisoformat(one.until)
        came_behind = any(in_time(one.night) < in_time(worse) <= first for worse in told)
        if in_time(one.night) > in_time(before) and not expired and last_words[one.night] == number and not came_behind:
            return one
    return None


def day_of_looking(night: str) -> date:
    """Return the day on which acceptances are looked at: today in UTC, or the day with which a night's label begins, where it is later."""
    today = datetime.now(UTC).date()
    try:
        return max(today, date.fromisoformat(night[:10]))
    except ValueError:
        return today
