"""Every check of the files passes a sound checkpoint and catches what is planted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from compressor import oneshot
from compressor.errors import ModelError
from harness.validation.format.files import check_files
from harness.validation.subject import read_subject


def outcomes(workspace, checkpoint) -> dict[str, str]:
    return {record.name: record.outcome.value for record in check_files(read_subject(workspace.base, checkpoint.folder))}


def record_of(workspace, checkpoint, name):
    return next(record for record in check_files(read_subject(workspace.base, checkpoint.folder)) if record.name == name)


@pytest.mark.parametrize("preset", ["W4A16", "W4A16_ASYM", "W3A16", "W8A8", "FP8", "FP8_DYNAMIC"])
def test_a_sound_checkpoint_passes_every_check(workspace, compressed, preset):
    assert set(outcomes(workspace, compressed(preset)).values()) == {"pass"}


def spoil_tokenizer_byte(checkpoint):
    path = checkpoint.folder / "tokenizer.json"
    raw = bytearray(path.read_bytes())
    raw[17] ^= 1
    path.write_bytes(raw)


def spoil_generation(checkpoint):
    path = checkpoint.folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": 0.5}))


def add_code(checkpoint):
    (checkpoint.folder / "custom_generate").mkdir()
    (checkpoint.folder / "custom_generate" / "generate.py").write_text("def generate(**inputs): ...\n")


def truncate(checkpoint):
    path = checkpoint.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


NORM = "model.norm.weight"
SCALE = "model.layers.0.mlp.up_proj.weight_scale"


def flip_byte(tensors):
    tensors[NORM].view(torch.uint8)[5] ^= 1


def say_twice(path: Path, key: str) -> None:
    path.write_text(path.read_text().replace("{", f'{{"{key}": 1, "{key}": 2, ', 1))


PLANTED = [
    ("files.config", lambda c: c.edit_config(lambda d: d.update(hidden_act="gelu")), "hidden_act"),
    ("files.config", lambda c: c.edit_config(lambda d: d.pop("vocab_size")), "vocab_size"),
    ("files.config", lambda c: c.edit_config(lambda d: d.update(_attn_implementation="eager")), "_attn_implementation: 'eager' stands"),
    ("files.config", lambda c: c.edit_config(lambda d: d.update(temperature=0.2)), "temperature: 0.2 stands"),
    ("files.config", lambda c: c.edit_config(lambda d: d.update(torch_dtype="float64")), "torch_dtype: 'float64' stands"),
    ("files.config", lambda c: (c.folder / "config.json").unlink(), "holds no config.json"),
    ("files.config", lambda c: (c.folder / "config.json").write_text("{"), "is not JSON"),
    ("files.generation_config", spoil_generation, "temperature"),
    ("files.generation_config", lambda c: (c.folder / "generation_config.json").unlink(), "is missing"),
    ("files.generation_config", lambda c: (c.folder / "generation_config.json").write_text("[]"), "not a JSON object"),
    ("files.tokenizer", spoil_tokenizer_byte, "first difference at byte 17"),
    ("files.tokenizer", lambda c: (c.folder / "tokenizer_config.json").unlink(), "tokenizer_config.json: is missing"),
    ("files.tokenizer", lambda c: (c.folder / "added_tokens.json").write_text("{}"), "the base has no such file"),
    ("files.tokenizer", lambda c: (c.folder / "tekken.json").write_text("{}"), "tekken.json: the base has no such file"),
    ("files.others", add_code, "custom_generate/generate.py: the base has no such file"),
    ("files.others", lambda c: (c.folder / "params.json").write_text("{}"), "params.json: the base has no such file"),
    *(
        ("files.others", lambda c, name=name: (c.folder / name).write_text("{}"), f"{name}: the base has no such file")
        for name in ("hf_quant_config.json", "quantize_config.json", "quant_config.json", "adapter_config.json", "model.gguf")
    ),
    ("files.config", lambda c: say_twice(c.folder / "config.json", "quantization_config"), "'quantization_config' stands twice"),
    ("files.generation_config", lambda c: say_twice(c.folder / "generation_config.json", "do_sample"), "'do_sample' stands twice"),
    ("files.tokenizer", lambda c: say_twice(c.folder / "tokenizer_config.json", "is_local"), "tokenizer_config.json: "),
    ("files.shards", truncate, "model.safetensors"),
    ("files.shards", lambda c: (c.folder / "model.safetensors.tmp").write_bytes(b""), "is no part of a finished checkpoint"),
    ("files.tensors", lambda c: c.edit(lambda t: t.pop(SCALE)), f"{SCALE}: is missing"),
    ("files.tensors", lambda c: c.edit(lambda t: t.pop(NORM)), f"{NORM}: is missing"),
    ("files.tensors", lambda c: c.edit(lambda t: t.update(ghost=torch.zeros(1))), "ghost: is unexpected"),
    ("files.tensors", lambda c: c.edit(lambda t: t.update({SCALE.replace("scale", "zero_point"): torch.zeros(1)})), "is unexpected"),
    ("files.tensors", lambda c: c.edit(flip_byte), "1 bytes differ, first at 5"),
    ("files.tensors", lambda c: c.edit(lambda t: t.update({NORM: t[NORM].float()})), "became torch.float32"),
    ("files.tensors", lambda c: c.edit_config(lambda d: d["quantization_config"].update(ignore=[])), "lm_head.weight_packed: is missing"),
    ("files.tensors", lambda c: c.edit_config(lambda d: d.pop("quantization_config")), "holds no quantization_config"),
    ("files.tensors", lambda c: c.edit_config(lambda d: d["quantization_config"].update(ignore=["Linear"])), "nothing is quantized"),
    ("files.tensors", lambda c: c.edit_config(lambda d: d["quantization_config"].update(ignore=["re:("])), "cannot be read"),
    ("files.tensors", lambda c: c.edit_config(lambda d: d["quantization_config"].update(config_groups={})), "no config_groups"),
]


@pytest.mark.parametrize(("name", "spoil", "message"), PLANTED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_planted_fault_is_caught_and_named(workspace, compressed, name, spoil, message):
    checkpoint = compressed()
    spoil(checkpoint)
    record = record_of(workspace, checkpoint, name)
    assert record.outcome == "fail"
    assert message in "\n".join([record.summary, *record.findings])


@pytest.mark.parametrize(("changed", "outcome"), [({"is_local": True, "local_files_only": True}, "pass"), ({"pad_token": "x"}, "fail")])
def test_where_a_tokenizer_was_loaded_from_is_no_property_of_it(workspace, compressed, changed, outcome):
    checkpoint = compressed()
    path = checkpoint.folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    assert record_of(workspace, checkpoint, "files.tokenizer").outcome == outcome


@pytest.mark.parametrize(("added", "outcome"), [(0.0, "pass"), (1e-3, "fail")])
def test_what_a_class_keeps_in_float32_may_be_stored_so(tmp_path, added, outcome):
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "n_routed_experts": 4, "first_k_dense_replace": 0}
    Glm4MoeForCausalLM(Glm4MoeConfig(**sizes, **heads)).bfloat16().save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "model.safetensors"  # as its makers store it
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    recipe = {"quant_modifiers": {"QuantizationModifier": {"scheme": "FP8_DYNAMIC", "ignore": ["lm_head", "re:.*(gate|experts)"]}}}
    oneshot(tmp_path / "base", recipe=recipe, output_dir=tmp_path / "out")
    name, path = "model.layers.0.mlp.gate.e_score_correction_bias", tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    assert tensors[name].dtype is torch.float32
    save_file({**tensors, name: tensors[name] + added}, path, {"format": "pt"})
    record = next(one for one in check_files(read_subject(tmp_path / "base", tmp_path / "out")) if one.name == "files.tensors")
    assert record.outcome == outcome, record.findings


def test_the_base_copied_as_compressed_is_caught(workspace, compressed):
    checkpoint = compressed()
    (checkpoint.folder / "config.json").write_bytes((workspace.base / "config.json").read_bytes())
    (checkpoint.folder / "model.safetensors").write_bytes((workspace.base / "model.safetensors").read_bytes())
    assert record_of(workspace, checkpoint, "files.tensors").outcome == "fail"


def test_a_config_spelled_by_another_version_is_equal_in_meaning(workspace, compressed):
    checkpoint = compressed()
    checkpoint.edit_config(lambda d: d.update(torch_dtype=d.pop("dtype"), transformers_version="4.0.0"))
    record = record_of(workspace, checkpoint, "files.config")
    assert record.outcome == "pass"
    assert "spelled by another version" in record.summary


@pytest.mark.parametrize(
    ("spelled", "outcome"),
    [({"rope_theta": 10000}, "pass"), ({"rope_theta": 500.0}, "fail"), ({"rope_scaling": {"rope_theta": 7}}, "fail")],
)
def test_a_setting_that_transformers_passes_over_does_not_contradict_the_base(workspace, compressed, spelled, outcome):
    """Older readers take it: a top-level `rope_theta` beside the base's `rope_parameters`."""
    checkpoint = compressed()
    checkpoint.edit_config(lambda d: d.update(spelled))
    record = record_of(workspace, checkpoint, "files.config")
    assert record.outcome == outcome, record
    assert outcome == "pass" or "rope_theta" in record.findings[0]


