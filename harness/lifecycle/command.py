"""The verb `harness verify`: a modifier by its name in, a report and an exit code out. Nothing heavy is imported before `run`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from harness.profiles import PROFILES

EPILOG = """exit codes: 0 every check passed or did not apply, 1 a check failed, 2 nothing can be said (a modifier that needs settings),
3 no verdict: bad input or a failure of the harness itself"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb.

    Args:
        parser: of the verb; changed.
    """
    parser.epilog = EPILOG
    parser.add_argument("modifier", metavar="PACKAGE.MODULE:NAME", help="a modifier class, or a fresh modifier object; also FILE.py:NAME")
    parser.add_argument(
        "--settings", metavar="JSON", type=_settings, default={}, help='settings for a class, such as \'{"scheme": "W4A16"}\''
    )
    parser.add_argument("--profile", choices=tuple(PROFILES), default="pr", help="how long the state machine looks (default: pr)")
    parser.add_argument(
        "--check", action="append", metavar="NAME", help="run only this check, by name or number; may be given several times"
    )
    parser.add_argument("--tag", action="append", default=[], metavar="TAG", help="a contract tag of the modifier, such as in_place")
    parser.add_argument("--time-limit", metavar="S", type=_seconds, help="seconds that one call may take before it hangs (default: 20)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of the table")


def run(args: argparse.Namespace) -> int:
    """Verify, and print the report.

    Args:
        args: as declared by `add_arguments`.

    Returns:
        The exit code of the verdict.
    """
    from harness.lifecycle.template import UnusableError, find_subject
    from harness.lifecycle.verify import TIME_LIMIT, unusable_report, verify

    sys.path.insert(0, str(Path.cwd()))  # a module beside which the command is run, as with `python -m`
    try:
        subject = find_subject(args.modifier, args.settings)
    except UnusableError as reason:
        report = unusable_report(args.modifier.rpartition(":")[2], args.profile, reason)
    else:
        limit = args.time_limit or TIME_LIMIT
        report = verify(subject, tags=args.tag, checks=args.check, profile=args.profile, time_limit=limit)
    print(report.to_json() if args.json else report.to_text(), end="")
    return report.exit_code


def _settings(text: str) -> dict[str, Any]:
    try:
        settings = json.loads(text)
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
