"""Schemes: what is inferred, and what is refused before any work."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from pydantic import ValidationError

from compressor.errors import SchemeError
from compressor.numerics import PRESETS, QuantizationArgs, QuantizationScheme, preset_scheme
from compressor.numerics.scheme import LEFT_OUT


def test_every_preset_of_compressed_tensors_exists_or_says_what_to_take_instead():
    assert set(PRESETS) | set(LEFT_OUT) == set(PRESET_SCHEMES) and not set(PRESETS) & set(LEFT_OUT)
    with pytest.raises(SchemeError, match="'unquantized' is a preset of compressed-tensors that does not exist here; put its targets"):
        preset_scheme("unquantized")


@pytest.mark.parametrize(("group_size", "strategy"), [(None, "tensor"), (-1, "channel"), (32, "group")])
def test_the_strategy_follows_from_the_group_size(group_size, strategy):
    assert QuantizationArgs(group_size=group_size).strategy == strategy
    assert QuantizationArgs(group_size=group_size, strategy=None).strategy == strategy


def test_ranges_and_storage():
    assert [QuantizationArgs(num_bits=bits).code_range for bits in (2, 4, 8)] == [(-2, 1), (-8, 7), (-128, 127)]
    assert QuantizationArgs(type="float").code_range == (-448, 448)
    assert QuantizationArgs().storage_dtype == torch.int8
    assert QuantizationArgs(type="float").storage_dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_bits": 9}, "less than or equal to 8"),
        ({"num_bits": 1}, "greater than or equal to 2"),
        ({"num_bit": 4}, "num_bit\n.*[Ee]xtra"),
        ({"type": "float", "num_bits": 6}, "num_bits=8 or 4, and symmetric=True"),
        ({"type": "float", "num_bits": 4}, "error, float4 with strategy='tensor' .*: fp4 and .* or num_bits=8"),
        ({"type": "float", "num_bits": 4, "group_size": 16}, "'group' and group_size=16: fp4 and .* groups of 32 .* give one"),
        (
            {"type": "float", "num_bits": 4, "group_size": 32, "strategy": "tensor_group"},
            "'tensor_group', group_size=32 with .* is not NVFP4; .*, group_size=16",
        ),
        ({"num_bits": 4, "group_size": 16, "strategy": "tensor_group"}, "is not NVFP4"),
        ({"type": "float", "scale_dtype": "uint8"}, "in groups of 32"),
        ({"group_size": 32, "scale_dtype": "torch.uint8"}, "MX formats"),
        ({"type": "float", "group_size": 32, "scale_dtype": "torch.float8_e4m3fn"}, "is not NVFP4"),
        ({"type": "float", "scale_dtype": "torch.float16"}, "scale_dtype"),
        ({"type": "float", "symmetric": False}, "num_bits=8 or 4, and symmetric=True"),
        ({"group_size": 0}, "group_size=0"),
        ({"group_size": -2}, "group_size=-2"),
        ({"strategy": "group"}, "positive group_size"),
        ({"strategy": "group", "group_size": -1}, "positive group_size, or strategy='channel'"),
        ({"strategy": "channel", "group_size": 32}, "strategy='group'"),
        ({"strategy": "blocks"}, "'tensor', 'channel', 'group'"),
        ({"strategy": "block"}, "block_structure such as"),
        ({"type": "float", "block_structure": [128, 128]}, "give strategy='block'"),
        *(
            ({"type": "float", "strategy": "block", "block_structure": odd}, "two positive numbers")
            for odd in ([0, 128], [128], "128", "128x", "128x0", "axb", 128, [True, 128])
        ),
        ({"strategy": "block", "block_structure": [128, 128]}, "is for fp8"),
        ({"type": "float", "strategy": "block", "block_structure": [128, 128], "dynamic": True}, "use 'token', 'group' or 'tensor'"),
        ({"dynamic": "local"}, "strategy='tensor_group'"),
        ({"strategy": "token"}, "dynamic=True"),
        ({"strategy": "channel", "dynamic": True}, "use 'token', 'group' or 'tensor'"),
        ({"strategy": "channel", "actorder": "group"}, "actorder='static'"),
        ({"observer": "minmx"}, "did you mean 'minmax'"),
        ({"observer": "mse", "observer_kwargs": {"maxshrnk": 0.1}}, "did you mean 'maxshrink'"),
        ({"observer": "mse", "observer_kwargs": {"maxshrink": 1.5}}, "at most 1"),
        ({"observer": "mse", "observer_kwargs": {"maxshrink": 0.001}}, "nothing to search"),
        ({"observer": "mse", "observer_kwargs": {"norm": -1}}, "norm=-1"),
        ({"observer": "mse", "observer_kwargs": {"grid": "100"}}, "grid='100'"),
        ({"observer": "mse", "observer_kwargs": {"patience": 0.5}}, "patience=0.5"),
        ({"observer": "minmax", "observer_kwargs": {"norm": 2}}, "minmax takes none"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields, message):
    with pytest.raises(ValidationError, match=message):
        QuantizationArgs(**fields)


INT8_TOKEN = QuantizationArgs(strategy="token", dynamic=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": INT8_TOKEN}, "dynamic=False"),
        ({"weights": QuantizationArgs(), "format": "float-quantized"}, "does not store"),
        ({"weights": QuantizationArgs(), "format": "marlin"}, "format"),
        ({"weights": QuantizationArgs(), "format": "nvfp4-pack-quantized"}, "does not store"),
        ({"weights": QuantizationArgs(strategy="attn_head")}, "not for weights"),
        ({"weights": QuantizationArgs(), "input_activations": QuantizationArgs(group_size=32)}, "no static scales"),
        ({"weights": QuantizationArgs(), "input_activations": QuantizationArgs(strategy="channel")}, "input_activations: strategy"),
        ({"weights": QuantizationArgs(), "input_activations": QuantizationArgs(actorder="weight")}, "input_activations: actorder"),
        ({"weights": QuantizationArgs(), "output_activations": QuantizationArgs()}, "output_activations"),
    ],
)
def test_a_scheme_refuses_what_it_cannot_do(fields, message):
    with pytest.raises(ValidationError, match=message):
        QuantizationScheme(targets=["Linear"], **fields)


def test_schemes_are_frozen_compare_by_value_and_survive_a_dump():
    scheme = preset_scheme("W4A16_ASYM", ["re:.*proj"])
    with pytest.raises(ValidationError, match="frozen"):
        scheme.format = "int-quantized"
    assert QuantizationScheme(**scheme.model_dump()) == scheme
    assert scheme != preset_scheme("W4A16", ["re:.*proj"])


def test_presets_are_found_in_any_case_and_keep_their_targets_apart():
    assert preset_scheme("fp8_dynamic") == PRESETS["FP8_DYNAMIC"]
    assert preset_scheme("W8A8", ["a"]).targets == ["a"]
    assert PRESETS["W8A8"].targets == PRESETS["INT8"].targets == ["Linear"]
    with pytest.raises(SchemeError, match="'W4A61' does not exist; did you mean 'W4A16'"):
        preset_scheme("W4A61")


def test_the_format_can_be_chosen_and_needs_weights():
    int8 = QuantizationArgs(strategy="channel")
    assert QuantizationScheme(targets=["Linear"], weights=int8).compression_format == "pack-quantized"
    assert QuantizationScheme(targets=["Linear"], weights=int8, format="int-quantized").compression_format == "int-quantized"
    assert QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(type="float")).compression_format == "float-quantized"
    with pytest.raises(SchemeError, match="nothing to compress"):
        _ = QuantizationScheme(targets=["Linear"], input_activations=INT8_TOKEN).compression_format


def test_spellings_of_recipes_are_taken():
    args = QuantizationArgs(type="INT", strategy="Group", group_size=64, actorder=False)
    assert (args.type, args.strategy, args.actorder) == ("int", "group", None)
    for size in ("128x64", "128X64", [128, 64], (128, 64)):
        assert QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=size).block_structure == (128, 64)


@pytest.mark.parametrize("settings", [{"zp_dtype": "torch.float8_e4m3fn"}, {"zp_dtype": None, "symmetric": False}])
def test_a_zero_point_dtype_that_changes_nothing_is_taken(settings):
    assert QuantizationArgs(**settings) == QuantizationArgs(symmetric=settings.get("symmetric", True))
    with pytest.raises(ValueError, match="zp_dtype='uint8' is not how zero points are stored here"):
        QuantizationArgs(zp_dtype="torch.uint8", symmetric=False)
    with pytest.raises(ValueError, match="zp_dtype='rubbish' is not how"):
        QuantizationArgs(zp_dtype="rubbish")
    with pytest.raises(ValueError, match="observer: mse would see nothing"):
        QuantizationArgs(dynamic=True, strategy="token", observer="mse")
