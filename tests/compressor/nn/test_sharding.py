"""A layer can be cut exactly where the pieces, quantized layers of their own, hold the same codes and scales."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compressor.errors import SchemeError
from compressor.nn import check_shards, quantized, shard_problems
from compressor.numerics import QuantizationArgs, QuantizationScheme, pack_int32, preset_scheme, unpack_int32


def model_of(scheme: QuantizationScheme, rows: int, columns: int) -> nn.Module:
    linear = nn.Linear(columns, rows, bias=False)
    parts = {"q_proj": quantized(linear, scheme), "o_proj": quantized(linear, scheme), "act": nn.ReLU()}
    return nn.ModuleDict(parts)


def scheme_of(**weights) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


@pytest.mark.parametrize(
    ("scheme", "shape", "shards", "problems"),
    [
        (preset_scheme("W4A16"), (64, 512), 4, {}),
        (preset_scheme("W4A16"), (64, 512), 8, {"o_proj": "64 columns a device cut through groups of 128 columns"}),
        (preset_scheme("W4A16"), (6, 512), 4, {"q_proj": "6 rows do not divide by 4"}),
        (preset_scheme("W4A16_ASYM"), (48, 512), 4, {"q_proj": "12 rows a device cut through words of 32 bits"}),
        (preset_scheme("W4A16_ASYM"), (64, 512), 4, {}),
        (scheme_of(num_bits=3, strategy="channel"), (8, 96), 2, {"o_proj": "48 columns a device cut through words of 32 bits"}),
        (scheme_of(num_bits=6, strategy="channel"), (8, 96), 2, {}),
        (preset_scheme("FP8_BLOCK"), (256, 256), 2, {}),
        (
            preset_scheme("FP8_BLOCK"),
            (192, 384),
            2,
            {
                "q_proj": "96 rows a device cut through blocks of 128 rows",
                "o_proj": "192 columns a device cut through blocks of 128 columns",
            },
        ),
        (preset_scheme("NVFP4A16"), (8, 64), 4, {}),
        (preset_scheme("NVFP4A16"), (8, 64), 8, {"o_proj": "8 columns a device cut through groups of 16 columns"}),
        (preset_scheme("W8A8"), (9, 27), 3, {}),
    ],
)
def test_what_stands_in_the_way_is_named(scheme, shape, shards, problems):
    model = model_of(scheme, *shape)
    assert shard_problems(model, shards) == problems
    assert shard_problems(model, 1) == {}
    if problems:
        with pytest.raises(SchemeError, match=rf"{len(problems)} layers cannot be shared by {shards} devices: {next(iter(problems))}: "):
            check_shards(model, shards)
    else:
        check_shards(model, shards)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("columns", [16, 32, 48, 96])
def test_words_are_whole_exactly_where_it_says(bits, columns):
    """Cutting the packed words in two gives the words of the halves, or it is a problem."""
    model = model_of(scheme_of(num_bits=bits, strategy="channel"), 4, columns)
    codes = model["o_proj"].codes()
    packed, half = model["o_proj"].weight_packed, codes[:, : columns // 2].contiguous()
    whole = packed.shape[1] % 2 == 0 and torch.equal(packed[:, : packed.shape[1] // 2], pack_int32(half, bits))
    assert whole == (shard_problems(model, 2) == {})
    if whole:
        assert torch.equal(unpack_int32(packed[:, : packed.shape[1] // 2].contiguous(), bits, half.shape), half)


def test_regrouped_columns_cannot_be_cut():
    scheme = scheme_of(num_bits=4, group_size=16, actorder="group")
    layer = quantized(nn.Linear(64, 8), scheme)
    layer.register_buffer("weight_g_idx", torch.arange(64, dtype=torch.int32) % 4)
    assert "regrouped by activation" in shard_problems(nn.ModuleDict({"o_proj": layer}), 2)["o_proj"]
    with pytest.raises(SchemeError, match="num_shards=0"):
        shard_problems(layer, 0)
