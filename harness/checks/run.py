"""`harness.check(subject)`: every check of the catalogue that fits the subject's kind and tags, and a report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from compressor.arguments import suggest
from compressor.errors import UserInputError
from harness.checks.adapt import adapt
from harness.checks.catalogue import Look, find_checks
from harness.checks.report import CheckReport
from harness.checks.tags import TAGS
from harness.profiles import PROFILES, active_profile
from harness.verdict import CheckRecord, Outcome


def check(
    subject: object,
    *,
    checks: Iterable[str | int] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    profile: str | None = None,
    draws: bool = True,
    seed: int = 0,
) -> CheckReport:
    """Hold a quantizer, packer, solver, transform, layer or observer against the catalogue.

    Args:
        subject: offers one of the protocols of `harness.checks.protocols`, or is something that `harness.checks.adapt` knows: a
            QuantizationArgs or QuantizationScheme, ours or compressed-tensors'.
        checks: names or numbers of the checks to run; by default all that fit the kind of the subject.
        expected_failures: reason by name of a check that fails today; one that passes all the same is a failure.
        profile: dev, pr, nightly or release; by default that of --harness-profile, else pr, which repeats exactly.
        draws: False leaves the random inputs out and looks at the fixed ones only.
        seed: of inputs that are drawn once.

    Returns:
        The report; a bad subject never raises.

    Raises:
        UserInputError: nothing of this kind can be checked, or a check, tag or profile does not exist.

    Example:
        >>> from compressor.numerics import QuantizationArgs
        >>> check(QuantizationArgs(num_bits=4, group_size=32), checks=[1, 5], draws=False).verdict.value
        'pass'
    """
    adapted = adapt(subject)
    chosen = find_checks(checks, adapted.kind)
    reasons = dict(expected_failures or {})
    find_checks(reasons, adapted.kind)
    unknown = sorted(frozenset(adapted.tags) - TAGS.keys())
    if unknown:
        raise UserInputError(f"{adapted.name}: {unknown[0]!r} is no contract tag; {suggest(unknown[0], list(TAGS))}")
    if profile is not None and profile not in PROFILES:
        raise UserInputError(f"check: profile={profile!r} does not exist; {suggest(profile, PROFILES)}")
    look = Look(PROFILES[profile] if profile else active_profile(), draws, seed)
    records = tuple(expect(one.run(adapted, look), reasons) for one in chosen)
    return CheckReport(adapted.name, look.profile.name, records, adapted.kind, tuple(sorted(adapted.tags)))


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
