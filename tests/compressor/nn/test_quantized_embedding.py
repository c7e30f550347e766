"""A quantized embedding looks up what its dequantized table holds, and unpacks only the rows it is asked for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from compressor.errors import SchemeError
from compressor.nn import QuantizedEmbedding, empty_layer, from_buffers, quantized
from compressor.numerics import QuantizationArgs, QuantizationScheme, preset_scheme
from harness import verify_module


def scheme_of(**weights) -> QuantizationScheme:
    return QuantizationScheme(targets=["Embedding"], weights=QuantizationArgs(**weights))


SCHEMES = {
    **{name: preset_scheme(name) for name in ("W4A16", "W4A16_ASYM", "W3A16", "W8A16", "NVFP4A16", "MXFP4A16", "MXFP8A16")},
    "int4 tensor": scheme_of(num_bits=4, strategy="tensor", symmetric=False),
    "int7 channel": scheme_of(num_bits=7, strategy="channel", symmetric=False),
    "fp8 channel": scheme_of(type="float", strategy="channel"),
    "int8 plain": scheme_of(strategy="channel").model_copy(update={"format": "int-quantized"}),
}
IDS = torch.tensor([[0, 3, 3], [12, 1, 0]])


def embedding_of(dtype: torch.dtype, **settings) -> nn.Embedding:
    embedding = nn.Embedding(13, 256, dtype=dtype, **settings)
    with torch.no_grad():
        embedding.weight.copy_(torch.rand(13, 256, generator=torch.Generator().manual_seed(0)) - 0.5)
    return embedding.eval()


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_are_those_of_the_table_and_of_compressed_tensors(name, dtype, their_weight):
    layer = quantized(embedding_of(dtype), SCHEMES[name], name="embed_tokens")
    assert isinstance(layer, QuantizedEmbedding)
    table = layer.dequantized_weight()
    assert torch.equal(table, their_weight(layer)) and table.dtype == dtype
    for ids in (IDS, torch.tensor(5), torch.tensor([], dtype=torch.int64), IDS.int()):
        assert torch.equal(layer(ids), table[ids.long()])
    with layer.materialize():
        assert torch.equal(layer(IDS), table[IDS])
    assert torch.equal(copy.deepcopy(layer)(IDS), layer(IDS))
    twin = from_buffers(embedding_of(dtype), SCHEMES[name], dict(layer.named_buffers()))
    assert torch.equal(twin(IDS), layer(IDS))


@pytest.mark.parametrize("name", SCHEMES)
def test_the_contract_of_modules_holds(name):
    assert verify_module(quantized(embedding_of(torch.bfloat16), SCHEMES[name]), IDS).passed


def test_a_look_up_does_not_unpack_the_table(peak_bytes):
    embedding = nn.Embedding(4096, 256, dtype=torch.bfloat16)
    layer = quantized(embedding, preset_scheme("W4A16"))
    assert peak_bytes(lambda: layer(IDS)) < embedding.weight.nbytes / 100
    assert peak_bytes(layer.dequantized_weight) >= embedding.weight.nbytes  # what it would have been


def test_what_an_embedding_cannot_have_is_refused_by_name():
    for scheme, message in (
        ("W8A8", r"^embed: input_activations were given for an embedding"),
        ("FP8_BLOCK", r"^embed: input_activations"),
    ):
        with pytest.raises(SchemeError, match=message):
            quantized(embedding_of(torch.float32), preset_scheme(scheme), name="embed")
    block = scheme_of(type="float", strategy="block", block_structure=(128, 128))
    with pytest.raises(SchemeError, match=r"^embed: strategy='block'"):
        quantized(embedding_of(torch.float32), block, name="embed")
    with pytest.raises(SchemeError, match=r"^embed: max_norm=1\.0"):
        quantized(embedding_of(torch.float32, max_norm=1.0), preset_scheme("W4A16"), name="embed")

    class Scaled(nn.Embedding):
        def forward(self, input):
            return super().forward(input) * 2

    with pytest.raises(SchemeError, match=r"^embed: Scaled has a forward of its own"):
        empty_layer(Scaled(13, 256), preset_scheme("W4A16"), name="embed")
    layer = quantized(embedding_of(torch.float32), preset_scheme("W4A16"), name="embed")
    with pytest.raises(SchemeError, match=r"^embed: ids of torch.float32"):
        layer(torch.ones(2))
    for wrong in (13, -1):
        with pytest.raises((IndexError, RuntimeError)):
            layer(torch.tensor([wrong]))


def test_the_repr_is_that_of_an_embedding_and_its_format():
    layer = quantized(embedding_of(torch.float32, padding_idx=0), preset_scheme("W4A16"))
    assert repr(layer).startswith("PackQuantizedEmbedding(13, 256, padding_idx=0, format=pack-quantized, type=int, bits=4")
