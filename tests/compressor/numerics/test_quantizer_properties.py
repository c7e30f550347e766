"""What every quantizer owes, as statements that hold for all weights. The numbers are those of the catalogue of checks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.errors import NumericsError
from compressor.numerics import (
    QParams,
    QuantizationArgs,
    calculate_qparams,
    check_qparams,
    dequantize,
    dynamic_qparams,
    fake_quantize,
    quantize,
    weight_qparams,
)

ORDINARY = ("normal", "outliers", "constant", "positive", "negative", "zero groups", "halves")


def _spread(qparams, case):
    """The scale of each weight, float64 [R, C]."""
    return qparams.scale.double().repeat_interleave(case.weight.shape[1] // qparams.scale.shape[-1], -1).expand(case.weight.shape)


@pytest.mark.parametrize("observer", ["minmax", "mse"])
@given(data=st.data())
def test_01_02_scales_are_positive_and_zero_points_are_codes(cases, observer, data):
    case = data.draw(cases(observer=observer))
    qparams = weight_qparams(case.weight, case.args)
    check_qparams(qparams, "weight", case.args)
    assert qparams.scale.dtype == case.weight.dtype


@given(data=st.data())
def test_03_codes_survive_the_way_to_values_and_back(cases, data):
    case = data.draw(cases(dtypes=(torch.float32,), styles=ORDINARY))
    qparams = weight_qparams(case.weight, case.args)
    low, high = case.args.code_range
    codes = torch.linspace(low, high, case.weight.numel()).reshape(case.weight.shape).to(case.args.storage_dtype)
    again = quantize(dequantize(codes, qparams, case.args), qparams, case.args)
    assert torch.equal(again.float(), codes.float())


@given(data=st.data())
def test_04_the_error_is_at_most_half_a_step(cases, data):
    case = data.draw(cases(types=("int",), styles=ORDINARY))
    if not case.args.symmetric and case.weight.dtype != torch.float32:
        return  # there, adding the zero point rounds on the grid of the sum, as in compressed-tensors
    qparams = weight_qparams(case.weight, case.args)
    values = dequantize(quantize(case.weight, qparams, case.args), qparams, case.args)
    scale, weight = _spread(qparams, case), case.weight.double()
    eps = torch.finfo(case.weight.dtype).eps
    rounding = 2 * eps * weight.abs() + (0 if case.args.symmetric else 256 * eps * scale)
    assert ((values.double() - weight).abs() <= scale / 2 + rounding).all()  # minmax: no weight lies outside of the clipping range


@given(data=st.data())
def test_04_the_error_of_fp8_is_at_most_half_its_own_step(cases, data):
    # Not float16: below absmax 0.027 its fp8 scales are subnormal and too coarse for this, as they are in compressed-tensors.
    case = data.draw(cases(dtypes=(torch.bfloat16, torch.float32), types=("float",), styles=ORDINARY))
    qparams = weight_qparams(case.weight, case.args)
    values = dequantize(quantize(case.weight, qparams, case.args), qparams, case.args)
    scale, weight = _spread(qparams, case), case.weight.double()
    limit = torch.maximum(weight.abs() / 16, scale * 2.0**-10) + 2 * torch.finfo(case.weight.dtype).eps * weight.abs()
    assert ((values.double() - weight).abs() <= limit).all()


@given(data=st.data())
def test_05_zero_stays_zero(cases, data):
    case = data.draw(cases())
    case.weight[..., -1] = 0
    qparams = weight_qparams(case.weight, case.args)
    values = dequantize(quantize(case.weight, qparams, case.args), qparams, case.args)
    assert (values[case.weight == 0] == 0).all()


@given(data=st.data())
def test_06_larger_weights_never_get_smaller_codes(cases, data):
    case = data.draw(cases(strategies=("tensor",)))
    weight = case.weight.flatten().sort().values
    codes = quantize(weight, weight_qparams(weight, case.args), case.args).float()
    assert (codes.diff() >= 0).all()


@pytest.mark.parametrize("observer", ["minmax", "mse"])
@given(data=st.data(), power=st.integers(-3, 3))
def test_07_a_power_of_two_passes_through(cases, same_bits, observer, data, power):
    case = data.draw(cases(styles=("halves",), observer=observer))
    factor = 2.0**power
    one, other = weight_qparams(case.weight, case.args), weight_qparams(case.weight * factor, case.args)
    assert same_bits(quantize(case.weight, one, case.args), quantize(case.weight * factor, other, case.args))
    nonzero = case.groups.abs().amax(-1) > 0  # groups of zeros have a scale of their own
    assert same_bits((one.scale * factor)[nonzero.reshape(one.scale.shape)], other.scale[nonzero.reshape(one.scale.shape)])


@given(data=st.data())
def test_08_symmetric_formats_are_odd_where_both_signs_have_a_code(cases, data):
    case = data.draw(cases(symmetric=(True,)))
    qparams = weight_qparams(case.weight, case.args)
    codes, mirrored = (quantize(weight, qparams, case.args).float() for weight in (case.weight, -case.weight))
    both = codes.abs() < case.args.code_range[1] if case.args.type == "int" else torch.ones_like(codes, dtype=torch.bool)
    assert torch.equal(codes[both], -mirrored[both])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_09_ties_go_to_even(dtype):
    halves = torch.arange(-15, 16, 2, dtype=dtype) / 2
    qparams = QParams(torch.tensor([0.25], dtype=dtype), None)
    codes = quantize(halves * 0.25, qparams, QuantizationArgs(num_bits=8))
    assert codes.tolist() == [-8, -6, -6, -4, -4, -2, -2, 0, 0, 2, 2, 4, 4, 6, 6, 8]
    fp8 = quantize(
        torch.tensor([17.0, 19.0, -21.0], dtype=dtype), QParams(torch.ones(1, dtype=dtype), None), QuantizationArgs(type="float")
    )
    assert fp8.float().tolist() == [16.0, 20.0, -20.0]


@pytest.mark.parametrize("observer", ["minmax", "mse"])
@given(data=st.data())
def test_11_a_group_knows_nothing_of_the_others(cases, same_bits, observer, data):
    case = data.draw(cases(strategies=("channel", "group"), observer=observer))
    before = weight_qparams(case.weight, case.args)
    changed = case.weight.clone()
    columns = case.args.group_size or changed.shape[1]
    changed[0, :columns] = torch.arange(columns, dtype=changed.dtype) - 3
    after = weight_qparams(changed, case.args)
    codes, codes_after = quantize(case.weight, before, case.args), quantize(changed, after, case.args)
    others = torch.ones_like(before.scale, dtype=torch.bool)
    others[0, 0] = False
    assert same_bits(before.scale[others], after.scale[others])
    spread = others.repeat_interleave(columns, 1)
    assert same_bits(codes[spread].float(), codes_after[spread].float())


@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), scale=st.sampled_from([1e-4, 1.0, 3.0]), seed=st.integers(0, 99)
)
def test_12_fp8_saturates_and_never_writes_nan(dtype, scale, seed):
    x = torch.randn(64, generator=torch.Generator().manual_seed(seed)) * 1000
    x[:6] = torch.tensor([448.0, 464.0, 465.0, 65504.0, float("inf"), float("-inf")])
    codes = quantize(x.to(dtype), QParams(torch.tensor([scale], dtype=dtype), None), QuantizationArgs(type="float"))
    assert not ((codes.view(torch.uint8) & 0x7F) == 0x7F).any()
    assert codes.float()[3:6].tolist() == [448.0, 448.0, -448.0]


@pytest.mark.parametrize("args", [QuantizationArgs(), QuantizationArgs(type="float"), QuantizationArgs(num_bits=4, symmetric=False)])
def test_12_nan_has_no_code(args):
    with pytest.raises(NumericsError, match="NaN"):
        quantize(torch.tensor([1.0, float("nan")]), QParams(torch.ones(1), None), args)


@given(data=st.data())
def test_14_the_stored_scale_gives_what_calibration_used(cases, same_bits, data):
    case = data.draw(cases())
    qparams = weight_qparams(case.weight, case.args)
    stored = dequantize(quantize(case.weight, qparams, case.args), qparams, case.args)
    used = fake_quantize(case.weight, qparams, case.args)
    assert stored.dtype == used.dtype
    assert torch.equal(stored, used)


@pytest.mark.parametrize("number_type", ["int", "float"])
@given(batch=st.integers(1, 3), tokens=st.integers(1, 6), seed=st.integers(0, 2**31))
def test_16_tokens_are_quantized_on_their_own(same_bits, number_type, batch, tokens, seed):
    args = QuantizationArgs(type=number_type, strategy="token", dynamic=True)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, tokens, 17, generator=generator, dtype=torch.float32).bfloat16()
    order = torch.randperm(tokens, generator=generator)
    qparams, permuted = dynamic_qparams(x, args), dynamic_qparams(x[:, order], args)
    assert same_bits(qparams.scale[:, order], permuted.scale)
    assert same_bits(fake_quantize(x, qparams, args)[:, order], fake_quantize(x[:, order], permuted, args))
    assert same_bits(dynamic_qparams(x[:, :1], args).scale, qparams.scale[:, :1])


@given(data=st.data())
def test_arguments_are_left_alone(cases, same_bits, data):
    case = data.draw(cases())
    weight = case.weight.clone()
    qparams = weight_qparams(case.weight, case.args)
    kept = qparams.map(torch.clone)
    codes = quantize(case.weight, qparams, case.args)
    codes_kept, float_codes = codes.clone(), codes.to(qparams.scale.dtype)
    dequantize(codes, qparams, case.args)
    dequantize(float_codes, qparams, case.args)
    fake_quantize(case.weight, qparams, case.args)
    assert same_bits(weight, case.weight)
    assert same_bits(codes, codes_kept)
    assert torch.equal(float_codes, codes_kept.to(float_codes.dtype))
    assert same_bits(kept.scale, qparams.scale)
    assert same_bits(calculate_qparams(case.groups.amin(-1), case.groups.amax(-1), case.args).scale.flatten(), kept.scale.flatten())
