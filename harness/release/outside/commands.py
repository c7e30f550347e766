"""Whatever else must hold, as a command line of the policy whose exit code is a judgement: servers and ONNX."""

from __future__ import annotations

import shlex
import shutil
import sys

from harness.release.candidate import Candidate
from harness.release.outside.process import end_of, lines_of, process
from harness.reporting.record import CheckRecord, Claim
from harness.reporting.verdict import EXIT_CODES, Outcome, Verdict

COMMANDS = ("sglang", "onnx")
"""Always on the page, also where the policy names no such command."""
_MEANINGS = {EXIT_CODES[verdict]: verdict.outcome for verdict in Verdict}


def check_commands(candidate: Candidate) -> list[CheckRecord]:
    """Run each command of the policy.

    Args:
        candidate: what is to be signed.

    Returns:
        One record per command, and for those that every release should have.
    """
    given = candidate.policy.commands
    return [_command(candidate, name, given.get(name)) for name in dict.fromkeys((*COMMANDS, *given))]


def _command(candidate: Candidate, name: str, line: str | None) -> CheckRecord:
    claim = Claim(f"command.{name}", f"The command {name} of the policy passes")
    if line is None:
        return claim.skipped("not run: the policy names no such command")
    places = {"base": candidate.base.absolute(), "compressed": candidate.compressed.absolute(), "python": sys.executable}
    words = shlex.split(line)
    for place, value in places.items():
        words = [word.replace(f"{{{place}}}", str(value)) for word in words]
    if shutil.which(words[0]) is None:
        return claim.skipped(f"not run: {words[0]} is not installed")
    done = process(words, candidate)
    if isinstance(done, str):
        return claim.record(Outcome.INCONCLUSIVE, done)
    outcome = _MEANINGS.get(done.returncode, Outcome.INCONCLUSIVE)
    findings = [] if outcome is Outcome.PASS else lines_of(done)
    return claim.record(outcome, f"exit code {done.returncode}: {end_of(done)}", evidence={"command": shlex.join(words)}, findings=findings)
