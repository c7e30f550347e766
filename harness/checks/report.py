"""The report of `harness.check`: a record per check of one subject, as text, JSON and JUnit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.lifecycle.report import VerifyReport
from harness.verdict import to_junit


@dataclass(frozen=True)
class CheckReport(VerifyReport):
    """What all checks say of one subject.

    Attributes:
        kind: of the subject.
        tags: what it promises.
    """

    kind: str = ""
    tags: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return {**super().to_dict(), "kind": self.kind, "tags": list(self.tags)}

    def to_junit(self) -> str:
        """Return a JUnit document with a test case per check."""
        return to_junit(self.records, self.subject)
