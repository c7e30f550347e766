"""What judges is right by itself: grids, rounding and layouts by brute force, and the oracle on problems with a known answer."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from harness.checks.oracles import (
    LAYOUTS,
    at_tie,
    damped,
    e2m1_grid,
    e4m3_grid,
    int_grid,
    nearest,
    quadratic_loss,
    solve_dense,
    spread,
    units,
)


def test_fp8_values_are_those_of_torch() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)
    assert torch.equal(e4m3_grid(), torch.unique(every[every.isfinite()]))


def test_fp4_values() -> None:
    assert e2m1_grid().tolist() == [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.mark.parametrize("grid", [int_grid(2), int_grid(4), e2m1_grid(), e4m3_grid()], ids=["int2", "int4", "e2m1", "e4m3"])
def test_nearest_by_brute_force(grid: torch.Tensor) -> None:
    middles = (grid[1:] + grid[:-1]) / 2
    points = torch.cat([grid, middles, middles * 1.0001, middles * 0.9999, torch.tensor([-1e9, 1e9])])
    zero = grid.tolist().index(0.0)
    for point, found in zip(points.tolist(), nearest(points, grid).tolist(), strict=True):
        clipped = min(max(point, float(grid[0])), float(grid[-1]))
        best = min(abs(clipped - code) for code in grid.tolist())
        candidates = [number for number, code in enumerate(grid.tolist()) if abs(clipped - code) == best]
        even = [number for number in candidates if (number - zero) % 2 == 0] or candidates
        assert found == grid[even[0]] if len(candidates) > 1 else found == grid[candidates[0]]


def test_only_ties_are_ties() -> None:
    grid = int_grid(4)
    points = torch.tensor([0.5, 0.5001, 2.0, -3.5, -3.5 * (1 + 2e-7), 100.0], dtype=torch.float64)
    assert at_tie(points, grid, 1.2e-7).tolist() == [True, False, False, True, True, False]


def test_units_and_spread_belong_together() -> None:
    weight = torch.arange(35.0).reshape(5, 7)
    assert units(weight, (2, 3)).shape == (9, 6)
    assert units(weight, (2, 3))[0].tolist() == [0, 1, 2, 7, 8, 9]
    wide = spread(torch.arange(9), (5, 7), (2, 3))
    assert wide[0].tolist() == [0, 0, 0, 1, 1, 1, 2] and wide[4].tolist() == [6, 6, 6, 7, 7, 7, 8]
    with pytest.raises(ValueError, match="8 numbers"):
        spread(torch.arange(8), (5, 7), (2, 3))


def test_a_stream_of_bits_by_hand() -> None:
    # 3 bits each, plus 4: -4 -> 000, 3 -> 111, 0 -> 100, read from the least significant bit.
    word = 0b000 | 0b111 << 3 | 0b100 << 6
    assert LAYOUTS["offset_stream"](np.array([[word]], dtype=np.int32), 3, 3).tolist() == [[-4, 3, 0]]
    assert LAYOUTS["e2m1_nibbles"](np.array([[0x9F]], dtype=np.uint8), 4, 2).tolist() == [[-6.0, -0.5]]


def test_the_oracle_rounds_where_columns_are_independent() -> None:
    weight = torch.rand(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 6 - 3
    ones, zeros = torch.ones_like(weight), torch.zeros_like(weight)
    codes, values = solve_dense(weight, torch.eye(5, dtype=torch.float64), ones, zeros, int_grid(4), torch.arange(5))
    assert torch.equal(codes, weight.round()) and torch.equal(values, codes)


def test_the_oracle_finds_the_best_codes_of_two_columns() -> None:
    H = damped(torch.tensor([[2.0, 1.8], [1.8, 2.0]]), 0.01)
    grid = int_grid(3)
    for seed in range(20):
        weight = torch.rand(1, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 4 - 2
        scale, zero = torch.ones_like(weight), torch.zeros_like(weight)
        own = min(
            quadratic_loss(weight - solve_dense(weight, H, scale, zero, grid, torch.tensor(order))[1], H) for order in ([0, 1], [1, 0])
        )
        every = [
            quadratic_loss(weight - torch.tensor([pair], dtype=torch.float64), H) for pair in itertools.product(range(-4, 4), repeat=2)
        ]
        naive = quadratic_loss(weight - weight.round(), H)
        assert min(every) - 1e-12 <= own <= naive + 1e-12
