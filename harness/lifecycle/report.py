"""The report of `verify`: a record per check of one modifier."""

from __future__ import annotations

from dataclasses import dataclass

from harness.reporting.record import decide
from harness.reporting.subject_report import SubjectReport
from harness.reporting.verdict import Outcome, Verdict

USABLE = "lifecycle.usable"
"""The record that says whether there is a modifier to check at all."""


@dataclass(frozen=True)
class VerifyReport(SubjectReport):
    """What all checks say of one modifier."""

    @property
    def verdict(self) -> Verdict:
        """What the records together mean; that the modifier can be made says nothing yet."""
        return decide(record for record in self.records if not (record.name == USABLE and record.outcome is Outcome.PASS))
