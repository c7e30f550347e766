"""Other programs, run to their end: what they print, and the two answers of a file of ours that another Python runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compressor.json_text import from_json
from harness.release.candidate import Candidate
from harness.reporting.record import CheckRecord, Claim
from harness.reporting.text import plain_text
from harness.reporting.verdict import Outcome

_MARK = "harness: "  # begins a line with an answer; the files that print it cannot be imported: they load what their Python has


def two_answers(
    claim: Claim, candidate: Candidate, python: Path | None, file: str, words: Sequence[str], given: str | None = None
) -> tuple[dict[str, str], Any] | CheckRecord:
    """Have another Python run a file that stands beside this one.

    Args:
        claim: that the answers decide.
        candidate: what is to be signed.
        python: the interpreter; None where the policy names none.
        file: its name.
        words: of its command line.
        given: to its standard input.

    Returns:
        The versions that it ran with and what it found; the record, where it did not come to that.
    """
    if python is None:
        return claim.skipped("not run: the policy names no interpreter")
    if shutil.which(python) is None:
        return claim.skipped(f"not run: there is no interpreter {python}")
    done = process([str(python), "-I", str(Path(__file__).with_name(file)), *words], candidate, given=given)
    if isinstance(done, str):
        return claim.record(Outcome.INCONCLUSIVE, done)
    try:
        answers = [from_json(line.removeprefix(_MARK)) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    except ValueError as error:
        return claim.record(Outcome.INCONCLUSIVE, f"its answer cannot be read: {error}")
    if not answers or done.returncode < 0:
        return claim.record(Outcome.INCONCLUSIVE, f"could not be tried: {end_of(done)}", findings=lines_of(done))
    versions = answers[0]
    if len(answers) < 2:
        return claim.record(Outcome.FAIL, f"{told(versions)}: {end_of(done)}", evidence=versions, findings=lines_of(done))
    return versions, answers[1]


def told(versions: dict[str, str]) -> str:
    """Name versions in a line, without torch's."""
    return ", ".join(f"{name} {version}" for name, version in versions.items() if name != "torch")


def process(
    words: Sequence[str], candidate: Candidate, folder: Path | None = None, given: str | None = None
) -> subprocess.CompletedProcess[str] | str:
    """Run a program to its end, offline.

    Args:
        words: of its command line.
        candidate: whose policy says how long it may take.
        folder: where it runs; None for here.
        given: to its standard input; None for this process's own.

    Returns:
        How it ended, or why it did not.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    try:
        return subprocess.run(
            words,
            cwd=folder,
            input=given,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60 * candidate.policy.minutes,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {candidate.policy.minutes:g} minutes"
    except OSError as error:
        return f"cannot be started ({error.strerror})"


def lines_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the last eight lines that a program printed."""
    return [plain_text(line) for line in (done.stdout + done.stderr).splitlines() if line.strip()][-8:]


def end_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a program printed.

    Args:
        done: it.

    Returns:
        At most 200 characters of it.
    """
    lines = lines_of(done)
    return lines[-1][:200] if lines else "it printed nothing"
