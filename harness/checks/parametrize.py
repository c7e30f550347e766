"""`@parametrize_with_catalogue([...])`: a pytest test per subject and check, with strict expected failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compressor.settings.kinds import LIST
from compressor.settings.options import checked
from harness.checks.catalogue.registry import find_checks
from harness.checks.run import USABLE, UnusableSubjectError, adapt, check, label_of, labels
from harness.reporting.expected import Expected, known_failures, reasons_for
from harness.reporting.verdict import Outcome


class CatalogueCheckFailedError(AssertionError):
    """A check of `parametrize_with_catalogue` has failed."""


@dataclass(frozen=True)
class BoundCheck:
    """One check by its name; call it in a test."""

    name: str

    def __call__(self, subject: object) -> None:
        """Check a subject.

        Args:
            subject: as for `harness.check`.

        Raises:
            CatalogueCheckFailedError: the check fails.
        """
        import pytest

        record = check(subject, checks=[self.name]).records[0]
        if record.outcome is Outcome.SKIP:
            pytest.skip(record.summary)
        if record.outcome is not Outcome.PASS:
            raise CatalogueCheckFailedError("\n".join([f"{record.name}: {record.title}", record.summary, *record.findings]))


@dataclass(frozen=True)
class _Unusable:
    """Stands for all checks of a subject that cannot be made, or whose properties raise; call it in a test."""

    reason: str

    def __call__(self, subject: object) -> None:
        """Fail.

        Args:
            subject: not looked at.

        Raises:
            CatalogueCheckFailedError: always.
        """
        raise CatalogueCheckFailedError(f"{USABLE.name}: {USABLE.title}\n{self.reason}")


@checked(subjects=LIST)
def parametrize_with_catalogue(subjects: Sequence[object], *, expected_failures: Expected = None) -> Any:
    """Return a pytest decorator that makes a test per subject and check of its kind.

    Args:
        subjects: as for `harness.check`.
        expected_failures: reason by name or number of a check that fails today, for all subjects, or a function that returns it for one;
            strict.

    Returns:
        The decorator; the test takes `subject` and `check`, and calls `check(subject)`.

    Raises:
        UserInputError: no list of subjects, or an expected failure that is no check, or has no reason.

    Example:
        >>> from compressor.numerics import QuantizationArgs
        >>> @parametrize_with_catalogue([QuantizationArgs(num_bits=4, group_size=32)])
        ... def test_quantizer(subject, check):
        ...     check(subject)
    """
    import pytest

    parameters = []
    for given in subjects:
        try:
            subject = adapt(given)
            name, kind, _ = labels(subject)
        except UnusableSubjectError as error:
            parameters.append(pytest.param(given, _Unusable(str(error)), id=f"{label_of(given)}-{USABLE.name}"))
            continue
        expected = reasons_for(expected_failures, given)
        find_checks(expected, kind)
        reasons = known_failures(expected, find_checks(None, kind))
        for one in find_checks(None, kind):
            failing = pytest.mark.xfail(reason=reasons.get(one.name, ""), strict=True, raises=CatalogueCheckFailedError)
            marks = [failing] if one.name in reasons else []
            parameters.append(pytest.param(subject, BoundCheck(one.name), id=f"{name}-{one.name}", marks=marks))
    return pytest.mark.parametrize(("subject", "check"), parameters)
