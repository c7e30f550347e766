"""From the commit to the layer: the checkpoints on both sides of it are held against each other, as `harness bisect` does."""

from __future__ import annotations

from dataclasses import replace

from compressor.progress import Progress
from harness.nightly.blame.answer import BlameReport
from harness.nightly.blame.measuring import CellMeasure


def with_layers(report: BlameReport, measure: CellMeasure, progress: Progress) -> BlameReport:
    """Add the search among layers to a report that names a commit.

    Args:
        report: of the search among commits.
        measure: that it used; its checkpoints are still there.
        progress: shows bars.

    Returns:
        The report; as it was where no commit was found, or the metric says nothing of a checkpoint.
    """
    if len(report.first_bad) != 1 or measure.judged_on is None:
        return report
    from harness.bisect import bisect

    data, device = measure.judged_on
    good, bad = (measure.checkpoint(revision) for revision in (report.steps[0].commit.revision, report.first_bad[0].revision))
    return replace(report, layers=bisect(good, bad, data, device=device, progress=progress))
