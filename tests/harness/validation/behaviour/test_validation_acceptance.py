"""The loader checks pass what loads and catch what does not load whole, or loads as something else."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version

from harness.validation.behaviour.acceptance import check_accepted, check_loads
from harness.validation.compare import validate
from harness.validation.subject import read_subject

HADAMARD = {"u": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}
SCALE = "model.layers.0.mlp.up_proj.weight_scale"


@pytest.mark.parametrize("preset", ["W4A16", "W3A16", "W8A8", "FP8", "FP8_DYNAMIC"])
def test_a_sound_checkpoint_is_accepted_and_loads(workspace, pristine, preset):
    subject = read_subject(workspace.base, pristine(preset))
    assert check_accepted(subject).outcome == "pass"
    record, model = check_loads(subject, allow_dequantize_load=False)
    assert record.outcome == "pass"
    assert model is not None
    assert not model.training


def quantization(change):
    return lambda checkpoint: checkpoint.edit_config(lambda data: change(data["quantization_config"]))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: c.edit_config(lambda d: d.pop("quantization_config")), "holds no quantization_config"),
        (quantization(lambda q: q.update(quant_method="gptq")), "quant_method is 'gptq'"),
        (quantization(lambda q: q.update(quantization_status="frozen")), "take the weights for uncompressed"),
        (quantization(lambda q: q["config_groups"]["group_0"]["weights"].update(bits=4)), "bits"),
        (quantization(lambda q: q["config_groups"]["group_0"]["weights"].update(strategy="rows")), "rows"),
        (quantization(lambda q: q["config_groups"]["group_0"]["weights"].update(actorder="group")), "has been removed"),
        (quantization(lambda q: q.update(config_groups=[])), "config_groups"),
        (quantization(lambda q: q.update(transform_config={"config_groups": HADAMARD})), "compression.json names no such rotation"),
    ],
)
def test_a_config_that_loaders_refuse_is_caught(workspace, compressed, spoil, message):
    checkpoint = compressed()
    spoil(checkpoint)
    record = check_accepted(read_subject(workspace.base, checkpoint.folder))
    assert record.outcome == "fail"
    assert message in "\n".join([record.summary, *record.findings])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: c.edit(lambda t: t.pop(SCALE)), f"missing_keys: {SCALE}"),
        (lambda c: c.edit(lambda t: t.update(ghost=torch.zeros(1))), "unexpected_keys: ghost"),
        (lambda c: c.edit(lambda t: t.update({"model.norm.weight": t["model.norm.weight"].float()})), "torch.float32 in the file"),
        (lambda c: (c.folder / "model.safetensors").write_bytes(b"nothing"), "does not load it: "),
    ],
)
def test_a_checkpoint_that_does_not_load_whole_is_caught(workspace, compressed, spoil, message):
    checkpoint = compressed()
    spoil(checkpoint)
    record, _ = check_loads(read_subject(workspace.base, checkpoint.folder), allow_dequantize_load=False)
    assert record.outcome == "fail"
    assert message in "\n".join([record.summary, *record.findings])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: c.edit(lambda t: t.update({SCALE: t[SCALE].T})), f"mismatched_keys: {SCALE}"),
        (quantization(lambda q: q["config_groups"]["group_0"]["weights"].update(num_bits=3)), "mismatched_keys"),
    ],
)
def test_a_tensor_of_another_shape_is_caught(workspace, compressed, spoil, message):
    """By the loader from transformers 5.23 on, which before takes what it is given; by the audit of the files always."""
    checkpoint = compressed()
    spoil(checkpoint)
    audited = {record.name: record for record in validate(workspace.base, checkpoint.folder, workspace.dataset).records}["weights.qparams"]
    assert audited.outcome == "fail" and "has the shape" in audited.summary
    if Version(transformers.__version__) >= Version("5.23"):
        record, _ = check_loads(read_subject(workspace.base, checkpoint.folder), allow_dequantize_load=False)
        assert record.outcome == "fail" and message in "\n".join([record.summary, *record.findings])


def test_a_checkpoint_that_loads_only_dequantized_is_judged_by_the_policy(workspace, pristine):
    subject = read_subject(workspace.base, pristine("W4A16_ASYM"))
    strict, model = check_loads(subject, allow_dequantize_load=False)
    if strict.outcome == "pass":
        pytest.skip("these versions of transformers and compressed-tensors load packed zero points as they stand")
    assert strict.outcome == "fail"
    assert "dequantize=True only" in strict.summary
    assert model is not None
    assert check_loads(subject, allow_dequantize_load=True)[0].outcome == "pass"


def test_loading_leaves_the_terminal_and_the_switches_of_transformers_alone(workspace, pristine, capfd):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    check_loads(read_subject(workspace.base, pristine()), allow_dequantize_load=False)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")
