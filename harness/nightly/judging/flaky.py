"""Finds cells that pass and fail by turns although nothing changed: same code, same environment. They are quarantined by evidence alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from harness.nightly.measurement import CellRow

LEAST_MIXED = 2
"""Revisions at which a cell must have had several outcomes before it counts as flaky: one may be the machine's fault."""
WINDOW = 30
"""Revisions that are looked at, the last ones; a cell that was repaired leaves quarantine when its evidence has left the window."""


@dataclass(frozen=True)
class Flaky:
    """The evidence against a cell.

    Attributes:
        cell: its name.
        mixed: revisions at which attempts in the same environment had different outcomes, oldest first.
        looked_at: number of revisions with several attempts.
    """

    cell: str
    mixed: tuple[str, ...]
    looked_at: int

    def __str__(self) -> str:
        shown = ", ".join(one[:12] for one in self.mixed[-3:])
        return f"passes and fails at the same revision in {len(self.mixed)} of {self.looked_at} that were tried twice ({shown})"


def find_flaky(rows: Sequence[CellRow]) -> dict[str, Flaky]:
    """Find the cells that are in quarantine.

    Args:
        rows: attempts, oldest first. Those at an unknown revision, or at one with uncommitted changes (`-dirty`), prove nothing.

    Returns:
        Name to evidence.
    """
    found: dict[str, dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.revision and not row.revision.endswith("-dirty") and row.outcome != "skipped":
            found[row.cell][row.revision, row.environment].append(row.outcome)
    flaky = {}
    for cell, attempts in found.items():
        tried = [(revision, outcomes) for (revision, _), outcomes in list(attempts.items())[-WINDOW:] if len(outcomes) > 1]
        mixed = tuple(revision for revision, outcomes in tried if "pass" in outcomes and set(outcomes) != {"pass"})
        if len(mixed) >= LEAST_MIXED:
            flaky[cell] = Flaky(cell, mixed, len(tried))
    return flaky
