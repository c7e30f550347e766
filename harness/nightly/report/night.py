"""What a history says of a night, without running anything."""

from __future__ import annotations

from dataclasses import dataclass

from compressor.errors import UserInputError
from harness.nightly.history import History
from harness.nightly.judging.flaky import find_flaky
from harness.nightly.judging.judge import judge
from harness.nightly.judging.judgement import Judgement
from harness.nightly.measurement import Acceptance, Measurement
from harness.nightly.runner import Night
from harness.reporting.verdict import Verdict


@dataclass(frozen=True)
class Trend:
    """A metric over its nights.

    Attributes:
        series: its measurements, by night.
        acceptances: what was accepted of it.
        judgement: of the last night.
    """

    series: list[Measurement]
    acceptances: list[Acceptance]
    judgement: Judgement

    @property
    def name(self) -> str:
        """Name of the metric."""
        return self.judgement.metric


_ORDER = (Verdict.REGRESSION, Verdict.INCONCLUSIVE, Verdict.PASS)


def read_night(history: History) -> tuple[Night, list[Trend]]:
    """Read the last night.

    Args:
        history: of several nights.

    Returns:
        The night with the last attempt at each of its cells, and all metrics of the history: those that are worse first.

    Raises:
        UserInputError: the history is empty.
    """
    labels = [night for night, *_ in history.nights()] + [row.night for row in history.cells()]
    if not labels:
        raise UserInputError(f"{history.path}: the history is empty; write to it with harness nightly add, or harness nightly run")
    last = max(labels)
    trends = []
    for name in history.metrics():
        series, words = history.series(name), history.acceptances(name)
        trends.append(Trend(series, words, judge(series, words)))
    trends.sort(key=lambda one: (_ORDER.index(one.judgement.verdict), one.name))
    rows = {row.cell: row for row in history.cells(last)}
    tonight = [one for one in trends if one.series[-1].night == last]
    revisions = [*(row.revision for row in rows.values()), *(one.series[-1].revision for one in tonight)]
    revision = next(filter(None, revisions), "")
    judgements = tuple(one.judgement for one in tonight)
    return Night(last, revision, tuple(rows.values()), judgements, find_flaky(history.cells()), 0), trends
