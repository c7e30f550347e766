"""Tasks of lm-evaluation-harness, in a process of its own: the checkpoint against its base, answer by answer.

D documents.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from compressor.json_text import from_json
from harness.release.candidate import Candidate, Check
from harness.release.outside.process import end_of, process
from harness.reporting.record import CheckRecord, Claim
from harness.reporting.verdict import Outcome
from harness.validation.behaviour.bootstrap import percentile_interval, power_of, resample_sums
from harness.validation.behaviour.quality import held_against

_NOT_INSTALLED = "No module named lm_eval"
_SIDES = ("base", "compressed")

_Answers = Mapping[tuple[str, str, int, str], float]
"""Metric, filter, number and digest of a document to what the model got for it."""


class _NoAnswer(Exception):
    """The evaluation gave nothing to compare."""


def check_tasks(candidate: Candidate) -> list[CheckRecord]:
    """Ask both models each task of the policy.

    Args:
        candidate: what is to be signed.

    Returns:
        One record per task; a skipped one where the policy names none.
    """
    given = candidate.policy.tasks
    if not given:
        return [Claim("tasks.lm-eval", "Tasks of lm-evaluation-harness pass").skipped("not run: the policy names no task")]
    return [_task(name, path).record(candidate) for name, path in given.items()]


def _task(name: str, path: Path) -> Check:
    claim = Claim(f"tasks.{name}", f"On the task {name} the checkpoint answers as well as its base")
    return Check(claim, lambda candidate: _look(claim, candidate, path))


def _look(claim: Claim, candidate: Candidate, path: Path) -> CheckRecord:
    python = candidate.policy.evaluator or Path(sys.executable)
    for missing in (path if not path.is_file() else None, python if shutil.which(python) is None else None):
        if missing is not None:
            return claim.skipped(f"not run: there is no {missing}")
    task = re.search(r"^task: *[\"']?([^\s\"'#]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    if task is None:
        return claim.record(Outcome.INCONCLUSIVE, f"{path.name} has no line 'task: NAME', and lm-evaluation-harness finds tasks by it")
    try:
        with TemporaryDirectory() as folder:
            base, compressed = (_ask(candidate, side, python, path, task[1], Path(folder)) for side in _SIDES)
    except _NoAnswer as error:
        told = str(error)
        return claim.skipped("not run: lm-evaluation-harness is not installed") if told == _NOT_INSTALLED else _unknown(claim, told)
    return _judge(claim, candidate, base, compressed) if base.keys() == compressed.keys() else _unknown(claim, "other documents were asked")


def _unknown(claim: Claim, told: str) -> CheckRecord:
    return claim.record(Outcome.INCONCLUSIVE, f"could not be asked: {told}")


def _ask(candidate: Candidate, side: str, python: Path, path: Path, task: str, folder: Path) -> _Answers:
    """Run one model; it is given by a link, since a comma in a path would end it."""
    (folder / side).symlink_to(getattr(candidate, side).absolute())
    output = folder / f"{side}-answers"
    model = ("--model", "hf", "--model_args", f"pretrained={folder / side},dtype=auto", "--device", str(candidate.device))
    asked = ("--tasks", task, "--include_path", str(path.parent.absolute()), "--log_samples", "--output_path", str(output))
    done = process([str(python), "-I", "-m", "lm_eval", "run", *model, *asked], candidate, path.parent)
    if isinstance(done, str):
        raise _NoAnswer(done)
    if done.returncode:
        raise _NoAnswer(_NOT_INSTALLED if done.stderr.rstrip().endswith(_NOT_INSTALLED) else f"{side}: {end_of(done)}")
    try:
        return _read(output, task)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _NoAnswer(f"{side}: its answers cannot be read ({type(error).__name__}: {error})") from error


def _read(output: Path, task: str) -> _Answers:
    """What each document got, more is better; metrics that have no number from 0 to 1 a document are left out."""
    written, samples = [*output.rglob("results_*.json")], [*output.rglob(f"samples_{task}_*.jsonl")]
    if len(written) != 1:
        raise ValueError(f"{len(written)} files of results were written, and one is wanted")
    (results,) = written
    better = from_json(results.read_text(encoding="utf-8"))["higher_is_better"][task]
    found: dict[tuple[str, str, int, str], float] = {}
    for row in (from_json(line) for path in samples for line in path.read_text(encoding="utf-8").splitlines()):
        for metric in row["metrics"]:
            if _is_share(row[metric]):
                found[metric, row["filter"], row["doc_id"], row["doc_hash"]] = row[metric] if better[metric] else -row[metric]
    return found


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1


def _judge(claim: Claim, candidate: Candidate, base: _Answers, compressed: _Answers) -> CheckRecord:
    """Hold the first metric, the one that a task names first, against the limit of the policy."""
    limits = candidate.policy.limits
    if not base:
        return _unknown(claim, "no metric gives a number from 0 to 1 for each document")
    first = next(iter(base))[:2]
    values_D2 = np.array([(base[key], compressed[key]) for key in base if key[:2] == first], dtype=np.float64)
    count, (before, after) = len(values_D2), np.abs(values_D2.mean(0))
    told = f"{first[0]} {before:.2%} -> {after:.2%} of {count} documents"
    if count < limits.min_sequences:
        return _unknown(claim, f"{told}: below {limits.min_sequences} no interval is trusted")
    lost_D1 = values_D2[:, :1] - values_D2[:, 1:]
    resampled = resample_sums(lost_D1, limits.num_resamples, candidate.seed)[:, 0] / count
    lost = percentile_interval(float(lost_D1.mean()), resampled, limits.confidence, count)
    outcome = held_against(lost, limits.max_accuracy_drop, is_upper=True)
    if outcome is Outcome.PASS and 3 / count > limits.max_accuracy_drop:  # as many may be lost where none was seen; no bootstrap knows it
        outcome = Outcome.INCONCLUSIVE
    power = power_of(lost.standard_error or 3 / count, limits.max_accuracy_drop, limits.confidence)
    told += f", lost {lost.estimate:+.2%} [{lost.low:+.2%}, {lost.high:+.2%}]; a loss of {power.smallest_detectable:.1%} shows with 80 %"
    unsure = "; more documents would tell" if outcome is Outcome.INCONCLUSIVE else ""
    differ = int(np.count_nonzero(lost_D1))
    documents = hashlib.sha256("".join(digest for *_, digest in base).encode()).hexdigest()  # what was asked, for whoever asks later
    evidence = {"lost": lost.to_dict(), "power": power.to_dict(), "answers that differ": differ, "filter": first[1], "documents": documents}
    limit = f"loss <= {limits.max_accuracy_drop:.1%} for the whole interval"
    return claim.record(outcome, told + unsure, limit=limit, evidence=evidence)
