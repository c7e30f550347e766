"""A check of the ties of second-order solvers: check 9, where no column moves another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from harness.checks.catalogue import Look, NothingToCheckError, register
from harness.checks.looking import refuse
from harness.checks.nearest import nearest
from harness.checks.protocols import Quantized, Solver
from harness.checks.solver_problems import per_value, problems, solve

_POWERS = (-3, 0)


@register(
    9,
    "ties",
    "Under H = c I planted ties go to the even code, and what lies an ulp beside them to the nearest",
    kind="solver",
    needs=("half_even",),
)
def ties(subject: Solver, look: Look) -> str:
    """Plant ties of the grid on scales that are powers of two: those that the solver chooses by itself, or those that it is given.

    Args:
        subject: a solver.
        look: how closely.

    Returns:
        What was seen.

    Raises:
        NothingToCheckError: it neither chooses such scales for any of the weights, nor takes scales from outside.
    """
    count = sum(_examined(subject, weight, None) for weight in _weights(subject))
    count += sum(_examined(subject, *given) for given in _given(subject))
    if not count:
        raise NothingToCheckError("this solver chose no scale that is a power of two, and takes none from outside")
    return f"{count} ties, and their neighbours"


def _examined(subject: Solver, weight: Tensor, like: Quantized | None) -> int:
    """The number of ties in a weight; each has to go to the even code, whatever the block."""
    count = 0
    for factor, block in ((1.0, None), (37.0, 1)):
        eye = torch.eye(weight.shape[1]) * factor
        for step in (0.0, torch.inf, -torch.inf):
            planted = torch.nextafter(weight, torch.full_like(weight, step)) if step else weight
            solved = solve(subject, planted, eye, block, like)
            scale, zero = per_value(solved)
            positions = planted.to(torch.float64) / scale + zero
            # Only here is a position the same in every precision: nothing is rounded on the way to it.
            exact = (torch.frexp(scale)[0] == 0.5) & (positions.to(torch.float32).to(torch.float64) == positions)
            expected = nearest(positions, subject.code_values)
            codes = solved.quantized.codes.to(torch.float64)
            where = f"H = {factor:g} I, {'on a tie' if not step else 'an ulp beside a tie'}"
            refuse(exact & (codes != expected), f"{where}: not half to even", code=codes, expected=expected, position=positions)
            middles = (subject.code_values[1:] + subject.code_values[:-1]) / 2
            count += int((exact & torch.isin(positions, middles)).sum()) if not step else 0
    return count


def _weights(subject: Solver) -> Iterator[Tensor]:
    """Ties of the whole grid, in groups whose ends ask for a power of two under one of the rules that scales follow."""
    grid = subject.code_values
    half = (grid[-1] - grid[0]) / 2
    columns = problems(subject)[0].weight.shape[1]
    size = subject.group_size or columns
    for low, high, offset in ((-half, half, 0.0), (-grid[-1], grid[-1], 0.0), (grid[0], grid[-1], 0.0), (0.0, 2 * half, float(-grid[0]))):
        weight = (_planted(grid, 8, columns) + offset).clamp(float(low), float(high))
        weight[:, ::size], weight[:, 1::size] = low, high
        for power in _POWERS:
            yield (weight * 2.0**power).to(torch.float32)


def _given(subject: Solver) -> Iterator[tuple[Tensor, Quantized]]:
    """Ties of the whole grid with the scales that go with them; none where the solver takes no scales."""
    grid, one = subject.code_values, problems(subject)[0]
    rows, columns = one.weight.shape
    solved = solve(subject, one.weight, one.hessian)
    if solved.group_C is not None:
        return
    # An even one: whether codes are rounded before or after it is added must not decide which neighbour is even.
    zero = None if solved.quantized.zero_point is None else torch.full_like(solved.quantized.zero_point, float(grid[0]))
    for power in _POWERS:
        wide = torch.full_like(solved.quantized.scale, 2.0**power)
        whole = None if solved.quantized.global_scale is None else torch.ones_like(solved.quantized.global_scale)
        like = replace(solved.quantized, scale=wide, zero_point=zero, global_scale=whole)
        weight = ((_planted(grid, rows, columns) - (0.0 if zero is None else float(grid[0]))) * 2.0**power).to(torch.float32)
        try:
            solve(subject, weight, torch.eye(columns), None, like)
        except NothingToCheckError:
            return
        yield weight, like


def _planted(grid: Tensor, rows: int, columns: int) -> Tensor:
    """The middles between all neighbours of a grid, one after the other, as often as they fit."""
    middles = (grid[1:] + grid[:-1]) / 2
    return middles[torch.arange(rows * columns) % len(middles)].reshape(rows, columns)