def test_files_that_the_base_does_not_have_are_skipped(workspace, compressed, tmp_path):
    import shutil

    base = tmp_path / "bare"
    shutil.copytree(workspace.base, base)
    checkpoint = compressed()
    for folder in (base, checkpoint.folder):
        for path in [*folder.glob("tokenizer*"), folder / "generation_config.json"]:
            path.unlink()
    records = {record.name: record for record in check_files(read_subject(base, checkpoint.folder))}
    assert records["files.tokenizer"].outcome == "skip"
    assert records["files.generation_config"].outcome == "skip"
    said = json.loads((base / "config.json").read_text())
    for added, outcome in (({"eos_token_id": said["eos_token_id"]}, "pass"), ({"temperature": 0.5}, "fail")):
        (checkpoint.folder / "generation_config.json").write_text(json.dumps({"_from_model_config": True, **added}))
        records = {record.name: record for record in check_files(read_subject(base, checkpoint.folder))}
        assert records["files.generation_config"].outcome == outcome, records["files.generation_config"].findings


def test_a_tied_copy_may_be_left_away_but_nothing_else(workspace, compressed, tmp_path):
    base = tmp_path / "tied"
    shutil.copytree(workspace.base, base)
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, base / "model.safetensors")
    checkpoint = compressed()

    def untie(found):
        found.pop("lm_head.weight")

    checkpoint.edit(untie)
    for tied, expected in ((True, "pass"), (False, "fail")):
        for folder in (base, checkpoint.folder):
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
        record = next(r for r in check_files(read_subject(base, checkpoint.folder)) if r.name == "files.tensors")
        assert record.outcome == expected


