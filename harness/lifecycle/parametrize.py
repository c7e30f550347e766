"""`@parametrize_with_checks([...])`: a pytest test per modifier and check, with strict expected failures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from compressor.settings.kinds import LIST
from compressor.settings.options import checked
from harness.lifecycle.checks.registry import CHECKS
from harness.lifecycle.driving.time_limit import TIME_LIMIT
from harness.lifecycle.forwards import Batch
from harness.lifecycle.report import USABLE
from harness.lifecycle.verify import chosen_checks, label_of, verify
from harness.reporting.expected import Expected, known_failures, reasons_for
from harness.reporting.verdict import Outcome


class CheckFailedError(AssertionError):
    """A check of `parametrize_with_checks` has failed."""


@checked(modifiers=LIST)
def parametrize_with_checks(
    modifiers: Sequence[object],
    model: nn.Module | None = None,
    *,
    inputs: Sequence[Batch] | None = None,
    tags: Iterable[str] = (),
    refusals: Iterable[type[Exception]] = (),
    expected_failures: Expected = None,
    time_limit: float = TIME_LIMIT,
) -> Any:
    """Return a pytest decorator that makes a test per modifier and check.

    Args:
        modifiers: fresh modifiers, or classes that need no arguments.
        model: as in `verify`.
        inputs: as in `verify`.
        tags: as in `verify`.
        refusals: as in `verify`.
        expected_failures: reason by name or number of a check that fails today, for all modifiers, or a function that returns it
            for one; strict.
        time_limit: as in `verify`.

    Returns:
        The decorator; the test takes `modifier` and `check`, and calls `check(modifier)`.

    Raises:
        UserInputError: no list of modifiers, or an expected failure that is no check, or has no reason.

    Example:
        >>> from compressor import QuantizationModifier
        >>> @parametrize_with_checks([QuantizationModifier(scheme="W8A16")])
        ... def test_modifier(modifier, check):
        ...     check(modifier)
    """
    import pytest

    parameters = []
    for number, modifier in enumerate(modifiers):
        reasons = reasons_for(expected_failures, modifier)
        chosen_checks(reasons)
        named = known_failures({key: why for key, why in reasons.items() if key != USABLE}, CHECKS.values())
        reasons = {**reasons, **named}
        for name in (USABLE, *CHECKS):
            check = BoundCheck(name, model, inputs, tuple(tags), tuple(refusals), time_limit)
            marks = [pytest.mark.xfail(reason=reasons[name], strict=True, raises=CheckFailedError)] if name in reasons else []
            label = f"{label_of(modifier)}{number if len(modifiers) > 1 else ''}-{name.removeprefix('lifecycle.')}"
            parameters.append(pytest.param(modifier, check, id=label, marks=marks))
    return pytest.mark.parametrize(("modifier", "check"), parameters)


@dataclass(frozen=True)
class BoundCheck:
    """One check with all that it needs but the modifier; call it in a test."""

    name: str
    model: nn.Module | None
    inputs: Sequence[Batch] | None
    tags: tuple[str, ...]
    refusals: tuple[type[Exception], ...]
    time_limit: float

    def __call__(self, modifier: object) -> None:
        """Check a modifier.

        Args:
            modifier: fresh, or a class.

        Raises:
            CheckFailedError: the check fails, or the modifier cannot be made.
        """
        import pytest

        report = verify(
            modifier,
            self.model,
            inputs=self.inputs,
            tags=self.tags,
            refusals=self.refusals,
            checks=[name for name in [self.name] if name != USABLE],
            time_limit=self.time_limit,
        )
        record = report.records[-1]
        if record.outcome is Outcome.SKIP:
            pytest.skip(record.summary)
        if record.outcome is not Outcome.PASS:
            raise CheckFailedError("\n".join([f"{record.name}: {record.title}", record.summary, *record.findings]))
