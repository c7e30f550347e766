"""Checks 55 to 60 pass a checkpoint of ours and catch what can go wrong between memory and file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor import oneshot
from harness import check
from harness.checks.adapters.ours import OurArtifact
from harness.checks.catalogue.registry import CheckFailed
from harness.checks.suites import artifact
from harness.reporting.verdict import Outcome
from harness.validation.format.scheme import WeightScheme

REFERENCE = Path(__file__).parents[3] / "golden" / "reference"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("artifact") / "w4"
    recipe = {"s_stage": {"s_modifiers": {"QuantizationModifier": {"scheme": "W4A16", "targets": ["Linear"], "ignore": ["lm_head"]}}}}
    return OurArtifact(REFERENCE, folder, oneshot(str(REFERENCE), recipe=recipe, output_dir=str(folder), device="cpu").model)


@pytest.fixture
def spoiled(saved, tmp_path):
    def spoil(change):
        shutil.copytree(saved.folder, tmp_path / "bad")
        change(tmp_path / "bad")
        return OurArtifact(REFERENCE, tmp_path / "bad", saved.model)

    return spoil


def tensors(change):
    def edit(folder):
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def config(change):
    def edit(folder):
        found = json.loads((folder / "config.json").read_text())
        change(found)
        (folder / "config.json").write_text(json.dumps(found))

    return edit


def outcome(subject, number):
    record = check(subject, checks=[number]).records[0]
    return record.outcome, record.summary


def test_a_checkpoint_of_ours_passes(saved):
    report = check(saved, checks=[55, 56, 57, 58, 59])
    assert {record.outcome for record in report.records} == {Outcome.PASS}, report.to_text()
    assert "tensors and the logits are equal" in report.records[0].summary


@pytest.mark.parametrize("plant", [
    tensors(lambda t: t.pop("model.norm.weight")),
    tensors(lambda t: t.pop("model.layers.2.mlp.up_proj.weight_scale")),
    tensors(lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)})),
    tensors(lambda t: t["model.layers.2.mlp.up_proj.weight_scale"].mul_(2)),
    tensors(lambda t: t["model.layers.0.input_layernorm.weight"].add_(1)),
    tensors(lambda t: t["model.layers.2.mlp.up_proj.weight_packed"].bitwise_xor_(1)),
])  # fmt: skip
def test_what_does_not_come_back_as_it_was_is_caught(plant, spoiled):
    assert outcome(spoiled(plant), 55)[0] is Outcome.FAIL


@pytest.mark.parametrize("plant", [
    config(lambda c: c["quantization_config"].update(quant_method="none-such")),
    config(lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(num_bits="four")),
    config(lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(strategy="diagonal")),
])  # fmt: skip
def test_a_config_that_readers_refuse_is_caught(plant, spoiled):
    assert outcome(spoiled(plant), 56)[0] is Outcome.FAIL


def test_a_reader_that_unpacks_wrongly_is_caught(saved):
    load = artifact.load_compressed

    def wrong(*args, **named):
        model = load(*args, **named)
        layer = model.model.layers[1].mlp.up_proj
        layer.weight_packed.copy_(layer.weight_packed.roll(1, 0))
        return model

    with mock.patch.object(artifact, "load_compressed", wrong):
        assert outcome(saved, 57)[0] is Outcome.FAIL
        assert outcome(saved, 55)[0] is Outcome.FAIL


def test_groups_that_a_cut_goes_through_must_be_named(saved):
    cut = OurArtifact(saved.base, saved.folder, num_shards=4)
    assert outcome(cut, 58) == (Outcome.PASS, "42 modules for 4 devices, 12 cannot be cut and are named")
    with mock.patch.object(OurArtifact, "uncuttable", return_value={}):
        found, summary = outcome(cut, 58)
    assert found is Outcome.FAIL
    assert "12 modules cannot be cut" in summary
    assert outcome(OurArtifact(saved.base, saved.folder, num_shards=1), 58)[0] is Outcome.SKIP


@pytest.mark.parametrize(("scheme", "steps"), [
    (dict(format="pack-quantized", num_bits=4, strategy="group", group_size=128), (1, 128)),
    (dict(format="pack-quantized", num_bits=4, strategy="channel"), (1, 8)),
    (dict(format="pack-quantized", num_bits=3, strategy="channel"), (1, 32)),
    (dict(format="pack-quantized", num_bits=4, strategy="group", group_size=12, symmetric=False), (8, 24)),
    (dict(format="int-quantized", num_bits=8, strategy="channel"), (1, 1)),
    (dict(format="float-quantized", num_bits=8, type="float", strategy="block", block=(128, 64)), (128, 64)),
    (dict(format="nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16), (1, 16)),
])  # fmt: skip
def test_what_hangs_together_is_known_for_every_format(scheme, steps):
    given = WeightScheme(**{"type": "int", "symmetric": True, "group_size": None, "has_static_input": False, **scheme})
    assert tuple(artifact.cut_step(given, axis) for axis in (0, 1)) == steps


def test_a_tokenizer_that_was_saved_anew_is_caught(spoiled):
    def change(folder):
        path = folder / "tokenizer.json"
        path.write_text(path.read_text() + "\n")

    assert outcome(spoiled(change), 59)[0] is Outcome.FAIL


def test_another_loss_on_another_device_is_caught():
    losses = torch.rand(2, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    assert "loss" in artifact.same_loss(losses * 1.001, losses)
    for wrong in (losses * 1.01, losses * 0.99, losses * torch.nan):
        with pytest.raises(CheckFailed):
            artifact.same_loss(wrong, losses)


def test_folders_that_are_no_checkpoints_are_failures(tmp_path):
    record = check(OurArtifact(REFERENCE, tmp_path), checks=[56]).records[0]
    assert record.outcome is Outcome.FAIL


NORM, UP, TWIN = "model.layers.0.input_layernorm.weight", "model.layers.2.mlp.up_proj", "model.layers.3.mlp.up_proj"


def exchanged(found):
    for last in ("weight_packed", "weight_scale"):
        found[f"{UP}.{last}"], found[f"{TWIN}.{last}"] = found[f"{TWIN}.{last}"], found[f"{UP}.{last}"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (tensors(lambda t: t[NORM].mul_(2)), f"files.tensors: 1 problem; first: {NORM}"),
        (tensors(exchanged), "weights.sqnr: 2 modules below the limit"),
        (tensors(lambda t: t[f"{UP}.weight_scale"].fill_(torch.nan)), "weights.qparams: 1 problem"),
        (config(lambda c: c.update(rope_parameters={"rope_type": "default", "rope_theta": 5.0})), "files.config: 1 differing key"),
    ],
)
def test_a_checkpoint_that_loads_alike_everywhere_is_held_against_its_base(plant, said, spoiled):
    bad = spoiled(plant)
    bad.model = None  # nothing in memory to compare with
    (bad.folder / "compression.json").unlink()
    assert said in outcome(bad, "artifact.against_base")[1]
    trained = type("Trained", (OurArtifact,), {"tags": frozenset({"trained"})})(bad.base, bad.folder)
    assert outcome(trained, "artifact.against_base")[0] is (Outcome.PASS if "sqnr" in said or "tensors" in said else Outcome.FAIL)


@pytest.mark.parametrize("part", ["tensors", "base", "quantization_config"])
def test_a_record_that_says_nothing_of_what_was_written_is_told(part, spoiled):
    def shorten(folder):
        record = json.loads((folder / "compression.json").read_text())
        del record[part]
        (folder / "compression.json").write_text(json.dumps(record))

    state, said = outcome(spoiled(shorten), "artifact.against_base")
    assert state is Outcome.FAIL and "compress again" in said


@pytest.mark.nightly
def test_with_a_record_one_bit_is_enough(saved, spoiled):
    assert outcome(saved, "artifact.against_base")[0] is Outcome.PASS
    bad = spoiled(tensors(lambda t: t[f"{UP}.weight_packed"][0, :1].bitwise_xor_(1)))
    assert "record.tensors: 1 tensor" in outcome(bad, "artifact.against_base")[1]


@pytest.mark.parametrize(("num_shards", "named", "said"), [(0, {}, "1 or more belongs"), (2, {"model.nope": "why"}, "no such module")])
def test_what_cannot_be_said_of_shards_is_told(num_shards, named, said, saved):
    wrong = type("Wrong", (OurArtifact,), {"uncuttable": lambda self: named})
    assert said in outcome(wrong(saved.base, saved.folder, None, num_shards), 58)[1]
