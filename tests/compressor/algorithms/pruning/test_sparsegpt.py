"""SparseGPT in R form is the paper's algorithm; refining only lowers the error; Wanda and OWL by their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compressor.algorithms.pruning.magnitude import Pattern, num_zeros, pruned_weights
from compressor.algorithms.pruning.sparsegpt import prune_sparsegpt
from compressor.algorithms.pruning.wanda import layer_sparsities, outlier_share, prune_wanda
from compressor.errors import NumericsError

COLUMNS, ROWS = 96, 40
PATTERNS = {"any": None, "2:4": Pattern(2, 4), "1:4": Pattern(1, 4), "4:8": Pattern(4, 8)}


def layer(seed: int = 0, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """A weight, and the second moments of an input of very unequal columns."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(600, COLUMNS, generator=generator) @ torch.randn(COLUMNS, COLUMNS, generator=generator)
    x *= torch.rand(COLUMNS, generator=generator)
    return torch.randn(rows, COLUMNS, generator=generator), 2 * x.t() @ x / len(x)


def error(weight: Tensor, pruned: Tensor, hessian: Tensor) -> float:
    difference = (weight - pruned).double()
    return float(((difference @ hessian.double()) * difference).sum())


def classical(weight: Tensor, hessian: Tensor, sparsity: float, pattern: Pattern | None, block: int) -> Tensor:
    """The pseudocode of the paper, in float64, by the inverse of the Hessian."""
    left, size = weight.double().clone(), len(hessian)
    damped = hessian.double() + 0.01 * hessian.double().diagonal().mean() * torch.eye(size, dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    for start in range(0, size, block):
        stop = min(start + block, size)
        mask = torch.zeros(len(weight), stop - start, dtype=torch.bool)
        if pattern is None:
            cost = (left[:, start:stop] / upper.diagonal()[start:stop]).square()
            count = num_zeros(sparsity, len(weight) * stop) - num_zeros(sparsity, len(weight) * start)
            mask.view(-1)[cost.reshape(-1).argsort(stable=True)[:count]] = True
        for column in range(start, stop):
            if pattern is not None and column % pattern.of == 0:
                cost = (left[:, column : column + pattern.of] / upper.diagonal()[column : column + pattern.of]).square()
                mask.scatter_(1, column - start + cost.argsort(dim=1, stable=True)[:, : pattern.of - pattern.keep], True)
            value = left[:, column].clone()
            miss = torch.where(mask[:, column - start], value, 0.0) / upper[column, column]
            left[:, column:] -= miss[:, None] * upper[column, column:]
            left[:, column] = torch.where(mask[:, column - start], 0.0, value)
    return left


@pytest.mark.parametrize("block", [32, 40, 128])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_without_refining_it_is_the_algorithm_of_the_paper(pattern: str, block: int) -> None:
    weight, hessian = layer()
    form = PATTERNS[pattern]
    sparsity = 0.5 if form is None else form.sparsity
    (found,) = prune_sparsegpt([weight], hessian, sparsity, form, block_size=block, refining_steps=0)
    expected = classical(weight, hessian, sparsity, form, block)
    assert torch.equal(found.weight_RC == 0, expected == 0)
    assert torch.allclose(found.weight_RC.double(), expected, atol=1e-3)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_counts_are_exact_and_refining_lowers_the_error(pattern: str, dtype: torch.dtype) -> None:
    weight, hessian = layer(1)
    form = PATTERNS[pattern]
    sparsity = 0.37 if form is None else form.sparsity
    weight = weight.to(dtype)
    errors = []
    for steps in (0, 2, 8, 64):
        (found,) = prune_sparsegpt([weight], hessian, sparsity, form, refining_steps=steps)
        assert found.weight_RC.dtype == dtype
        assert int((found.weight_RC == 0).sum()) == num_zeros(sparsity, weight.numel())
        if form is not None:
            assert bool((found.weight_RC.unflatten(1, (-1, form.of)).ne(0).sum(-1) == form.keep).all())
        errors.append(error(weight, found.weight_RC, hessian))
    assert errors[0] > errors[1] > errors[2] >= errors[3] * 0.999
    assert errors[2] < 0.9 * errors[0] and errors[2] < 1.05 * errors[3]


def test_it_is_never_worse_than_the_smallest_weights_alone() -> None:
    for seed in range(6):
        weight, hessian = layer(seed)
        (gone,) = pruned_weights([weight], 0.5)
        (found,) = prune_sparsegpt([weight], hessian, 0.5)
        assert error(weight, found.weight_RC, hessian) < 0.5 * error(weight, weight.masked_fill(gone, 0.0), hessian)


def test_refined_weights_are_the_best_that_the_kept_ones_can_be() -> None:
    weight, hessian = layer(2, rows=4)
    (found,) = prune_sparsegpt([weight], hessian, 0.5, refining_steps=200)
    damped = hessian.double() + 0.01 * hessian.double().diagonal().mean() * torch.eye(COLUMNS, dtype=torch.float64)
    for row, own in zip(found.weight_RC, weight, strict=True):
        kept = row != 0
        best = torch.linalg.solve(damped[kept][:, kept], damped[kept] @ own.double())
        assert torch.allclose(row[kept].double(), best, atol=2e-3)


def test_zeros_that_are_there_stay_and_count() -> None:
    weight, hessian = layer(3)
    there = torch.rand(weight.shape, generator=torch.Generator().manual_seed(7)) < 0.45
    weight.masked_fill_(there, 0.0)
    (found,) = prune_sparsegpt([weight], hessian, 0.5, keep_zeros=True)
    assert not found.weight_RC[there].any() and int((found.weight_RC == 0).sum()) == num_zeros(0.5, weight.numel())
    (found,) = prune_sparsegpt([weight], hessian, 0.2, keep_zeros=True)
    assert torch.equal(found.weight_RC == 0, weight == 0)
    shift = 0.1 * layer(8)[1]
    (found,) = prune_sparsegpt([weight], hessian, 0.2, shift_CC=shift, keep_zeros=True)
    assert torch.equal(found.weight_RC == 0, weight == 0)
    (free,) = prune_sparsegpt([weight], hessian, 0.2, shift_CC=shift)
    assert bool(free.weight_RC[there].any())  # moved towards other outputs they are of use


def test_a_stack_is_what_each_weight_is_alone() -> None:
    (one, hessian), (other, _) = layer(4), layer(5, rows=7)
    together = prune_sparsegpt([one, other], hessian, 0.5)
    for weight, found in zip((one, other), together, strict=True):
        (alone,) = prune_sparsegpt([weight], hessian, 0.5)
        assert torch.equal(alone.weight_RC, found.weight_RC) and alone.relative_error == found.relative_error


def test_rows_that_do_not_divide_into_runs_are_refused() -> None:
    weight, hessian = layer()
    with pytest.raises(NumericsError, match="weight: rows of 96 do not divide into runs of 7; leave the module out"):
        prune_sparsegpt([weight], hessian, 4 / 7, Pattern(3, 7))


def test_a_weight_that_is_no_number_is_told() -> None:
    weight, hessian = layer()
    weight[0, 0] = torch.nan
    with pytest.raises(NumericsError, match=r"^weight: a weight holds NaN"):
        prune_sparsegpt([weight], hessian, 0.5)
    with pytest.raises(NumericsError, match="NaN or infinity"):
        prune_wanda(weight, hessian.diagonal(), 0.5)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_wanda_keeps_the_largest_products_of_each_row(pattern: str) -> None:
    weight, hessian = layer(6)
    form, mean_square = PATTERNS[pattern], hessian.diagonal() / 2
    gone = prune_wanda(weight, mean_square, 0.3 if form is None else form.sparsity, form)
    if form is None:
        counts = gone.sum(1)
        assert int(counts.sum()) == num_zeros(0.3, gone.numel()) and int(counts.max() - counts.min()) <= 1
    for row, out in zip(weight.abs() * mean_square.sqrt(), gone, strict=True):
        runs = [slice(None)] if form is None else [slice(start, start + form.of) for start in range(0, COLUMNS, form.of)]
        for run in runs:
            assert form is None or int(out[run].sum()) == form.of - form.keep
            assert float(row[run][out[run]].max()) <= float(row[run][~out[run]].min())


def test_layers_with_outliers_keep_more() -> None:
    assert outlier_share([torch.tensor([1.0, 1.0, 1.0, 9.0]), torch.ones(4)], 3.0) == 1 / 8
    shares = layer_sparsities([0.01, 0.02, 0.03], [100, 100, 200], 0.6, 0.08)
    assert shares[0] > shares[1] > shares[2] and shares[0] - shares[2] == pytest.approx(0.16)
    assert (shares[0] + shares[1] + 2 * shares[2]) / 4 == pytest.approx(0.6)
    assert layer_sparsities([0.5, 0.5], [1, 9], 0.7, 0.08) == [0.7, 0.7]


@pytest.mark.parametrize("sparsity", [0.02, 0.5, 0.97])
def test_layers_that_lose_all_or_nothing_leave_the_share_of_all_together_as_it_is(sparsity: float) -> None:
    shares = layer_sparsities([0.0, 0.1, 0.7, 1.0], [3, 1, 2, 4], sparsity, 0.3)
    assert sum(share * size for share, size in zip(shares, [3, 1, 2, 4], strict=True)) / 10 == pytest.approx(sparsity)
    assert all(0 <= share <= 1 for share in shares) and shares == sorted(shares, reverse=True)
    assert shares[0] - shares[3] <= 0.6 + 1e-12


@pytest.mark.parametrize("form", [None, Pattern(2, 4), Pattern(5, 8)])
def test_a_parameter_is_pruned_where_gradients_are_on(form):
    weight, hessian = torch.rand(3, 48, generator=torch.Generator().manual_seed(0)), torch.eye(48)
    (plain,) = prune_sparsegpt([weight], hessian, 0.5 if form is None else form.sparsity, form)
    (found,) = prune_sparsegpt([torch.nn.Parameter(weight)], hessian, 0.5 if form is None else form.sparsity, form)
    assert torch.equal(found.weight_RC, plain.weight_RC) and not found.weight_RC.requires_grad
