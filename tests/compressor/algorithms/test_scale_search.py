"""Searched scales: the best of the candidates for each row and group, never worse than the observed one, zero points as they were."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compressor.algorithms.babai import NUM_CANDIDATES, SEARCHED_MULTIPLES, Factor, Grid, can_search, search_scales
from compressor.algorithms.gptq import activation_order, quantize_gptq
from compressor.numerics import PRESETS, QParams, QuantizationArgs, weight_qparams

SIZE = 16


def problem(rows: int = 12, columns: int = 48, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight with outliers, which make clipping pay, and the damped Hessian of correlated inputs."""
    g = torch.Generator().manual_seed(seed)
    x = (torch.rand(300, 8, generator=g) - 0.5) @ (torch.rand(8, columns, generator=g) - 0.5)
    x += 0.3 * (torch.rand(300, columns, generator=g) - 0.5)
    hessian = 2 * x.t() @ x / len(x)
    hessian.diagonal().add_(0.01 * hessian.diagonal().mean())
    weight = (torch.rand(rows, columns, generator=g) - 0.5) ** 3
    return weight, hessian


def group_loss(weight_S: Tensor, hessian_SS: Tensor, scale: float, zero: float, args: QuantizationArgs) -> float:
    """Loss of one row of one group, rounded column by column in float64 by eliminating columns from the inverse."""
    w, inverse = weight_S.double().clone(), torch.linalg.inv(hessian_SS.double())
    low, high = args.code_range
    values = torch.empty_like(w)
    for k in range(len(w)):
        values[k] = ((w[k] / scale + zero).clamp(low, high).round() - zero) * scale
        w -= (w[k] - values[k]) / inverse[k, k] * inverse[k]
        inverse -= torch.outer(inverse[:, k], inverse[k]) / inverse[k, k]
        inverse[k, k] = 1.0
    error = weight_S.double() - values
    return float(0.5 * error @ hessian_SS.double() @ error)


def search(weight: Tensor, hessian: Tensor, observed: QParams, args: QuantizationArgs, order: Tensor) -> Tensor:
    group = torch.arange(weight.shape[1]) // SIZE
    factor = Factor.of(hessian[order][:, order], "m")
    return search_scales(weight.t()[order].contiguous(), factor, Grid(observed.scale, observed.zero_point, group, args), order)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_best_candidate_wins(bits: int, symmetric: bool) -> None:
    """In their own order, columns of later groups make good what they can: that leaves the Schur complement of the group."""
    args = QuantizationArgs(num_bits=bits, group_size=SIZE, symmetric=symmetric)
    weight, hessian = problem()
    observed = weight_qparams(weight, args)
    chosen = search(weight, hessian, observed, args, torch.arange(48))
    assert chosen.dtype == observed.scale.dtype
    multiples = torch.linspace(*SEARCHED_MULTIPLES[bits], NUM_CANDIDATES)
    moved = 0
    for group in range(3):
        run, later = slice(group * SIZE, (group + 1) * SIZE), slice((group + 1) * SIZE, 48)
        whole = hessian.double()
        left = whole[run, run] - whole[run, later] @ torch.linalg.solve(whole[later, later], whole[later, run])
        for row in range(0, 12, 5):
            zero = 0.0 if observed.zero_point is None else float(observed.zero_point[row, group])
            scales = [float(multiple * observed.scale[row, group]) for multiple in multiples]
            losses = [group_loss(weight[row, run], left, scale, zero, args) for scale in scales]
            own = group_loss(weight[row, run], left, float(chosen[row, group]), zero, args)
            assert own <= min(losses) * (1 + 1e-4)
            moved += float(chosen[row, group]) != float(observed.scale[row, group])
    assert moved > 0


def test_another_order_of_rounding_asks_for_other_scales() -> None:
    args = QuantizationArgs(num_bits=3, group_size=SIZE)
    weight, hessian = problem(64)
    observed = weight_qparams(weight, args)
    orders = [torch.arange(48), activation_order(hessian)]
    found = [search(weight, hessian, observed, args, order) for order in orders]
    assert not torch.equal(*found)


@pytest.mark.parametrize("actorder", [None, "static"])
def test_gptq_errs_less_with_searched_scales(actorder: str | None) -> None:
    args = QuantizationArgs(num_bits=3, group_size=SIZE)
    weight, hessian = problem(64, 96)
    losses = {}
    for search in (False, True):
        (own,), _ = quantize_gptq([weight], hessian, args, actorder=actorder, scale_search=search)  # type: ignore[arg-type]
        losses[search] = own.loss
    assert losses[True] < 0.95 * losses[False]


def test_a_scale_that_rounds_to_zero_is_never_chosen() -> None:
    args = QuantizationArgs(num_bits=3, group_size=SIZE)
    _, hessian = problem()
    tiny = torch.finfo(torch.bfloat16).smallest_normal * torch.ones(2, 48)
    scale = torch.full((2, 3), 2.0**-133, dtype=torch.bfloat16)  # the smallest positive bfloat16
    chosen = search(tiny, hessian, QParams(scale, None), args, torch.arange(48))
    assert bool((chosen > 0).all())


def test_only_integer_groups_are_searched() -> None:
    searched = {name: can_search(scheme.weights) for name, scheme in PRESETS.items() if scheme.weights is not None}
    assert searched["W4A16"] and searched["W4A16_ASYM"] and searched["W3A8"]
    for bits, is_symmetric in ((2, True), (3, True), (2, False), (3, False), (4, False)):
        args = QuantizationArgs(num_bits=bits, symmetric=is_symmetric, group_size=SIZE)
        assert can_search(args) is (is_symmetric or bits >= 4)
    assert {PRESETS[name].weights.type for name, yes in searched.items() if yes} == {"int"}
    assert not searched["W8A8"] and not searched["NVFP4"] and not searched["MXFP4"] and not searched["FP8_BLOCK"]
    weight, hessian = problem(8, 48)
    args = PRESETS["W8A8"].weights
    assert args is not None
    plain, searching = (quantize_gptq([weight], hessian, args, scale_search=search)[0][0] for search in (False, True))
    assert torch.equal(plain.codes_RC, searching.codes_RC)
