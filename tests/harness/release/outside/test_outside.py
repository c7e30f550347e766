"""Other versions in environments of their own: what their Python answers decides, and no answer is no pass."""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.release.candidate import Candidate
from harness.release.outside import elsewhere
from harness.release.outside.commands import check_commands, check_environments
from harness.release.policy import ReleasePolicy
from harness.reporting.record import CheckRecord
from harness.reporting.verdict import Outcome
from tests.harness.release.conftest import Release

IDS = list(range(5, 21))


@pytest.fixture(scope="module")
def candidate(made: Release) -> Candidate:
    return Candidate(made.base, made.compressed, ReleasePolicy(), [IDS, IDS], torch.device("cpu"), 0)


def printed(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the file that other interpreters run prints in this one."""
    monkeypatch.setattr(sys, "argv", ["elsewhere.py", str(folder), *map(str, IDS)])
    runpy.run_path(elsewhere.__file__, run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    return [json.loads(line.removeprefix(elsewhere.MARK)) for line in lines if line.startswith(elsewhere.MARK)]


def looked(candidate: Candidate, policy: ReleasePolicy) -> dict[str, CheckRecord]:
    asked = Candidate(candidate.base, candidate.compressed, policy, candidate.rows, candidate.device, 0)
    asked.__dict__["model"] = candidate.model  # loaded once
    return {record.name: record for record in (*check_environments(asked), *check_commands(asked))}


def python_that_prints(folder: Path, text: str) -> Path:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    path.chmod(0o755)
    return path


def test_an_answer_decides_and_none_is_no_pass(
    candidate: Candidate, made: Release, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions, logits = printed(made.compressed, capsys, monkeypatch)
    answers: dict[str, tuple[list[Any], Outcome, str]] = {
        "right": ([versions, logits], Outcome.PASS, "logits part by 0.0e+00"),
        "other": ([versions, [-one for one in logits]], Outcome.FAIL, "logits part by"),
        "fewer": ([versions, logits[:-1]], Outcome.FAIL, "predicts 95 tokens, here 96"),
        "refused": ([versions], Outcome.FAIL, "KeyError: scheme"),
        "silent": ([], Outcome.INCONCLUSIVE, "could not be tried: KeyError: scheme"),
    }
    for name, (told, outcome, words) in answers.items():
        python = python_that_prints(tmp_path, "\n".join([*(elsewhere.MARK + json.dumps(one) for one in told), "KeyError: scheme"]))
        record = looked(candidate, ReleasePolicy(environments={name: python}))[f"environment.{name}"]
        assert record.outcome is outcome and words in record.summary, name
        assert len(answers[name][0]) == 2 or record.findings[-1] == "KeyError: scheme", name
    python = python_that_prints(tmp_path, "\n".join(elsewhere.MARK + json.dumps(one) for one in (versions, logits)))
    nothing = Candidate(made.base, tmp_path, ReleasePolicy(environments={"own": python}), [IDS, IDS], torch.device("cpu"), 0)
    record = next(record for record in check_environments(nothing) if record.name == "environment.own")
    assert record.outcome is Outcome.INCONCLUSIVE and "does not load" in record.summary


def test_what_the_policy_does_not_name_or_is_not_there_was_not_run(candidate: Candidate, tmp_path: Path) -> None:
    records = looked(candidate, ReleasePolicy(environments={"newest": tmp_path / "python"}))
    assert {record.outcome for record in records.values()} == {Outcome.SKIP}
    assert list(records) == [f"environment.{one}" for one in ("oldest", "newest")] + [f"command.{one}" for one in ("sglang", "onnx")]
    assert all(record.summary.startswith("not run: ") for record in records.values())


def test_a_command_that_does_not_end_is_ended_and_tells_nothing(candidate: Candidate) -> None:
    start = time.monotonic()
    records = looked(candidate, ReleasePolicy(commands={"vllm": "sleep 60"}, minutes=0.01))
    assert records["command.vllm"].outcome is Outcome.INCONCLUSIVE and "did not end within" in records["command.vllm"].summary
    assert time.monotonic() - start < 30
