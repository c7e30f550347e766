"""One record of a check, and what several mean together. How they are shown stands beside: `text`, `junit`, `pages`.

A check never prints and never raises for a bad subject: it returns a CheckRecord. What the records together mean is decided in one
place, `decide`, and the exit codes of the command line follow from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.reporting.verdict import Outcome, Verdict, worst

MAX_SHOWN_FINDINGS = 20
"""How many single findings a rendered record lists; the JSON report holds all of them."""


@dataclass(frozen=True)
class CheckRecord:
    """The result of one check.

    Attributes:
        name: dotted, family first: `files.tokenizer`.
        title: the statement that was checked, as a sentence.
        outcome: what was found.
        summary: the decisive fact in one line; the reason, for a skip.
        limit: what the fact was held against; empty where the statement itself is the limit.
        evidence: numbers and short texts by name, JSON types only.
        findings: the single offenders, one line each.
    """

    name: str
    title: str
    outcome: Outcome
    summary: str
    limit: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """The part of the name before the first dot."""
        return self.name.split(".", 1)[0]

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        return {
            "name": self.name,
            "title": self.title,
            "outcome": self.outcome.value,
            "summary": self.summary,
            "limit": self.limit,
            "evidence": dict(self.evidence),
            "findings": list(self.findings),
        }


@dataclass(frozen=True)
class Claim:
    """A statement that a check looks into; it makes the records about itself."""

    name: str
    title: str

    def record(
        self, outcome: Outcome, summary: str, *, limit: str = "", evidence: Mapping[str, Any] | None = None, findings: Sequence[str] = ()
    ) -> CheckRecord:
        """Return the record of what was found about this claim."""
        return CheckRecord(self.name, self.title, outcome, summary, limit, dict(evidence or {}), tuple(findings))

    def skipped(self, reason: str) -> CheckRecord:
        """Return the record of a check that had nothing to look at."""
        return self.record(Outcome.SKIP, reason)

    def found(
        self, findings: Sequence[str], summary: str, *, limit: str = "", evidence: Mapping[str, Any] | None = None, noun: str = "problem"
    ) -> CheckRecord:
        """Return a pass with `summary` when there are no findings, else a failure that counts them and shows the first."""
        if not findings:
            return self.record(Outcome.PASS, summary, limit=limit, evidence=evidence)
        count = f"{len(findings)} {noun}{'' if len(findings) == 1 else 's'}"
        return self.record(Outcome.FAIL, f"{count}; first: {findings[0]}", limit=limit, evidence=evidence, findings=findings)


def decide(records: Iterable[CheckRecord]) -> Verdict:
    """Return what the records together mean.

    Args:
        records: the records of one subject.
    Returns:
        REGRESSION if any check failed, else INCONCLUSIVE if any could not tell or if no check looked at anything, else PASS.
    """
    meaning = {verdict.outcome: verdict for verdict in Verdict}
    return worst(meaning[record.outcome] for record in records if record.outcome is not Outcome.SKIP)
