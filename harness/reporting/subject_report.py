"""The report on one subject: a record per check, as text, JSON and JUnit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from compressor.console import Console
from compressor.json_text import to_json
from harness.reporting.junit import to_junit
from harness.reporting.record import CheckRecord, decide
from harness.reporting.text import as_text, to_table
from harness.reporting.verdict import EXIT_CODES, Outcome, Verdict


@dataclass(frozen=True)
class SubjectReport:
    """What all checks say of one subject.

    Attributes:
        subject: in words.
        profile: how long the harness looked.
        records: one record per check, in order.
    """

    subject: str
    profile: str
    records: tuple[CheckRecord, ...]

    @property
    def verdict(self) -> Verdict:
        """What the records together mean."""
        return decide(self.records)

    @property
    def passed(self) -> bool:
        """True when every check passed or did not apply."""
        return self.verdict is Verdict.PASS

    @property
    def exit_code(self) -> int:
        """0 pass, 1 a check failed, 2 nothing can be said."""
        return EXIT_CODES[self.verdict]

    def causes(self) -> list[list[CheckRecord]]:
        """Return the failed checks, those together that met one and the same cause, in the order in which they ran."""
        groups: list[tuple[set[str], list[CheckRecord]]] = []
        for record in self.records:
            if record.outcome is not Outcome.FAIL:
                continue
            own = set(record.evidence.get("causes", [record.name]))
            known = next((group for group in groups if group[0] & own), None)
            if known is None:
                groups.append((own, [record]))
            else:
                known[0].update(own)
                known[1].append(record)
        return [records for _, records in groups]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        records = [record.to_dict() for record in self.records]
        causes = [{"found": group[0].summary, "checks": [one.name for one in group]} for group in self.causes()]
        return {"subject": self.subject, "profile": self.profile, "verdict": self.verdict.value, "causes": causes, "checks": records}

    def to_json(self) -> str:
        """Return JSON that is the same for the same report."""
        return to_json(self.to_dict())

    def to_junit(self) -> str:
        """Return a JUnit document with a test case per check."""
        return to_junit(self.records, self.subject)

    def to_text(self, width: int = 140) -> str:
        """Return a table, the findings of failed checks, and the verdict.

        Args:
            width: columns of the terminal.

        Returns:
            Plain text, ending in a newline.
        """
        return as_text(self._show, width)

    def _show(self, console: Console) -> None:
        groups = self.causes()
        first = {one.name: group[0].name for group in groups for one in group[1:]}
        console.print(to_table([replace(one, summary=f"as {first[one.name]}") if one.name in first else one for one in self.records]))
        for group in groups:
            also = f"\n  seen by {len(group)} checks: {', '.join(one.name for one in group)}" if group[1:] else ""
            findings = [f"{group[0].name}: {group[0].title}{also}", *group[0].findings]
            console.print(*findings, sep="\n  ", markup=False, highlight=False)
        console.print(f"{self.subject}: {self.verdict.value}", markup=False, highlight=False)

    def __str__(self) -> str:
        """Return the table."""
        return self.to_text()
