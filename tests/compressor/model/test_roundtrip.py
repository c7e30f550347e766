"""What is written loads in transformers alone and computes the same logits, to the last bit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from compressor.model.checkpoints.save import save_checkpoint
from compressor.model.loading.load import quiet_transformers
from compressor.numerics import QuantizationArgs, QuantizationScheme, preset_scheme

_PRESETS = ["W4A16", "W4A16_ASYM", "W3A16", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC"]


def _reload(folder, auto_class=None):
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        model, info = (auto_class or AutoModelForCausalLM).from_pretrained(folder, local_files_only=True, output_loading_info=True)
    problems = {key: value for key, value in info.items() if value}
    assert not problems
    return model.eval()


def _assert_same_logits(model, folder, token_ids):
    with torch.inference_mode():
        ours = model(token_ids).logits
        theirs = _reload(folder)(token_ids).logits
    assert ours.isfinite().all() and ours.std() > 0
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("preset", _PRESETS)
@pytest.mark.parametrize(
    ("kind", "config"), [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("qwen2", {})], ids=["llama", "llama-tied", "qwen2"]
)
def test_transformers_computes_the_same_logits(kind, config, preset, make_model, quantize_linears, token_ids, tmp_path):
    model = make_model(kind, **config)
    schemes = quantize_linears(model, preset_scheme(preset))
    folder = save_checkpoint(model, tmp_path / "out", schemes=schemes, record={})
    _assert_same_logits(model, folder, token_ids)


def _int(**weights):
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


def _int8_inputs(*, weights, inputs):
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=QuantizationArgs(**inputs))


_UNUSUAL = {
    "int2-group": _int(num_bits=2, group_size=32),
    "int5-group-asymmetric": _int(num_bits=5, group_size=32, symmetric=False),
    "int6-channel": _int(num_bits=6, strategy="channel"),
    "int7-channel-asymmetric": _int(num_bits=7, strategy="channel", symmetric=False),
    "int4-tensor": _int(num_bits=4),
    "int4-static-actorder": _int(num_bits=4, group_size=32, actorder="static", observer="mse"),
    "int8-alone-unpacked": _int(strategy="channel").model_copy(update={"format": "int-quantized"}),
    "int8-asymmetric": _int8_inputs(weights={"strategy": "channel", "symmetric": False}, inputs={"strategy": "token", "dynamic": True}),
    "int8-static-asymmetric-inputs": _int8_inputs(weights={"strategy": "channel"}, inputs={"symmetric": False}),
    "int4-with-int8-inputs": _int8_inputs(weights={"num_bits": 4, "group_size": 32}, inputs={"strategy": "token", "dynamic": True}),
    "fp8-alone": QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(type="float", strategy="channel")),
}


@pytest.mark.parametrize("name", _UNUSUAL)
def test_schemes_beside_the_presets(name, make_model, quantize_linears, token_ids, tmp_path):
    model = make_model("llama", intermediate_size=160)
    schemes = quantize_linears(model, _UNUSUAL[name])
    folder = save_checkpoint(model, tmp_path / "out", schemes=schemes, record={})
    _assert_same_logits(model, folder, token_ids)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_keep_their_logits(dtype, make_model, quantize_linears, token_ids, tmp_path):
    model = make_model(dtype=dtype)
    schemes = quantize_linears(model, preset_scheme("W4A16_ASYM"))
    folder = save_checkpoint(model, tmp_path / "out", schemes=schemes, record={})
    _assert_same_logits(model, folder, token_ids)


@pytest.mark.parametrize("second", ["W8A16", "FP8_DYNAMIC"])
def test_two_schemes_in_one_model(second, make_model, quantize_linears, token_ids, tmp_path):
    model = make_model()
    schemes = quantize_linears(model, preset_scheme(second, ["re:.*self_attn"]), ignore=("LlamaAttention",))
    schemes |= quantize_linears(model, preset_scheme("W4A16", ["Linear"]))
    folder = save_checkpoint(model, tmp_path / "out", schemes=schemes, record={})
    _assert_same_logits(model, folder, token_ids)


def test_a_quantized_head_unties_the_embeddings(make_model, quantize_linears, token_ids, tmp_path):
    model = make_model(tie_word_embeddings=True)
    schemes = quantize_linears(model, preset_scheme("W8A8"), ignore=())
    assert "lm_head" in schemes
    folder = save_checkpoint(model, tmp_path / "out", schemes=schemes, record={})
    _assert_same_logits(model, folder, token_ids)
    assert model.config.tie_word_embeddings is True


def test_a_model_that_generates_nothing(make_model, quantize_linears, token_ids, tmp_path):
    from transformers import AutoModel

    model = make_model("bert")
    schemes = quantize_linears(model, preset_scheme("W4A16"), ignore=())
    folder = save_checkpoint(model, tmp_path / "out", schemes=schemes, record={})
    assert not (folder / "generation_config.json").exists()
    with torch.inference_mode():
        assert torch.equal(model(token_ids).last_hidden_state, _reload(folder, AutoModel)(token_ids).last_hidden_state)


def test_experts_and_routers_stay_as_they_are(make_model, quantize_linears, token_ids, tmp_path):
    model = make_model("mixtral", num_local_experts=2, num_experts_per_tok=1)
    schemes = quantize_linears(model, preset_scheme("FP8_DYNAMIC"))
    folder = save_checkpoint(model, tmp_path / "out", schemes=schemes, record={})
    _assert_same_logits(model, folder, token_ids)
    ignore = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.mlp.gate" in ignore


def test_shards_load_like_one_file(make_model, quantize_linears, token_ids, tmp_path):
    model = make_model()
    schemes = quantize_linears(model, preset_scheme("W4A16"))
    folder = save_checkpoint(model, tmp_path / "out", schemes=schemes, record={}, max_shard_bytes=100_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(list(folder.glob("*.safetensors"))) > 1
    _assert_same_logits(model, folder, token_ids)


def test_a_model_without_quantized_layers_is_an_ordinary_folder(make_model, token_ids, tmp_path):
    model = make_model(tie_word_embeddings=True)
    folder = save_checkpoint(model, tmp_path / "out", schemes={}, record={})
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    _assert_same_logits(model, folder, token_ids)


@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 10_000])
def test_a_plain_module_is_its_state_dict(max_shard_bytes, quantize_linears, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.Linear(128, 128))
    model[3].weight = model[2].weight
    schemes = quantize_linears(model, preset_scheme("W4A16"), ignore=("2", "3"))
    folder = save_checkpoint(model, tmp_path / "out", schemes=schemes, record={"seed": 1}, max_shard_bytes=max_shard_bytes)
    files = sorted(folder.glob("*.safetensors"))
    assert (len(files) > 1) == (max_shard_bytes == 10_000) == (folder / "model.safetensors.index.json").exists()
    stored = {name: value for path in files for name, value in load_file(path).items()}
    assert stored.keys() == model.state_dict().keys()
    assert all(torch.equal(stored[name], value) for name, value in model.state_dict().items())
    record = json.loads((folder / "compression.json").read_text())
    assert record["seed"] == 1
    config = record["quantization_config"]
    assert config["ignore"] == ["2", "3"]
    assert QuantizationScheme.model_validate(config["config_groups"]["group_0"]).compression_format == config["format"]
