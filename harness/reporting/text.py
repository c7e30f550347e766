"""What people read at a terminal: tables, and texts without what only a terminal understands."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING

from harness.reporting.record import CheckRecord
from harness.reporting.verdict import Outcome, Verdict

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from compressor.console import Console

_WIDE = 120  # columns of a terminal
_STYLES = {Outcome.PASS: "green", Outcome.FAIL: "bold red", Outcome.INCONCLUSIVE: "yellow", Outcome.SKIP: "dim"}
VERDICT_STYLES: Mapping[Verdict, str] = {
    Verdict.PASS: "bold green",
    Verdict.REGRESSION: "bold red",
    Verdict.INCONCLUSIVE: "bold yellow",
}


def plain_console(width: int) -> Console:
    """Return a console for standard output that takes no text for markup.

    Args:
        width: columns where it is no terminal.

    Returns:
        The console.
    """
    from compressor.console import Console  # a session of pytest that prints no table loads no rich

    return Console(width=None if sys.stdout.isatty() else width, highlight=False, markup=False)


def as_text(show: Callable[[Console], None], width: int) -> str:
    """Return what would be printed, without colours.

    Args:
        show: prints on the console that it is given.
        width: columns.

    Returns:
        The text.
    """
    from compressor.console import Console

    text = StringIO()
    show(Console(file=text, width=width, no_color=True))
    return text.getvalue()


def plain_table(headings: Sequence[str], rows: Iterable[Sequence[str | Text]], *, is_lined: bool = False) -> Table:
    """Return a table without frames; what is too long for its column goes on below.

    Args:
        headings: of the columns.
        rows: a text per column.
        is_lined: draw a line below the headings.

    Returns:
        A table of rich.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD if is_lined else None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def to_table(records: Iterable[CheckRecord], *, width: int = 80) -> Table:
    """Return a rich table, a row per record; the limits have a column where the terminal is wide enough."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    table.add_column("check", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    columns = ("found", "limit") if width >= _WIDE else ("found",)
    for column in columns:
        table.add_column(column, overflow="fold")
    for record in records:
        outcome = Text(record.outcome.value, style=_STYLES[record.outcome])
        table.add_row(record.name, outcome, Text(printable(record.summary)), *([Text(record.limit, style="dim")] if width >= _WIDE else []))
    return table


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as indented lines whose columns stand below each other, however wide; for logs and failure messages."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def plain_text(text: str) -> str:
    """Put a text of another library on one line, without the escape sequences that colour a terminal.

    Args:
        text: any.

    Returns:
        Its words.
    """
    return " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).split())


def printable(line: str) -> str:
    """Write control characters of a line as escapes: names in a file of somebody else may colour a terminal, or break a line."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)


def code_span(text: str) -> str:
    """Quote somebody else's text in Markdown, so that it is shown as it is: no HTML, link, emphasis or mention in it counts.

    Args:
        text: any.

    Returns:
        One line: the text between more backticks than stand together in it.
    """
    line = printable(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    space = " " if line[:1] in ("`", " ") or line[-1:] in ("`", " ") else ""  # a space on either side is no part of it
    return f"{fence}{space}{line}{space}{fence}" if line else ""
