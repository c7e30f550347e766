"""Our numbers are those of compressed-tensors 0.20, to the last bit: transformers runs that library on our checkpoints."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationScheme as TheirScheme
from compressed_tensors.quantization import QuantizationStatus, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle import forward as their_forward
from compressed_tensors.quantization.utils import calculate_qparams as their_calculate_qparams
from hypothesis import given
from hypothesis import strategies as st

from compressor.numerics import (
    PRESETS,
    QParams,
    QuantizationArgs,
    QuantizationScheme,
    calculate_qparams,
    dequantize,
    dynamic_qparams,
    fake_quantize,
    pack_int32,
    quantize,
    unpack_int32,
    weight_qparams,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@given(data=st.data())
def test_scales_and_zero_points_are_theirs(cases, peer_args, same_bits, data):
    case = data.draw(cases())
    min_vals, max_vals = case.groups.amin(-1), case.groups.amax(-1)
    if data.draw(st.booleans(), label="without dimensions"):
        min_vals, max_vals = min_vals.min(), max_vals.max()
    ours = calculate_qparams(min_vals, max_vals, case.args)
    scale, zero_point = their_calculate_qparams(min_vals, max_vals, peer_args(case.args))
    sane = scale.isfinite()  # max - min may overflow there, not here
    assert ours.scale.shape == scale.shape
    assert same_bits(ours.scale[sane], scale[sane])
    assert ours.scale.isfinite().all()
    assert (ours.zero_point is None) == case.args.symmetric
    if ours.zero_point is not None:
        assert same_bits(ours.zero_point[sane], zero_point[sane])


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_points_of_ranges_without_dimensions_are_theirs(peer_args, same_bits, dtype):
    """Theirs are computed in float32 then, else in the dtype of the range: bfloat16 and 8 bits tell."""
    args = QuantizationArgs(symmetric=False)
    differs = 0
    for lowest in torch.linspace(-3, 0, 40, dtype=dtype):
        highest = torch.tensor(255.0, dtype=dtype) + lowest
        ours = calculate_qparams(lowest, highest, args)
        assert same_bits(ours.zero_point, their_calculate_qparams(lowest, highest, peer_args(args))[1])
        differs += int(ours.zero_point != calculate_qparams(lowest.reshape(1), highest.reshape(1), args).zero_point)
    assert (differs > 0) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("scale_dtype", DTYPES)
@given(data=st.data())
def test_codes_and_values_are_theirs(cases, peer_args, same_bits, scale_dtype, data):
    case = data.draw(cases(styles=("normal", "outliers", "constant", "zeros", "zero groups", "subnormal", "halves", "negative")))
    qparams = weight_qparams(case.weight, case.args)
    qparams = QParams(qparams.scale.to(scale_dtype), qparams.zero_point)
    if not bool((qparams.scale > 0).all()):
        return  # underflowed in this dtype: never stored
    scale, zero_point, args = *qparams[:2], peer_args(case.args)
    codes = quantize(case.weight, qparams, case.args)
    assert same_bits(codes, their_forward.quantize(case.weight, scale, zero_point, args, dtype=case.args.storage_dtype))
    assert same_bits(dequantize(codes, qparams, case.args), their_forward.dequantize(codes, scale, zero_point, args))
    assert same_bits(fake_quantize(case.weight, qparams, case.args), their_forward.fake_quantize(case.weight, scale, zero_point, args))


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    strategy=st.sampled_from(["token", "tensor"]),
    number=st.sampled_from([("int", 8, True), ("int", 8, False), ("int", 4, True), ("int", 4, False), ("float", 8, True)]),
    seed=st.integers(0, 2**31),
)
def test_dynamic_activations_are_theirs(peer_args, same_bits, dtype, shape, strategy, number, seed):
    number_type, num_bits, symmetric = number
    args = QuantizationArgs(type=number_type, num_bits=num_bits, symmetric=symmetric, strategy=strategy, dynamic=True)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).to(dtype)
    x[torch.rand(shape, generator=generator) < 0.2] = -0.0
    module = torch.nn.Linear(1, 1)
    module.quantization_status = QuantizationStatus.COMPRESSED
    expected = their_forward.forward_quantize(module, x, "input", peer_args(args))
    assert same_bits(fake_quantize(x, dynamic_qparams(x, args), args), expected)


@given(data=st.data())
def test_static_activations_are_theirs(cases, peer_args, same_bits, data):
    case = data.draw(cases(strategies=("tensor",), styles=("normal", "outliers", "zeros", "halves")))
    qparams = weight_qparams(case.weight, case.args)
    x = (case.weight * 2).unsqueeze(0)  # past the ends of the range, too
    assert same_bits(fake_quantize(x, qparams, case.args), their_forward.fake_quantize(x, *qparams[:2], peer_args(case.args)))


@given(num_bits=st.integers(1, 8), rows=st.integers(1, 70), columns=st.integers(1, 70), dim=st.integers(0, 1), seed=st.integers(0, 2**31))
def test_packed_words_are_theirs(same_bits, num_bits, rows, columns, dim, seed):
    half = 1 << (num_bits - 1)
    codes = torch.randint(-half, half, (rows, columns), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))
    packed = pack_int32(codes, num_bits, dim)
    assert same_bits(packed, pack_to_int32(codes, num_bits, dim))
    assert same_bits(unpack_int32(packed, num_bits, codes.shape, dim), unpack_from_int32(packed, num_bits, codes.shape, dim))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_mean_what_theirs_mean(name, peer_args):
    ours, expected = PRESETS[name], preset_name_to_scheme(name, ["Linear"])
    for ours_args, their_args in ((ours.weights, expected.weights), (ours.input_activations, expected.input_activations)):
        assert (ours_args is None) == (their_args is None)
        if ours_args is not None:
            # The dtype of zero points that a symmetric format does not have is written in some presets and inferred in others.
            left_out = {"observer": None, "zp_dtype": None}
            assert peer_args(ours_args).model_copy(update=left_out) == their_args.model_copy(update=left_out)
            assert ours_args.observer == their_args.observer
    assert ours.output_activations is expected.output_activations is None
    assert ours.compression_format == infer_module_format(torch.nn.Linear, expected).value


@given(
    bits=st.integers(2, 8),
    inputs=st.sampled_from([None, QuantizationArgs(strategy="token", dynamic=True), QuantizationArgs(type="float"), QuantizationArgs()]),
)
def test_the_format_of_integer_weights_is_theirs(peer_args, bits, inputs):
    weights = QuantizationArgs(num_bits=bits, strategy="channel")
    ours = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    scheme = TheirScheme(targets=["Linear"], weights=peer_args(weights), input_activations=inputs and peer_args(inputs))
    assert ours.compression_format == infer_module_format(torch.nn.Linear, scheme).value


@given(data=st.data())
def test_their_compressor_reads_our_tensors_to_the_same_weight(cases, peer_args, same_bits, data):
    case = data.draw(cases(strategies=("channel", "group"), styles=("normal", "outliers", "zero groups")))
    scheme = QuantizationScheme(targets=["Linear"], weights=case.args)
    qparams = weight_qparams(case.weight, case.args)
    codes = quantize(case.weight, qparams, case.args)
    state = {"weight_scale": qparams.scale}
    if scheme.compression_format == "pack-quantized":
        state |= {"weight_packed": pack_int32(codes, case.args.num_bits), "weight_shape": torch.tensor(codes.shape)}
        if qparams.zero_point is not None:
            state["weight_zero_point"] = pack_int32(qparams.zero_point, case.args.num_bits, dim=0)
    else:
        state["weight"] = codes
    their_scheme = TheirScheme(targets=["Linear"], weights=peer_args(case.args))
    read = BaseCompressor.get_value_from_registry(scheme.compression_format).decompress(state, their_scheme)
    assert same_bits(read["weight"], dequantize(codes, qparams, case.args))
