"""`harness trace-audit`: flags do what they say, exit codes tell verdicts from mistakes; with --peer-python, the peer is audited too."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from harness.cli import main
from harness.traceability import audit
from harness.traceability.architectures import choose
from harness.traceability.batches import Batch
from harness.traceability.flows import Flow, PlanFlow
from harness.traceability.toys.registry import TOYS


def result_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["trace-audit", *arguments, "--json"])
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, result


def test_json_holds_every_check_of_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    code, result = result_of(capsys, "masked", "crossed", "--targets", "layer", "--targets", "linear", "--engine", "suspend")
    assert code == 0 and result["counts"] == {"ok": 4}
    assert [(row["subject"], row["targets"]) for row in result["rows"]] == [
        (name, level) for name in ("masked", "crossed") for level in ("layer", "linear")
    ]
    assert all(row["used"] == "suspend" and row["checks"]["two_pass"] == {"finding": "ok", "detail": ""} for row in result["rows"])
    assert [row["num_stages"] for row in result["rows"]] == [3, 8, 3, 8]


def test_several_engines_are_audited_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    code, result = result_of(capsys, "crossed", "--engine", "graph", "--engine", "suspend", "--targets", "inferred")
    assert code == 0 and [row["used"] for row in result["rows"]] == ["graph", "suspend"]


def test_the_table_says_what_was_refused_and_that_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace-audit", "in_threads", "--engine", "suspend", "--targets", "layer"]) == 0
    told = capsys.readouterr().out
    assert "refused" in told and "thread of its own" in told and "1 audits" in told


@pytest.mark.parametrize(("error", "finding"), [(None, "SILENT"), (KeyError("x"), "crash")])
def test_silent_errors_and_crashes_are_failures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception | None, finding: str
) -> None:
    plain = audit.make_flow

    def wrong_flow(model: nn.Module, batch: Batch, patterns: Sequence[str] | None, engine: str) -> Flow:
        if error is not None:
            raise error
        flow = plain(model, batch, ["layers.0"], engine)
        assert isinstance(flow, PlanFlow)
        flow.targets = ["layers.0", "layers.1"]
        return flow

    monkeypatch.setattr(audit, "make_flow", wrong_flow)
    code, result = result_of(capsys, "masked", "--engine", "suspend", "--targets", "layer")
    assert code == 1 and result["rows"][0]["finding"] == finding


def test_toys_and_more_choose_what_is_audited(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def note(self: audit.Auditor, subject: Any, level: str) -> Any:
        seen.append(subject.name)
        return audit.Row(subject.name, level, self.engine, checks={"same": (audit.Finding.OK, "")})

    monkeypatch.setattr(audit.Auditor, "audit", note)
    for flags, expected in {
        (): [one.name for one in choose([])],
        ("--toys",): list(TOYS),
        ("--more",): [one.name for one in choose([], more=True)],
        ("llama", "masked"): ["llama", "masked"],
    }.items():
        seen.clear()
        assert main(["trace-audit", *flags, "--targets", "layer"]) == 0
        assert seen == expected
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["lama"], "'lama' is not in the zoo; did you mean 'llama'?"),
        (["llama", "--peer"], "llmcompressor is not installed here"),
        (["llama", "--peer", "--engine", "graph"], "--peer traces with another library"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["trace-audit", *arguments]) == 3
    told = capsys.readouterr().err
    assert complaint in told and told.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--engine", "magic"], ["--targets", "all"]])
def test_unknown_choices_are_refused_before_anything_is_imported(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["trace-audit", *arguments])
    assert raised.value.code == 3


@pytest.mark.peer
def test_the_peer_is_right_about_llama_and_silently_wrong_about_mistral(peer_python: Path, repo_root: Path) -> None:
    command = [str(peer_python), "-m", "harness.cli", "trace-audit", "llama", "mistral", "--peer", "--targets", "layer", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(repo_root)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=repo_root, env=environment)
    assert done.returncode == 1, done.stderr
    findings = {row["subject"]: row["finding"] for row in json.loads(done.stdout)["rows"]}
    assert findings == {"llama": "ok", "mistral": "SILENT"}
