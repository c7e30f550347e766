"""A site of a history that needs no network: a page for the night, a page for each metric with its trend, JUnit and Markdown."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from compressor.atomic import check_output_dir
from compressor.errors import UserInputError
from compressor.json_text import to_json
from harness.nightly.cells import CellOutcome
from harness.nightly.history import History
from harness.nightly.judging.bridging import LIVE_NIGHTS, level
from harness.nightly.judging.flaky import find_flaky
from harness.nightly.judging.judge import judge
from harness.nightly.judging.judgement import Judgement
from harness.nightly.measurement import Acceptance, CellRow, Measurement, in_time, short
from harness.nightly.runner import Night
from harness.reporting.junit import to_junit
from harness.reporting.pages import render, write_texts
from harness.reporting.plots import ACCENT, GRID, INK, LIMIT, MUTED, inline_plot
from harness.reporting.record import CheckRecord
from harness.reporting.text import code_span
from harness.reporting.verdict import Outcome, Verdict

_SHOWN_NIGHTS = 365
_SLUG = 60
_OUTCOMES = {Verdict.PASS: Outcome.PASS, Verdict.REGRESSION: Outcome.FAIL, Verdict.INCONCLUSIVE: Outcome.INCONCLUSIVE}
_SENTENCES = {
    Verdict.PASS: "Every cell passed, and no metric is worse.",
    Verdict.REGRESSION: "A metric is worse, or a cell did not pass.",
    Verdict.INCONCLUSIVE: "Nothing is known to be worse, and not everything could be told.",
}


def write_site(history: History, output_dir: str | Path) -> tuple[Path, Night]:
    """Write index.html, a page for each metric, junit.xml, summary.md and night.json.

    Args:
        history: what is shown.
        output_dir: folder to write; must not exist, or be empty.

    Returns:
        The path of index.html, and the night.

    Raises:
        UserInputError: the history is empty.
        OutputError: the folder cannot be used.
        CheckpointError: the disk is full or fails; nothing is left.
    """
    target = check_output_dir(output_dir)
    night, trends = read_night(history)
    files = {f"metrics/{page_of(one.name)}": _metric_page(history, one) for one in trends}
    files |= {
        "index.html": _index_page(night, trends),
        "junit.xml": to_junit(records_of(night), "nightly"),
        "summary.md": summary_of(night),
        "night.json": to_json(night.to_dict()),
    }
    write_texts(target, files)
    return target / "index.html", night


def page_of(metric: str) -> str:
    """Return the file name of a metric's page, which stays the same from night to night."""
    digest = hashlib.sha256(metric.encode()).hexdigest()[:6]
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', metric)[:_SLUG]}-{digest}.html"


def records_of(night: Night) -> list[CheckRecord]:
    """Return cells and metrics as records, for JUnit.

    Args:
        night: what was found.

    Returns:
        A record a cell, then a record a metric. A cell in quarantine is inconclusive; a metric of which nothing can be told is skipped
        where the night's verdict passes over it, so that a CI server agrees with the exit code.
    """
    cells = [
        CheckRecord(
            f"cell.{row.cell}",
            f"{row.cell} passes",
            Outcome.SKIP if row.outcome == CellOutcome.SKIPPED else _OUTCOMES[night.verdict_of(row)],
            f"{row.outcome}: {night.summary_of(row)}",
        )
        for row in night.rows
    ]
    metrics = [
        CheckRecord(
            f"metric.{one.metric}", f"{one.metric} is no worse", _OUTCOMES[one.verdict] if night.counts(one) else Outcome.SKIP, one.summary
        )
        for one in night.judgements
    ]
    return cells + metrics


def summary_of(night: Night) -> str:
    """Return the night in Markdown, for a pull request or a chat: one sentence, then a line for each thing that is not right."""
    worse = [one for one in night.judgements if one.verdict is Verdict.REGRESSION]
    few = [one for one in night.judgements if one.verdict is Verdict.INCONCLUSIVE]
    not_passed = [row for row in night.rows if row.outcome != CellOutcome.PASS]
    passed = len(night.rows) - len(not_passed)
    head = f"**{night.verdict.value}**, night {code_span(night.night)}{f' at {code_span(night.commit)}' if night.commit else ''}: "
    head += f"{passed} of {len(night.rows)} cells passed; {len(worse)} of {len(night.judgements)} metrics are worse"
    head += f", of {len(few)} nothing can be told yet." if few else "."
    lines = [f"- {code_span(one.metric)}: {code_span(one.summary)}" for one in (*worse, *(one for one in few if one.is_long))]
    for row in not_passed:
        lines.append(": ".join(filter(None, (f"- {code_span(row.cell)}", row.outcome, code_span(night.summary_of(row))))))
    return "\n".join([head, *([""] if lines else []), *lines]) + "\n"


