"""The audit of qparams, ranges that nearly overflow, and groups that are not runs of columns (g_idx)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.errors import NumericsError, SchemeError
from compressor.numerics import (
    QParams,
    QuantizationArgs,
    calculate_qparams,
    check_groups,
    check_qparams,
    dequantize,
    dynamic_qparams,
    quantize,
    weight_qparams,
)

ASYM4 = QuantizationArgs(num_bits=4, symmetric=False)
GROUP2 = QuantizationArgs(num_bits=4, group_size=2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_bad_scale_is_named(bad):
    with pytest.raises(NumericsError, match=r"up_proj: 1 of 2 scales are not finite and positive"):
        check_qparams(QParams(torch.tensor([[1.0], [bad]]), None), "up_proj")


@pytest.mark.parametrize(
    ("zero_point", "args", "message"),
    [
        (torch.zeros(1), None, "not torch.int8"),
        (torch.zeros(2, dtype=torch.int8), None, "as its scale asks"),
        (torch.full((1,), 8, dtype=torch.int8), ASYM4, "outside of the codes -8 to 7"),
        (None, ASYM4, "symmetric=False"),
        (torch.zeros(1, dtype=torch.int8), QuantizationArgs(), "symmetric=True"),
    ],
)
def test_a_bad_zero_point_is_named(zero_point, args, message):
    with pytest.raises(NumericsError, match=f"up_proj: .*{message}"):
        check_qparams(QParams(torch.ones(1), zero_point), "up_proj", args)


def test_good_qparams_pass_and_none_at_all_do_not():
    check_qparams(QParams(torch.ones(3, 1), None), "up_proj", QuantizationArgs())
    check_qparams(QParams(torch.ones(1), torch.full((1,), -8, dtype=torch.int8)), "up_proj", ASYM4)
    with pytest.raises(NumericsError, match="0 of 0 scales"):
        check_qparams(QParams(torch.ones(0, 1), None), "up_proj")


def test_nan_in_the_range_shows_in_the_scale_and_is_never_cast():
    nan = torch.tensor([float("nan"), 0.0])
    for args in (QuantizationArgs(), ASYM4):
        qparams = calculate_qparams(nan, nan, args)
        assert qparams.scale.isnan().tolist() == [True, False]
        with pytest.raises(NumericsError, match="1 of 2 scales"):
            check_qparams(qparams, "up_proj", args)
    assert qparams.zero_point.tolist() == [0, 0]


def test_a_range_wider_than_the_dtype_still_has_a_scale():
    ends = torch.tensor([60000.0], dtype=torch.float16)
    qparams = calculate_qparams(-ends, ends, ASYM4)
    assert qparams.scale.item() == pytest.approx(8000, rel=1e-3)
    assert qparams.zero_point.item() in (-1, 0)


@given(groups=st.integers(1, 5), size=st.integers(1, 6), symmetric=st.booleans(), seed=st.integers(0, 2**31))
def test_g_idx_is_a_permutation_of_the_columns(same_bits, groups, size, symmetric, seed):
    args = QuantizationArgs(num_bits=4, group_size=size, symmetric=symmetric)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, groups * size, generator=generator).bfloat16()
    qparams = weight_qparams(weight, args)
    codes = quantize(weight, qparams, args)
    order = torch.randperm(groups * size, generator=generator)
    g_idx = (torch.arange(groups * size) // size)[order].to(torch.int32)
    assert same_bits(quantize(weight[:, order], qparams, args, g_idx), codes[:, order])
    assert same_bits(dequantize(codes[:, order], qparams, args, g_idx), dequantize(codes, qparams, args)[:, order])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check_groups(64, QuantizationArgs(group_size=128)), "64 columns do not divide into groups of group_size=128"),
        (lambda: quantize(torch.ones(1, 3), QParams(torch.ones(1, 1), None), GROUP2), "3 columns do not divide"),
        (lambda: quantize(torch.ones(1, 4), QParams(torch.ones(1, 1), None), GROUP2), "does not fit 4 columns in 2 groups"),
        (
            lambda: quantize(torch.ones(1, 4), QParams(torch.ones(1, 2), None), GROUP2, torch.zeros(3, dtype=torch.int32)),
            "a group for each of 4 columns",
        ),
        (
            lambda: dequantize(
                torch.ones(1, 4, dtype=torch.int8), QParams(torch.ones(1), None), QuantizationArgs(), torch.zeros(4, dtype=torch.int32)
            ),
            "only groups have one",
        ),
        (lambda: dynamic_qparams(torch.ones(1, 4), QuantizationArgs()), "dynamic=True"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call, message):
    with pytest.raises(SchemeError, match=message):
        call()
