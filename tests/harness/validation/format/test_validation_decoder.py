"""The decoder agrees bit for bit with compressed-tensors in every format, though it shares no line with it."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given
from hypothesis import strategies as st

from harness.validation.format import container, decoder, scheme
from harness.validation.format import scheme as float_formats
from harness.validation.format.decoder import decode_module, expected_parts, float8_values, unpack_bits
from harness.validation.format.scheme import WeightScheme, read_config_groups


@given(st.data(), st.integers(1, 8), st.integers(1, 70), st.integers(1, 3))
def test_unpack_is_the_inverse_of_the_peers_packing_for_any_width_and_length(data, num_bits, count, rows):
    low, high = -(1 << (num_bits - 1)), (1 << (num_bits - 1)) - 1
    values = data.draw(st.lists(st.lists(st.integers(low, high), min_size=count, max_size=count), min_size=rows, max_size=rows))
    packed = pack_to_int32(torch.tensor(values, dtype=torch.int8), num_bits)
    codes, is_clean = unpack_bits(packed.numpy(), num_bits, count)
    assert codes.tolist() == values
    assert is_clean


@given(st.data(), st.integers(1, 8), st.integers(1, 40))
def test_unpack_reads_one_little_endian_number(data, num_bits, count):
    values = data.draw(st.lists(st.integers(0, (1 << num_bits) - 1), min_size=count, max_size=count))
    number = sum(value << (i * num_bits) for i, value in enumerate(values))
    num_words = -(-count * num_bits // 32)
    words = np.frombuffer(number.to_bytes(4 * num_words, "little"), dtype="<i4").reshape(1, -1)
    codes, _ = unpack_bits(words, num_bits, count)
    assert (codes[0] + (1 << (num_bits - 1))).tolist() == values


def test_a_bit_behind_the_last_value_is_noticed():
    words = pack_to_int32(torch.tensor([[1, -2, 3]], dtype=torch.int8), 4)
    assert unpack_bits(words.numpy(), 4, 3)[1]
    assert not unpack_bits((words | (1 << 12)).numpy(), 4, 3)[1]


def test_float8_table_is_e4m3fn():
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_array_equal(float8_values(), expected)


SCHEMES = [
    *[
        {"num_bits": bits, "strategy": "group", "group_size": 16, "symmetric": symmetric}
        for bits in range(2, 9)
        for symmetric in (True, False)
    ],
    *[{"num_bits": bits, "strategy": "channel", "symmetric": symmetric} for bits in (3, 4, 8) for symmetric in (True, False)],
    {"num_bits": 4, "strategy": "tensor", "symmetric": True},
]


def weight_of(dtype: torch.dtype) -> torch.Tensor:
    weight = torch.rand(37, 48, generator=torch.Generator().manual_seed(3)) * 2 - 1
    weight[4] = 0
    weight[5] *= 1e-3
    return weight.to(dtype)


def compressed_parts(weight: torch.Tensor, args: dict, format_name: str, kind: str = "int") -> tuple[dict, QuantizationScheme]:
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(type=kind, **args), format=format_name)
    weights = scheme.weights
    view = weight.unflatten(-1, (-1, args["group_size"])) if weights.strategy == "group" else weight
    axis = None if weights.strategy == "tensor" else -1
    low, high = (weight.amin(), weight.amax()) if axis is None else (view.amin(axis), view.amax(axis))
    if weights.strategy == "channel":
        low, high = low[:, None], high[:, None]
    scale, zero_point = calculate_qparams(low, high, weights)
    parts = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
    return BaseCompressor.get_value_from_registry(format_name).compress(parts, scheme), scheme


def assert_decodes_as_the_peer(parts: dict, scheme: QuantizationScheme, format_name: str) -> None:
    expected = BaseCompressor.get_value_from_registry(format_name).decompress(parts, scheme)["weight"]
    weights = scheme.weights
    own = WeightScheme(
        format=format_name, num_bits=weights.num_bits, type=str(weights.type), symmetric=weights.symmetric,
        strategy=str(weights.strategy), group_size=weights.group_size, has_static_input=False,
    )  # fmt: skip
    decoded = decode_module(parts, own)
    assert decoded.weight.dtype == expected.dtype
    assert torch.equal(decoded.weight.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
    assert decoded.has_clean_padding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("args", SCHEMES, ids=lambda args: "-".join(str(value) for value in args.values()))
def test_packed_integers_decode_bitwise(args, dtype):
    parts, scheme = compressed_parts(weight_of(dtype), args, "pack-quantized")
    assert_decodes_as_the_peer(parts, scheme, "pack-quantized")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("args", [SCHEMES[-1], SCHEMES[-3], SCHEMES[-2], SCHEMES[4], SCHEMES[5]], ids=str)
def test_plain_integers_decode_bitwise(args, dtype):
    parts, scheme = compressed_parts(weight_of(dtype), args, "int-quantized")
    assert_decodes_as_the_peer(parts, scheme, "int-quantized")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_fp8_decodes_bitwise(strategy, dtype):
    parts, scheme = compressed_parts(weight_of(dtype), {"num_bits": 8, "strategy": strategy}, "float-quantized", "float")
    assert_decodes_as_the_peer(parts, scheme, "float-quantized")


PACKED = WeightScheme("pack-quantized", 4, "int", True, "group", 16, False)


def test_a_column_map_sends_every_column_to_its_group():
    parts, _ = compressed_parts(weight_of(torch.float32), SCHEMES[4], "pack-quantized")
    straight = decode_module(parts, PACKED)
    same = decode_module(parts | {"weight_g_idx": torch.arange(48, dtype=torch.int32) // 16}, PACKED)
    assert torch.equal(same.weight, straight.weight)
    swapped = decode_module(parts | {"weight_g_idx": 2 - torch.arange(48, dtype=torch.int32) // 16}, PACKED)
    expected = torch.from_numpy(straight.codes).float() * parts["weight_scale"].flip(1).repeat_interleave(16, dim=1)
    assert torch.equal(swapped.weight, expected)
    with pytest.raises(ValueError, match="names groups outside"):
        decode_module(parts | {"weight_g_idx": torch.full((48,), 3, dtype=torch.int32)}, PACKED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts.pop("weight_scale"), "weight_scale is missing"),
        (lambda parts: parts.pop("weight_shape"), "weight_shape is missing"),
        (lambda parts: parts.update(weight_scale=parts["weight_scale"].T), "weight_scale has the shape"),
        (lambda parts: parts.update(weight_shape=torch.tensor([37, 64])), "has the shape"),
        (lambda parts: parts.update(weight_shape=torch.tensor([37, 40])), "has the shape"),
        (lambda parts: parts.update(weight_packed=parts["weight_packed"].long()), "has the dtype torch.int64"),
        (lambda parts: parts.update(weight_shape=torch.tensor([0, 48])), "is no matrix"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, message):
    parts, _ = compressed_parts(weight_of(torch.bfloat16), SCHEMES[4], "pack-quantized")
    change(parts)
    with pytest.raises(ValueError, match=message):
        decode_module(parts, PACKED)


def test_expected_parts_are_what_the_peer_writes():
    for args in SCHEMES:
        parts, scheme = compressed_parts(weight_of(torch.bfloat16), args, "pack-quantized")
        weights = scheme.weights
        own = WeightScheme("pack-quantized", weights.num_bits, "int", weights.symmetric, str(weights.strategy), weights.group_size, False)
        assert expected_parts(own, (37, 48)) == {name: tuple(part.shape) for name, part in parts.items()}


def test_config_groups_are_read_as_written_and_foreign_ones_are_named():
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    config = {
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights},
            "group_1": {
                "targets": ["re:.*x"],
                "weights": {"num_bits": 4, "type": "float", "group_size": 16},
                "format": "nvfp4-pack-quantized",
            },
            "group_2": {"targets": ["y"], "weights": {"num_bits": 8, "strategy": "block", "type": "float"}, "format": "float-quantized"},
        },
    }
    first, second, third = read_config_groups(config)
    assert first.scheme is not None
    assert first.scheme.label == "int4, symmetric, per group of 32, pack-quantized"
    assert second.scheme is None
    assert second.reason == "this decoder does not read strategy group"
    assert third.reason == "this decoder does not read strategy block"
    with pytest.raises(ValueError, match="holds no config_groups"):
        read_config_groups({})
    with pytest.raises(ValueError, match=r"config_groups.a: needs targets and weights"):
        read_config_groups({"config_groups": {"a": {"targets": []}}})


@pytest.mark.parametrize("module", [container, decoder, scheme, float_formats], ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_oracle_imports_nothing_that_it_checks(module):
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    allowed = {"numpy", "torch", "__future__", "json", "math", "collections.abc", "dataclasses", "pathlib", "typing"}
    siblings = {"harness.validation.format.scheme"}
    assert imported <= allowed | siblings
