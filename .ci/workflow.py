"""Run the steps of a workflow on this machine, from the file that the server reads.

python .ci/workflow.py .github/workflows/release.yml sign-off base=MODEL compressed=MODEL-W4A16 dataset=heldout.jsonl
python .ci/workflow.py .github/workflows/nightly.yml --list

Steps that use an action (checkout, setup-python, cache, upload) are named and left out: what they give is here already. A workflow that
asks for what this does not know (variables of a step, another shell, other conditions) is refused, not run in part.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

BASH = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c")  # as the server starts it
KEYS_OF_JOB = {"runs-on", "timeout-minutes", "env", "steps"}
KEYS_OF_STEP = {"name", "uses", "with", "run", "if"}
CONDITIONS = {"", "always()"}
INPUT = re.compile(r"\$\{\{ *inputs\.([a-z_-]+) *\}\}")


def main(words: list[str]) -> int:
    """Run one job, or list all; return 0, or the exit code of the first step that failed."""
    if not words or words[0].startswith("-"):
        return _wrong("name a file in .github/workflows, then a job, or --list")
    path, *rest = words
    workflow = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    jobs: Mapping[str, Any] = workflow["jobs"]
    if rest == ["--list"]:
        for name, job in jobs.items():
            print(f"{name}:", *(f"  {_title(step)}" for step in job["steps"]), sep="\n")
        return 0
    names = [word for word in rest if "=" not in word] or list(jobs)
    if len(names) != 1 or names[0] not in jobs:
        return _wrong(f"{path} has the jobs {', '.join(jobs)}; name one of them")
    if unknown := [*sorted({"env", "defaults"} & set(workflow)), *_unknown(jobs[names[0]])]:
        return _wrong(f"{path}: {names[0]} has {', '.join(unknown)}, which only the server knows; teach this file, or leave it out")
    declared = (workflow.get("on", workflow.get(True)) or {}).get("workflow_dispatch") or {}  # YAML 1.1 reads the key `on` as true
    inputs = {name: str(one.get("default", "")) for name, one in declared.get("inputs", {}).items()}
    inputs |= dict(word.split("=", 1) for word in rest if "=" in word)
    if missing := [name for name, value in inputs.items() if not value]:
        return _wrong(f"{path} needs {', '.join(f'{name}=...' for name in missing)}")
    return _run(jobs[names[0]], inputs)


def _run(job: Mapping[str, Any], inputs: Mapping[str, str]) -> int:
    env = {name: INPUT.sub(lambda found: inputs[found[1]], str(value)) for name, value in job.get("env", {}).items()}
    code = 0
    for step in job["steps"]:
        print(f"== {_title(step)}", flush=True)
        if "run" not in step or (code and step.get("if") != "always()"):
            continue
        code = subprocess.run([*BASH, step["run"]], env={**os.environ, **env}, check=False).returncode or code
    return code


def _unknown(job: Mapping[str, Any]) -> list[str]:
    """What a job asks for that is not done here."""
    steps = job["steps"]
    keys = [*sorted(set(job) - KEYS_OF_JOB), *sorted({key for step in steps for key in set(step) - KEYS_OF_STEP})]
    return keys + [f"if: {step['if']}" for step in steps if step.get("if", "") not in CONDITIONS]


def _title(step: Mapping[str, Any]) -> str:
    return f"not here: {step['uses']}" if "uses" in step else str(step.get("name", step["run"]))


def _wrong(message: str) -> int:
    print(f"workflow: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
