"""What the policy has others say: command lines whose exit code is a judgement (servers, ONNX), and other versions of transformers."""

from __future__ import annotations

import math
import shlex
import shutil
import sys
from pathlib import Path

import torch

from harness.release.candidate import Candidate, Check
from harness.release.outside.process import end_of, lines_of, process, told, two_answers
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


# Other versions of transformers, in environments of their own: the checkpoint loads there and predicts the same.

ENVIRONMENTS = ("oldest", "newest")
"""Always on the page, also where the policy names no interpreter for them."""


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
    ids = [str(token) for token in candidate.prompts[0][0].tolist()]
    answers = two_answers(claim, candidate, python, "elsewhere.py", [str(candidate.compressed.absolute()), *ids])
    return answers if isinstance(answers, CheckRecord) else _judge(claim, candidate, *answers)


def _judge(claim: Claim, candidate: Candidate, versions: dict[str, str], logits: list[float]) -> CheckRecord:
    own = candidate.model(input_ids=candidate.prompts[0], use_cache=False).logits[0, -1].float().cpu()
    found, limit = torch.tensor(logits), candidate.policy.generation.max_dtype_deviation
    if found.shape != own.shape:
        return claim.record(Outcome.FAIL, f"{told(versions)}: predicts {len(found)} tokens, here {len(own)}", evidence=versions)
    apart = ((found - own).abs().max() / own.abs().max().clamp(min=1e-30)).item()
    is_apart = not math.isfinite(apart) or apart > limit
    findings = [f"logits part by {apart:.1e} of the largest"] if is_apart else []
    return claim.found(findings, f"{told(versions)}: logits part by {apart:.1e} of the largest", limit=f"<= {limit:g}", evidence=versions)
