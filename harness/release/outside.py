"""Checks that run in other processes: other versions in environments of their own, and commands such as servers, tasks and ONNX."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from compressor.json_text import from_json
from harness.release.candidate import Candidate, Check
from harness.reporting.record import CheckRecord, Claim
from harness.reporting.text import plain_text
from harness.reporting.verdict import EXIT_CODES, Outcome, Verdict

ENVIRONMENTS = ("oldest", "newest")
"""Always on the page, also where the policy names no interpreter for them."""
COMMANDS = ("vllm", "sglang", "onnx")
"""Likewise, of commands."""
_ELSEWHERE, _MARK = Path(__file__).with_name("elsewhere.py"), "harness: "  # not imported: it loads torch, and is for other interpreters
_MEANINGS = {EXIT_CODES[verdict]: verdict.outcome for verdict in Verdict}


def check_environments(candidate: Candidate) -> list[CheckRecord]:
    """Load the checkpoint in each environment of the policy.

    Args:
        candidate: what is to be signed.

    Returns:
        One record per environment, and for those that every release should have.
    """
    given = candidate.policy.environments
    return [_environment(name, given.get(name)).record(candidate) for name in dict.fromkeys((*ENVIRONMENTS, *given))]


def _environment(name: str, python: Path | None) -> Check:
    claim = Claim(f"environment.{name}", f"The environment {name} loads it and predicts the same")
    return Check(claim, lambda candidate: _look(claim, candidate, python))


def _look(claim: Claim, candidate: Candidate, python: Path | None) -> CheckRecord:
    if python is None:
        return claim.skipped("not run: the policy names no interpreter")
    if shutil.which(python) is None:
        return claim.skipped(f"not run: there is no interpreter {python}")
    ids = [str(token) for token in candidate.prompts[0][0].tolist()]
    done = process([str(python), "-I", str(_ELSEWHERE), str(candidate.compressed.absolute()), *ids], candidate)
    if isinstance(done, str):
        return claim.record(Outcome.INCONCLUSIVE, done)
    try:
        answers = [from_json(line.removeprefix(_MARK)) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    except ValueError as error:
        return claim.record(Outcome.INCONCLUSIVE, f"its answer cannot be read: {error}")
    if not answers or done.returncode < 0:
        return claim.record(Outcome.INCONCLUSIVE, f"could not be tried: {end_of(done)}", findings=_lines(done))
    versions = answers[0]
    told = f"transformers {versions['transformers']}, compressed-tensors {versions['compressed-tensors']}"
    if len(answers) < 2:
        return claim.record(Outcome.FAIL, f"{told}: {end_of(done)}", evidence=versions, findings=_lines(done))
    return _judge(claim, candidate, told, versions, answers[1])


def _judge(claim: Claim, candidate: Candidate, told: str, versions: dict[str, str], logits: list[float]) -> CheckRecord:
    own = candidate.model(input_ids=candidate.prompts[0], use_cache=False).logits[0, -1].float().cpu()
    found, limit = torch.tensor(logits), candidate.policy.generation.max_dtype_deviation
    if found.shape != own.shape:
        return claim.record(Outcome.FAIL, f"{told}: predicts {len(found)} tokens, here {len(own)}", evidence=versions)
    apart = ((found - own).abs().max() / own.abs().max().clamp(min=1e-30)).item()
    is_apart = not math.isfinite(apart) or apart > limit
    findings = [f"logits part by {apart:.1e} of the largest"] if is_apart else []
    return claim.found(findings, f"{told}: logits part by {apart:.1e} of the largest", limit=f"<= {limit:g}", evidence=versions)


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
    findings = [] if outcome is Outcome.PASS else _lines(done)
    return claim.record(outcome, f"exit code {done.returncode}: {end_of(done)}", evidence={"command": shlex.join(words)}, findings=findings)


def process(words: Sequence[str], candidate: Candidate, folder: Path | None = None) -> subprocess.CompletedProcess[str] | str:
    """Run a program to its end, offline.

    Args:
        words: of its command line.
        candidate: whose policy says how long it may take.
        folder: where it runs; None for here.

    Returns:
        How it ended, or why it did not.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    try:
        return subprocess.run(
            words,
            cwd=folder,
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


def _lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [plain_text(line) for line in (done.stdout + done.stderr).splitlines() if line.strip()][-8:]


def end_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a program printed.

    Args:
        done: it.

    Returns:
        At most 200 characters of it.
    """
    lines = _lines(done)
    return lines[-1][:200] if lines else "it printed nothing"
