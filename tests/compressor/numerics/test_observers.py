"""Observers: what they find, and that neither order nor batch size has a say in it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.errors import NumericsError, SchemeError
from compressor.numerics import (
    MinMaxObserver,
    MSEObserver,
    QuantizationArgs,
    calculate_global_scale,
    fake_quantize,
    make_observer,
    weight_qparams,
)

STATIC = [
    QuantizationArgs(type="float", observer="static_minmax"),
    QuantizationArgs(symmetric=False),
    QuantizationArgs(observer="mse"),
    QuantizationArgs(num_bits=4, symmetric=False, observer="mse"),
]


def _heavy_tail(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.randn(*shape, generator=generator).abs() ** 2


@pytest.mark.parametrize("args", STATIC)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    cuts=st.lists(st.integers(0, 600), max_size=6),
    seed=st.integers(0, 2**31),
)
def test_order_and_batches_do_not_matter(same_bits, args, dtype, cuts, seed):
    values = _heavy_tail(600, seed=seed).to(dtype)
    whole, parts = make_observer(args), make_observer(args)
    whole.update(values.reshape(2, 30, 10))
    shuffled = values[torch.randperm(600, generator=torch.Generator().manual_seed(seed))]
    edges = [0, *sorted(cuts), 600]
    for start, stop in itertools.pairwise(edges):
        parts.update(shuffled[start:stop])
    one, other = whole.qparams(), parts.qparams()
    assert same_bits(one.scale, other.scale)
    assert one.scale.shape == (1,) and one.scale.dtype == dtype
    assert (one.zero_point is None) == args.symmetric
    assert one.zero_point is None or same_bits(one.zero_point, other.zero_point)


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_histogram_is_exact_for_bfloat16(same_bits, symmetric):
    args = QuantizationArgs(num_bits=4, symmetric=symmetric, observer="mse")
    x = _heavy_tail(64, 33).bfloat16()
    observer = make_observer(args)
    for row in x:
        observer.update(row)
    expected = weight_qparams(x, args)
    assert same_bits(observer.qparams().scale, expected.scale)
    assert symmetric or same_bits(observer.qparams().zero_point, expected.zero_point)


def test_minmax_covers_every_batch_and_not_more():
    observer = make_observer(QuantizationArgs(symmetric=False))
    for bound in (1.0, 2.55, -1.0):
        observer.update(torch.tensor([[bound, 0.0]]))
    assert observer.qparams().scale.item() == pytest.approx(3.55 / 255)


@given(data=st.data())
def test_mse_never_loses_to_minmax(cases, data):
    case = data.draw(cases(styles=("normal", "outliers", "constant", "zero groups", "halves"), dtypes=(torch.float32,)))
    searched = case.args.model_copy(update={"observer": "mse"})
    losses = []
    for args in (case.args, searched):
        error = fake_quantize(case.weight, weight_qparams(case.weight, args), args) - case.weight
        losses.append(error.double().abs().pow(2.4).reshape(case.groups.shape).sum(-1))
    assert (losses[1] <= losses[0] * (1 + 1e-5)).all()


@pytest.mark.parametrize("bits", [6, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mse_never_loses_to_minmax_in_16_bits_by_the_nearest_codes(dtype, bits):
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    losses = []
    for observer in ("minmax", "mse"):
        args = QuantizationArgs(num_bits=bits, group_size=32, observer=observer)
        qparams = weight_qparams(weight, args)
        error = fake_quantize(weight.float(), qparams._replace(scale=qparams.scale.float()), args) - weight.float()
        losses.append(error.double().abs().pow(2.4).unflatten(1, (2, 32)).sum(-1))
    assert (losses[1] <= losses[0] * (1 + 1e-5)).all()


@pytest.mark.parametrize("settings", [{}, {"norm": 2}, {"maxshrink": 0.5, "grid": 40, "norm": 3.0}])
def test_mse_finds_the_best_of_the_grid(settings):
    """The oracle is written in float64 numpy, one row at a time."""
    args = QuantizationArgs(num_bits=4, strategy="channel", observer="mse", observer_kwargs=settings)
    weight = _heavy_tail(12, 96)
    scales = weight_qparams(weight, args).scale.flatten().tolist()
    maxshrink, grid, norm = settings.get("maxshrink", 0.2), settings.get("grid", 100), settings.get("norm", 2.4)
    for row, scale in zip(weight.numpy().astype(np.float64), scales, strict=True):

        def loss(step, row=row):
            return (np.abs(np.clip(np.rint(row / step), -8, 7) * step - row) ** norm).sum()

        full = np.abs(row).max() / 7.5
        losses = [loss(full * (1 - i / grid)) for i in range(round(maxshrink * grid))]
        assert loss(scale) <= min(losses) * (1 + 1e-4)
        assert min(abs(scale / full - (1 - i / grid)) for i in range(len(losses))) < 1e-6


def test_a_clipped_outlier_buys_finer_steps():
    weight = torch.linspace(-1, 1, 4096).reshape(1, -1).clone()
    weight[0, 0] = 1.25
    args = QuantizationArgs(num_bits=3, strategy="channel")
    full, searched = (weight_qparams(weight, args.model_copy(update={"observer": name})).scale for name in ("minmax", "mse"))
    assert searched < 0.95 * full


def test_tiny_weights_are_searched_like_any_other(same_bits):
    """1e-20 to the power 2.4 is zero in float32: errors must be counted in steps, not in units of the weight."""
    args = QuantizationArgs(num_bits=4, group_size=32, observer="mse")
    weight = _heavy_tail(8, 64)
    assert same_bits(weight_qparams(weight * 2.0**-70, args).scale, weight_qparams(weight, args).scale * 2.0**-70)


def test_values_that_bfloat16_rounds_to_infinity_do_not_blind_the_search():
    x = torch.linspace(-1, 1, 4001) * 2.9e38
    x[0] = torch.finfo(torch.float32).max
    scales = []
    for observer in (make_observer(QuantizationArgs(num_bits=3, observer=name)) for name in ("minmax", "mse")):
        observer.update(x)
        scales.append(observer.qparams().scale.item())
    assert scales[1] < 0.95 * scales[0]


def test_patience_stops_each_group_on_its_own(same_bits):
    patient = QuantizationArgs(num_bits=4, group_size=32, observer="mse", observer_kwargs={"patience": 1})
    weight = _heavy_tail(16, 64)
    together = weight_qparams(weight, patient)
    alone = torch.cat([weight_qparams(row, patient).scale for row in weight.split(1)])
    assert same_bits(together.scale, alone)
    exhaustive = weight_qparams(weight, patient.model_copy(update={"observer_kwargs": {}}))
    assert (together.scale >= exhaustive.scale).all() and (together.scale > exhaustive.scale).any()


def test_large_weights_are_searched_in_pieces_with_the_same_result(same_bits, monkeypatch):
    weight = _heavy_tail(24, 64).bfloat16()
    for strategy, group_size in (("tensor", None), ("channel", None), ("group", 16)):
        args = QuantizationArgs(num_bits=4, symmetric=False, strategy=strategy, group_size=group_size, observer="mse")
        whole = weight_qparams(weight, args)
        with monkeypatch.context() as patch:
            patch.setattr("compressor.numerics.observers.CHUNK", 48)
            pieces = weight_qparams(weight, args)
        assert same_bits(whole.scale, pieces.scale) and same_bits(whole.zero_point, pieces.zero_point)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("observer", ["minmax", "mse"])
def test_13_nan_and_infinity_are_errors_that_name_the_module(observer, bad):
    x = torch.ones(4, 8)
    x[2, 3] = bad
    for strategy, group_size in (("tensor", None), ("channel", None), ("group", 4)):
        args = QuantizationArgs(strategy=strategy, group_size=group_size, observer=observer)
        with pytest.raises(NumericsError, match=r"layers\.3\.up_proj: holds NaN or infinity"):
            weight_qparams(x, args, "layers.3.up_proj")
    with pytest.raises(NumericsError, match=r"layers\.3\.up_proj input: holds NaN"):
        make_observer(QuantizationArgs(observer=observer), "layers.3.up_proj input").update(x)


@pytest.mark.parametrize("args", STATIC)
def test_an_observer_without_values_says_so(args):
    observer = make_observer(args, "layers.3")
    observer.update(torch.zeros(0, 16))
    with pytest.raises(NumericsError, match=r"layers\.3: the observer never saw a value"):
        observer.qparams()


@pytest.mark.parametrize(
    ("observer", "kind"),
    [(None, MinMaxObserver), ("minmax", MinMaxObserver), ("memoryless_minmax", MinMaxObserver), ("mse", MSEObserver)],
)
def test_the_name_chooses_the_observer(observer, kind):
    assert type(make_observer(QuantizationArgs(observer=observer))) is kind


@pytest.mark.parametrize(
    "args", [QuantizationArgs(strategy="token", dynamic=True), QuantizationArgs(dynamic=True), QuantizationArgs(strategy="channel")]
)
def test_only_static_activations_are_observed(args):
    with pytest.raises(SchemeError, match="has no range to observe"):
        make_observer(args)


@pytest.mark.parametrize(
    ("weight", "args", "message"),
    [
        (torch.ones(2, 64), QuantizationArgs(group_size=48), "64 columns do not divide into groups of group_size=48"),
        (torch.ones(2, 64), QuantizationArgs(strategy="token", dynamic=True), "not for weights"),
        (torch.ones(2, 64, dtype=torch.int8), QuantizationArgs(), "not a floating-point weight"),
        (torch.ones(0, 64), QuantizationArgs(), "with values"),
    ],
)
def test_weights_that_cannot_be_quantized_are_refused(weight, args, message):
    with pytest.raises(SchemeError, match=message):
        weight_qparams(weight, args)


@pytest.mark.parametrize("name", ["nvfp4_expanded_mse", "fouroversix"])
def test_a_range_wider_than_the_weights_is_found_where_it_fits_better(name):
    """Largest values of 4, not of 6: there the steps of fp4 are half as wide, next to them."""
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    global_scale = calculate_global_scale(*weight.aminmax())

    def losses(observer):
        own = args.model_copy(update={"observer": observer})
        qparams = weight_qparams(weight, own, global_scale=global_scale)
        error = (fake_quantize(weight, qparams, own) - weight).double().abs().pow(2.4).reshape(8, 4, 16).sum(-1)
        return error, qparams.scale.float()

    (plain, narrow), (expanded, wide) = losses("mse"), losses(name)
    assert (expanded <= plain * (1 + 1e-9)).all() and float(expanded.sum()) < 0.9 * float(plain.sum())
    assert bool((wide > 1.2 * narrow).any())
    full = losses("minmax")[1]  # the oracle: every candidate, one group at a time
    for row, group in ((0, 0), (3, 2), (7, 3)):
        values = weight[row, 16 * group : 16 * group + 16]
        found = []
        for candidate in range(111):
            share = 1.8 * (1 - candidate / 200)
            scale = (full[row, group].double() * share).to(torch.float8_e4m3fn).float()
            step = scale / global_scale.float().flatten()[0]
            grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0])
            codes = (values.abs()[:, None] / step - grid).abs().argmin(1)
            found.append(float(((grid[codes] * step) - values.abs()).double().abs().pow(2.4).sum()))
        assert float(expanded[row, group]) <= min(found) * 1.02


def test_a_wider_range_is_for_formats_whose_steps_are_uneven():
    for observer in ("nvfp4_expanded_mse", "nvfp4_expanded_imatrix", "fouroversix"):
        with pytest.raises(ValueError, match=f"{observer} is for floats of 4 bits"):
            QuantizationArgs(num_bits=4, group_size=32, observer=observer)
    with pytest.raises(ValueError, match=r"expand=0\.5 would narrow"):
        QuantizationArgs(num_bits=4, group_size=32, observer="mse", observer_kwargs={"expand": 0.5})
