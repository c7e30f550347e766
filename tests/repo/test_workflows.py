"""Workflows are what they should be: pinned, with the least permissions, without expressions in shell lines; and they run here, too."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def _faults(workflow: dict[Any, Any]) -> list[str]:
    """What a reviewer of workflows looks for first."""
    found = [] if workflow.get("permissions") == {"contents": "read"} else ["permissions"]
    for name, job in workflow["jobs"].items():
        found += [f"{name}: timeout"] * ("timeout-minutes" not in job) + [f"{name}: permissions"] * ("permissions" in job)
        for step in job["steps"]:
            used, line = step.get("uses", ""), step.get("run", "")
            found += [f"{name}: {used} is not pinned"] * bool(used and not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", used))
            found += [f"{name}: an expression in a shell line"] * ("${{" in line)
            found += [f"{name}: credentials stay"] * ("checkout" in used and step.get("with", {}).get("persist-credentials") is not False)
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_pinned_and_may_do_nothing_but_read(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert _faults(yaml.safe_load(text)) == []
    assert all(re.search(r" # v\d+\.\d+\.\d+$", line) for line in text.splitlines() if "uses:" in line)


def test_the_three_are_there() -> None:
    assert [path.stem for path in WORKFLOWS] == ["nightly", "pull-request", "release"]


PLANTED = {
    "permissions": ("contents: read", "contents: write"),
    "is not pinned": ("@11bd71901bbe5b1630ceea73d27597364c9af683", "@v4"),
    "an expression in a shell line": ("bash .ci/run", "bash .ci/run ${{ github.head_ref }}"),
    "timeout": ("timeout-minutes: 90", "continue-on-error: true"),
    "credentials stay": ("persist-credentials: false", "fetch-depth: 0"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(fault: str) -> None:
    text = (ROOT / ".github" / "workflows" / "pull-request.yml").read_text(encoding="utf-8")
    before, after = PLANTED[fault]
    assert before in text
    assert any(fault in found for found in _faults(yaml.safe_load(text.replace(before, after, 1))))


ACTIONLINT = Path(sysconfig.get_path("scripts")) / "actionlint"
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="its wheels are for Linux")
UNSOUND = {
    'unexpected key "timeout-minute"': ("timeout-minutes", "timeout-minute"),
    'property "reff" is not defined': ("github.ref", "github.reff"),
    'label "ubuntu-24.4" is unknown': ("ubuntu-24.04", "ubuntu-24.4"),
    'unexpected key "with"': ("steps:", "steps:\n      - with: {a: b}\n        run: echo"),
}


def _actionlint(text: str) -> subprocess.CompletedProcess[str]:
    words = [ACTIONLINT, "-no-color", "-config-file", ROOT / ".github" / "actionlint.yaml", "-"]
    return subprocess.run(words, input=text, capture_output=True, text=True, check=False)


@ON_LINUX
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actionlint_finds_nothing(path: Path) -> None:
    done = _actionlint(path.read_text(encoding="utf-8"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@ON_LINUX
@pytest.mark.parametrize("told", UNSOUND)
def test_actionlint_finds_what_is_planted(told: str) -> None:
    before, after = UNSOUND[told]
    text = (ROOT / ".github" / "workflows" / "pull-request.yml").read_text(encoding="utf-8")
    done = _actionlint(text.replace(before, after, 1))
    assert before in text and done.returncode == 1 and told in done.stdout


def _here(*words: str | Path) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, ROOT / ".ci" / "workflow.py", *words], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_job_is_listed_with_its_steps(path: Path) -> None:
    code, out, _ = _here(path, "--list")
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    assert code == 0 and out.count("\n") == sum(1 + len(job["steps"]) for job in jobs.values())


def test_a_job_runs_from_its_file_with_inputs_and_ends_with_the_code_of_the_step_that_failed(tmp_path: Path) -> None:
    file = tmp_path / "one.yml"
    file.write_text(
        """
on: {workflow_dispatch: {inputs: {word: {required: true}, other: {default: there}}}}
jobs:
  job:
    env: {WORD: "${{ inputs.word }} ${{ inputs.other }}"}
    steps:
      - uses: actions/checkout@v4
      - run: echo "said $WORD"
      - run: false | cat
      - run: echo not reached
      - {run: echo at the end, if: always()}
"""
    )
    code, out, _ = _here(file, "job", "word=hello; exit 7")
    assert code == 1
    assert "not here: actions/checkout@v4\n" in out and "said hello; exit 7 there\n" in out
    assert "\nat the end\n" in out and "\nnot reached\n" not in out
    for key, told in (("env: {A: b}", "env"), ("working-directory: /", "working-directory"), ("if: failure()", "if: failure()")):
        (tmp_path / "other.yml").write_text(file.read_text().replace("if: always()", key))
        said = _here(tmp_path / "other.yml", "job", "word=w")
        assert said[:2] == (2, "") and f"job has {told}, which only the server knows" in said[2]
    (tmp_path / "other.yml").write_text(f"defaults: {{run: {{shell: sh}}}}\n{file.read_text()}")
    assert "job has defaults, which only" in _here(tmp_path / "other.yml", "job", "word=w")[2]
    assert _here(file, "job") == (2, "", f"workflow: {file} needs word=...\n")
    assert _here(file, "jab")[2] == f"workflow: {file} has the jobs job; name one of them\n"


def test_a_runner_whose_gpu_is_not_seen_fails_before_its_tests_are_skipped() -> None:
    (step,) = (one for one in yaml.safe_load(WORKFLOWS[0].read_text(encoding="utf-8"))["jobs"]["gpu"]["steps"] if "run" in one)
    (line,) = (line for line in step["run"].splitlines() if 'device="cuda"' in line)
    assert step["run"].index(line) < step["run"].index("-m pytest")
    if not torch.cuda.is_available():
        words = ["bash", "-c", line.replace(".venv-gpu/bin/python", sys.executable)]
        assert subprocess.run(words, capture_output=True, check=False).returncode == 1
