"""Checkpoints whose weights are not the base's rounded ones: trained ones, and those that quantize keys and values only."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor import MagnitudePruningModifier, load_compressed, oneshot
from compressor.algorithms.pruning.magnitude import Blocks, pruned_weights
from harness.cli import main
from harness.validation.compare import validate
from harness.validation.format.files import check_tensors
from harness.validation.format.sparsity import check_sparsity
from harness.validation.subject import read_subject
from tests import tiny

KV_ONLY = {"quant_stage": {"quant_modifiers": {"QuantizationModifier": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}}}


def outcomes(report) -> dict[str, str]:
    return {record.name: record.outcome.value for record in report.records}


def record_of(report, name):
    return next(record for record in report.records if record.name == name)


def move(folder, step=2**-6):
    """Stand in for training: every stored float weight moves a little."""
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("norm.weight", "embed_tokens.weight", "lm_head.weight")):
            tensors[name] = (tensor.float() * (1 + step * torch.rand(tensor.shape, generator=generator))).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def trained(compressed):
    checkpoint = compressed("W8A16")
    move(checkpoint.folder)
    return checkpoint.folder


def test_other_values_are_a_fault_unless_the_model_was_trained(workspace, trained):
    untold, told = (validate(workspace.base, trained, workspace.dataset, trained=flag) for flag in (False, True))
    assert outcomes(untold)["files.tensors"] == "fail"
    assert told.verdict == "pass" and outcomes(told)["weights.sqnr"] == outcomes(told)["weights.scales"] == "skip"
    record = record_of(told, "files.tensors")
    assert record.evidence["trained"] == 7 and "7 trained" in record.summary  # embedding, head, 2 x 2 norms, last norm
    assert told.to_dict()["provenance"]["trained"] is True


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_training_excuses_no_number_that_is_not_finite(workspace, trained, value):
    """In the row of a token, which the held-out text need not use."""
    tensors = load_file(trained / "model.safetensors")
    tensors["model.embed_tokens.weight"][-1, 3] = value
    save_file(tensors, trained / "model.safetensors", metadata={"format": "pt"})
    record = record_of(validate(workspace.base, trained, workspace.dataset, trained=True), "files.tensors")
    assert record.outcome == "fail" and record.evidence["trained"] == 6
    assert any(text.startswith("model.embed_tokens.weight: holds numbers that are not finite") for text in record.findings)


def test_training_excuses_no_missing_tensor_other_shape_or_wrong_behaviour(workspace, trained):
    tensors = load_file(trained / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], 40.0)
    tensors["lm_head.weight"] = -tensors["lm_head.weight"]
    save_file(tensors, trained / "model.safetensors", metadata={"format": "pt"})
    found = outcomes(validate(workspace.base, trained, workspace.dataset, trained=True))
    assert {"behaviour.perplexity", "behaviour.kl"} <= {name for name, outcome in found.items() if outcome == "fail"}
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"].float()
    save_file(tensors, trained / "model.safetensors", metadata={"format": "pt"})
    record = record_of(validate(workspace.base, trained, workspace.dataset, trained=True), "files.tensors")
    assert record.outcome == "fail" and any("norm.weight: is missing" in text for text in record.findings)
    assert any(text.startswith("lm_head.weight: torch.bfloat16") for text in record.findings), record.findings


def test_a_dense_trained_model_needs_no_quantization_config_but_must_have_been_trained(workspace, tmp_path):
    dense = tmp_path / "dense"
    shutil.copytree(workspace.base, dense)
    unmoved = validate(workspace.base, dense, workspace.dataset, trained=True)
    assert unmoved.verdict == "regression" and "nothing was trained" in record_of(unmoved, "files.tensors").summary
    move(dense)
    found = validate(workspace.base, dense, workspace.dataset, trained=True)
    assert found.verdict == "pass" and outcomes(found)["format.accepted"] == "skip"


def test_norms_may_move_as_far_as_the_record_says_and_no_further(workspace, tmp_path):
    ids = torch.randint(96, (48, 24), generator=torch.Generator().manual_seed(8))
    groups = {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}}
    recipe = {"GPTQModifier": {"ignore": ["lm_head"], "config_groups": groups}, "ScaleTuningModifier": {"steps": 16}}
    oneshot(workspace.base, recipe=recipe, dataset=ids, output_dir=tmp_path / "out")
    record = check_tensors(read_subject(workspace.base, tmp_path / "out"))
    assert record.outcome == "pass" and "5 trained" in record.summary, record.findings
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["model.norm.weight"][3] *= 1.5
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    findings = check_tensors(read_subject(workspace.base, tmp_path / "out")).findings
    assert any(text.startswith("model.norm.weight") for text in findings)


def test_the_flag_reaches_the_validation(workspace, trained, tmp_path, capsys):
    arguments = ["validate", str(workspace.base), str(trained), "--dataset", str(workspace.dataset), "--quiet", "--json"]
    codes = [main([*arguments, "--output-dir", str(tmp_path / "a")]), main([*arguments, "--output-dir", str(tmp_path / "b"), "--trained"])]
    reports = capsys.readouterr().out
    assert codes == [1, 0] and json.loads(reports[reports.rindex("\n{") :])["provenance"]["trained"] is True


@pytest.mark.nightly
def test_keys_and_values_alone_may_be_quantized(reference_model, tmp_path):
    data = {"dataset": reference_model / "calibration.safetensors", "num_calibration_samples": 4}
    oneshot(reference_model, recipe=KV_ONLY, output_dir=tmp_path / "out", **data)
    report = validate(reference_model, tmp_path / "out", reference_model / "heldout.safetensors", num_samples=24)
    assert (
        report.verdict == "pass" and record_of(report, "format.accepted").summary == "keys and values float8, symmetric, per tensor, static"
    )
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    del tensors["model.layers.2.self_attn.v_scale"]
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    broken = validate(reference_model, tmp_path / "out", reference_model / "heldout.safetensors", num_samples=24)
    assert "v_scale: is missing" in record_of(broken, "files.tensors").findings[0]


@pytest.fixture
def pruned(workspace, tmp_path):
    """A dense 2:4 checkpoint with the record that a pruner writes."""
    folder = tmp_path / "pruned"
    shutil.copytree(workspace.base, folder)
    tensors, modules = load_file(folder / "model.safetensors"), {}
    for name, weight in tensors.items():
        if "mlp" in name:
            smallest = weight.abs().unflatten(-1, (-1, 4)).topk(2, dim=-1, largest=False).indices
            tensors[name] = weight.unflatten(-1, (-1, 4)).scatter(-1, smallest, 0).flatten(-2).contiguous()
            modules[name.removesuffix(".weight")] = {"scheme": "int4", "details": {"sparsity": 0.5, "pruned": "2:4, 50% zeros"}}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "compression.json").write_text(json.dumps({"modules": modules}))
    return folder


def sparsity_of(workspace, folder):
    return check_sparsity(read_subject(workspace.base, folder, trained=True))


def test_zeros_that_were_promised_are_counted_in_the_file(workspace, pruned):
    record = sparsity_of(workspace, pruned)
    assert record.outcome == "pass" and record.evidence == {"modules": 6, "share of zeros": 0.5}
    assert outcomes(validate(workspace.base, pruned, workspace.dataset, trained=True))["weights.sparsity"] == "pass"


def test_a_record_without_its_modules_says_nothing_of_zeros(workspace, pruned):
    (pruned / "compression.json").write_text(json.dumps({"seed": 0}))
    record = sparsity_of(workspace, pruned)
    assert record.outcome == "inconclusive" and "lists no modules" in record.summary
    (pruned / "compression.json").unlink()
    assert sparsity_of(workspace, pruned).outcome == "skip"


def plant(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors["model.layers.1.mlp.up_proj.weight"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def one_too_many(weight):
    weight[3, 4:8] = torch.tensor([1.0, 1.0, 1.0, 0.0])
    weight[3, 8:12] = torch.tensor([1.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            lambda weight: weight.view(-1).index_fill_(0, (weight.view(-1) == 0).nonzero()[0], 1),
            "of its weights are zero, and compression.json counts",
        ),
        (one_too_many, "1 blocks of 4 keep more than 2 weights"),
        (lambda weight: weight[5].zero_(), "of its weights are zero, and compression.json counts"),
    ],
    ids=["a zero that grew", "the share kept, the pattern broken", "a row of zeros"],
)
def test_zeros_that_nobody_wrote_are_named(workspace, pruned, change, fault):
    plant(pruned, change)
    record = sparsity_of(workspace, pruned)
    assert record.outcome == "fail" and all("model.layers.1.mlp.up_proj" in text for text in record.findings)
    assert any(fault in text for text in record.findings), record.findings


@pytest.mark.parametrize(("structure", "name"), [(Blocks(1, None), "channel"), (Blocks(None, 1), "filter"), (Blocks(4, 2), "block_4,2")])
def test_what_went_as_a_whole_is_counted_as_such(workspace, pruned, structure, name):
    tensors = load_file(workspace.base / "model.safetensors")
    weight = tensors["model.layers.1.mlp.up_proj.weight"]
    (gone,) = pruned_weights([weight], 0.5, structure)
    weight[gone] = 0
    record = {"details": {"sparsity": 0.5, "pruned": f"unstructured, 10% zeros; {name}, 50% zeros"}}
    (pruned / "compression.json").write_text(json.dumps({"modules": {"model.layers.1.mlp.up_proj": record}}))
    save_file(tensors, pruned / "model.safetensors", metadata={"format": "pt"})
    assert sparsity_of(workspace, pruned).outcome == "pass"
    kept, lost = (~gone).nonzero()[0], gone.nonzero()[0]
    weight[tuple(lost)], weight[tuple(kept)] = weight[tuple(kept)].clone(), 0  # as many zeros, one of them elsewhere
    save_file(tensors, pruned / "model.safetensors", metadata={"format": "pt"})
    assert "are zero as a whole" in sparsity_of(workspace, pruned).findings[0]


def test_rows_of_a_weight_that_lies_as_in_by_out_are_its_columns(tmp_path):
    base = tiny.gpt2(n_layer=1, n_positions=16)
    base.save_pretrained(tmp_path / "base")
    recipe = MagnitudePruningModifier(targets=["Conv1D"], final_sparsity=0.5, mask_structure="2:4")
    oneshot(tmp_path / "base", recipe=recipe, output_dir=tmp_path / "out")
    assert check_sparsity(read_subject(tmp_path / "base", tmp_path / "out")).outcome == "pass"


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ("2:4, 50% zeros", "pass"),
        ("2:4, 50% zeros; unstructured, 0.2 to 0.5 zeros", "pass"),
        ("unstructured, 50% zeros, by outliers", "pass"),
        *((said, "fail") for said in ("2:4, 90% zeros", "2:4, 50% zero", "2:4, 50% zeros and more", "unstructured, some zeros", "2:4")),
    ],
)
def test_what_the_record_says_of_zeros_is_read_to_its_end(workspace, pruned, said, outcome):
    record = json.loads((pruned / "compression.json").read_text())
    for entry in record["modules"].values():
        entry["details"]["pruned"] = said
    (pruned / "compression.json").write_text(json.dumps(record))
    assert sparsity_of(workspace, pruned).outcome == outcome


def test_a_pruned_module_that_is_not_there_is_named(workspace, pruned):
    record = json.loads((pruned / "compression.json").read_text())
    record["modules"]["model.layers.9.mlp.up_proj"] = {"details": {"sparsity": 0.5}}
    (pruned / "compression.json").write_text(json.dumps(record))
    assert sparsity_of(workspace, pruned).findings == ("model.layers.9.mlp.up_proj: its weight cannot be read",)


def test_zeros_of_codes_are_zeros_of_the_weight(workspace, compressed):
    checkpoint = compressed("W4A16")
    modules = {"model.layers.0.mlp.down_proj": {"scheme": "int4 group 16", "details": {"sparsity": 0.9}}}
    (checkpoint.folder / "compression.json").write_text(json.dumps({"modules": modules}))
    assert "counts 5,530 (90.00%)" in sparsity_of(workspace, checkpoint.folder).findings[0]
    weight = load_compressed(checkpoint.folder).get_submodule("model.layers.0.mlp.down_proj").dequantized_weight()
    modules["model.layers.0.mlp.down_proj"]["details"]["sparsity"] = float((weight == 0).double().mean())
    (checkpoint.folder / "compression.json").write_text(json.dumps({"modules": modules}))
    assert sparsity_of(workspace, checkpoint.folder).outcome == "pass"


ODD = [
    *(("pruned", f"{pattern}, 50% zeros") for pattern in ("2:0", "0:4", "4:4", "5:4", "2:99999999999999999999", "block_0,4", "half")),
    ("pruned", "2:4"),
    *(("sparsity", value) for value in (1.5, -1, True, None, "half", float("nan"), [0.5])),
]


@pytest.mark.parametrize(("key", "value"), ODD, ids=str)
def test_what_a_record_says_of_zeros_and_cannot_mean_is_named(workspace, pruned, key, value):
    """A promise that cannot be read is none that holds."""
    record = json.loads((pruned / "compression.json").read_text())
    record["modules"]["model.layers.1.mlp.up_proj"]["details"][key] = value
    (pruned / "compression.json").write_text(json.dumps(record))
    found = sparsity_of(workspace, pruned)
    said = "is no share" if key == "sparsity" else "is nothing that a weight"
    assert found.outcome == "fail" and said in found.findings[0], found.findings


@pytest.mark.parametrize("change", [{"modules": None}, {"modules": []}, {"modules": {"a": None}}, {"modules": {"a": {"details": "x"}}}])
def test_a_record_whose_promises_cannot_be_read_does_not_promise_nothing(workspace, pruned, change):
    record = json.loads((pruned / "compression.json").read_text())
    (pruned / "compression.json").write_text(json.dumps({**record, **change}))
    assert sparsity_of(workspace, pruned).outcome == "fail"