@pytest.mark.parametrize(("tied", "added", "expected"), [(True, 0.0, "pass"), (True, 1.0, "fail"), (False, 0.0, "fail")])
def test_a_tied_head_may_be_stored_twice_with_equal_bytes(workspace, compressed, tmp_path, tied, added, expected):
    base, checkpoint = tmp_path / "tied", compressed()
    shutil.copytree(workspace.base, base)
    tensors = load_file(base / "model.safetensors")
    tensors.pop("lm_head.weight")
    save_file(tensors, base / "model.safetensors")
    checkpoint.edit(lambda found: found.update({"lm_head.weight": found["model.embed_tokens.weight"] + added}))
    for folder in (base, checkpoint.folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    record = next(record for record in check_files(read_subject(base, checkpoint.folder)) if record.name == "files.tensors")
    assert record.outcome == expected, record.findings


def test_targets_are_ranked_names_before_patterns_before_classes(workspace, compressed):
    checkpoint = compressed()
    other = {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}, "format": "int-quantized"}
    exact = {
        "targets": ["model.layers.1.mlp.down_proj"],
        "weights": {"num_bits": 3, "type": "int", "group_size": 16},
        "format": "pack-quantized",
    }

    def add(data):
        groups = data["quantization_config"]["config_groups"]
        groups |= {"group_1": other, "group_2": exact}

    checkpoint.edit_config(add)
    modules = read_subject(workspace.base, checkpoint.folder).modules
    assert modules["model.layers.0.mlp.up_proj"].name == "group_0"
    assert modules["model.layers.0.mlp.down_proj"].name == "group_1"
    assert modules["model.layers.1.mlp.down_proj"].name == "group_2"
    assert "lm_head" not in modules
    assert "model.embed_tokens" not in modules


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda base: base.rename(base.with_name("gone")), "no such folder for the base model"),
        (lambda base: (base / "config.json").unlink(), "holds no config.json"),
        (lambda base: (base / "model.safetensors").unlink(), "the base cannot be read"),
        (lambda base: (base / "config.json").write_text('{"model_type": "nonsense"}'), "cannot build a causal language model"),
        (lambda base: (base / "config.json").write_text('{"quantization_config": {}}'), "the base is quantized itself"),
    ],
)
def test_a_bad_base_is_the_callers_mistake(workspace, compressed, tmp_path, spoil, message):
    import shutil

    base = tmp_path / "base"
    shutil.copytree(workspace.base, base)
    spoil(base)
    with pytest.raises(ModelError, match=message):
        read_subject(base, compressed().folder)


def test_a_missing_compressed_folder_and_twice_the_same_folder_are_mistakes(workspace, tmp_path):
    with pytest.raises(ModelError, match="no such folder for the compressed model"):
        read_subject(workspace.base, tmp_path / "nowhere")
    with pytest.raises(ModelError, match="give two folders"):
        read_subject(workspace.base, workspace.base)
