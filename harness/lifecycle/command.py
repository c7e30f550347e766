"""The verb `harness verify`: a modifier by its name in, a report and an exit code out. Nothing heavy is imported before `run`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from compressor.json_text import from_json
from compressor.settings.kinds import Flag, Number, Text, Texts
from compressor.settings.options import Option, Settings
from harness.profiles import PROFILES
from harness.reporting.verdict import Verdict, exit_codes
from harness.verbs import Command


def _settings(text: str) -> dict[str, Any]:
    try:
        settings = from_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object of settings")
    return settings


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


class VerifySettings(Settings):
    """The choices of one verification of a modifier."""

    modifier: Annotated[Text, Option(positional=True, metavar="PACKAGE.MODULE:NAME")]
    """A modifier class, or a fresh modifier object; also FILE.py:NAME."""
    settings: Annotated[Mapping[str, Any] | None, Option(metavar="JSON", read=_settings)] = None
    """Settings for a class, such as '{"scheme": "W4A16"}'."""
    profile: Annotated[Text, Option(choices=tuple(PROFILES))] = "pr"
    """How long the state machine looks."""
    checks: Annotated[Texts | None, Option("--check", metavar="NAME", repeats=True)] = None
    """Run only this check, by name or number; may be given several times."""
    tag: Annotated[Texts, Option(metavar="TAG", repeats=True)] = ()
    """A contract tag of the modifier, such as in_place."""
    time_limit: Annotated[Number | None, Option(metavar="S", read=_seconds)] = None
    """Seconds that one call may take before it hangs (default: 20)."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print the report as JSON instead of the table."""


def run(settings: VerifySettings) -> Verdict:
    """Verify, and print the report.

    Args:
        settings: of the verb.

    Returns:
        What the report says.
    """
    from harness.lifecycle.driving.time_limit import TIME_LIMIT
    from harness.lifecycle.template import UnusableError, find_subject
    from harness.lifecycle.verify import unusable_report, verify

    sys.path.insert(0, str(Path.cwd()))  # a module beside which the command is run, as with `python -m`
    with contextlib.redirect_stdout(sys.stderr):  # what a modifier prints must not mix with the report
        try:
            subject = find_subject(settings.modifier, settings.settings or {})
        except UnusableError as reason:
            report = unusable_report(settings.modifier.rpartition(":")[2], settings.profile, reason)
        else:
            limit = settings.time_limit or TIME_LIMIT
            report = verify(subject, tags=settings.tag, checks=settings.checks, profile=settings.profile, time_limit=limit)
    print(report.to_json() if settings.as_json else report.to_text(), end="")
    return report.verdict


COMMAND = Command(
    "hold a modifier against the lifecycle contract: checks 43 and 47 to 54, others by name, and a state machine",
    VerifySettings,
    run,
    exit_codes("every check passed or did not apply", "a check failed", "nothing can be said: it needs settings, or no check applied"),
)
