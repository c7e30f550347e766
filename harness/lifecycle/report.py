"""The report of `verify`: a record per check, as text and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO
from typing import Any

from harness.verdict import EXIT_CODES, CheckRecord, Outcome, Verdict, decide, to_json, to_table

USABLE = "lifecycle.usable"
"""The record that says whether there is a modifier to check at all."""


@dataclass(frozen=True)
class VerifyReport:
    """What all checks say of one modifier.

    Attributes:
        subject: the modifier in words.
        profile: how long the state machine looked.
        records: one record per check, in order.
    """

    subject: str
    profile: str
    records: tuple[CheckRecord, ...]

    @property
    def verdict(self) -> Verdict:
        """What the records together mean; that the modifier can be made says nothing yet."""
        return decide(record for record in self.records if not (record.name == USABLE and record.outcome is Outcome.PASS))

    @property
    def passed(self) -> bool:
        """True when every check passed or did not apply."""
        return self.verdict is Verdict.PASS

    @property
    def exit_code(self) -> int:
        """0 pass, 1 a check failed, 2 nothing can be said."""
        return EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        records = [record.to_dict() for record in self.records]
        return {"subject": self.subject, "profile": self.profile, "verdict": self.verdict.value, "checks": records}

    def to_json(self) -> str:
        """Return JSON that is the same for the same report."""
        return to_json(self.to_dict())

    def to_text(self, width: int = 140) -> str:
        """Return a table, the findings of failed checks, and the verdict.

        Args:
            width: columns of the terminal.

        Returns:
            Plain text, ending in a newline.
        """
        from rich.console import Console

        console = Console(file=StringIO(), width=width, no_color=True)
        console.print(to_table(self.records))
        for record in self.records:
            if record.outcome is Outcome.FAIL:
                console.print(f"{record.name}: {record.title}", *record.findings, sep="\n  ", markup=False, highlight=False)
        console.print(f"{self.subject}: {self.verdict.value}", markup=False, highlight=False)
        file = console.file
        assert isinstance(file, StringIO)
        return file.getvalue()

    def __str__(self) -> str:
        """Return the table."""
        return self.to_text()