def _index_page(night: Night, trends: list[Trend]) -> str:
    counts = Counter(one.judgement.verdict for one in trends)
    tiles = [
        ("cells that passed", f"{sum(row.outcome == CellOutcome.PASS for row in night.rows)} of {len(night.rows)}", "each ran by itself"),
        ("metrics that are worse", str(counts[Verdict.REGRESSION]), f"of {len(trends)}"),
        ("nothing can be told", str(counts[Verdict.INCONCLUSIVE]), "too few nights, too much noise, another machine"),
        ("nights", str(len({one.night for trend in trends for one in trend.series})), f"until {night.night}"),
    ]
    cells = [(row, night.verdict_of(row), night.summary_of(row)) for row in night.rows]
    metrics = [(one, f"metrics/{page_of(one.name)}", _plot(one, small=True)) for one in trends]
    data = {"night": night, "sentence": _SENTENCES[night.verdict], "tiles": tiles, "cells": cells, "metrics": metrics}
    return render("nightly.html.j2", data)


def _metric_page(history: History, trend: Trend) -> str:
    environments = {one.environment: dict(history.environment(one.environment).facts) for one in trend.series}
    rows = [(one, float(np.median(one.values))) for one in reversed(trend.series[-_SHOWN_NIGHTS:])]
    data = {"trend": trend, "plot": _plot(trend, small=False), "rows": rows, "environments": environments, "short": short}
    return render("nightly_metric.html.j2", data)


def _plot(trend: Trend, *, small: bool) -> str:
    """The level of every night; the environment of the last one in full ink, changes and acceptances as lines."""
    series = trend.series[-_SHOWN_NIGHTS:]
    paired = series[-1].kind == "paired"
    levels = [float(np.mean(one.values)) if paired else math.exp(level(one.values, "lower")) for one in series]
    here = [one.environment == series[-1].environment or paired for one in series]
    places = {one.night: place for place, one in enumerate(series)}
    changes = [places[one.night] for one in trend.judgement.changes if one.night in places and one.acceptance is None]
    accepted = [places[one.night] for one in trend.acceptances if one.night in places]

    def paint(axes: Axes) -> None:
        for wanted, color in ((False, MUTED), (True, ACCENT)):
            at = [place for place, one in enumerate(here) if one is wanted]
            axes.plot(at, [levels[place] for place in at], "o", color=color, markersize=2 if small else 4, markeredgewidth=0)
        for place in changes:
            axes.axvline(place - 0.5, color=LIMIT, linewidth=1.2)
        for place in accepted:
            axes.axvline(place - 0.5, color=INK, linewidth=0.8, linestyle=(0, (3, 3)))
        if small:
            axes.set_axis_off()
            return
        shown = sorted({0, len(series) // 2, len(series) - 1})
        axes.set_xticks(shown, [series[place].night for place in shown])
        axes.grid(axis="y", color=GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.set_ylabel(f"{series[-1].better} is better")

    name = f"trend-{page_of(trend.name).removesuffix('.html')}"
    description = f"{trend.name} over {len(series)} nights: {trend.judgement.summary}"
    return inline_plot(name, description, (1.6, 0.34) if small else (7.2, 2.8), paint)


# What a history says of a night, without running anything.


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
        The night with the last attempt at each of its cells on each machine, and all metrics of the history: those that are worse first.

    Raises:
        UserInputError: the history is empty.
    """
    labels = [night for night, *_ in history.nights()] + [row.night for row in history.cells()]
    if not labels:
        raise UserInputError(f"{history.path}: the history is empty; write to it with harness nightly add, or harness nightly run")
    last = max(labels, key=in_time)
    trends = []
    for name in history.metrics():
        series, words = history.series(name), history.acceptances(name)
        trends.append(Trend(series, words, judge(series, words)))
    trends.sort(key=lambda one: (_ORDER.index(one.judgement.verdict), one.name))
    rows = _last_attempts(history, last)
    live = sorted(set(labels), key=in_time)[-LIVE_NIGHTS:]  # what is worse and was not measured in the last night is worse still
    revisions = [*(row.revision for row in rows), *(one.series[-1].revision for one in trends if one.series[-1].night == last)]
    revision = next(filter(None, revisions), "")
    judgements = tuple(one.judgement for one in trends if one.series[-1].night in live)
    return Night(last, revision, rows, judgements, find_flaky(history.cells()), 0), trends


def _last_attempts(history: History, night: str) -> tuple[CellRow, ...]:
    """Of each cell and environment the last attempt at the newest commit; `run --at` runs what the history has known for longer.

    What ran with uncommitted changes is no reading of a commit, and `run` goes on from those that are: it counts where it is all there is.
    """
    known: dict[str, tuple[bool, int]] = {}
    for row in history.cells():
        known.setdefault(row.revision, (not row.revision.endswith("-dirty"), len(known)))
    rows: dict[tuple[str, str], CellRow] = {}
    for row in history.cells(night):
        kept = rows.get((row.cell, row.environment), row)
        if known[row.revision] >= known[kept.revision]:
            rows[row.cell, row.environment] = row
    return tuple(rows.values())
