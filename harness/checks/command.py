"""The verb `harness check`: a quantizer, packer, solver, observer or layer by its name in, a report and an exit code out."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from compressor.settings.kinds import Flag, Text, Texts
from compressor.settings.options import Option, Settings
from harness.profiles import PROFILES
from harness.reporting.verdict import Verdict, exit_codes, worst
from harness.verbs import Command

if TYPE_CHECKING:
    from harness.checks.run import CheckReport


class CheckSettings(Settings):
    """The choices of one run of the catalogue."""

    subject: Annotated[Text, Option(positional=True, metavar="PACKAGE.MODULE:NAME")]
    """An object, also FILE.py:NAME, that offers a protocol of harness.checks.protocols, or a list of them."""
    checks: Annotated[Texts | None, Option("--check", metavar="NAME", repeats=True)] = None
    """Run only this check, by name or number; may be given several times."""
    expect_failure: Annotated[Texts, Option(metavar="NAME=REASON", repeats=True)] = ()
    """A check that fails today, by name or number, and must; it has to be one of those that run."""
    profile: Annotated[Text, Option(choices=tuple(PROFILES))] = "pr"
    """How many random inputs are drawn."""
    no_draws: Annotated[Flag, Option()] = False
    """Only the fixed inputs, no random ones."""
    as_json: Annotated[Flag, Option("--json", group="shown")] = False
    """Print JSON instead of the tables."""
    junit: Annotated[Flag, Option(group="shown")] = False
    """Print a JUnit document instead of the tables."""


def run(settings: CheckSettings) -> Verdict:
    """Check, and print the reports.

    Args:
        settings: of the verb.

    Returns:
        The worst of the reports.

    Raises:
        UserInputError: an expected failure without a reason, a check that no subject has, or no subject.
    """
    from compressor.json_text import to_json
    from harness.reporting.junit import suites_to_junit

    with contextlib.redirect_stdout(sys.stderr):  # what subjects print must not mix with the reports
        reports = _reports(settings)
    if settings.as_json:
        print(to_json([report.to_dict() for report in reports]), end="")
    elif settings.junit:
        print(suites_to_junit((report.subject, report.records) for report in reports), end="")
    else:
        print(*(report.to_text() for report in reports), sep="", end="")
    return worst(report.verdict for report in reports)


def _reports(settings: CheckSettings) -> list[CheckReport]:
    from compressor.errors import UserInputError
    from compressor.object_reference import own_names, resolve
    from harness.checks.run import check

    sys.path.insert(0, str(Path.cwd()))  # a module beside which the command is run, as with `python -m`
    found = resolve(settings.subject, "subject", names=own_names, files=True).value
    subjects = list(found) if isinstance(found, list | tuple) else [found]
    reasons = dict(text.partition("=")[::2] for text in settings.expect_failure)
    if not all(reasons.values()):
        raise UserInputError("--expect-failure: a check without a reason was given; write NAME=REASON")
    if len(reasons) < len(settings.expect_failure):
        raise UserInputError("--expect-failure: one check was given more than once; give it one reason")
    if not subjects:
        raise UserInputError(f"{settings.subject}: an empty list was given; name at least one subject")
    asked = [(one, checks, _those_of(one, reasons) if reasons else []) for one, checks in _asked(subjects, settings.checks, reasons)]
    if unseen := sorted(reasons.keys() - {name for _, _, own in asked for name in own}):
        raise UserInputError(f"--expect-failure {unseen[0]}: no subject that is looked at has such a check; leave it out")
    reports = []
    for one, checks, own in asked:
        expected = {name: reasons[name] for name in own}
        reports.append(check(one, checks=checks, expected_failures=expected, profile=settings.profile, draws=not settings.no_draws))
    return reports


def _asked(subjects: Sequence[object], wanted: Sequence[str] | None, reasons: Iterable[str]) -> list[tuple[object, list[str] | None]]:
    """Each subject with those of the wanted checks that its kind has; who has none of them is left out, which is said."""
    from compressor.errors import UserInputError
    from harness.checks.catalogue.registry import find_checks
    from harness.checks.run import adapt

    find_checks([*(wanted or ()), *reasons])  # a name that no kind has is a mistake
    if wanted is None:
        return [(one, None) for one in subjects]
    found: list[tuple[object, list[str] | None]] = [(one, own) for one in subjects if (own := _those_of(one, wanted))]
    if not found:
        find_checks(wanted, adapt(subjects[0]).kind)
    if unseen := [key for key in wanted if not any(key in (own or ()) for _, own in found)]:
        raise UserInputError(f"--check {unseen[0]}: no subject that is looked at has such a check; leave it out")
    if left_out := len(subjects) - len(found):
        print(f"{left_out} of {len(subjects)} subjects have no check {', '.join(wanted)}, and are left out", file=sys.stderr)
    return found


def _those_of(subject: object, wanted: Iterable[str]) -> list[str]:
    """Of names and numbers of checks, those that a check of the subject's kind has."""
    from harness.checks.catalogue.registry import find_checks
    from harness.checks.run import UnusableSubjectError, adapt

    try:
        kind = adapt(subject).kind
    except UnusableSubjectError:  # its report says so, whatever was asked for
        return list(wanted)
    known = {key for check in find_checks(None, kind) for key in (check.name, str(check.number))}
    return [key for key in wanted if key in known]


COMMAND = Command(
    "hold a quantizer, solver, layer, transform, pruner, run or checkpoint against the catalogue",
    CheckSettings,
    run,
    exit_codes("every check passed or did not apply", "a check failed", "no check applied, or none but those that fail as expected")
    + "; whatever the code of a subject raises is a finding, sys.exit(0) too, and only an interrupt ends a run",
)
