"""The whole validation: sound checkpoints of every preset, a verdict for every kind of planted fault, nothing random in the report."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from xml.etree import ElementTree

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from compressor.errors import CheckpointError, DatasetError, ModelError, OutputError
from compressor.json_text import to_json
from harness.bisect import bisect
from harness.validation.behaviour.acceptance import check_accepted
from harness.validation.behaviour.scoring import TokenBatch, model_logits, sees_ahead
from harness.validation.compare import validate
from harness.validation.policy import Policy, SqnrLimits
from harness.validation.report import page as report_module
from harness.validation.report.page import write_report
from harness.validation.subject import read_subject
from tests import tiny

LENIENT = Policy(max_perplexity_ratio=1.5, max_mean_kl=0.4, min_top1_agreement=0.6, max_accuracy_drop=0.2, allow_dequantize_load=True)


def outcomes(report) -> dict[str, str]:
    return {record.name: record.outcome.value for record in report.records}


@pytest.mark.parametrize("preset", ["W4A16", "W4A16_ASYM", "W3A16", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC"])
def test_a_sound_checkpoint_passes(workspace, pristine, preset):
    report = validate(workspace.base, pristine(preset), workspace.dataset, policy=LENIENT)
    assert report.exit_code == 0
    assert set(outcomes(report).values()) == {"pass", "skip"}
    assert [record.name for record in report.records if record.outcome == "skip"] == [
        "record.whole", "record.base", "record.data", "record.tensors", "record.config", "serving.kv_cache", "weights.sparsity",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "change", "says"),
    [
        ("W4A16", {}, "int4, symmetric, per group of 16, pack-quantized"),
        ("W8A8", {}, "int8, symmetric, per channel, int-quantized, inputs int8, symmetric, per token, dynamic"),
        ("FP8", {}, "float8, symmetric, per tensor, float-quantized, inputs float8, symmetric, per tensor, static"),
        ("W8A8", {"output_activations": {"num_bits": 8, "dynamic": True}}, "dynamic, outputs int8, symmetric, per tensor, dynamic"),
        (
            "W8A8",
            {"input_activations": {"num_bits": 4, "symmetric": False, "strategy": "token", "dynamic": True}},
            "inputs int4, asymmetric",
        ),
    ],
)
def test_what_is_done_to_weights_inputs_and_outputs_is_named(workspace, compressed, preset, change, says):
    folder = compressed(preset).folder
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    record = check_accepted(read_subject(workspace.base, folder))
    assert record.outcome == "pass" and says in record.summary
    assert record.evidence["schemes"] == [record.summary]


def test_the_default_policy_tells_8_bits_from_3(workspace, pristine):
    good, bad = (validate(workspace.base, pristine(preset), workspace.dataset) for preset in ("W8A8", "W3A16"))
    assert (good.verdict, bad.verdict) == ("pass", "regression")
    failed = {name for name, outcome in outcomes(bad).items() if outcome == "fail"}
    assert failed == {"behaviour.perplexity", "behaviour.kl", "behaviour.top1", "behaviour.accuracy"}


def spoil_scale(checkpoint, value):
    def change(tensors):
        tensors["model.layers.1.mlp.up_proj.weight_scale"].view(-1)[0] = value

    checkpoint.edit(change)


def copy_base(workspace, checkpoint):
    for name in ("config.json", "model.safetensors"):
        (checkpoint.folder / name).write_bytes((workspace.base / name).read_bytes())


PLANTED = {
    "NaN scale": (lambda w, c: spoil_scale(c, float("nan")), {"weights.qparams", "weights.sqnr", "weights.scales", "behaviour.finite"}),
    "wrong scale": (lambda w, c: spoil_scale(c, 0.5), {"weights.scales"}),
    "missing tensor": (lambda w, c: c.edit(lambda t: t.pop("model.layers.1.mlp.up_proj.weight_scale")), {"files.tensors", "format.loads"}),
    "base as compressed": (copy_base, {"files.tensors", "format.accepted"}),
    "no weights": (lambda w, c: (c.folder / "model.safetensors").unlink(), {"files.shards", "files.tensors", "format.loads"}),
    "no config": (lambda w, c: (c.folder / "config.json").unlink(), {"files.config", "files.tensors", "format.accepted", "format.loads"}),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_gives_a_regression_by_the_checks_that_are_there_for_it(workspace, compressed, fault):
    spoil, expected = PLANTED[fault]
    checkpoint = compressed()
    spoil(workspace, checkpoint)
    report = validate(workspace.base, checkpoint.folder, workspace.dataset, policy=LENIENT)
    assert report.verdict == "regression"
    assert report.exit_code == 1
    assert expected <= {name for name, outcome in outcomes(report).items() if outcome == "fail"}
    assert len(report.records) == 31  # a check that cannot run is skipped with its reason, never left away
    json.loads(to_json(report.to_dict()))


def test_calibration_data_is_not_held_out_data(workspace, compressed):
    checkpoint = compressed()
    clean = validate(workspace.base, checkpoint.folder, workspace.dataset, policy=LENIENT)
    record = {"base": clean.provenance["base"]["sha256"], "data": {"sha256": clean.provenance["dataset"]["sha256"]}}
    (checkpoint.folder / "compression.json").write_text(json.dumps(record))
    report = validate(workspace.base, checkpoint.folder, workspace.dataset, policy=LENIENT)
    assert outcomes(report)["record.base"] == "pass"
    assert outcomes(report)["record.data"] == "fail"


def test_a_limit_of_the_policy_decides(workspace, pristine):
    strict = Policy(**(LENIENT.model_dump() | {"min_sqnr_db": SqnrLimits(int4=60.0)}))
    report = validate(workspace.base, pristine(), workspace.dataset, policy=strict)
    assert outcomes(report)["weights.sqnr"] == "fail"
    assert report.provenance["versions"]["torch"] == version("torch")  # a build for CUDA calls itself 2.11.0+cu130


def test_texts_and_token_tensors_are_data_too(workspace, pristine):
    texts = [" ".join(f"w{(7 * i + j) % 96}" for j in range(12)) for i in range(24)]
    report = validate(workspace.base, pristine("W8A8"), texts, policy=LENIENT, num_samples=22)
    assert report.provenance["dataset"]["num_samples"] == 22
    ids = torch.randint(96, (21, 10), generator=torch.Generator().manual_seed(0))
    report = validate(workspace.base, pristine("W8A8"), ids, max_seq_length=8)
    assert report.provenance["dataset"]["num_tokens"] == 21 * 8


def test_bad_data_is_the_callers_mistake(workspace, pristine, tmp_path):
    with pytest.raises(DatasetError, match="nowhere"):
        validate(workspace.base, pristine(), tmp_path / "nowhere.txt")
    with pytest.raises(DatasetError, match="vocabulary"):
        validate(workspace.base, pristine(), torch.full((30, 4), 96))
    with pytest.raises(DatasetError, match="more than the model takes"):
        validate(workspace.base, pristine(), workspace.dataset, max_seq_length=65)
    save_file({"input_ids": torch.ones(20, 1, dtype=torch.int32)}, tmp_path / "short.safetensors")
    with pytest.raises(DatasetError, match="two real tokens"):
        validate(workspace.base, pristine(), tmp_path / "short.safetensors")


@pytest.fixture(scope="module")
def report(workspace, pristine):
    return validate(workspace.base, pristine(), workspace.dataset)


def test_the_report_is_the_same_for_the_same_inputs_apart_from_the_run_block(workspace, pristine, report, tmp_path):
    again = validate(workspace.base, pristine(), workspace.dataset)
    pages = [write_report(one, tmp_path / name) for one, name in ((report, "first"), (again, "second"))]
    first, second = (json.loads((page.parent / "report.json").read_text()) for page in pages)
    assert first.pop("run")["seconds"] >= 0
    second.pop("run")
    assert first == second
    assert (pages[0].parent / "junit.xml").read_bytes() == (pages[1].parent / "junit.xml").read_bytes()
    assert without_footer(pages[0]) == without_footer(pages[1])


def without_footer(page) -> str:
    return re.sub(r"<footer>.*?</footer>", "", page.read_text(), flags=re.DOTALL)


def test_the_page_needs_nothing_else_and_shows_every_check(report, tmp_path):
    text = write_report(report, tmp_path / "out").read_text()
    assert not re.search(r'(?:src|href)="(?!#)', text)
    assert "<script" not in text
    assert "url(http" not in text
    assert "@import" not in text
    assert text.count("<svg ") == 4
    assert text.count('role="img" aria-label=') == 4
    assert all(f'id="{record.name}"' in text for record in report.records)
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    references = re.findall(r'(?:href="#|url\(#)([^")]*)', text)
    assert set(references) <= set(ids)
    assert not re.search(r"#0[1-6]0[1-6]0[1-6]", text)  # every marker colour became a variable of the page
    assert report.verdict.value in text


def test_the_junit_file_and_the_json_file_hold_every_check(report, tmp_path):
    folder = write_report(report, tmp_path / "out").parent
    assert sorted(path.name for path in folder.iterdir()) == ["junit.xml", "report.html", "report.json"]
    suite = ElementTree.parse(folder / "junit.xml").getroot()[0]
    assert suite.get("tests") == str(len(report.records))
    data = json.loads((folder / "report.json").read_text())
    assert [check["name"] for check in data["checks"]] == [record.name for record in report.records]
    assert list(data) == sorted(data)
    assert len(data["modules"]) == 14


def test_a_report_is_written_whole_or_not_at_all(report, tmp_path, monkeypatch):
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "note").write_text("mine")
    with pytest.raises(OutputError, match="not empty"):
        write_report(report, occupied)
    with pytest.raises(OutputError, match="lies in the folder"):
        write_report(report, f"{report.provenance['compressed']['path']}/report")

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report_module.Path, "write_text", full_disk)
    with pytest.raises(CheckpointError, match="No space left"):
        write_report(report, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["occupied"]


def test_names_from_outside_cannot_break_the_page(workspace, pristine, report, tmp_path):
    import dataclasses

    hostile = "</style><script>alert(1)</script>"
    spoiled = dataclasses.replace(
        report,
        records=(dataclasses.replace(report.records[0], summary=hostile, findings=(hostile,)),),
        provenance=report.provenance | {"compression": {hostile: hostile}},
    )
    assert "<script" not in write_report(spoiled, tmp_path / "out").read_text()


def test_a_base_that_predicts_no_next_token_is_refused_with_what_validate_takes(tmp_path):
    config = tiny.config("bert", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    for name in ("base", "compressed"):
        transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / name)
    with pytest.raises(ModelError, match=r"BertForSequenceClassification, .* give a causal language model") as caught:
        validate(tmp_path / "base", tmp_path / "compressed", [])
    assert "name the class" not in str(caught.value)  # validate takes none


def test_labels_that_take_prompts_out_are_said_not_to_be_read(workspace, pristine, tmp_path):
    ids = load_file(workspace.dataset)["input_ids"]
    save_file({"input_ids": ids, "labels": ids.where(torch.arange(24) >= 12, -100)}, tmp_path / "labels.safetensors")
    report = validate(workspace.base, pristine("W8A16"), tmp_path / "labels.safetensors", policy=LENIENT)
    (told,) = [record.summary for record in report.records if record.name == "behaviour.finite"]
    assert told.startswith(f"{23 * len(ids):,} predictions; -100 among the labels of the data is not read")


def test_prompts_that_do_not_count_are_read(workspace, pristine, tmp_path):
    folder = pristine("W8A16")
    ids = load_file(workspace.dataset)["input_ids"]
    counted = (torch.arange(24) >= 12).expand(len(ids), -1)
    save_file({"input_ids": ids, "loss_mask": counted.long()}, tmp_path / "answers.safetensors")
    report = validate(workspace.base, folder, tmp_path / "answers.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(workspace.base, dtype="auto")
    with torch.no_grad():
        logits = model(ids).logits[:, 11:-1].float()
    due = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 12:].flatten())
    assert len(report.scores.tokens) == 12 * len(ids)
    assert report.scores.tokens.nll_base.mean() == pytest.approx(float(due), rel=1e-3)
    found = bisect(workspace.base, folder, tmp_path / "answers.safetensors", measure="loss", num_samples=len(ids)).search
    assert found.total == pytest.approx(float((report.scores.tokens.nll_compressed - report.scores.tokens.nll_base).mean()), rel=1e-2)


@pytest.mark.parametrize(("name", "said"), [("BertForMaskedLM", "fills masks"), ("BertLMHeadModel", "depends on later tokens")])
def test_a_base_that_reads_later_tokens_is_refused(name, said, tmp_path):
    config = tiny.config("bert", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    for folder in ("base", "compressed"):
        getattr(transformers, name)(config).save_pretrained(tmp_path / folder)
    with pytest.raises(ModelError, match=rf"{said}; validate compares .* give a causal language model"):
        validate(tmp_path / "base", tmp_path / "compressed", torch.arange(64).reshape(4, 16) % 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoders_of_all_kinds_see_nothing_ahead(dtype):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    ids = [TokenBatch(torch.arange(64).reshape(2, 32) % 31, torch.arange(32).expand(2, 32) > 3)]
    for name, given in {"BertLMHeadModel": {"is_decoder": True}, "MixtralForCausalLM": {"num_key_value_heads": 2}}.items():
        kind = getattr(transformers, name)
        model = kind(kind.config_class(**sizes, **given)).to(dtype).eval()
        assert not sees_ahead(model_logits(model, torch.device("cpu")), ids)
