"""fp4, NVFP4, the MX formats and blocks of fp8: what their definitions say, and to the last bit what compressed-tensors 0.20 computes."""

from __future__ import annotations

import math

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import fake_quantize as their_fake_quantize
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams as their_calculate_qparams
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam
from compressed_tensors.quantization.utils.helpers import maybe_pad_tensor_for_block_quant
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compressor.errors import NumericsError, SchemeError
from compressor.numerics import (
    QuantizationArgs,
    calculate_global_scale,
    calculate_qparams,
    check_qparams,
    decode_mx_scale,
    dequantize,
    dynamic_qparams,
    encode_mx_scale,
    fake_quantize,
    mx_scale,
    pack_fp4,
    preset_scheme,
    quantize,
    unpack_fp4,
    weight_qparams,
)
from compressor.numerics.formats import FP4_VALUES, snap_

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WEIGHTS = ("NVFP4A16", "MXFP4A16", "MXFP8A16", "FP8_BLOCK")
STYLES = ("normal", "outliers", "constant", "zeros", "zero groups", "tiny", "halves", "huge")


def weight_of(style: str, shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(shape, generator=generator, dtype=torch.float64) * 4 - 2
    if style == "outliers":
        values[:, ::17] *= 100
    elif style == "constant":
        values[:] = values[0, 0]
    elif style == "zeros":
        values.zero_()
    elif style == "zero groups":
        values[:, :32] = 0
    elif style == "tiny":
        values *= torch.finfo(dtype).smallest_normal * 8
    elif style == "halves":
        values = torch.randint(-12, 13, shape, generator=generator) / 2
    elif style == "huge":
        values *= torch.finfo(dtype).max / 2.5
    return values.to(dtype)


def theirs(preset: str):
    return preset_name_to_scheme(preset, ["Linear"])


def their_global_scale(low: Tensor, high: Tensor) -> Tensor:
    """Theirs, but in float32 where it overflows in float16, and the largest number where it does there: 1 leaves small weights none."""
    largest = max(float(low.abs().max()), float(high.abs().max()))
    wide = (low.float(), high.float()) if 448.0 * 6 / max(largest, 1e-30) > torch.finfo(low.dtype).max else (low, high)
    found, most = generate_gparam(wide[0].min(), wide[1].max()), torch.finfo(torch.float32).max
    return torch.full_like(found, most) if largest and 448.0 * 6 / largest > most else found


def test_fp4_rounds_to_the_nearest_and_ties_to_even() -> None:
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    x = torch.cat([x, ties, -ties])
    for value, snapped in zip(x.tolist(), snap_(x.clone(), "float", 4).tolist(), strict=True):
        distances = [abs(min(abs(value), 6.0) - code) for code in FP4_VALUES]
        nearest = [index for index, distance in enumerate(distances) if distance == min(distances)]
        even = next((index for index in nearest if index % 2 == 0), nearest[0])
        assert abs(snapped) == FP4_VALUES[even] and (snapped == 0 or math.copysign(1, snapped) == math.copysign(1, value))


@given(dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**31))
def test_fp4_rounding_is_theirs(same_bits, dtype, seed):
    from compressed_tensors.quantization.quant_args import FP4_E2M1_DATA

    x = ((torch.rand(200, generator=torch.Generator().manual_seed(seed)) * 16 - 8) * 4).round().div(4).to(dtype)
    x = torch.cat([x, torch.tensor([0.0, -0.0, -0.1, 0.1, 0.25, -0.25], dtype=dtype)])
    assert same_bits(snap_(x.clone(), "float", 4), FP4_E2M1_DATA.cast_to_fp4(x.clamp(-6, 6)))


