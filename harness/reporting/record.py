"""One record of a check, and three ways to show a list of them: terminal table, JSON, JUnit. Pages are in `pages`.

A check never prints and never raises for a bad subject: it returns a CheckRecord. What the records together mean is decided in one
place, `decide`, and the exit codes of the command line follow from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from harness.reporting.verdict import Outcome, Verdict, worst

if TYPE_CHECKING:
    from rich.table import Table


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
    meaning = {Outcome.PASS: Verdict.PASS, Outcome.FAIL: Verdict.REGRESSION, Outcome.INCONCLUSIVE: Verdict.INCONCLUSIVE}
    return worst(meaning[record.outcome] for record in records if record.outcome is not Outcome.SKIP)


def to_junit(records: Sequence[CheckRecord], suite: str) -> str:
    """Return the records as a JUnit document.

    Args:
        records: one test case each; an inconclusive one is an `error`, because it must not read as a pass.
        suite: name of the test suite.
    Returns:
        The XML text; without times, so that equal records give equal bytes.
    """
    count = {outcome: str(sum(record.outcome is outcome for record in records)) for outcome in Outcome}
    attributes = {
        "name": suite,
        "tests": str(len(records)),
        "failures": count[Outcome.FAIL],
        "errors": count[Outcome.INCONCLUSIVE],
        "skipped": count[Outcome.SKIP],
    }
    root = ElementTree.Element("testsuites")
    parent = ElementTree.SubElement(root, "testsuite", attributes)
    tags = {Outcome.FAIL: "failure", Outcome.INCONCLUSIVE: "error", Outcome.SKIP: "skipped"}
    for record in records:
        case = ElementTree.SubElement(parent, "testcase", {"classname": f"{suite}.{record.family}", "name": record.name})
        if record.outcome in tags:
            result = ElementTree.SubElement(case, tags[record.outcome], {"message": _printable(record.summary)})
            if record.outcome is not Outcome.SKIP:
                result.set("type", record.outcome.value)
            result.text = _printable("\n".join([f"limit: {record.limit}" if record.limit else record.title, *record.findings]))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _printable(text: str) -> str:
    return "".join(char if char in "\n\t" or char >= " " else "\N{REPLACEMENT CHARACTER}" for char in text)


_WIDE = 120  # columns of a terminal
_STYLES = {Outcome.PASS: "green", Outcome.FAIL: "bold red", Outcome.INCONCLUSIVE: "yellow", Outcome.SKIP: "dim"}


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
        table.add_row(record.name, outcome, Text(record.summary), *([Text(record.limit, style="dim")] if width >= _WIDE else []))
    return table
