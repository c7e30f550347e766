"""The verb `harness catalogue`: every check with its number, its statement, and the bugs that it would have caught."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb.

    Args:
        parser: of the verb; changed.
    """
    from harness.checks.catalogue import KINDS

    parser.add_argument("--kind", choices=tuple(KINDS), help="only the checks for subjects of this kind")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")


def run(args: argparse.Namespace) -> int:
    """Print the catalogue.

    Args:
        args: as declared by `add_arguments`.

    Returns:
        0.
    """
    rows = listing(args.kind)
    if args.json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return 0
    from rich import box
    from rich.table import Table

    from compressor.console import Console

    table = Table("no.", "check", "statement", "needs", "would have caught", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        where = row["name"] or row["command"]
        table.add_row(str(row["number"] or ""), where, row["title"], " ".join(row["needs"]), " ".join(row["caught_by"]))
    Console(width=None if sys.stdout.isatty() else 180, highlight=False, markup=False).print(table)
    return 0


def listing(kind: str | None = None) -> list[dict[str, Any]]:
    """Return the catalogue as JSON types, by number.

    Args:
        kind: only the checks for subjects of this kind; None also lists what other parts of the harness hold.

    Returns:
        A row per check.
    """
    from harness.checks.catalogue import find_checks
    from harness.checks.elsewhere import ELSEWHERE

    rows: list[dict[str, Any]] = [
        {
            "number": one.number,
            "name": one.name,
            "title": one.title,
            "kind": one.kind,
            "needs": sorted(one.needs),
            "caught_by": list(one.caught_by),
            "lives": one.function.__module__.replace(".", "/") + ".py",
            "command": "harness check PACKAGE.MODULE:SUBJECT",
        }
        for one in find_checks(None, kind)
    ]
    others = [] if kind else ELSEWHERE
    rows += [
        {
            "number": one.number,
            "name": "",
            "title": one.title,
            "kind": "",
            "needs": [],
            "caught_by": list(one.caught_by),
            "lives": one.lives,
            "command": one.command,
        }
        for one in others
    ]
    return sorted(rows, key=lambda row: (row["number"] or 1000, row["name"]))
