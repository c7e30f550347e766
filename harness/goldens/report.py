"""Differences as text: a table for terminals and failure messages. No torch."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.goldens.store.paths import CACHE_DIR
from harness.reporting.text import aligned

_FAR = (1 << 63) - 1  # `harness.tolerance.bits.FAR`, without torch
HEADINGS = ("tensor", "tier", "max abs", "ulp", "SQNR dB", "changed", "share", "first index")


def comparison_lines(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a table of comparisons.

    Args:
        rows: `Comparison.to_dict()` each.

    Returns:
        Lines, the headings first; none for no rows.
    """
    cells = [row_cells(row) for row in rows]
    return aligned([HEADINGS, *cells]) if cells else []


def golden_command(action: str, name: str, cache_dir: Path, *options: str) -> str:
    """Return a command line that finds what this run left, in the folder in which the run was started.

    Args:
        action: of `harness golden`.
        name: of the golden.
        cache_dir: folder of what runs leave.
        *options: of the action.

    Returns:
        The line, for a POSIX shell.
    """
    elsewhere = [] if cache_dir == Path.cwd() / CACHE_DIR else ["--cache-dir", str(cache_dir)]
    return shlex.join(["harness", "golden", action, *options, *elsewhere, *(["--"] if name.startswith("-") else []), name])


def row_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one comparison as the texts of a row of HEADINGS."""
    if row.get("num_elements") is None:  # another dtype or shape: nothing could be measured
        return (str(row["tensor"]), str(row["tier"]), row["summary"], "", "", "", "", "")
    ulp = row["max_ulp"]
    return (
        str(row["tensor"]),
        str(row["tier"]),
        number(row["max_abs"]),
        "-" if ulp is None else "nan/inf" if ulp >= _FAR else f"{ulp:,}",
        number(row["sqnr_db"]),
        f"{row['num_changed']:,} of {row['num_elements']:,}",
        f"{row['share']:.2%}",
        "-" if row["first_index"] is None else str(list(row["first_index"])),
    )


def number(value: Any) -> str:
    """Return a number in four digits; `inf` and `nan` may have become texts on their way."""
    return "-" if value is None else f"{float(value):.4g}"
