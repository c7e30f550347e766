"""The runtime layer computes what compressed-tensors computes, from the bytes that go on disk."""

from __future__ import annotations

import copy

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs as PeerArgs
from compressed_tensors.quantization import fake_quantize as peer_fake_quantize
from torch import Tensor, nn

from compressor.algorithms.rtn import round_to_nearest
from compressor.errors import SchemeError
from compressor.nn import NaiveQuantizedLinear, PackQuantizedLinear, QuantizedLinear
from compressor.numerics import QParams, QuantizationScheme, calculate_qparams, dequantize, preset_scheme
from compressor.numerics.packing import quantized_bytes

PRESETS = ("W4A16", "W4A16_ASYM", "W3A16", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC")
DTYPES = (torch.bfloat16, torch.float32)


def linear_of(rows: int = 24, columns: int = 256, dtype: torch.dtype = torch.bfloat16, *, bias: bool = True) -> nn.Linear:
    g = torch.Generator().manual_seed(rows * columns)
    linear = nn.Linear(columns, rows, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=g) - 0.5)
    return linear.eval()


def quantized(linear: nn.Linear, scheme: QuantizationScheme) -> tuple[QuantizedLinear, QParams, Tensor]:
    args = scheme.weights
    assert args is not None
    weight = linear.weight.detach()
    if args.strategy == "tensor":
        low, high = torch.aminmax(weight)
    else:
        groups = weight.unflatten(1, (-1, args.group_size if args.strategy == "group" and args.group_size else weight.shape[1]))
        low, high = groups.amin(-1), groups.amax(-1)
    qparams = calculate_qparams(low, high, args)
    codes = round_to_nearest(weight, qparams, args).codes_RC
    inputs = None
    if scheme.input_activations is not None and not scheme.input_activations.dynamic:
        inputs = calculate_qparams(
            torch.tensor([-1.0], dtype=weight.dtype), torch.tensor([1.5], dtype=weight.dtype), scheme.input_activations
        )
    return QuantizedLinear.from_linear(linear, scheme, codes, qparams, input_qparams=inputs), qparams, codes


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_is_the_product_with_what_the_codes_mean(preset: str, dtype: torch.dtype) -> None:
    linear = linear_of(dtype=dtype)
    scheme = preset_scheme(preset)
    layer, qparams, codes = quantized(linear, scheme)
    assert scheme.weights is not None
    assert torch.equal(layer.codes().float(), codes.float())
    weight = dequantize(codes, qparams, scheme.weights)
    assert torch.equal(layer.dequantized_weight(), weight)
    x = (torch.rand(2, 5, 256, generator=torch.Generator().manual_seed(1)) - 0.5).to(dtype)
    if scheme.input_activations is not None:
        x_seen = _peer_input(layer, x, scheme)
    else:
        x_seen = x
    assert torch.equal(layer(x), nn.functional.linear(x_seen, weight, linear.bias))


def _peer_input(layer: QuantizedLinear, x: Tensor, scheme: QuantizationScheme) -> Tensor:
    """The input as compressed-tensors' own forward would quantize it."""
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    args = scheme.input_activations
    assert args is not None
    peer_args = PeerArgs(num_bits=args.num_bits, type=args.type, strategy=args.strategy, symmetric=args.symmetric, dynamic=args.dynamic)
    if args.dynamic:
        scale, zero_point = compute_dynamic_scales_and_zp(x, peer_args, layer)
    else:
        scale, zero_point = layer.get_buffer("input_scale"), None
    return peer_fake_quantize(x, scale, zero_point, peer_args)


