"""Exactly as many weights go as asked, the smallest ones, the same on every machine, and never against the pattern."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.algorithms.hessian import relative_output_error
from compressor.algorithms.pruning.magnitude import Blocks, Pattern, num_zeros, pruned_weights, removed_share, smallest
from compressor.algorithms.pruning.schedule import SCHEDULES, SparsitySchedule
from compressor.errors import NumericsError


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.floats(0, 1))
def test_the_first_of_the_smallest_go(values: list[int], share: float) -> None:
    count = int(share * len(values))
    found = smallest(torch.tensor(values, dtype=torch.float32).abs(), count)
    wanted = sorted(range(len(values)), key=lambda place: (abs(values[place]), place))[:count]
    assert sorted(found.nonzero().flatten().tolist()) == sorted(wanted)


@given(st.integers(1, 4), st.integers(2, 6), st.integers(1, 5), st.integers(1, 4), st.floats(0, 1), st.integers(0, 9))
def test_a_pattern_holds_at_every_share_and_the_count_is_exact(keep: int, of: int, rows: int, runs: int, share: float, seed: int) -> None:
    pattern = Pattern(min(keep, of - 1), of)
    weight = (torch.randn(rows, runs * of, generator=torch.Generator().manual_seed(seed)) * 2).round()
    sparsity = share * pattern.sparsity
    (mask,) = pruned_weights([weight], sparsity, pattern)
    assert int(mask.sum()) == num_zeros(sparsity, weight.numel())
    assert int(mask.unflatten(1, (-1, of)).sum(-1).max()) <= of - pattern.keep
    (whole,) = pruned_weights([weight], pattern.sparsity, pattern)
    assert bool((whole.unflatten(1, (-1, of)).sum(-1) == of - pattern.keep).all())
    assert not bool((mask & ~whole).any())  # masks of a growing share grow
    kept, gone = weight.abs().unflatten(1, (-1, of)), whole.unflatten(1, (-1, of))
    assert bool((kept.masked_fill(gone, math.inf).amin(-1) >= kept.masked_fill(~gone, -1).amax(-1)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_magnitude_everywhere_is_cut_at_the_exact_count(dtype: torch.dtype) -> None:
    weight = torch.full((3, 7), -0.25, dtype=dtype)
    (mask,) = pruned_weights([weight], 0.5)
    assert mask.flatten().tolist() == [True] * 10 + [False] * 11


def test_together_the_small_layer_gives_most() -> None:
    small, large = torch.rand(4, 4) * 0.1, torch.rand(4, 4) + 1
    masks = pruned_weights([small, large], 0.5, together=True)
    assert [int(mask.sum()) for mask in masks] == [16, 0]
    assert [int(mask.sum()) for mask in pruned_weights([small, large], 0.5)] == [8, 8]
    first, second = pruned_weights([torch.ones(2, 2), torch.ones(2, 2)], 0.75, together=True)
    assert [int(first.sum()), int(second.sum())] == [4, 2]


def test_nan_and_infinity_are_refused() -> None:
    for value in (math.nan, math.inf):
        with pytest.raises(NumericsError, match="NaN or infinity"):
            pruned_weights([torch.tensor([[1.0, value]])], 0.5)


@pytest.mark.parametrize(("total", "sparsity"), [(100, 0.29), (1000, 0.001), (7, 0.5), (10, 1.0), (10, 0.0), (3, 1 / 3)])
def test_counts_are_whole_numbers_without_the_noise_of_floats(total: int, sparsity: float) -> None:
    assert num_zeros(sparsity, total) == math.floor(round(sparsity * total, 6))


@pytest.mark.parametrize(
    ("kind", "exponent", "wanted"),
    [
        ("linear", 2.0, lambda x: x),
        ("cubic", 2.0, lambda x: 1 + (x - 1) ** 3),
        ("polynomial_decay", 4.0, lambda x: 1 - (1 - x) ** 4),
        ("polynomial", 1.5, lambda x: x**1.5),
    ],
)
def test_schedules_follow_their_formulas(kind: str, exponent: float, wanted) -> None:
    schedule = SparsitySchedule(kind, 0.2, 0.8, start=10, end=30, exponent=exponent)
    values = [schedule.at(index) for index in range(5, 36)]
    assert values[:6] == [0.2] * 6 and values[25:] == [0.8] * 6
    for index in range(10, 31):
        assert schedule.at(index) == pytest.approx(0.2 + 0.6 * wanted((index - 10) / 20))
    assert values == sorted(values)
    assert kind in SCHEDULES


@pytest.mark.parametrize("shape", [(4, 6), (8, 4, 3, 3)])
@pytest.mark.parametrize(("rows", "columns"), [(1, None), (None, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_blocks_go_as_a_whole_those_with_the_least_sum(shape: tuple[int, ...], rows: int | None, columns: int | None, share: float) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    weight[0] = weight[1]  # equal blocks: the first goes first
    high, wide = rows or shape[0], columns or shape[1]
    places = [(top, left) for top in range(0, shape[0], high) for left in range(0, shape[1], wide)]
    sums = {place: float(weight[place[0] : place[0] + high, place[1] : place[1] + wide].double().abs().sum()) for place in places}
    wanted = torch.zeros(shape, dtype=torch.bool)
    for top, left in sorted(places, key=lambda place: (sums[place], places.index(place)))[: math.floor(share * len(places) + 1e-9)]:
        wanted[top : top + high, left : left + wide] = True
    (mask,) = pruned_weights([weight], share, Blocks(rows, columns))
    assert torch.equal(mask, wanted)
    (more,) = pruned_weights([weight.masked_fill(mask, 0.0)], max(share, 0.75), Blocks(rows, columns))
    assert not bool((mask & ~more).any())  # what is zero goes first


def test_only_whole_blocks_fit() -> None:
    assert Blocks(2, 3).fit((4, 6)) and Blocks(1, None).fit((5, 7)) and Blocks(2, 1).fit((4, 3, 3, 3))
    assert not Blocks(2, 3).fit((4, 7)) and not Blocks(3, 3).fit((4, 6)) and not Blocks(1, None).fit((4,))


@pytest.mark.parametrize("size", [1e-25, 1.0, 3e20, 1e37])
def test_the_share_that_goes_does_not_depend_on_the_size_of_weights_and_inputs(size: float) -> None:
    weight, gone = torch.tensor([[1.0, -2.0, 2.0], [4.0, 0.5, 0.0]]), torch.tensor([[True, True, False], [False, True, True]])
    assert float(removed_share(weight * size, gone)) == pytest.approx(5.25 / 25.25)
    squares = torch.tensor([1.0, 3.0, 2.0])
    assert float(removed_share(weight * size, gone, squares * min(size, 1e30))) == pytest.approx(13.75 / 37.75)
    off = weight.masked_fill(gone, 0.0) * size
    assert relative_output_error(weight * size, off, torch.diag(squares)) == pytest.approx(13.75 / 37.75)
    assert float(removed_share(torch.zeros(2, 3), gone)) == 0.0
