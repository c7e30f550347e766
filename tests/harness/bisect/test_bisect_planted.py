"""Damage of every kind, planted into one module of a checkpoint, is found there; what is not damaged is not blamed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor import oneshot
from compressor.errors import CompressorError, DatasetError, ModelError, UserInputError
from harness.bisect import bisect, swap_difference
from harness.bisect.difference import swapped
from harness.bisect.models import load_pair
from tests import tiny

REFERENCE = Path(__file__).parents[3] / "golden" / "reference"


def exchange(tensors, one, other):
    for key in [key for key in tensors if key.startswith(f"{one}.")]:
        twin = key.replace(one, other)
        tensors[key], tensors[twin] = tensors[twin], tensors[key]


def rolled(tensors, key, dim):
    tensors[key].copy_(tensors[key].roll(1, dim))


LAYERS = "model.layers"
PLANTS = {
    "doubled scale": (f"{LAYERS}.3.mlp.up_proj", lambda t: t[f"{LAYERS}.3.mlp.up_proj.weight_scale"].mul_(2)),
    "zeroed codes": (f"{LAYERS}.0.self_attn.o_proj", lambda t: t[f"{LAYERS}.0.self_attn.o_proj.weight"].zero_()),
    "rows rolled": (f"{LAYERS}.4.mlp.down_proj", lambda t: rolled(t, f"{LAYERS}.4.mlp.down_proj.weight", 0)),
    "two weights exchanged": (f"{LAYERS}.2.mlp.gate_proj", lambda t: exchange(t, f"{LAYERS}.2.mlp.gate_proj", f"{LAYERS}.2.mlp.up_proj")),
    "negated norm": (f"{LAYERS}.1.input_layernorm", lambda t: t[f"{LAYERS}.1.input_layernorm.weight"].neg_()),
    "no number comes out": (f"{LAYERS}.2.self_attn.v_proj", lambda t: t[f"{LAYERS}.2.self_attn.v_proj.weight_scale"].fill_(3e38)),
    "embedding": ("model.embed_tokens", lambda t: rolled(t, "model.embed_tokens.weight", 1)),
    "head": ("lm_head", lambda t: t["lm_head.weight"].mul_(0.3)),
}


def test_scales_that_are_no_numbers_are_named_before_anything_runs(spoiled, tiny_base, tiny_tokens):
    name = f"{LAYERS}.2.self_attn.v_proj.weight_scale"
    with pytest.raises(ModelError, match=f"{name} holds NaN or infinity"):
        bisect(tiny_base, spoiled(lambda t: t[name].fill_(torch.nan)), tiny_tokens, device="cpu")


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("measure", ["kl", "sqnr"])
def test_a_planted_bug_is_found(plant, measure, spoiled, tiny_base, tiny_tokens):
    module, change = PLANTS[plant]
    report = bisect(tiny_base, spoiled(change), tiny_tokens, measure=measure, device="cpu")
    assert report.answer == "found", report.to_text()
    assert report.layers[0].modules[0].module == module, report.to_text()
    assert len(report.layers) == 1
    assert report.num_passes < report.num_parts / 2
    assert module in report.to_text()


def test_the_loss_finds_what_makes_predictions_worse(spoiled, tiny_base, build_llama):
    """On tokens that the base itself would say; on random ones a broken model may well have the smaller loss."""
    with torch.no_grad():
        ids = build_llama().generate(torch.arange(4)[:, None] + 3, max_new_tokens=15, do_sample=False, pad_token_id=0, eos_token_id=None)
    report = bisect(tiny_base, spoiled(PLANTS["doubled scale"][1]), ids, measure="loss", device="cpu")
    assert report.layers[0].modules[0].module == PLANTS["doubled scale"][0], report.to_text()


def test_modifier_stage_and_weight_of_the_guilty_module_are_named(spoiled, tiny_base, tiny_tokens):
    report = bisect(tiny_base, spoiled(PLANTS["doubled scale"][1]), tiny_tokens, device="cpu")
    blame = report.layers[0].modules[0]
    assert (blame.modifier, blame.stage, blame.part) == ("QuantizationModifier", "first_stage", "weight")
    assert blame.weight_sqnr_db < 1 < 30 < blame.usual_sqnr_db
    assert blame.recorded_error is not None
    assert blame.recorded_error < 0.01


def test_a_module_that_no_modifier_was_to_change_is_told_apart(spoiled, tiny_base, tiny_tokens):
    blame = bisect(tiny_base, spoiled(PLANTS["negated norm"][1]), tiny_tokens, device="cpu").layers[0].modules[0]
    assert blame.modifier.startswith("none: compression.json does not name this module")
    assert blame.stage is None


def test_without_a_record_the_modifier_is_unknown(spoiled, tiny_base, tiny_tokens):
    folder = spoiled(PLANTS["doubled scale"][1])
    (folder / "compression.json").unlink()
    assert bisect(tiny_base, folder, tiny_tokens, device="cpu").layers[0].modules[0].modifier.startswith("unknown")


def test_the_other_of_two_exchanged_weights_is_a_suspect(spoiled, tiny_base, tiny_tokens):
    report = bisect(tiny_base, spoiled(PLANTS["two weights exchanged"][1]), tiny_tokens, device="cpu")
    named = {blame.module for blame in report.layers[0].modules} | set(report.suspects)
    assert {"model.layers.2.mlp.gate_proj", "model.layers.2.mlp.up_proj"} <= named


def test_two_broken_layers_are_both_found_the_first_one_first(spoiled, tiny_base, tiny_tokens):
    def change(tensors):
        PLANTS["doubled scale"][1](tensors)
        PLANTS["zeroed codes"][1](tensors)

    report = bisect(tiny_base, spoiled(change), tiny_tokens, limit=0.05, device="cpu")
    assert [layer.culprit.name for layer in report.layers] == ["model.layers.0", "model.layers.3"], report.to_text()


def test_a_healthy_checkpoint_is_spread_or_within_the_limit(tiny_compressed, tiny_base, tiny_tokens):
    assert bisect(tiny_base, tiny_compressed, tiny_tokens, limit=1.0, device="cpu").answer == "no difference"
    report = bisect(tiny_base, tiny_compressed, tiny_tokens, limit=1e-9, device="cpu")
    assert (report.answer, report.layers, report.test) == ("spread", (), None)
    assert "5 layers go beyond the limit by themselves, model.layers.0 first" in report.to_text()


def test_an_accepted_checkpoint_may_stand_for_the_base(spoiled, tiny_compressed, tiny_tokens):
    report = bisect(tiny_compressed, spoiled(PLANTS["zeroed codes"][1]), tiny_tokens, device="cpu")
    assert (report.num_parts, report.num_passes) == (1, 3)
    assert report.layers[0].modules[0].module == PLANTS["zeroed codes"][0]


def test_equal_checkpoints_have_no_difference(spoiled, tiny_compressed, tiny_tokens):
    report = bisect(tiny_compressed, spoiled(lambda tensors: None), tiny_tokens, device="cpu")
    assert (report.answer, report.num_parts, report.exit_code) == ("no difference", 0, 0)


def test_a_wrong_scale_of_the_input_is_told_from_one_of_the_weight(tiny_base, tiny_tokens, tmp_path, compress, spoil_copy):
    static = (
        "{ignore: [lm_head], config_groups: {g: {targets: [Linear], weights: {num_bits: 8, strategy: channel}, "
        "input_activations: {num_bits: 8, strategy: tensor}}}}"
    )
    folder = compress(tiny_base, tmp_path / "static", static, tiny_base.parent)
    bad = spoil_copy(folder, tmp_path / "bad", lambda t: t["model.layers.1.mlp.up_proj.input_scale"].mul_(40))
    blame = bisect(tiny_base, bad, tiny_tokens, device="cpu").layers[0].modules[0]
    assert (blame.module, blame.part) == ("model.layers.1.mlp.up_proj", "input")


KV = "{num_bits: 8, type: int, strategy: tensor}"
WEIGHTS = "config_groups: {g: {targets: [Linear], weights: {num_bits: 8, strategy: channel}}}"
KV_SETTINGS = {
    "beside weights": f"{{kv_cache_scheme: {KV}, ignore: [lm_head], {WEIGHTS}}}",
    "alone": f"{{kv_cache_scheme: {KV}}}",
    "with queries": f"{{config_groups: {{g: {{targets: [LlamaAttention], input_activations: {KV}}}}}}}",
}


@pytest.mark.parametrize(
    ("settings", "state"), [("beside weights", "keys"), ("alone", "values"), ("with queries", "queries"), ("with queries", "values")]
)
def test_a_wrong_scale_of_an_attention_is_found_with_whose_it_is_and_the_modifier_that_made_it(
    settings, state, tiny_base, tiny_tokens, tmp_path, compress, spoil_copy
):
    folder = compress(tiny_base, tmp_path / "kv", KV_SETTINGS[settings], tiny_base.parent)
    bad = spoil_copy(folder, tmp_path / "bad", lambda t: t[f"model.layers.3.self_attn.{state[0]}_scale"].mul_(60))
    report = bisect(tiny_base, bad, tiny_tokens, device="cpu")
    blame = report.layers[0].modules[0]
    assert (blame.module, blame.part) == ("model.layers.3.self_attn", state), report.to_text()
    assert (blame.modifier, blame.stage, blame.scheme) == ("QuantizationModifier", "first_stage", "int8 tensor")
    assert bisect(folder, bad, tiny_tokens, device="cpu").layers[0].modules[0].part == state


def test_experts_that_are_fused_in_the_base_are_found_one_by_one(tmp_path, tiny_tokens, compress, spoil_copy):
    build_mixtral().save_pretrained(tmp_path / "base")
    (tmp_path / "tokens.safetensors").write_bytes(tiny_tokens.read_bytes())
    settings = "{ignore: [lm_head, 're:.*gate$'], config_groups: {g: {targets: [Linear], weights: {num_bits: 8, strategy: channel}}}}"
    folder = compress(tmp_path / "base", tmp_path / "w8", settings, tmp_path)
    keys = []

    def change(tensors):
        keys.extend(key for key in tensors if "layers.1" in key and "experts.2" in key and key.endswith("weight_scale"))
        for key in keys:
            tensors[key].mul_(3)

    report = bisect(tmp_path / "base", spoil_copy(folder, tmp_path / "bad", change), tiny_tokens, device="cpu")
    assert len(keys) == 3
    assert report.layers[0].culprit.name == "model.layers.1", report.to_text()
    named = [blame.module for blame in report.layers[0].modules] + list(report.layers[0].shares)
    assert any("experts.2" in name for name in named), report.to_text()


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"rms_norm_eps": 1.0}, "rms_norm_eps"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"num_attention_heads": 8, "head_dim": 4, "num_key_value_heads": 4}, "head_dim, num_attention_heads, num_key_value_heads"),
    ],
)
@pytest.mark.parametrize("measure", ["kl", "loss", "sqnr"])
def test_what_lies_outside_of_all_modules_is_not_blamed_on_one(changes, keys, measure, tiny_compressed, tiny_base, tiny_tokens, tmp_path):
    shutil.copytree(tiny_compressed, tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelError, match=f"no module can be blamed; config.json differs in {keys}: make that equal"):
        bisect(tiny_base, tmp_path / "other", tiny_tokens, measure=measure)


def test_a_base_of_another_dtype_keeps_its_rotary_angles(tiny_base, tiny_compressed, tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    pair = load_pair(tmp_path / "half", tiny_compressed)
    assert pair.base.lm_head.weight.dtype == torch.float32 == pair.base.model.rotary_emb.inv_freq.dtype
    back = load_pair(tiny_base, copied_in(tiny_compressed, tmp_path / "low", "bfloat16"))
    assert back.base.lm_head.weight.dtype == torch.bfloat16
    assert back.base.model.rotary_emb.inv_freq.dtype == torch.float32


def copied_in(folder, target, dtype):
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    tensors = load_file(target / "model.safetensors")
    tensors = {name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_both_models_are_as_before_after_every_swap(tiny_base, tiny_compressed):
    pair = load_pair(tiny_base, tiny_compressed, device="cpu")
    before = [dict(model.named_modules()) for model in (pair.base, pair.compressed)]
    with pytest.raises(KeyError), swapped(pair, frozenset(pair.parts[:3])) as mixed:
        assert mixed.get_submodule(pair.parts[0]) is before[1][pair.parts[0]]
        assert mixed.get_submodule(pair.parts[3]) is before[0][pair.parts[3]]
        raise KeyError
    for model, modules in zip((pair.base, pair.compressed), before, strict=True):
        now = dict(model.named_modules())
        assert now.keys() == modules.keys()
        assert all(now[name] is modules[name] for name in now)


@pytest.mark.nightly
def test_the_printed_test_fails_and_passes_after_the_repair(spoiled, tiny_base, tiny_compressed, tiny_tokens, tmp_path):
    report = bisect(tiny_base, spoiled(PLANTS["zeroed codes"][1]), tiny_tokens, device="cpu")
    repaired = report.test.replace(json.dumps(str(tmp_path / "spoiled")), json.dumps(str(tiny_compressed)))
    assert repaired != report.test
    (tmp_path / "test_broken.py").write_text(report.test)
    (tmp_path / "test_repaired.py").write_text(repaired)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    environment = {"PYTHONPATH": str(REFERENCE.parents[1]), "PATH": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert "1 failed, 1 passed" in result.stdout, result.stdout + result.stderr
    assert "test_broken.py::test_model_layers_0_self_attn_o_proj" in result.stdout


def test_bad_input_is_refused(tiny_base, tiny_compressed, tiny_tokens, tmp_path, build_llama):
    build_llama(hidden_size=64).save_pretrained(tmp_path / "wide")
    build_llama(layers=2).save_pretrained(tmp_path / "short")
    for base, compressed, dataset, error, word in (
        (tmp_path / "wide", tiny_compressed, tiny_tokens, ModelError, "different architectures"),
        (tmp_path / "short", tiny_compressed, tiny_tokens, ModelError, "different architectures"),
        (tiny_base, tmp_path / "short", tiny_tokens, ModelError, "different architectures"),
        (tiny_compressed, tiny_base, tiny_tokens, ModelError, "give the base first"),
        (tiny_base, tmp_path / "nowhere", tiny_tokens, ModelError, "no such folder"),
        (tiny_base, tiny_base, tiny_tokens, ModelError, "two folders"),
        (tiny_base, tiny_compressed, tmp_path / "none.safetensors", DatasetError, "none.safetensors"),
        (tiny_base, tiny_compressed, torch.tensor([[5000, 1]]), DatasetError, "5000"),
        (tiny_base, tiny_compressed, torch.tensor([[5], [1]]), DatasetError, "two tokens"),
    ):
        with pytest.raises(error, match=word):
            bisect(base, compressed, dataset, device="cpu")
    with pytest.raises(DatasetError, match="no sequence of max_seq_length=1 has two tokens"):
        bisect(tiny_base, tiny_compressed, tiny_tokens, max_seq_length=1, device="cpu")
    with pytest.raises(UserInputError, match="measure='l1'"):
        bisect(tiny_base, tiny_compressed, tiny_tokens, measure="l1")
    for limit in (float("nan"), float("inf"), 0.0, -1.0):
        with pytest.raises(UserInputError, match="is no number above 0"):
            bisect(tiny_base, tiny_compressed, tiny_tokens, limit=limit)
    with pytest.raises(UserInputError, match="no module 'x'"):
        swap_difference(tiny_base, tiny_compressed, ["x"], [[1, 2]])
    with pytest.raises(CompressorError, match="tokens"):
        swap_difference(tiny_base, tiny_compressed, ["lm_head"], [[1], [2]])


@pytest.mark.parametrize("measure", ["kl", "loss", "sqnr"])
def test_a_base_that_predicts_nan_is_nothing_to_compare_with(measure, spoil_copy, tiny_base, tiny_compressed, tiny_tokens, tmp_path):
    broken = spoil_copy(tiny_base, tmp_path / "broken", lambda tensors: tensors["model.norm.weight"].fill_(torch.nan))
    with pytest.raises(ModelError, match="the base model's predictions are not finite"):
        bisect(broken, tiny_compressed, tiny_tokens, measure=measure, device="cpu")


def test_a_record_with_a_part_of_another_kind_is_named(spoiled, tiny_base, tiny_tokens):
    folder = spoiled(PLANTS["doubled scale"][1])
    record = json.loads((folder / "compression.json").read_text())
    for module in record["modules"].values():
        module["error"] = "x"
    (folder / "compression.json").write_text(json.dumps(record))
    with pytest.raises(ModelError, match=r"compression.json: modules.*error.*; restore the file"):
        bisect(tiny_base, folder, tiny_tokens, device="cpu")


def test_a_layer_can_be_swapped_whole(tiny_base, tiny_compressed):
    rows = [[1, 2, 3, 4]]
    layer = swap_difference(tiny_base, tiny_compressed, ["model.layers.1"], rows)
    module = swap_difference(tiny_base, tiny_compressed, ["model.layers.1.mlp.up_proj"], rows)
    assert layer > module > 0
    assert swap_difference(tiny_base, tiny_compressed, ["model.norm"], rows) == 0.0


@pytest.mark.nightly
def test_a_corrupted_module_of_the_reference_model_is_found(tmp_path, compress, spoil_copy):
    (tmp_path / "tokens.safetensors").write_bytes((REFERENCE / "heldout.safetensors").read_bytes())
    folder = compress(REFERENCE, tmp_path / "w4", "{scheme: W4A16, targets: [Linear], ignore: [lm_head]}", tmp_path)
    name = "model.layers.3.mlp.up_proj"
    bad = spoil_copy(folder, tmp_path / "bad", lambda tensors: tensors[f"{name}.weight_scale"].mul_(2))
    report = bisect(REFERENCE, bad, REFERENCE / "heldout.safetensors", num_samples=2, max_seq_length=64, device="cpu")
    assert [blame.module for blame in report.layers[0].modules] == [name], report.to_text()
    assert (report.num_parts, report.num_layers) == (42, 6)
    assert report.num_passes <= 12


def test_moved_scales_are_moved_in_the_base_too(tiny_base, tiny_tokens, spoil_copy, tmp_path):
    """Else norms and weights would differ that hold what they should, and none could stand in for that of the other model."""
    from compressor import oneshot

    recipe = (
        "s_stage: {quant_modifiers: {SmoothQuantModifier: {}, QuantizationModifier: {scheme: W8A8, targets: [Linear], ignore: [lm_head]}}}"
    )
    oneshot(str(tiny_base), recipe=recipe, dataset=str(tiny_tokens), output_dir=str(tmp_path / "smooth"), device="cpu")
    healthy = load_pair(tiny_base, tmp_path / "smooth", device="cpu")
    assert not [part for part in healthy.parts if "norm" in part]
    name = f"{LAYERS}.3.mlp.up_proj"
    broken = spoil_copy(tmp_path / "smooth", tmp_path / "broken", lambda tensors: tensors[f"{name}.weight_scale"].mul_(2))
    report = bisect(tiny_base, broken, tiny_tokens, device="cpu")
    assert report.layers[0].modules[0].module == name, report.to_text()


def build_mixtral():
    model = tiny.mixtral(vocab_size=96, intermediate_size=32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(8 if "experts" in name or "proj" in name or "lm_head" in name else 1)
    return model


PRUNED = {
    "llama": (f"{LAYERS}.2.mlp.up_proj", "SparseGPTModifier: {sparsity: 0.5, mask_structure: '2:4', targets: [Linear], ignore: [lm_head]}"),
    "mixtral": (
        f"{LAYERS}.1.mlp.experts.2",
        "WandaPruningModifier: {sparsity: 0.1, targets: [Linear], ignore: [lm_head, 're:.*gate$']}",
    ),
}


@pytest.mark.parametrize("kind", PRUNED)
def test_a_checkpoint_in_which_nothing_is_quantized_is_searched_too(kind, tiny_tokens, build_llama, spoil_copy, tmp_path):
    module, modifier = PRUNED[kind]
    damaged = {"llama": f"{module}.weight", "mixtral": f"{LAYERS}.1.block_sparse_moe.experts.2.w2.weight"}
    (build_llama() if kind == "llama" else build_mixtral()).save_pretrained(tmp_path / "base")
    oneshot(tmp_path / "base", recipe=f"s_stage: {{m_modifiers: {{{modifier}}}}}", dataset=str(tiny_tokens), output_dir=tmp_path / "pruned")
    broken = spoil_copy(tmp_path / "pruned", tmp_path / "broken", lambda tensors: tensors[damaged[kind]].mul_(-3))
    report = bisect(tmp_path / "base", broken, tiny_tokens, device="cpu")
    blame = report.layers[0].modules[0]
    assert (report.answer, blame.modifier) == ("found", modifier.partition(":")[0]), report.to_text()
    assert blame.module.startswith(module)