@pytest.mark.parametrize("preset", PRESETS)
def test_state_dict_round_trip_copy_and_size(preset: str) -> None:
    scheme = preset_scheme(preset)
    layer, _, _ = quantized(linear_of(), scheme)
    x = torch.rand(1, 3, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    other, _, _ = quantized(linear_of(), scheme)
    with torch.no_grad():
        for buffer in other.buffers():
            buffer.zero_()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert sum(t.nbytes for name, t in layer.state_dict().items() if name != "bias") == quantized_bytes(24, 256, scheme)


def test_class_and_names_follow_the_format() -> None:
    packed, _, _ = quantized(linear_of(), preset_scheme("W4A16_ASYM"))
    assert isinstance(packed, PackQuantizedLinear)
    assert set(packed.state_dict()) == {"weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "bias"}
    naive, _, _ = quantized(linear_of(bias=False), preset_scheme("FP8"))
    assert isinstance(naive, NaiveQuantizedLinear)
    assert set(naive.state_dict()) == {"weight", "weight_scale", "input_scale"}
    assert naive.state_dict()["weight"].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("preset", [*PRESETS, "NVFP4A16", "MXFP4A16"])
def test_whoever_reads_the_weight_gets_the_values_that_it_stands_for(preset: str) -> None:
    from compressor.nn import quantized as rounded

    linear = linear_of(dtype=torch.float32)
    layer = rounded(linear, preset_scheme(preset).model_copy(update={"input_activations": None}))
    read = layer.weight
    assert read.dtype == torch.float32 and torch.equal(read, layer.dequantized_weight())
    assert float((read - linear.weight).detach().norm()) < 0.3 * float(linear.weight.detach().norm())
    assert copy.deepcopy(layer).state_dict().keys() == layer.state_dict().keys()
    assert "weight" in layer.state_dict() or "weight_packed" in layer.state_dict()


def test_materialize_keeps_the_weight_only_inside_the_context() -> None:
    layer, _, _ = quantized(linear_of(), preset_scheme("W4A16"))
    assert layer.dequantized_weight() is not layer.dequantized_weight()
    with layer.materialize():
        assert layer.dequantized_weight() is layer.dequantized_weight()
        x = torch.ones(1, 256, dtype=torch.bfloat16)
        inside = layer(x)
    assert layer.dequantized_weight() is not layer.dequantized_weight()
    assert torch.equal(inside, layer(x))


def test_reordered_groups_are_read_through_their_index() -> None:
    linear = linear_of(8, 256)
    scheme = preset_scheme("W4A16")
    assert scheme.weights is not None
    g_idx = (torch.arange(256) % 2).int()
    scale = torch.tensor([[0.1, 0.2]], dtype=torch.bfloat16).expand(8, 2)
    codes = torch.ones(8, 256, dtype=torch.int8)
    layer = QuantizedLinear.from_linear(linear, scheme, codes, QParams(scale, None), g_idx_C=g_idx)
    expected = scale[:, g_idx.long()]
    assert torch.equal(layer.dequantized_weight(), expected)
    assert "weight_g_idx" in layer.state_dict()


def test_what_cannot_be_stored_is_refused() -> None:
    linear = linear_of()
    static = preset_scheme("FP8")
    codes, scale = torch.zeros(24, 256, dtype=torch.float8_e4m3fn), torch.ones(1, dtype=torch.bfloat16)
    with pytest.raises(SchemeError, match=r"static input without a scale"):
        QuantizedLinear.from_linear(linear, static, codes, QParams(scale, None))
    with pytest.raises(SchemeError, match=r"stores no g_idx"):
        QuantizedLinear.from_linear(linear, preset_scheme("W8A8"), codes.to(torch.int8), QParams(scale, None), g_idx_C=torch.zeros(256))


def test_one_zero_point_for_the_whole_tensor_is_stored_as_it_is() -> None:
    args = {"num_bits": 4, "strategy": "tensor", "symmetric": False}
    scheme = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": args})
    layer, qparams, codes = quantized(linear_of(), scheme)
    assert qparams.zero_point is not None
    assert torch.equal(layer.state_dict()["weight_zero_point"], qparams.zero_point)
    assert torch.equal(layer.dequantized_weight(), dequantize(codes, qparams, layer.weight_args))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_change_of_dtype_keeps_the_codes(dtype: torch.dtype) -> None:
    layer, _, codes = quantized(linear_of(), preset_scheme("FP8"))
    layer.to(dtype)
    assert layer.weight_scale.dtype == dtype
    assert layer.codes().dtype == torch.float8_e4m3fn
    assert torch.equal(layer.codes().float(), codes.float())


def test_repr_says_what_it_is() -> None:
    layer, _, _ = quantized(linear_of(), preset_scheme("W4A16"))
    assert "bits=4, strategy=group, group_size=128" in repr(layer)
    assert "format=pack-quantized" in repr(layer)
