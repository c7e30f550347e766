"""Records as JUnit, which CI servers read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree import ElementTree

from harness.reporting.record import CheckRecord
from harness.reporting.verdict import Outcome

_NOWHERE = frozenset(map(chr, [*range(0xD800, 0xE000), 0xFFFE, 0xFFFF]))


def to_junit(records: Sequence[CheckRecord], suite: str) -> str:
    """Return the records as a JUnit document.

    Args:
        records: one test case each; an inconclusive one is an `error`, because it must not read as a pass.
        suite: name of the test suite.
    Returns:
        The XML text; without times, so that equal records give equal bytes.
    """
    return suites_to_junit([(suite, records)])


def suites_to_junit(suites: Iterable[tuple[str, Sequence[CheckRecord]]]) -> str:
    """Return several suites as one JUnit document.

    Args:
        suites: name and records of each, as `to_junit` takes them.

    Returns:
        The XML text.
    """
    root = ElementTree.Element("testsuites")
    for name, records in suites:
        _add_suite(root, name, records)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_suite(root: ElementTree.Element, suite: str, records: Sequence[CheckRecord]) -> None:
    count = {outcome: str(sum(record.outcome is outcome for record in records)) for outcome in Outcome}
    attributes = {
        "name": _printable(suite),
        "tests": str(len(records)),
        "failures": count[Outcome.FAIL],
        "errors": count[Outcome.INCONCLUSIVE],
        "skipped": count[Outcome.SKIP],
    }
    parent = ElementTree.SubElement(root, "testsuite", attributes)
    tags = {Outcome.FAIL: "failure", Outcome.INCONCLUSIVE: "error", Outcome.SKIP: "skipped"}
    for record in records:
        case = ElementTree.SubElement(parent, "testcase", {"classname": _printable(f"{suite}.{record.family}"), "name": record.name})
        if record.outcome in tags:
            result = ElementTree.SubElement(case, tags[record.outcome], {"message": _printable(record.summary)})
            if record.outcome is not Outcome.SKIP:
                result.set("type", record.outcome.value)
            result.text = _printable("\n".join([f"limit: {record.limit}" if record.limit else record.title, *record.findings]))


def _printable(text: str) -> str:
    """What XML may hold: neither controls nor halves of surrogate pairs."""
    return "".join("\N{REPLACEMENT CHARACTER}" if (char < " " and char not in "\n\t") or char in _NOWHERE else char for char in text)
