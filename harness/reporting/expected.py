"""Failures that are known beforehand: a check that fails as expected is a skip, and one that does not is a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from compressor.errors import UserInputError
from harness.reporting.record import CheckRecord
from harness.reporting.verdict import Outcome


class Listed(Protocol):
    """A check, by what it may be called."""

    @property
    def name(self) -> str:
        """Dotted, family first."""

    @property
    def number(self) -> int | None:
        """In the catalogue."""


Expected = Mapping[str, str] | Mapping[int, str] | Mapping[str | int, str] | Callable[[Any], Mapping[str, str]] | None
"""Reasons by name or number of a check, or a function that returns them for a subject."""


def reasons_for(expected: Expected, subject: object) -> Mapping[str, str]:
    """Find out what is expected to fail for one subject.

    Args:
        expected: reasons by name or number, for all subjects; a function that returns them for one; None for none.
        subject: given to the function.

    Returns:
        The reasons by name or number, as texts.

    Raises:
        UserInputError: they are no mapping of names or numbers to texts, or a number is given in two ways.
    """
    found: object = expected(subject) if callable(expected) else expected or {}
    if not isinstance(found, Mapping):
        what = f"expected_failures: a {type(found).__name__} was given, and each check needs its reason"
        raise UserInputError(f"{what}; give a mapping of its name or number to the reason")
    for key, reason in found.items():
        if not isinstance(key, str | int) or not isinstance(reason, str):
            if reason is None:
                raise UserInputError(f"expected failure {key!r}: has no reason; say why it fails today")
            what = f"expected failure {key!r}: a {type(key).__name__} has a reason of type {type(reason).__name__}"
            raise UserInputError(f"{what}; give a mapping of names or numbers of checks to texts")
    reasons = {str(key): reason for key, reason in found.items()}
    if len(reasons) < len(found):
        raise UserInputError("expected failures: one check is given by its number in two ways; give it one reason")
    return reasons


def known_failures(reasons: Mapping[str, str], chosen: Iterable[Listed]) -> dict[str, str]:
    """Find the checks that are expected to fail.

    Args:
        reasons: why a check fails today, by its name or number.
        chosen: the checks that run.

    Returns:
        The reason by the name of each check.

    Raises:
        UserInputError: one is without a reason or has two, or none of those that run is meant, so that nobody would look whether it fails.
    """
    if empty := [key for key, reason in reasons.items() if not reason.strip()]:
        raise UserInputError(f"expected failure {empty[0]!r}: has no reason; say why it fails today")
    called = [(key, check.name) for check in chosen for key in (check.name, str(check.number)) if key in reasons]
    if unseen := sorted(reasons.keys() - {key for key, _ in called}):
        raise UserInputError(f"expected failure {unseen[0]!r}: is none of the checks that run; run it too, or expect nothing of it")
    found = {name: reasons[key] for key, name in called}
    if len(found) < len(called):
        raise UserInputError("expected failures: one check is given by its name and by its number; give it one reason")
    return found


def expect(record: CheckRecord, reasons: Mapping[str, str]) -> CheckRecord:
    """Turn a failure that was expected into a skip, and anything else that was expected to fail into a failure.

    Args:
        record: what a check found.
        reasons: why a check fails today, by its name.

    Returns:
        The record that is reported.
    """
    reason = reasons.get(record.name)
    if reason is None:
        return record
    if record.outcome is Outcome.FAIL:
        return replace(record, outcome=Outcome.SKIP, summary=f"fails as expected ({reason}): {record.summary}")
    text = f"was expected to fail ({reason}), and did not: {record.summary}; take it out of expected_failures"
    return replace(record, outcome=Outcome.FAIL, summary=text, findings=(text,))