@given(rows=st.integers(0, 9), pairs=st.integers(0, 40), seed=st.integers(0, 2**31))
def test_fp4_bytes_are_theirs_and_come_back(same_bits, rows, pairs, seed):
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8

    packed = torch.randint(0, 256, (rows, pairs), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    codes = unpack_fp4(packed)
    assert codes.shape == (rows, 2 * pairs) and torch.equal(pack_fp4(codes), packed)
    assert same_bits(codes.to(torch.bfloat16), unpack_fp4_from_uint8(packed, rows, 2 * pairs))
    assert torch.equal(packed, pack_fp4_to_uint8(codes.to(torch.bfloat16)))


def test_what_is_no_fp4_is_not_packed() -> None:
    with pytest.raises(NumericsError, match="no fp4 value"):
        pack_fp4(torch.tensor([[0.5, 0.75]]).to(torch.float8_e4m3fn))
    with pytest.raises(SchemeError, match="even number of columns"):
        pack_fp4(torch.zeros(2, 3).to(torch.float8_e4m3fn))
    with pytest.raises(SchemeError, match=r"not float8_e4m3fn|are not float8"):
        pack_fp4(torch.zeros(2, 4))
    with pytest.raises(SchemeError, match=r"not torch\.uint8"):
        unpack_fp4(torch.zeros(2, 4, dtype=torch.int8))


def test_mx_scales_are_the_powers_of_two_that_their_bytes_say() -> None:
    stored = torch.arange(255, dtype=torch.uint8)
    scales = decode_mx_scale(stored)
    assert scales.tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert torch.equal(encode_mx_scale(scales), stored)
    for wrong in (0.0, -1.0, 3.0, float("nan"), float("inf")):
        with pytest.raises(NumericsError, match="no power of two"):
            encode_mx_scale(torch.tensor([1.0, wrong]))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_value_of_a_group_lands_in_the_last_binade(bits: int) -> None:
    largest = {4: 6.0, 8: 448.0}[bits]
    values = torch.linspace(1, 2, 129, dtype=torch.float32)[:-1]
    for exponent in (-20, -1, 0, 1, 30):
        scaled = values * 2.0**exponent / mx_scale(values * 2.0**exponent, bits)
        below = values < 1.75
        assert torch.all(scaled[below] < largest * 1.75 / 1.5 + 64 * (bits == 8)) and torch.all(scaled[below] >= largest / 2)
        assert torch.all(scaled[~below] < largest) and torch.all(scaled[~below] >= largest / 2.1)
    with pytest.raises(SchemeError, match="MX scales"):
        mx_scale(values, 6)


@pytest.mark.parametrize("preset", WEIGHTS)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_theirs(same_bits, preset, style, dtype):
    """Scales, global scale, codes and bytes; shapes with remainders for blocks, one row, prime rows."""
    for shape in ((24, 256), (1, 128), (7, 384), *([(130, 200), (1, 1), (131, 127)] if preset == "FP8_BLOCK" else [])):
        weight, scheme, their_scheme = weight_of(style, shape, dtype, sum(shape)), preset_scheme(preset), theirs(preset)
        args = scheme.weights
        ours = weight_qparams(weight, args)
        if args.block_structure is not None:
            padded = maybe_pad_tensor_for_block_quant(weight, args.block_structure)
            blocks = padded.reshape(padded.shape[0] // 128, 128, -1, 128).transpose(1, 2)
            low, high, global_scale = blocks.amin((2, 3)), blocks.amax((2, 3)), None
        else:
            groups = weight.unflatten(1, (-1, args.group_size))
            low, high = groups.amin(-1), groups.amax(-1)
            global_scale = their_global_scale(low, high) if args.has_global_scale else None
        scale, _ = their_calculate_qparams(low, high, their_scheme.weights, global_scale=global_scale)
        assert same_bits(ours.scale, scale.to(dtype))
        assert (ours.global_scale is None) == (global_scale is None)
        assert ours.global_scale is None or same_bits(ours.global_scale, global_scale)
        check_qparams(ours, "w", args)
        codes = quantize(weight, ours, args)
        state = {"weight": weight, "weight_scale": ours.scale}
        state |= {} if global_scale is None else {"weight_global_scale": global_scale}
        compressor = BaseCompressor.get_value_from_registry(scheme.compression_format)
        packed = compressor.compress(state, their_scheme)
        if args.num_bits == 4:
            assert torch.equal(packed["weight_packed"], pack_fp4(codes))
        else:
            assert same_bits(packed["weight"], codes)
        if args.is_mx:
            assert torch.equal(packed["weight_scale"], encode_mx_scale(ours.scale))
        read = compressor.decompress(packed, their_scheme)["weight"]
        as_read = ours._replace(scale=ours.scale.to(read.dtype))
        assert same_bits(read, dequantize(codes, as_read, args))


@pytest.mark.parametrize("preset", ["NVFP4", "MXFP4", "MXFP8", "FP8_BLOCK"])
@pytest.mark.parametrize("style", ["normal", "outliers", "zeros", "zero groups", "halves"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dynamic_groups_of_activations_are_theirs(same_bits, preset, style, dtype):
    args, their_args = preset_scheme(preset).input_activations, theirs(preset).input_activations
    x = weight_of(style, (10, 256), dtype, 3).reshape(2, 5, 256)
    global_scale = generate_gparam(x.min(), x.max()) if args.has_global_scale else None
    if global_scale is not None:
        assert same_bits(calculate_global_scale(x.min(), x.max()), global_scale)
    scale, zero_point = compute_dynamic_scales_and_zp(x, their_args, None, global_scale=global_scale)
    ours = dynamic_qparams(x, args, global_scale)
    assert same_bits(ours.scale, scale)
    assert same_bits(fake_quantize(x, ours, args), their_fake_quantize(x, scale, zero_point, their_args, global_scale=global_scale))


@given(preset=st.sampled_from(WEIGHTS), dtype=st.sampled_from(DTYPES), style=st.sampled_from(STYLES), seed=st.integers(0, 999))
def test_codes_are_fixed_points_and_groups_are_local(same_bits, preset, dtype, style, seed):
    args = preset_scheme(preset).weights
    weight = weight_of(style, (3, 256), dtype, seed)
    qparams = weight_qparams(weight, args)
    codes = quantize(weight.float(), qparams._replace(scale=qparams.scale.float()), args)
    wide = qparams._replace(scale=qparams.scale.float())
    again = quantize(dequantize(codes, wide, args), wide, args)
    assert torch.equal(again.float(), codes.float())
    assert torch.equal(dequantize(torch.zeros_like(codes), qparams, args), torch.zeros_like(weight))
    if preset in ("MXFP4A16", "MXFP8A16"):  # another group does not change this one
        other = weight.clone()
        other[:, 32:64] *= 0.4
        changed = weight_qparams(other, args)
        assert same_bits(changed.scale[:, [0, *range(2, 8)]], qparams.scale[:, [0, *range(2, 8)]])


@pytest.mark.parametrize("preset", WEIGHTS)
def test_an_error_is_at_most_half_a_step(preset: str) -> None:
    args = preset_scheme(preset).weights
    weight = weight_of("normal", (5, 256), torch.float32, 11)
    qparams = weight_qparams(weight, args)
    values = dequantize(quantize(weight, qparams, args), qparams, args)
    largest = weight.abs().max()
    # The widest steps: 2 below a largest code of 6 for fp4, 32 below 448 for fp8; MX scales are up to twice as coarse, and saturate.
    share = (1 / 3 if args.num_bits == 4 else 1 / 14) * (2 if args.is_mx else 1) / 2
    assert (values - weight).abs().max() <= share * largest * 1.1


def test_a_global_scale_fills_the_range_of_fp8_and_zeros_have_one() -> None:
    weight = weight_of("normal", (8, 64), torch.float32)
    qparams = weight_qparams(weight, preset_scheme("NVFP4").weights)
    assert float(qparams.scale.max()) == 448.0
    assert calculate_global_scale(torch.zeros(3), torch.zeros(3)).tolist() == [1.0]
    shared = weight_qparams(weight, preset_scheme("NVFP4").weights, global_scale=torch.tensor([7.0]))
    assert shared.global_scale is not None and shared.global_scale.tolist() == [7.0]


@pytest.mark.parametrize("size", [3e-35, 8e-36, 7e-36, 1e-36, 1e-38, 2e-39])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_so_small_that_a_global_scale_overflows_do_not_become_zero(size: float, dtype: torch.dtype) -> None:
    args = preset_scheme("NVFP4").weights
    weight = (weight_of("normal", (8, 64), torch.float64) * size).to(dtype)
    qparams = weight_qparams(weight, args)
    check_qparams(qparams, "w", args)
    values = dequantize(quantize(weight, qparams, args), qparams, args)
    assert float((values.double() - weight.double()).norm() / weight.double().norm()) < 0.12


def test_bad_global_scales_are_refused() -> None:
    args = preset_scheme("NVFP4").weights
    good = weight_qparams(torch.ones(2, 32), args)
    for wrong in (
        torch.tensor([0.0]),
        torch.tensor([float("nan")]),
        torch.tensor([-1.0]),
        torch.ones(2),
        torch.ones(1, dtype=torch.float64),
    ):
        with pytest.raises(NumericsError, match="w: global scale"):
            check_qparams(good._replace(global_scale=wrong), "w", args)


def test_shapes_that_do_not_fit_are_refused() -> None:
    block = preset_scheme("FP8_BLOCK").weights
    qparams = weight_qparams(torch.ones(200, 200), block)
    assert qparams.scale.shape == (2, 2)
    with pytest.raises(SchemeError, match="does not fit 300 rows and 200 columns in blocks of 128 x 128"):
        quantize(torch.ones(300, 200), qparams, block)
    with pytest.raises(SchemeError, match="do not divide into groups of group_size=16"):
        weight_qparams(torch.ones(2, 40), preset_scheme("NVFP4").weights)
    with pytest.raises(SchemeError, match="do not divide into groups of group_size=32"):
        dynamic_qparams(torch.ones(2, 3, 40), preset_scheme("MXFP4").input_activations)
    with pytest.raises(NumericsError, match="holds NaN or infinity"):
        weight_qparams(torch.full((2, 32), float("nan")), preset_scheme("MXFP4").weights)


def test_the_mse_observer_never_does_worse(same_bits) -> None:
    weight = weight_of("outliers", (6, 256), torch.float32, 5)
    for preset in WEIGHTS:
        plain = preset_scheme(preset).weights
        searching = QuantizationArgs(**{**dict(plain), "observer": "mse", "observer_kwargs": {"norm": 2.0}})
        errors = []
        for args in (plain, searching):
            qparams = weight_qparams(weight, args)
            errors.append(float((dequantize(quantize(weight, qparams, args), qparams, args) - weight).square().sum()))
        assert errors[1] <= errors[0] * 1.0001


@pytest.mark.parametrize("value", [1.0, 448.0 * 6])
def test_ranges_without_dimensions_give_one_scale(value: float) -> None:
    args = preset_scheme("NVFP4").input_activations
    global_scale = calculate_global_scale(torch.tensor(-value), torch.tensor(value / 2))
    qparams = calculate_qparams(torch.tensor(-value), torch.tensor(value / 2), args, global_scale)
    assert qparams.scale.shape == (1,) and qparams.scale.tolist() == [448.0]
