"""`harness validate` from the command line: report, table or JSON, exit codes that tell verdicts from mistakes, inputs left alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from harness import cli, validate


@pytest.fixture
def folders(workspace, pristine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return [str(workspace.base), str(pristine("W8A8")), "--dataset", str(workspace.dataset), "--quiet"]


def test_validate_prints_table_verdict_and_where_the_report_is(folders, capsys, tmp_path):
    assert cli.main(["validate", *folders, "--output-dir", "out"]) == 0
    text = capsys.readouterr().out
    assert "behaviour.perplexity" in text
    assert "verdict: pass" in text
    assert f"{tmp_path}/out/report.html" in text
    assert (tmp_path / "out" / "report.json").is_file()


def test_json_on_standard_output_is_the_report(folders, capsys):
    assert cli.main(["validate", *folders, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == json.loads(Path("W8A8-validation/report.json").read_text())


def test_bars_go_to_standard_error(folders, capsys):
    folders.remove("--quiet")
    assert cli.main(["validate", *folders, "--json"]) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert "predictions" in captured.err


def test_every_flag_changes_what_it_says(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("harness.validation.report.page.render_page", lambda report: "")

    def report(*flags: str) -> dict:
        cli.main(["validate", *folders, "--json", "--output-dir", f"out{len(list(tmp_path.iterdir()))}", *flags])
        return json.loads(capsys.readouterr().out)

    plain = report()
    assert report("--num-samples", "21")["provenance"]["dataset"]["num_samples"] == 21
    assert report("--max-seq-length", "9")["provenance"]["dataset"]["num_tokens"] == 40 * 9
    assert report("--seed", "5")["metrics"]["kl"]["low"] != plain["metrics"]["kl"]["low"]
    assert report("--confidence", "0.8")["policy"]["confidence"] == 0.8
    assert report("--device", "cpu")["run"]["device"] == "cpu"
    served = [report("--serve", server)["provenance"]["served by"] for server in ("sglang", "none")]
    assert [plain["provenance"]["served by"], *served] == ["vLLM 0.33.0", "SGLang 0.5.23", None]
    (tmp_path / "policy.yaml").write_text("max_mean_kl: 0.03\n")
    assert report("--policy", "policy.yaml")["policy"]["max_mean_kl"] == 0.03


def test_verdicts_become_exit_codes(workspace, pristine, tmp_path, capsys):
    (tmp_path / "unsure.yaml").write_text("min_sequences: 1000\n")
    common = ["--dataset", str(workspace.dataset), "--quiet", "--json"]
    bad = cli.main(["validate", str(workspace.base), str(pristine("W3A16")), *common, "--output-dir", str(tmp_path / "a")])
    unsure = cli.main(["validate", str(workspace.base), str(pristine("W8A8")), *common, "--output-dir", str(tmp_path / "b"),
                       "--policy", str(tmp_path / "unsure.yaml")])  # fmt: skip
    assert (bad, unsure) == (1, 2)


MISTAKES = {
    "no such base": (["nowhere", "{compressed}", "--dataset", "{data}"], "no such folder for the base model"),
    "no such checkpoint": (["{base}", "nowhere", "--dataset", "{data}"], "no such folder for the compressed model"),
    "no such data": (["{base}", "{compressed}", "--dataset", "nowhere.txt"], "nowhere.txt"),
    "unknown data": (["{base}", "{compressed}", "--dataset", "{base}/config.yml"], "config.yml"),
    "empty data": (["{base}", "{compressed}", "--dataset", "empty.txt"], "empty.txt"),
    "too long": (["{base}", "{compressed}", "--dataset", "{data}", "--max-seq-length", "4096"], "more than the model takes"),
    "no such policy": (["{base}", "{compressed}", "--dataset", "{data}", "--policy", "nowhere.yaml"], "no such policy file"),
    "typo in policy": (["{base}", "{compressed}", "--dataset", "{data}", "--policy", "typo.yaml"], "typo.yaml:1: max_kl"),
    "no such device": (["{base}", "{compressed}", "--dataset", "{data}", "--device", "abacus"], "abacus"),
    "report exists": (["{base}", "{compressed}", "--dataset", "{data}", "--output-dir", "full"], "not empty"),
    "report in the base": (["{base}", "{compressed}", "--dataset", "{data}", "--output-dir", "{base}/report"], "which is only read"),
    "base as compressed": (["{base}", "{base}", "--dataset", "{data}"], "give two folders"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_bad_input_gives_one_line_exit_code_3_and_no_report(workspace, pristine, tmp_path, monkeypatch, capsys, mistake):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "typo.yaml").write_text("max_kl: 1\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    arguments, message = MISTAKES[mistake]
    places = {"base": workspace.base, "compressed": pristine("W8A8"), "data": workspace.dataset}
    code = cli.main(["validate", *(argument.format(**places) for argument in arguments), "--quiet"])
    captured = capsys.readouterr()
    assert code == 3
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert captured.err.startswith("harness validate: error: ")
    assert message in captured.err
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("flag", ["--seed=-1", "--seed=1.5", "--confidence=0.99999999999999994", "--confidence=1", "--num-samples=0"])
def test_numbers_out_of_range_are_refused_by_the_parser(folders, capsys, flag):
    with pytest.raises(SystemExit) as caught:
        cli.main(["validate", *folders, flag])
    assert caught.value.code == 3
    assert "Traceback" not in (text := capsys.readouterr().err)
    assert f"'{flag.partition('=')[2]}' is not a" in text


@pytest.mark.parametrize("more", [16, -16])
def test_another_vocabulary_is_a_regression_and_no_crash(workspace, compressed, more):
    def resized(tensors):
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            tensors[name] = torch.cat([tensors[name], tensors[name][:more]]) if more > 0 else tensors[name][:more]

    checkpoint = compressed()
    checkpoint.edit(resized)
    checkpoint.edit_config(lambda config: config.update(vocab_size=96 + more))
    report = validate(workspace.base, checkpoint.folder, workspace.dataset)
    found = {record.name: record for record in report.records}
    assert report.verdict.value == "regression" and found["files.config"].outcome == "fail"
    assert found["behaviour.kl"].summary == f"the base predicts 96 tokens, the checkpoint {96 + more}"


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (ZeroDivisionError, 3)])
def test_an_interruption_and_a_bug_are_no_verdicts(folders, monkeypatch, capsys, tmp_path, error, code):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("harness.validation.compare.score_models", fail)
    try:
        result = cli.main(["validate", *folders])
    except SystemExit as exit_error:
        result = exit_error.code
    assert result == code
    assert not list(tmp_path.iterdir())
    assert "Traceback" in capsys.readouterr().err if code == 3 else True


def test_the_inputs_stay_untouched(workspace, compressed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint, base = compressed("W8A8"), tmp_path / "base"
    shutil.copytree(workspace.base, base)
    content = {path: path.read_bytes() for folder in (base, checkpoint.folder) for path in folder.iterdir()}
    cli.main(["validate", str(base), str(checkpoint.folder), "--dataset", str(workspace.dataset), "--quiet", "--output-dir", "out"])
    assert {path: path.read_bytes() for folder in (base, checkpoint.folder) for path in folder.iterdir()} == content
