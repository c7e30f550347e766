"""Products of codes are exact, whatever path runs, and scales and zero points come out as the definition says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compressor.errors import SchemeError
from compressor.numerics import (
    QParams,
    QuantizationArgs,
    code_product,
    dequantize,
    preset_scheme,
    product_path,
    products,
    quantize,
    run_width,
    scaled_product,
    weight_qparams,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZES = st.sampled_from((1, 2, 3, 7, 8, 16, 17, 31, 64, 127))


def int8(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def fp8(*shape: int, seed: int = 0) -> Tensor:
    values = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return torch.where((values & 0x7F) == 0x7F, 0, values).to(torch.uint8).view(torch.float8_e4m3fn)


@given(tokens=SIZES, columns=SIZES, rows=SIZES, seed=st.integers(0, 999))
def test_both_integer_paths_give_the_sum_of_products(tokens, columns, rows, seed):
    x, weight = int8(tokens, columns, seed=seed), int8(rows, columns, seed=seed + 1)
    exact = x.long() @ weight.long().t()
    for path in {product_path(torch.int8, CPU, tokens, columns, rows), "int_exact"}:
        product = code_product(x, weight, path)
        assert product.dtype == torch.int32 and torch.equal(product.long(), exact)


def test_the_largest_sums_do_not_overflow():
    x, weight = torch.full((2, 131071), -128, dtype=torch.int8), torch.full((3, 131071), -128, dtype=torch.int8)
    for path in {product_path(torch.int8, CPU, 2, 131071, 3), "int_exact"}:
        assert code_product(x, weight, path).tolist() == [[16384 * 131071] * 3] * 2
    wide = torch.full((1, 131073), -128, dtype=torch.int8)
    assert product_path(torch.int8, CPU, 1, 131073, 1) == "int_exact"
    assert code_product(wide, wide, "int_exact").tolist() == [[16384 * 131073]]


@given(tokens=SIZES, columns=SIZES, rows=SIZES, seed=st.integers(0, 999))
def test_fp8_products_are_exact_before_they_are_rounded_once(tokens, columns, rows, seed):
    x, weight = fp8(tokens, columns, seed=seed), fp8(rows, columns, seed=seed + 1)
    # In units of 2^-9 every fp8 value is an integer below 2^18, so that integers can check the sum.
    integers = (x.double() * 512).long() @ (weight.double() * 512).long().t()
    assert torch.equal(code_product(x, weight, "fp8_exact"), (integers.double() / 2**18).float())


@pytest.mark.parametrize(
    ("dtype", "device", "shape", "path"),
    [
        (torch.int8, CPU, (1, 7, 3), "int_mm"),
        (torch.int8, CPU, (0, 7, 3), "int_exact"),
        (torch.int8, CPU, (2, 1, 3), "int_exact"),
        (torch.int8, CPU, (2, 2, 3), "int_mm"),
        (torch.int8, CUDA, (17, 64, 64), "int_mm"),
        (torch.int8, CUDA, (16, 64, 64), "int_exact"),
        (torch.int8, CUDA, (17, 63, 64), "int_exact"),
        (torch.int8, CUDA, (17, 64, 63), "int_exact"),
        (torch.int8, torch.device("meta"), (17, 64, 64), "int_exact"),
        (torch.float8_e4m3fn, CPU, (17, 64, 64), "fp8_exact"),
        (torch.float8_e4m3fn, CUDA, (17, 63, 64), "fp8_exact"),
        (torch.float8_e4m3fn, CUDA, (17, 64, 65), "fp8_exact"),
    ],
)
def test_the_path_follows_from_device_and_shape(dtype, device, shape, path, monkeypatch):
    monkeypatch.setattr(products, "cpu_int_mm_is_exact", lambda: True)
    assert product_path(dtype, device, *shape) == path


def test_a_cpu_whose_kernel_saturates_sums_exactly_another_way(monkeypatch):
    def saturating(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        shifted = x.int() + 128  # the instruction multiplies unsigned by signed, and adds pairs in 16 bits
        pairs = (shifted[:, :, None] * weight.int()[None]).unflatten(1, (-1, 2)).sum(2).clamp(-(2**15), 2**15 - 1)
        return (pairs.sum(1) - 128 * weight.int().sum(0)).to(torch.int32)

    probe = products.cpu_int_mm_is_exact.__wrapped__
    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert not probe()
    monkeypatch.setattr(products, "cpu_int_mm_is_exact", probe)
    assert product_path(torch.int8, CPU, 32, 33, 7) == "int_exact"


def test_new_gpus_multiply_fp8(monkeypatch):
    for capability, path in (((8, 9), "scaled_mm"), ((9, 0), "scaled_mm"), ((8, 0), "fp8_exact")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert product_path(torch.float8_e4m3fn, CUDA, 1, 64, 64) == path


TOKEN, TENSOR = QuantizationArgs(strategy="token", dynamic=True), QuantizationArgs()
COMBINATIONS = {
    "int8 channel, token": (QuantizationArgs(strategy="channel"), TOKEN),
    "int8 tensor, tensor": (QuantizationArgs(), TENSOR),
    "int4 groups, token": (QuantizationArgs(num_bits=4, group_size=32), TOKEN),
    "int8 asymmetric, asymmetric": (QuantizationArgs(strategy="channel", symmetric=False), QuantizationArgs(symmetric=False)),
    "int5 asymmetric groups, asymmetric tokens": (
        QuantizationArgs(num_bits=5, group_size=16, symmetric=False),
        QuantizationArgs(strategy="token", dynamic=True, symmetric=False),
    ),
    "fp8 channel, token": (preset_scheme("FP8_DYNAMIC").weights, preset_scheme("FP8_DYNAMIC").input_activations),
    "fp8 tensor, tensor": (preset_scheme("FP8").weights, QuantizationArgs(type="float")),
    "fp8 blocks, groups": (preset_scheme("FP8_BLOCK").weights, preset_scheme("FP8_BLOCK").input_activations),
    "fp8 blocks, token": (preset_scheme("FP8_BLOCK").weights, preset_scheme("FP8_DYNAMIC").input_activations),
    "mxfp8": (preset_scheme("MXFP8").weights, preset_scheme("MXFP8").input_activations),
}


def input_qparams(x: Tensor, args: QuantizationArgs) -> QParams:
    from compressor.numerics import calculate_qparams, dynamic_qparams

    return dynamic_qparams(x, args) if args.dynamic else calculate_qparams(x.amin().reshape(1), x.amax().reshape(1), args)


@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.parametrize("shape", [(2, 3, 256, 24), (1, 1, 128, 1), (3, 5, 384, 131)])
def test_a_scaled_product_is_that_of_the_dequantized_values(name, shape):
    weight_args, x_args = COMBINATIONS[name]
    batch, tokens, columns, rows = shape
    generator = torch.Generator().manual_seed(columns + rows)
    x = torch.rand(batch, tokens, columns, generator=generator) * 3 - 1
    weight = torch.rand(rows, columns, generator=generator) - 0.3
    weight_parts, x_parts = weight_qparams(weight, weight_args), input_qparams(x, x_args)
    codes, x_codes = quantize(weight, weight_parts, weight_args), quantize(x, x_parts, x_args)
    found = scaled_product(x_codes, x_parts, x_args, codes, weight_parts, weight_args)
    wide = [parts.map(lambda part: part.double() if part.is_floating_point() else part) for parts in (x_parts, weight_parts)]
    expected = dequantize(x_codes, wide[0], x_args) @ dequantize(codes, wide[1], weight_args).t()
    assert found.dtype == torch.float32 and found.shape == (batch, tokens, rows)
    runs = columns // run_width(columns, x_args, weight_args)
    bound = expected.abs().max() * (runs + 3) * torch.finfo(torch.float32).eps * 4
    assert (found.double() - expected).abs().max() <= bound
    for decoy in (torch.zeros_like(expected), expected / 2, expected.roll(1, -1) if rows > 1 else expected + 1):
        assert (decoy - expected).abs().max() > bound


def test_blocks_that_are_cut_short_take_their_own_scale():
    weight_args = preset_scheme("FP8_BLOCK").weights
    x_args = preset_scheme("FP8_DYNAMIC").input_activations
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.rand(1, 2, 200, generator=generator), torch.rand(130, 200, generator=generator)
    weight[128:, 128:] *= 50
    weight_parts, x_parts = weight_qparams(weight, weight_args), input_qparams(x, x_args)
    codes, x_codes = quantize(weight, weight_parts, weight_args), quantize(x, x_parts, x_args)
    found = scaled_product(x_codes, x_parts, x_args, codes, weight_parts, weight_args)
    expected = dequantize(x_codes, x_parts, x_args).double() @ dequantize(codes, weight_parts, weight_args).double().t()
    assert torch.allclose(found.double(), expected, rtol=1e-5)


def test_runs_are_as_wide_as_scales_allow():
    w8a8, block = preset_scheme("W8A8"), preset_scheme("FP8_BLOCK")
    assert run_width(300, w8a8.input_activations, w8a8.weights) == 300
    assert run_width(384, block.input_activations, block.weights) == 128
    assert run_width(256, QuantizationArgs(strategy="group", group_size=64, dynamic=True), QuantizationArgs(group_size=32)) == 32
    assert run_width(200, w8a8.input_activations, block.weights) == 8


def test_codes_of_two_kinds_have_no_product():
    args = QuantizationArgs()
    with pytest.raises(SchemeError, match="dequantize first"):
        scaled_product(int8(2, 4), QParams(torch.ones(1), None), args, fp8(3, 4), QParams(torch.ones(1), None), args)
