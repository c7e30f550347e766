"""The config says to compressed-tensors what compressed-tensors would say itself."""

from __future__ import annotations

import json

import pytest
from torch import nn

from compressor.model.checkpoints.format import quantization_config, unquantized_linears
from compressor.model.checkpoints.save import save_checkpoint
from compressor.numerics import PRESETS, preset_scheme

_FORMATS = {"W4A16": "pack-quantized", "W3A16": "pack-quantized", "W8A8": "int-quantized", "FP8": "float-quantized"}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_reads_as_compressed_tensors_own(preset):
    theirs = pytest.importorskip("compressed_tensors.quantization")
    ours = quantization_config({"a.q_proj": preset_scheme(preset), "a.k_proj": preset_scheme(preset)}, ["lm_head"])
    scheme = theirs.preset_name_to_scheme(preset, ["Linear"])
    scheme.format = ours["format"]
    expected = theirs.QuantizationConfig(
        config_groups={"group_0": scheme}, format=ours["format"], quantization_status="compressed", ignore=["lm_head"]
    )
    assert theirs.QuantizationConfig.model_validate(ours).model_dump(mode="json") == expected.model_dump(mode="json")
    assert ours["config_groups"] == expected.model_dump(mode="json")["config_groups"]
    assert ours["format"] == _FORMATS.get(preset, ours["format"])
    assert json.loads(json.dumps(ours)) == ours


def test_several_schemes_name_their_modules():
    schemes = {"a": preset_scheme("W4A16", ["re:a"]), "b": preset_scheme("W8A8"), "c": preset_scheme("W4A16", ["Linear"])}
    config = quantization_config(schemes, [])
    assert config["format"] == "mixed-precision"
    assert [group["targets"] for group in config["config_groups"].values()] == [["a", "c"], ["b"]]
    assert [group["format"] for group in config["config_groups"].values()] == ["pack-quantized", "int-quantized"]


def test_several_schemes_of_one_format_share_it():
    config = quantization_config({"a": preset_scheme("W4A16"), "b": preset_scheme("W8A16")}, [])
    assert config["format"] == "pack-quantized" and len(config["config_groups"]) == 2


def test_only_packed_zero_points_are_unpacked_while_loading():
    assert quantization_config({"a": preset_scheme("W4A16_ASYM")}, [])["dequantize"] is True
    assert "dequantize" not in quantization_config({"a": preset_scheme("W4A16")}, [])
    assert "dequantize" not in quantization_config({"a": preset_scheme("W4A16_ASYM"), "b": preset_scheme("W8A16")}, [])


class _TopKRouter(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(nn.init.zeros_(nn.Linear(*shape).weight))


class _GatedDeltaNet(_TopKRouter):
    """A matrix of its own, but no router."""


def test_one_format_is_one_group_whoever_asked_for_it_and_in_whatever_order_its_columns_were_solved():
    rounded = preset_scheme("W4A16_ASYM", targets=["re:.*up_proj"])
    weights = rounded.weights.model_copy(update={"actorder": "static"})
    solved = rounded.model_copy(update={"weights": weights, "targets": ["re:.*down_proj"]})
    config = quantization_config({"mlp.down_proj": solved, "mlp.up_proj": rounded}, [])
    assert [group["targets"] for group in config["config_groups"].values()] == [["Linear"]] and config["dequantize"]
    stored = solved.model_copy(update={"weights": weights.model_copy(update={"actorder": "group"})})
    assert len(quantization_config({"mlp.down_proj": stored, "mlp.up_proj": rounded}, [])["config_groups"]) == 2


def test_what_readers_would_take_for_linear_is_ignored_by_name():
    model = nn.ModuleDict(
        {"lin": nn.Linear(2, 2), "norm": nn.LayerNorm(2), "router": _TopKRouter((2, 2)), "delta": _GatedDeltaNet((2, 2)), "act": nn.ReLU()}
    )
    assert unquantized_linears(model) == ["lin", "router"]


@pytest.mark.parametrize("two_schemes", [False, True])
def test_names_in_the_files_may_differ_from_those_in_the_model(two_schemes, make_model, quantize_linears, tmp_path):
    from safetensors import safe_open
    from transformers.core_model_loading import WeightRenaming

    model = make_model()
    model._weight_conversions = [WeightRenaming(source_patterns=r"^trunk\.", target_patterns=r"model.")]
    schemes = quantize_linears(model, preset_scheme("W8A16", [r"re:model\.layers\.0.*proj"]), ignore=()) if two_schemes else {}
    schemes |= quantize_linears(model, preset_scheme("W4A16"), ignore=("lm_head", r"re:.*down_proj"))
    folder = save_checkpoint(model, tmp_path / "out", schemes=schemes, record={})
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        keys = set(file.keys())
    assert "trunk.layers.1.mlp.up_proj.weight_packed" in keys and not any(key.startswith("model.") for key in keys)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert {"lm_head", "model.layers.1.mlp.down_proj", "trunk.layers.1.mlp.down_proj"} <= set(config["ignore"])
    if two_schemes:
        assert {"model.layers.0.mlp.up_proj", "trunk.layers.0.mlp.up_proj"} <= set(config["config_groups"]["group_0"]["targets"])
