"""`harness release` from the command line: the page, the statement, and a folder that is held against it later."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from compressor.errors import UserInputError
from harness import cli
from harness.release.page import render_page
from harness.release.policy import ReleasePolicy
from harness.release.report import ReleaseReport
from harness.release.statement import verify_statement
from harness.reporting.record import CheckRecord
from harness.reporting.verdict import Outcome
from tests.harness.release.conftest import POLICY, Release

POLICY_TEXT = """
dataset: {dataset}
required: [files.config, command.right]
limits: {limits}
generation: {generation}
environments: {{newest: nowhere/python}}
commands:
  right: "{{python}} -c pass"
  wrong: "{{python}} -c 'print(7); raise SystemExit(1)'"
  unsure: "{{python}} -c 'raise SystemExit(5)'"
  vllm: no-such-program {{compressed}}
waivers:
  command.wrong: {{reason: the reason of the waiver, until: 2999-01-01}}
  command.unsure: {{reason: it is not known, until: 2999-01-01}}
"""


@pytest.fixture(scope="module")
def signed(made: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signed")
    limits, generation = (json.dumps(part.model_dump(mode="json")) for part in (POLICY.limits, POLICY.generation))
    text = POLICY_TEXT.format(dataset=made.dataset, limits=limits, generation=generation)
    (folder / "p.yaml").write_text(text)
    options = ["--policy", str(folder / "p.yaml"), "--output-dir", str(folder / "out"), "--device", "cpu", "--num-samples", "30"]
    assert cli.main(["release", str(made.base), str(made.compressed), *options, "--seed", "3", "--quiet"]) == 0
    return folder / "out"


def test_the_report_holds_what_was_asked_for(signed: Path) -> None:
    data = json.loads((signed / "release.json").read_text())
    assert (data["verdict"], data["provenance"]["seed"], data["provenance"]["data"]["num_samples"]) == ("pass", 3, 30)
    assert data["run"]["device"] == "cpu"
    found = {one["name"]: one for one in data["checks"]}
    assert "there is no interpreter" in found["environment.newest"]["summary"]
    assert found["tasks.lm-eval"]["summary"] == "not run: the policy names no task"
    outcomes = {name: found[f"command.{name}"]["outcome"] for name in ("right", "wrong", "unsure", "vllm", "onnx")}
    assert outcomes == {"right": "pass", "wrong": "fail", "unsure": "inconclusive", "vllm": "skip", "onnx": "skip"}
    assert found["command.vllm"]["summary"] == "not run: no-such-program is not installed"


def test_the_page_names_waivers_and_what_was_not_run_and_needs_no_network(signed: Path) -> None:
    page = (signed / "release.html").read_text()
    assert "Waived until 2999-01-01" in page and "the reason of the waiver" in page and "not run: this machine" in page
    shown = html.unescape(page)
    assert [one["name"] for one in json.loads((signed / "release.json").read_text())["checks"] if one["title"] not in shown] == []
    assert "Released by" in page and not any(word in page for word in ("src=", "<script", "@import", 'href="http'))
    assert (signed / "junit.xml").is_file()


def test_nobody_is_asked_to_sign_what_did_not_pass(signed: Path) -> None:
    data = json.loads((signed / "release.json").read_text())
    records = tuple(CheckRecord(one["name"], one["title"], Outcome.FAIL, one["summary"]) for one in data["checks"][:2])
    page = render_page(ReleaseReport(records, ReleasePolicy(), {}, data["provenance"], data["run"]))
    assert "Not to be released" in page and "Released by" not in page


def test_the_statement_is_of_in_toto_and_names_every_file(signed: Path, made: Release) -> None:
    statement = json.loads((signed / "statement.json").read_text())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert {one["name"] for one in statement["subject"]} == {path.name for path in made.compressed.iterdir()}
    predicate = statement["predicate"]
    assert predicate["result"] == "WARNED" and predicate["warnedTests"] == ["command.unsure", "command.wrong"]
    assert {"dataset", "policy", "base/model.safetensors"} <= {one["name"] for one in predicate["configuration"]}


def test_a_folder_is_verified_wherever_it_lies_and_each_change_is_named(
    signed: Path, release: Release, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["release", "verify", str(signed / "statement.json"), str(release.compressed)]
    assert cli.main(words) == 0
    (release.compressed / "config.json").write_text("{}")
    (release.compressed / "generation_config.json").unlink()
    (release.compressed / "extra.txt").write_text("x")
    capsys.readouterr()
    assert cli.main([*words, "--json"]) == 1
    told = next(one for one in json.loads(capsys.readouterr().out)["checks"] if one["name"] == "statement.files")
    assert told["findings"] == ["config.json: has other bytes", "extra.txt: was added", "generation_config.json: is missing"]
    (release.compressed / "a\nverdict: pass").write_text("x")
    assert cli.main(words) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "extra.txt: was added" in lines and [line for line in lines if line.startswith("verdict:")] == ["verdict: regression"]


def test_a_waiver_that_has_ended_since_and_a_failed_sign_off_are_told(signed: Path, made: Release, tmp_path: Path) -> None:
    statement = signed / "statement.json"
    _, result = verify_statement(statement, made.compressed, today=date(2999, 1, 2))
    assert result.outcome is Outcome.FAIL and "command.unsure: its waiver ended on 2999-01-01" in result.findings
    data = json.loads(statement.read_text())
    data["predicate"] |= {"verdict": "regression", "result": "FAILED", "failedTests": ["format.x"]}
    (tmp_path / "statement.json").write_text(json.dumps(data))
    _, result = verify_statement(tmp_path / "statement.json", made.compressed, today=date(2026, 11, 25))
    assert (result.outcome, result.summary) == (Outcome.FAIL, "the sign-off said regression: format.x")


def test_an_inconclusive_sign_off_names_what_was_and_the_waivers_that_have_ended(signed: Path, made: Release, tmp_path: Path) -> None:
    data = json.loads((signed / "statement.json").read_text())
    unsure = [*data["predicate"]["warnedTests"], "x.y", "x.z"]
    data["predicate"] |= {"verdict": "inconclusive", "result": "WARNED", "warnedTests": unsure}
    (tmp_path / "s.json").write_text(json.dumps(data))
    _, result = verify_statement(tmp_path / "s.json", made.compressed, today=date(2026, 11, 25))
    assert (result.outcome, result.summary) == (Outcome.INCONCLUSIVE, "the sign-off said inconclusive: x.y, x.z")
    _, result = verify_statement(tmp_path / "s.json", made.compressed, today=date(2999, 1, 2))
    assert result.outcome is Outcome.FAIL and result.summary.startswith(
        "the sign-off said inconclusive: x.y, x.z; command.unsure: its waiver"
    )
    assert "command.unsure: its waiver ended on 2999-01-01" in result.findings


CONTRADICTIONS: dict[str, tuple[dict[str, object], str]] = {
    "result": ({"result": "FAILED"}, "result is FAILED, and the tests say WARNED"),
    "failed tests": ({"failedTests": ["files.safe"]}, "verdict is pass, and the tests say regression"),
    "warned tests": ({"warnedTests": ["command.unsure", "command.wrong", "x.y"]}, "the tests say inconclusive"),
    "nothing passed": ({"passedTests": []}, "the tests say inconclusive"),
    "two lists": ({"passedTests": ["command.wrong"]}, "a test stands in two lists"),
    "policy waived": (
        {
            "warnedTests": ["command.unsure", "command.wrong", "policy.required"],
            "waivers": {name: {"reason": "r", "until": "2999-01-01"} for name in ("command.unsure", "command.wrong", "policy.required")},
        },
        "what nothing can waive is waived",
    ),
    "waived": ({"warnedTests": [], "passedTests": ["a.b"]}, "what is waived is not among warnedTests"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_statement_that_contradicts_itself_is_none(name: str, signed: Path, made: Release, tmp_path: Path) -> None:
    fields, said = CONTRADICTIONS[name]
    data = json.loads((signed / "statement.json").read_text())
    data["predicate"] |= fields
    (tmp_path / "s.json").write_text(json.dumps(data))
    with pytest.raises(UserInputError, match="predicate: contradicts itself: ") as caught:
        verify_statement(tmp_path / "s.json", made.compressed, today=date(2026, 11, 25))
    assert said in str(caught.value)


def test_a_statement_that_does_not_say_what_it_rests_on_is_none(signed: Path, made: Release, tmp_path: Path) -> None:
    sound = json.loads((signed / "statement.json").read_text())
    rests_on = sound["predicate"]["configuration"]
    parts = ("dataset", "policy", "base/", "base/config.json", "base/model.safetensors")
    without = [[one for one in rests_on if not one["name"].startswith(kind)] for kind in parts]
    shards = [{**rests_on[0], "name": f"base/model-0000{number}-of-00003.safetensors"} for number in (1, 2, 3)]
    others = [one for one in rests_on if one["name"] != "base/model.safetensors"]
    index = {**rests_on[0], "name": "base/model.safetensors.index.json"}
    held_out = {**rests_on[0], "name": "base/heldout.safetensors"}
    without += [
        [*others, held_out],
        [*others, *shards],
        [*others, index],
        [*others, index, *shards[:2]],
        [*others, index, shards[0], shards[2]],
    ]
    nameless = [[{**one, "name": ""} if one["name"] == "base/model.safetensors" else one for one in rests_on]]
    wrong = [{"configuration": one} for one in ([], rests_on + rests_on[:1], *without, *nameless)] + [
        {"versions": one} for one in (7, None, {"torch": 2}, {}, {"torch": ""})
    ]
    for fields in wrong:
        (tmp_path / "s.json").write_text(json.dumps({**sound, "predicate": {**sound["predicate"], **fields}}))
        with pytest.raises(UserInputError, match=f"is no statement of a sign-off: predicate.{next(iter(fields))}"):
            verify_statement(tmp_path / "s.json", made.compressed, today=date(2026, 11, 25))


def test_a_statement_that_rests_on_no_tokenizer_has_not_seen_it_pass(signed: Path, made: Release, tmp_path: Path) -> None:
    told = json.loads((signed / "statement.json").read_text())
    rests_on = told["predicate"]["configuration"]
    told["predicate"]["configuration"] = [one for one in rests_on if one["name"] != "base/tokenizer.json"]
    assert len(told["predicate"]["configuration"]) == len(rests_on) - 1 and "files.tokenizer" in told["predicate"]["passedTests"]
    (tmp_path / "s.json").write_text(json.dumps(told))
    with pytest.raises(UserInputError, match=r"configuration does not name base/tokenizer\.json"):
        verify_statement(tmp_path / "s.json", made.compressed, today=date(2026, 11, 25))


def _pipe(folder: Path) -> str:
    os.mkfifo(folder / "x")
    return "x: is a pipe, a socket or a device"


def _link(target: str) -> Callable[[Path], str]:
    def put(folder: Path) -> str:
        (folder / "x").symlink_to(target)
        return "x: is a link"

    return put


def _same_bytes(folder: Path) -> str:
    (folder / "config.json").rename(folder.parent / "away.json")
    (folder / "config.json").symlink_to(folder.parent / "away.json")
    return "config.json: is a link"


def _folder_for_file(folder: Path) -> str:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    return "config.json: is missing"


NO_FILES = {
    "link to a folder": _link("/tmp"),
    "link to nowhere": _link("/nope"),
    "pipe": _pipe,
    "same": _same_bytes,
    "folder": _folder_for_file,
}


@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_no_file_is_named_whatever_it_leads_to(name: str, signed: Path, release: Release) -> None:
    finding = NO_FILES[name](release.compressed)
    record, _ = verify_statement(signed / "statement.json", release.compressed, today=date(2026, 11, 25))
    assert (record.outcome, record.findings) == (Outcome.FAIL, (finding,))


MISTAKES = {
    "nowhere.json": (None, "cannot be read"),
    "text": ("no", "is not JSON"),
    "empty": ("{}", "is no statement of a sign-off: _type: is missing; name"),
    "deep": ("[" * 100_000, "is not JSON: its entries are nested too deeply"),
    "twice": ('{"_type": 1, "_type": 2}', "'_type' stands twice"),
    "list": ("[]", "is no statement of a sign-off: the file: [] is not allowed: a mapping belongs there; name its statement.json"),
}
DAMAGED = {
    "subject: [] is not allowed: at least 1 must be there": lambda told: told.update(subject=[]),
    "subject: {} is not allowed: a list belongs there": lambda told: told.update(subject={}),
    "predicate.versions: {} is not allowed: at least 1 must be there": lambda told: told["predicate"].update(versions={}),
    "predicate.verdict: {} is not allowed: 'pass', 'regression' or 'inconclusive' belongs there": lambda told: told["predicate"].update(
        verdict={}
    ),
    "predicateType: {} is not allowed: 'https://in-toto.io/attestation/test-result/v0.1' belongs there": lambda told: told.update(
        predicateType={}
    ),
    "predicate.waivers: [] is not allowed: a mapping belongs there": lambda told: told["predicate"].update(waivers=[]),
    "predicate.passedTests: 7 is not allowed: a list belongs there": lambda told: told["predicate"].update(passedTests=7),
    "until: 'soon' is not allowed: write a day as YYYY-MM-DD": lambda told: told["predicate"].update(
        waivers={"files.a": {"reason": "r", "until": "soon"}}
    ),
    "is not allowed: a text that matches ^[0-9a-f]{64}$ belongs there": lambda told: told["subject"][0]["digest"].update(sha256="AB" * 32),
    "predicate: contradicts itself": lambda told: told["predicate"].update(passedTests=[]),
}


@pytest.mark.parametrize("said", DAMAGED)
def test_a_statement_that_is_damaged_is_told_in_our_words(said: str, signed: Path, made: Release, tmp_path: Path) -> None:
    told = json.loads((signed / "statement.json").read_text())
    DAMAGED[said](told)
    (tmp_path / "statement.json").write_text(json.dumps(told))
    with pytest.raises(UserInputError, match=re.escape(said)):
        verify_statement(tmp_path / "statement.json", made.compressed, today=date(2026, 11, 25))


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_no_statement_is_bad_input(name: str, made: Release, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, said = MISTAKES[name]
    if text is not None:
        (tmp_path / name).write_text(text)
    assert cli.main(["release", "verify", str(tmp_path / name), str(made.compressed)]) == 3
    assert said in capsys.readouterr().err


def test_mistakes_on_the_command_line_are_no_verdict(made: Release, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = ["release", str(made.base), str(made.compressed), "--output-dir", str(tmp_path / "out"), "--quiet", "--json"]
    assert cli.main(folders) == 3 and "dataset: none was given" in capsys.readouterr().err
    assert cli.main([*folders, "--dataset", "nowhere.jsonl"]) == 3 and "nowhere.jsonl" in capsys.readouterr().err
    shutil.copytree(made.compressed, tmp_path / "own")
    inside = ["release", str(made.base), str(tmp_path / "own"), "--output-dir", str(tmp_path / "own" / "out")]
    assert cli.main(inside) == 3 and "only read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("base", "compressed", "told"),
    [
        ("base", "nothere", "nothere: no such folder for the compressed model"),
        ("base", "file", "file: no such folder for the compressed model"),
        ("file", "base", "file: no such folder for the base model"),
        ("base", "base", "base: is given as base and as compressed model"),
    ],
)
def test_what_is_no_folder_is_told_before_anything_is_read(
    base: str, compressed: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "file").write_text("no folder")
    code = cli.main(["release", base, compressed, "--dataset", "held.jsonl", "--quiet"])
    error = capsys.readouterr().err
    assert code == 3 and told in error and error.count("\n") == 1 and not list(tmp_path.glob("*-release"))
