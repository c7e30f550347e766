"""Every layer x scheme x shape x dtype against a slow float64 reading of its bytes, and to the last bit against compressed-tensors."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from compressor.errors import NumericsError, SchemeError
from compressor.nn import (
    Fp4QuantizedLinear,
    NaiveQuantizedLinear,
    PackQuantizedLinear,
    QuantizedLayer,
    QuantizedLinear,
    quantized,
    replacement,
    set_matmul,
)
from compressor.numerics import (
    PRESETS,
    QParams,
    QuantizationArgs,
    QuantizationScheme,
    preset_scheme,
    quantize,
    quantized_bytes,
    weight_qparams,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOKEN8 = QuantizationArgs(strategy="token", dynamic=True)


def scheme_of(weights: dict, inputs: dict | QuantizationArgs | None = None) -> QuantizationScheme:
    return QuantizationScheme.model_validate({"targets": ["Linear"], "weights": weights, "input_activations": inputs})


ONE_OF_MANY = {f"W{bits}A{inputs}" for bits in (2, 3, 5, 6, 7) for inputs in (4, 8, 16)}  # their bits come below
SCHEMES = {
    **{name: preset_scheme(name) for name in PRESETS if name not in {"INT8", *ONE_OF_MANY}},
    **{f"int{bits} channel": scheme_of({"num_bits": bits, "strategy": "channel"}) for bits in range(2, 9)},
    **{f"int{bits} channel asymmetric": scheme_of({"num_bits": bits, "strategy": "channel", "symmetric": False}) for bits in (2, 3, 7, 8)},
    **{f"int{bits} groups asymmetric": scheme_of({"num_bits": bits, "group_size": 16, "symmetric": False}) for bits in (3, 5, 8)},
    "int4 tensor asymmetric": scheme_of({"num_bits": 4, "strategy": "tensor", "symmetric": False}),
    "int8 static": scheme_of({"strategy": "channel"}, {}),
    "int8 static asymmetric": scheme_of({"strategy": "channel", "symmetric": False}, {"symmetric": False}),
    "int8 dynamic tensor": scheme_of({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": True}),
    "fp8 channel alone": scheme_of({"type": "float", "strategy": "channel"}),
    "fp8 groups": scheme_of({"type": "float", "group_size": 16}, {"type": "float", "strategy": "token", "dynamic": True}),
}


def columns_of(scheme: QuantizationScheme) -> tuple[int, ...]:
    """One-wide, odd and prime columns where the scheme allows them, else one group and three."""
    sizes = [args.group_size for args in (scheme.weights, scheme.input_activations) if args is not None and args.is_grouped]
    return (max(sizes), 3 * max(sizes)) if sizes else (1, 33, 131)


def decoded(layer: QuantizedLayer) -> Tensor:
    """The weight by the definition of its format: bits, tables and float64; rounded once to the dtype in which it is unpacked."""
    state, args = layer.state_dict(), layer.scheme.weights
    rows, columns = layer.weight_size
    if "weight_packed" in state and args.type == "int":
        codes = words(state["weight_packed"], args.num_bits, columns)
    elif "weight_packed" in state:
        table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
        nibbles = [[nibble for byte in row for nibble in (byte & 15, byte >> 4)] for row in state["weight_packed"].tolist()]
        codes = torch.tensor([[table[nibble] for nibble in row] for row in nibbles], dtype=torch.float64)
    else:
        codes = state["weight"].double()
    scale, unpacked_to = state["weight_scale"], state["weight_scale"].dtype
    if scale.dtype == torch.uint8:
        scale, unpacked_to = torch.tensor(2.0, dtype=torch.float64) ** (scale.double() - 127), torch.bfloat16
    scale = scale.double()
    if "weight_global_scale" in state:
        scale, unpacked_to = (scale.float() / state["weight_global_scale"]).double(), torch.bfloat16
    zero = state.get("weight_zero_point")
    if zero is not None and zero.dtype == torch.int32:
        zero = words(zero.t().contiguous(), args.num_bits, rows).t()
    offset = codes - (0 if zero is None else spread(zero.double(), (rows, columns), args))
    values = offset * spread(scale, (rows, columns), args)
    wide = values.float() if "weight_global_scale" in state else values  # one float32 product comes before the rounding
    return wide.to(unpacked_to)


def words(packed: Tensor, bits: int, count: int) -> Tensor:
    """Read each row as one little-endian stream of bits."""
    stream = np.unpackbits(packed.numpy().astype("<i4").view(np.uint8), axis=1, bitorder="little")[:, : count * bits]
    places = stream.reshape(len(stream), count, bits).astype(np.int64) << np.arange(bits)
    return torch.from_numpy(places.sum(-1) - (1 << (bits - 1))).double()


def spread(parts: Tensor, shape: tuple[int, int], args: QuantizationArgs) -> Tensor:
    rows, columns = shape
    parts = parts.reshape(-1, parts.shape[-1])
    if args.block_structure:
        return torch.tensor([[parts[r // 128, c // 128] for c in range(columns)] for r in range(rows)], dtype=torch.float64)
    width = columns // parts.shape[1]
    return parts.repeat_interleave(width, 1).expand(rows, -1)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_forward_is_theirs_and_the_weight_is_its_definition(name, dtype, make_layer, their_weight, their_input, rand):
    scheme = SCHEMES[name]
    for columns in columns_of(scheme):
        for rows in (1, 7, 131) if columns < 200 else (5,):
            layer = make_layer(scheme, rows, columns, dtype)
            weight = layer.dequantized_weight()
            assert weight.dtype == dtype and torch.equal(weight, decoded(layer).to(dtype))
            assert torch.equal(weight, their_weight(layer))
            for shape in ((1, 1, columns), (2, 3, columns), (5, columns)):
                x = rand(*shape, dtype=dtype, seed=columns)
                seen = their_input(layer, x)
                assert torch.equal(layer(x), nn.functional.linear(seen, their_weight(layer), layer.bias))
                assert layer.matmul_path(x) == "dequantized"
    wide = make_layer(scheme, 7, columns_of(scheme)[-1], dtype)
    x = rand(2, 3, wide.in_features, dtype=dtype, seed=1)
    exact = their_input(wide, x).double() @ decoded(wide).double().t() + wide.bias.double()
    magnitude = their_input(wide, x).double().abs() @ decoded(wide).double().abs().t() + wide.bias.double().abs()
    bound = magnitude * (torch.finfo(dtype).eps + wide.in_features * torch.finfo(torch.float32).eps)
    assert torch.all((wide(x).double() - exact).abs() <= bound)
    for decoy in (torch.zeros_like(exact), exact / 2, exact.roll(1, -1)):
        assert not torch.all((decoy - exact).abs() <= bound)


NATIVE = {
    "W8A8": "int8",
    "W4A8": "int8",
    "int8 static": "int8",
    "int8 static asymmetric": "int8",
    "int8 dynamic tensor": "int8",
    "FP8": "fp8_exact",
    "FP8_DYNAMIC": "fp8_exact",
    "FP8_BLOCK": "fp8_exact",
    "MXFP8": "fp8_exact",
    "fp8 groups": "fp8_exact",
    "W4A16": "dequantized",
    "W4AFP8": "dequantized",
    "NVFP4": "dequantized",
    "MXFP4": "dequantized",
    "MXFP4XFP8": "dequantized",
    "fp8 channel alone": "dequantized",
}


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_times_codes_are_the_exact_product(name, dtype, make_layer, rand, int8_path):
    """The table of paths on a CPU, and one rounding in place of many: the products of codes are summed exactly."""
    scheme = SCHEMES[name]
    columns = columns_of(scheme)[-1]
    layer = make_layer(scheme, 19, columns, dtype)
    x = rand(2, 3, columns, dtype=dtype, seed=2)
    reference = layer(x)
    layer.matmul = "native"
    assert layer.matmul_path(x) == (int8_path if NATIVE[name] == "int8" else NATIVE[name])
    native = layer(x)
    assert native.dtype == dtype and native.shape == reference.shape
    if NATIVE[name] == "dequantized":
        assert torch.equal(native, reference)
        return
    args = scheme.input_activations
    x_qparams = layer._input_qparams(x, args)
    codes = quantize(x, x_qparams, args)
    x_scale = x_qparams.scale.double()
    if args.is_grouped:
        x_scale = x_scale.repeat_interleave(args.group_size, -1)
    x_zero = 0 if x_qparams.zero_point is None else x_qparams.zero_point.double()
    values = (codes.double() - x_zero) * x_scale
    state = layer.state_dict()
    zero = 0 if "weight_zero_point" not in state else spread(state["weight_zero_point"].double(), layer.weight_size, scheme.weights)
    parts = spread(layer.weight_qparams().scale.double(), layer.weight_size, scheme.weights)
    exact = values @ ((layer.codes().double() - zero) * parts).t() + layer.bias.double()
    bound = exact.abs() * torch.finfo(dtype).eps + exact.abs().max() * 2e-6
    assert torch.all((native.double() - exact).abs() <= bound)
    assert not torch.all((exact / 2 - exact).abs() <= bound)


@pytest.mark.parametrize("columns", [1, 7, 131])
@pytest.mark.parametrize("rows", [1, 2, 131])
def test_both_integer_paths_give_one_result(columns, rows, make_layer, rand, monkeypatch):
    from compressor.numerics import products

    layer = make_layer(preset_scheme("W8A8"), rows, columns, torch.bfloat16)
    layer.matmul = "native"
    x = rand(3, 4, columns, dtype=torch.bfloat16, seed=9)
    fast = layer(x)
    monkeypatch.setattr(products, "product_path", lambda *shape: "int_exact")
    assert torch.equal(layer(x), fast)


def test_a_permutation_of_tokens_permutes_the_result(make_layer, rand):
    for name in ("W8A8", "FP8_DYNAMIC", "NVFP4", "MXFP4", "FP8_BLOCK"):
        layer = make_layer(preset_scheme(name), 9, 256, torch.float32)
        x, order = rand(1, 6, 256, dtype=torch.float32, seed=3), torch.tensor([3, 1, 5, 0, 2, 4])
        for matmul in ("reference", "native"):
            set_matmul(layer, matmul)
            assert torch.equal(layer(x[:, order]).contiguous(), layer(x)[:, order].contiguous())


@pytest.mark.parametrize("name", SCHEMES)
def test_state_dict_copy_bytes_and_dtype_moves(name, make_layer, rand):
    scheme = SCHEMES[name]
    columns = columns_of(scheme)[-1]
    layer = make_layer(scheme, 24, columns, torch.bfloat16)
    kind = {"pack-quantized": PackQuantizedLinear}.get(scheme.compression_format, NaiveQuantizedLinear)
    assert isinstance(layer, Fp4QuantizedLinear if scheme.weights.num_bits == 4 and scheme.weights.type == "float" else kind)
    x = rand(2, 3, columns, dtype=torch.bfloat16, seed=5)
    before = {key: (value.dtype, value.clone()) for key, value in layer.state_dict().items()}
    assert {key: (tuple(value.shape), value.dtype) for key, value in layer.state_dict().items() if key != "bias"} == dict(layer.specs())
    stored = sum(value.nbytes for key, value in layer.state_dict().items() if key != "bias")
    assert stored == quantized_bytes(24, columns, scheme)
    other = make_layer(scheme, 24, columns, torch.bfloat16, bias=True)
    with torch.no_grad():
        for tensor in (*other.buffers(), *other.parameters()):
            tensor.zero_()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x)) and torch.equal(copy.deepcopy(layer)(x), layer(x))
    codes = layer.codes().clone()
    layer.to(torch.float32)
    assert layer.dtype == torch.float32 and torch.equal(layer.codes().float(), codes.float())
    assert layer(x.float()).dtype == torch.float32 and layer.dequantized_weight().dtype == torch.float32
    layer.to(torch.bfloat16)
    for key, (dtype, value) in before.items():
        assert layer.state_dict()[key].dtype == dtype and torch.equal(layer.state_dict()[key].float(), value.float())


def test_the_meta_device_and_back_keeps_every_dtype(make_layer):
    for name in ("W4A16", "FP8", "NVFP4", "MXFP4", "MXFP8"):
        layer = make_layer(preset_scheme(name), 8, 128, torch.float16)
        dtypes = {key: value.dtype for key, value in layer.named_buffers()}
        empty = layer.to("meta").to_empty(device="cpu")
        assert {key: value.dtype for key, value in empty.named_buffers()} == dtypes


def test_columns_in_groups_of_their_own_are_read_through_g_idx(make_linear, rand):
    linear = make_linear(6, 64, torch.float32)
    args = QuantizationArgs(num_bits=4, group_size=16, symmetric=False, actorder="group")
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    g_idx = torch.empty(64, dtype=torch.int32)
    g_idx[order] = torch.arange(64, dtype=torch.int32) // 16
    qparams = weight_qparams(linear.weight.detach()[:, order], args)
    codes = quantize(linear.weight.detach(), qparams, args, g_idx)
    layer = replacement(linear, scheme, codes, qparams, g_idx_C=g_idx)
    scale, zero = qparams.scale[:, g_idx.long()], qparams.zero_point[:, g_idx.long()].float()
    assert torch.equal(layer.dequantized_weight(), (codes.float() - zero) * scale)
    x = rand(2, 64, dtype=torch.float32, seed=0)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.dequantized_weight(), linear.bias))
    assert set(layer.specs()) == set(dict(layer.named_buffers()))


@given(rows=st.integers(1, 40), groups=st.integers(1, 4), bits=st.integers(2, 8), symmetric=st.booleans(), seed=st.integers(0, 999))
def test_packed_layers_of_any_shape_hold_their_codes(rows, groups, bits, symmetric, seed):
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(groups * 13, rows, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.rand(linear.weight.shape, generator=generator) - 0.5)
    layer = quantized(linear, scheme_of({"num_bits": bits, "group_size": 13, "symmetric": symmetric}))
    assert torch.equal(layer.dequantized_weight(), decoded(layer))


def test_gpt2_layers_are_linear_layers_with_their_weight_transposed(rand):
    from transformers.pytorch_utils import Conv1D

    conv = Conv1D(7, 256)
    with torch.no_grad():
        conv.weight.copy_(rand(256, 7, dtype=torch.float32, seed=1))
        conv.bias.copy_(rand(7, dtype=torch.float32, seed=2))
    linear = nn.Linear(256, 7)
    linear.weight, linear.bias = nn.Parameter(conv.weight.detach().t().contiguous()), conv.bias
    for name in ("W4A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16", "MXFP4"):
        ours, same = quantized(conv, preset_scheme(name)), quantized(linear, preset_scheme(name))
        assert (ours.in_features, ours.out_features) == (256, 7)
        assert all(torch.equal(value.float(), same.state_dict()[key].float()) for key, value in ours.state_dict().items())
        x = rand(2, 3, 256, dtype=torch.float32, seed=3)
        assert torch.equal(ours(x), same(x))


BAD_INPUTS = {
    "columns": (lambda: torch.zeros(2, 3), "in_features=256"),
    "integers": (lambda: torch.zeros(2, 256, dtype=torch.int64), "floating point"),
    "a number": (lambda: torch.tensor(1.0), "in_features=256"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_inputs_are_refused_by_name(case, make_linear):
    make, message = BAD_INPUTS[case]
    layer = quantized(make_linear(4, 256, torch.float32), preset_scheme("W4A16"), name="model.layers.3.up_proj")
    with pytest.raises(SchemeError, match=rf"^model\.layers\.3\.up_proj: .*{message}"):
        layer(make())
    with pytest.raises(SchemeError, match=r"up_proj: an input of torch.bfloat16 meets a layer that computes in torch.float32"):
        layer(torch.zeros(2, 256, dtype=torch.bfloat16))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_product_of_codes_refuses_what_has_no_code(wrong, make_linear):
    layer = quantized(make_linear(4, 256, torch.float32), preset_scheme("W8A8"), name="up_proj")
    layer.matmul = "native"
    x = torch.ones(1, 2, 256)
    x[0, 1, 3] = wrong
    with pytest.raises(NumericsError, match=r"^up_proj: its input holds NaN or infinity"):
        layer(x)


def test_weights_and_schemes_that_do_not_fit_are_refused_by_name(make_linear):
    linear = make_linear(4, 200, torch.float32)
    for scheme, message in (
        ("W4A16", r"^up_proj: 200 columns do not divide into groups of group_size=128"),
        ("FP8_BLOCK", r"^up_proj input: 200 columns do not divide into groups of group_size=128"),
        ("FP8", r"^up_proj: a static input without a scale"),
        ("NVFP4", r"^up_proj: 200 columns do not divide"),
    ):
        with pytest.raises(SchemeError, match=message):
            quantized(linear, preset_scheme(scheme), name="up_proj")
    with torch.no_grad():
        linear.weight[1, 1] = float("nan")
    with pytest.raises(NumericsError, match=r"^up_proj: holds NaN or infinity"):
        quantized(linear, preset_scheme("W8A8"), name="up_proj")
    with pytest.raises(SchemeError, match=r"^conv: Conv2d has no quantized layer"):
        quantized(nn.Conv2d(1, 1, 1), preset_scheme("W8A8"), name="conv")
    scale = QParams(torch.ones(4, 1), None)
    with pytest.raises(SchemeError, match=r"^up_proj: codes torch.int8 \(4, 100\) are not torch.int8 \(4, 200\)"):
        QuantizedLinear.from_linear(linear, preset_scheme("W8A8"), torch.zeros(4, 100, dtype=torch.int8), scale, name="up_proj")
    with pytest.raises(SchemeError, match=r"^up_proj\.weight_scale: shape \(3, 1\) is not \(4, 1\)"):
        wrong = QParams(torch.ones(3, 1), None)
        QuantizedLinear.from_linear(linear, preset_scheme("W8A8"), torch.zeros(4, 200, dtype=torch.int8), wrong, name="up_proj")
    with pytest.raises(SchemeError, match="'fast' does not exist"):
        set_matmul(linear, "fast")


def test_an_expert_without_tokens_gives_nothing(make_layer):
    for name in ("W8A8", "FP8", "NVFP4", "W4A16"):
        layer = make_layer(preset_scheme(name), 8, 128, torch.float32)
        for matmul in ("reference", "native"):
            set_matmul(layer, matmul)
            assert layer(torch.zeros(0, 128)).shape == (0, 8)


def test_the_repr_says_format_and_way(make_layer):
    layer = make_layer(preset_scheme("W8A8"), 8, 128, torch.float32)
    assert "format=int-quantized, type=int, bits=8, strategy=channel" in repr(layer) and "native" not in repr(layer)
    assert set_matmul(nn.Sequential(layer, nn.ReLU()), "native") == 1
    assert repr(layer).endswith("matmul=native)")
