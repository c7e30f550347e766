"""What is required must have looked, waivers end, and what a policy names wrongly is told."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from xml.etree import ElementTree

import pytest

from compressor.errors import UserInputError
from harness.release.policy import ReleasePolicy, Waiver, load_release_policy
from harness.release.report import ReleaseReport, judged
from harness.reporting.junit import to_junit
from harness.reporting.record import CheckRecord
from harness.reporting.verdict import Outcome, Verdict

TODAY = date(2026, 11, 25)
OUTCOMES = {"files.a": Outcome.PASS, "files.b": Outcome.FAIL, "device.c": Outcome.SKIP, "weights.d": Outcome.INCONCLUSIVE}


def report(*, required: tuple[str, ...] = ("files.a",), without: tuple[str, ...] = (), **until: date) -> ReleaseReport:
    waivers = {name.replace("_", "."): Waiver(reason="known", until=day) for name, day in until.items()}
    records = [CheckRecord(name, name, outcome, outcome.value) for name, outcome in OUTCOMES.items() if name not in without]
    return judged(records, ReleasePolicy(required=required, waivers=waivers), TODAY, {}, {})


def found(one: ReleaseReport, name: str) -> CheckRecord:
    return next(record for record in one.records if record.name == name)


def test_a_failure_is_a_regression_and_a_check_that_cannot_tell_is_no_pass() -> None:
    assert report().verdict is Verdict.REGRESSION
    assert report(without=("files.b",)).verdict is Verdict.INCONCLUSIVE
    assert report(without=("files.b", "weights.d")).verdict is Verdict.PASS


def test_what_is_required_and_was_skipped_fails_by_name() -> None:
    one = report(required=("files.*", "device.*", "behaviour.kl"), without=("files.b", "weights.d"))
    record = found(one, "policy.required")
    assert record.outcome is Outcome.FAIL and one.verdict is Verdict.REGRESSION
    assert record.findings == ("device.c: is required, and was skipped: skip", "behaviour.kl: is required, and is no check")


def test_a_waiver_counts_to_its_last_day_and_then_fails_by_name() -> None:
    assert report(files_b=TODAY, weights_d=TODAY).verdict is Verdict.PASS
    ended = report(files_b=date(2026, 11, 24), weights_d=TODAY)
    assert ended.verdict is Verdict.REGRESSION and list(ended.waived) == ["weights.d"]
    assert found(ended, "policy.waivers").findings == ("files.b: ended on 2026-11-24 (known); repair it, or decide again",)


def test_no_waiver_covers_a_required_check_that_was_skipped() -> None:
    one = report(required=("device.c",), without=("files.b", "weights.d"), device_c=TODAY)
    assert one.verdict is Verdict.REGRESSION and not one.waived
    told = "device.c: is required, and was skipped: skip; a waiver lets it fail, and not be left out: have it run, or do not require it"
    assert found(one, "policy.required").findings == (told,)
    assert found(one, "policy.waivers").summary == "0 in use; device.c was skipped, which none covers"


def test_a_waiver_that_nothing_needs_is_told_and_one_of_no_check_is_a_mistake() -> None:
    idle = report(files_a=TODAY, without=("files.b", "weights.d"))
    assert idle.verdict is Verdict.PASS and found(idle, "policy.waivers").summary == "0 in use; files.a passes without it"
    wrong = report(files_aa=TODAY, without=("files.b", "weights.d"))
    assert wrong.verdict is Verdict.REGRESSION
    assert found(wrong, "policy.waivers").findings == ("files.aa: is no check; did you mean files.a?",)


def test_a_waived_failure_is_skipped_with_its_reason_for_a_ci() -> None:
    suite = ElementTree.fromstring(to_junit(report(files_b=TODAY).for_junit(), "release"))[0]
    case = next(case for case in suite if case.get("name") == "files.b")
    assert case[0].tag == "skipped" and case[0].get("message") == "waived until 2026-11-25: known; fail"


def test_a_file_gives_a_policy_with_paths_beside_it_and_default_needs_none(tmp_path: Path) -> None:
    (tmp_path / "heldout.jsonl").write_text("{}")
    path = tmp_path / "p.yaml"
    path.write_text(
        "dataset: heldout.jsonl\nlimits: {max_mean_kl: 0.01}\nenvironments: {oldest: old/python}\n"
        "commands: {onnx: '{python} x.py {compressed}'}\nwaivers: {files.a: {reason: r, until: 2027-01-31}}\n"
    )
    policy = load_release_policy(path)
    assert policy.dataset == str(tmp_path / "heldout.jsonl") and policy.environments["oldest"] == tmp_path / "old/python"
    assert policy.limits.max_mean_kl == 0.01 and policy.waivers["files.a"].until == date(2027, 1, 31)
    assert load_release_policy(Path("default")) == load_release_policy(None) == ReleasePolicy()


MISTAKES = {
    "requird: []": "p.yaml:1: requird: is no setting; did you mean required?",
    "waivers: {files.a: {until: 2027-01-31}}": "waivers.files.a.reason: is missing; add it",
    "waivers: {files.a: {reason: ' ', until: 2027-01-31}}": "waivers.files.a.reason: ' ' is not allowed",
    "waivers: {files.a: {reason: r, until: soon}}": "waivers.files.a.until: 'soon' is not allowed",
    "waivers: {files.a: {reason: r, until: 4070908800}}": "waivers.files.a.until: 4070908800 is not allowed: write a day as YYYY-MM-DD",
    "waivers: {files.a: {reason: r, until: 2027-01-31T00:00:00}}": "is not allowed: write a day as YYYY-MM-DD",
    "waivers: {policy.waivers: {reason: r, until: 2027-01-31}}": "cannot be waived",
    "commands: {onnx: 'x {folder}'}": "{folder} in onnx is no place; places are {base}, {compressed}, {python}",
    "commands: {onnx: ''}": "onnx is empty",
    "commands: {onnx: 'make && pytest'}": "onnx has &&, and no shell reads a command; write bash -c",
    "commands: {onnx: 'pytest | tee log'}": "onnx has |, and no shell reads a command",
    "limits: {max_mean_kl: -1}": "limits.max_mean_kl: -1 is not allowed",
    "minutes: .inf": "minutes: inf is not allowed: input should be a finite number",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_in_a_policy_is_told_in_a_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(UserInputError) as caught:
        load_release_policy(tmp_path / "p.yaml")
    assert MISTAKES[text] in str(caught.value)


def test_a_policy_that_is_not_there_is_no_default(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="no such policy file; name one, or write --policy default"):
        load_release_policy(tmp_path / "p.yaml")
