"""Tasks of lm-evaluation-harness: both models answer, and what the checkpoint loses decides. Another program stands in its place."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch

from compressor.errors import UserInputError
from harness.release.candidate import Candidate
from harness.release.outside.tasks import check_tasks
from harness.release.policy import ReleasePolicy, load_release_policy
from harness.reporting.record import CheckRecord
from harness.reporting.verdict import Outcome

EVALUATOR = """#!{python}
import json, pathlib, sys
words = dict(zip(sys.argv, sys.argv[1:]))
assert sys.argv[1:5] == ["-I", "-m", "lm_eval", "run"] and pathlib.Path("answers.json").exists(), "it runs beside the task"
side = pathlib.Path(words["--model_args"].removeprefix("pretrained=").removesuffix(",dtype=auto"))
told, out = json.load(open("answers.json"))[side.name], pathlib.Path(words["--output_path"]) / "model"
if "error" in told:
    sys.exit(told["error"])
assert side.resolve().is_dir()
out.mkdir(parents=True)
rows = [dict(doc_id=n, doc_hash=told["hash"], filter="none", metrics=["m", "text"], m=m, text="a") for n, m in enumerate(told["m"])]
(out / f"samples_{{words['--tasks']}}_now.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
(out / "results_now.json").write_text(json.dumps(dict(higher_is_better={{words["--tasks"]: dict(m=told["more"], text=True)}})))
"""


def answers(right: int, wrong: int, *, digest: str = "a", more: bool = True) -> dict[str, object]:
    return {"m": [1.0] * right + [0.0] * wrong, "hash": digest, "more": more}


def asked(folder: Path, base: object, compressed: object, task: str = "task: questions\n") -> CheckRecord:
    """The record of a task whose answers are given."""
    for name in ("a base, with a comma", "compressed", "tasks"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "tasks" / "answers.json").write_text(json.dumps({"base": base, "compressed": compressed}))
    (folder / "tasks" / "mine.yaml").write_text(task)
    (folder / "python").write_text(EVALUATOR.format(python=sys.executable))
    (folder / "python").chmod(0o755)
    (folder / "policy.yaml").write_text("tasks: {mine: tasks/mine.yaml}\nevaluator: python\n")
    policy = load_release_policy(folder / "policy.yaml")
    (record,) = check_tasks(Candidate(folder / "a base, with a comma", folder / "compressed", policy, [], torch.device("cpu"), 0))
    assert record.name == "tasks.mine"
    return record


FOUND = {
    "the same": (answers(900, 100), answers(900, 100), Outcome.PASS, "m 90.00% -> 90.00% of 1000 documents"),
    "worse": (answers(900, 100), answers(800, 200), Outcome.FAIL, "lost +10.00%"),
    "better": (answers(800, 200), answers(900, 100), Outcome.PASS, "lost -10.00%"),
    "worse, less is better": (answers(100, 900, more=False), answers(200, 800, more=False), Outcome.FAIL, "m 10.00% -> 20.00%"),
    "a true loss of three in a hundred": (answers(90, 10), answers(87, 13), Outcome.INCONCLUSIVE, "more documents would tell"),
    "alike, but few": (answers(50, 10), answers(50, 10), Outcome.INCONCLUSIVE, "more documents would tell"),
    "better, but few": (answers(50, 10), answers(51, 9), Outcome.INCONCLUSIVE, "more documents would tell"),
    "below what an interval takes": (answers(10, 2), answers(2, 10), Outcome.INCONCLUSIVE, "below 20 no interval is trusted"),
    "other documents": (answers(900, 100), answers(900, 100, digest="b"), Outcome.INCONCLUSIVE, "other documents were asked"),
    "no number": ({**answers(0, 0), "m": ["a"]}, {**answers(0, 0), "m": ["a"]}, Outcome.INCONCLUSIVE, "no metric gives a number"),
    "another form": (answers(9, 1), {"m": [1.0], "hash": "a", "more": None}, Outcome.INCONCLUSIVE, "other documents were asked"),
    "stopped": (answers(900, 100), {"error": "out of memory"}, Outcome.INCONCLUSIVE, "compressed: out of memory"),
    "not there": ({"error": "python: No module named lm_eval"}, {}, Outcome.SKIP, "not run: lm-evaluation-harness is not installed"),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_the_checkpoint_loses_on_a_task_decides_and_no_answer_is_no_pass(name: str, tmp_path: Path) -> None:
    base, compressed, outcome, told = FOUND[name]
    record = asked(tmp_path, base, compressed)
    assert record.outcome is outcome and told in record.summary, record


def test_the_power_of_a_task_is_said(tmp_path: Path) -> None:
    record = asked(tmp_path, answers(90, 10), answers(87, 13))
    assert record.evidence["documents"] == hashlib.sha256(b"a" * 100).hexdigest()
    assert record.evidence["answers that differ"] == 3 and 0.04 < record.evidence["power"]["smallest_detectable_difference"] < 0.06
    assert "a loss of 4.8% shows with 80 %" in record.summary and record.limit == "loss <= 1.0% for the whole interval"


def test_a_task_without_a_name_or_file_and_a_policy_without_tasks_look_at_nothing(tmp_path: Path) -> None:
    assert asked(tmp_path, {}, {}, task="group: all\n").summary.startswith("mine.yaml has no line 'task: NAME'")
    (tmp_path / "tasks" / "mine.yaml").unlink()
    policy = load_release_policy(tmp_path / "policy.yaml")
    candidate = Candidate(tmp_path, tmp_path, policy, [], torch.device("cpu"), 0)
    assert [(one.outcome, one.summary) for one in check_tasks(candidate)] == [
        (Outcome.SKIP, f"not run: there is no {tmp_path / 'tasks' / 'mine.yaml'}")
    ]
    (none,) = check_tasks(Candidate(tmp_path, tmp_path, ReleasePolicy(), [], torch.device("cpu"), 0))
    assert (none.name, none.outcome, none.summary) == ("tasks.lm-eval", Outcome.SKIP, "not run: the policy names no task")
    (tmp_path / "policy.yaml").write_text("tasks: [mine.yaml]\n")
    with pytest.raises(UserInputError, match="tasks"):
        load_release_policy(tmp_path / "policy.yaml")
