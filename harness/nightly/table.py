"""What `harness nightly` prints for people."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from compressor.console import Console
from harness.reporting.text import VERDICT_STYLES, plain_table
from harness.reporting.verdict import Verdict

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from harness.nightly.judging.judgement import Judgement
    from harness.nightly.judging.simulation import Figures
    from harness.nightly.measurement import Acceptance, Measurement
    from harness.nightly.runner import Night


def show_judgements(found: Sequence[Judgement], verdict: Verdict) -> None:
    """Print a row a metric, those that are worse first, and the verdict."""
    from rich.text import Text

    order = [Verdict.REGRESSION, Verdict.INCONCLUSIVE, Verdict.PASS]
    rows = [
        (_name(one.metric), Text(one.verdict.value, style=VERDICT_STYLES[one.verdict]), Text(one.summary))
        for one in sorted(found, key=lambda one: order.index(one.verdict))
    ]
    _print(
        plain_table(("metric", "verdict", "found"), rows, is_lined=True),
        f"{len(found)} metric{'' if len(found) == 1 else 's'}: {verdict.value}",
    )


def show_night(found: Night) -> None:
    """Print a row a cell, the metrics that are worse, and the verdict."""
    from rich.text import Text

    rows = []
    for row in found.rows:
        style = "green" if row.outcome == "pass" else "bold red"
        outcome = Text(row.outcome, style="yellow" if row.cell in found.flaky else style)
        rows.append((_name(row.cell), outcome, f"{row.seconds:.1f}", f"{row.memory / (1 << 30):.2f}", Text(found.summary_of(row))))
    table = plain_table(("cell", "outcome", "seconds", "GiB", "found"), rows, is_lined=True)
    worse = [f"{one.metric}: {one.summary}" for one in found.judgements if one.verdict is Verdict.REGRESSION]
    few = [one for one in found.judgements if one.verdict is Verdict.INCONCLUSIVE]
    unsure = [f"{one.metric}: {one.summary}" for one in few if one.is_long]
    unsure += [f"of {len(few)} of {len(found.judgements)} metrics nothing can be told yet"] if few else []
    resumed = [f"{found.resumed} cells had been done before"] if found.resumed else []
    resumed += [f"cells that had been done ran again: {found.anew}"] if found.anew else []
    _print(table, *worse, *unsure, *resumed, f"{found.night} at {found.commit or 'an unknown revision'}: {found.verdict.value}")


def show_nights(rows: Sequence[tuple[str, int, int]]) -> None:
    """Print night, number of metrics and number of readings."""
    from rich.text import Text

    cells = [(Text(night), f"{metrics:,}", f"{readings:,}") for night, metrics, readings in rows]
    _print(plain_table(("night", "metrics", "readings"), cells, is_lined=True), f"{len(rows)} night{'' if len(rows) == 1 else 's'}")


def show_series(series: Sequence[Measurement], words: Sequence[Acceptance], judgement: Judgement) -> None:
    """Print the nights of a metric, and what they say."""
    from rich.text import Text

    from harness.nightly.measurement import short

    rows = []
    for one in series:
        values = sorted(one.values)
        median = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
        spread = f"{(values[-1] - values[0]) / median:.1%}" if median else "-"  # half of the sequences lost nothing
        rows.append((Text(one.night), f"{median:.5g}", spread, str(len(values)), one.environment, Text(short(one.revision))))
    table = plain_table(("night", "median", "spread", "times", "environment", "revision"), rows, is_lined=True)
    lines = [f"accepted since {one.night}{' until ' + one.until if one.until else ''}: {one.reason}" for one in words]
    _print(table, *lines, f"{judgement.metric}: {judgement.verdict.value}: {judgement.summary}")


def show_figures(found: Sequence[Figures]) -> None:
    """Print false alarms, and by when changes were seen, a row a kind of noise."""
    rows = [
        (
            one.noise,
            f"{one.false_alarms:.2f} ({one.between[0]:.2f} to {one.between[1]:.2f})",
            *(f"{share:.0%}, night {_night(one.median_night[name])}" for name, share in one.seen.items()),
        )
        for one in found
    ]
    table = plain_table(("noise", "false alarms", *found[0].seen), rows, is_lined=True)
    alarms = "false alarms: of 50 metrics in 100 nights, and the 95 % interval of that"
    _print(table, f"{alarms}; changes: share seen in time (3, 15, 20 nights), median night")


def _name(name: str) -> Text:
    """A name that is long for the terminal goes on in the next line behind a slash, not in the middle of a word."""
    from rich.text import Text

    lines, width = [""], Console().width // 3 - 4
    for part in re.findall(r"[^/]+/?|/", name):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return Text("\n".join(lines))


def _night(night: float) -> str:
    return "never" if math.isinf(night) else f"{night:g}"


def _print(table: Table, *lines: str) -> None:
    console = Console()
    console.print(table)
    console.print(*lines, sep="\n", markup=False, highlight=False)
