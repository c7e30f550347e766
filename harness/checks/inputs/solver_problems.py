"""Problems for solvers: weights and calibration inputs, correlated as activations are, the same every time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.checks.catalogue.registry import CheckFailed, NothingToCheckError
from harness.checks.inputs.examine import refuse
from harness.checks.oracles import damped, nearest, quadratic_loss
from harness.checks.protocols import Quantized, Solved, Solver

MAX_SHARE = 1e-3
"""Share of codes that may differ where two computations differ by rounding errors only."""


@dataclass(frozen=True)
class Problem:
    """A weight and the inputs that it reads.

    Attributes:
        name: in words.
        weight: float32 or bfloat16 [R, C].
        x: float32 [N, C].
        hessian: 2 * mean(x x^T), computed in float64, float32 [C, C].
    """

    name: str
    weight: Tensor
    x: Tensor
    hessian: Tensor


def problem(name: str, rows: int, columns: int, tokens: int, seed: int = 0, mix: float = 0.4) -> Problem:
    """Make a problem.

    Args:
        name: in words.
        rows: of the weight.
        columns: of the weight.
        tokens: of the input; fewer than columns give a singular Hessian.
        seed: of the draw.
        mix: how much columns share.

    Returns:
        The problem.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64) * 2 - 1  # noqa: E731
    weight = (draw(rows, columns) + draw(rows, columns)) * 0.05 * (1 + torch.arange(columns) % 3)
    magnitudes = 0.3 + torch.rand(columns, generator=generator, dtype=torch.float64) * 3
    x = (draw(tokens, columns) + mix * draw(tokens, 6) @ draw(6, columns) * 3) * magnitudes
    x = x.to(torch.float32)
    return Problem(name, weight.to(torch.float32), x, hessian_of(x))


def hessian_of(x: Tensor) -> Tensor:
    """Return 2 * mean(x x^T), computed in float64, in float32."""
    wide = x.to(torch.float64)
    return (2 * wide.t() @ wide / len(x)).to(torch.float32)


def problems(solver: Solver) -> list[Problem]:
    """Return problems whose columns suit the solver's groups: ordinary, of one row, square, with more rows than columns, and singular.

    One has a last group that is not full, of whoever takes it.
    """
    size = solver.group_size or 1
    columns = size * max(1, round(48 / size)) if solver.group_size else 47
    narrow = problem("", 8, columns, 250, seed=5)
    return [
        problem("ordinary", 24, columns, 300, seed=1),
        problem("singular", 16, columns, columns // 2, seed=2),
        problem("one row", 1, columns, 200, seed=3),
        problem("square", columns, columns, 300, seed=7),
        problem("more rows than columns", columns + 40, columns, 300, seed=6),
        replace(narrow, name="bfloat16", weight=narrow.weight.to(torch.bfloat16)),
        *_ragged(solver, size),
    ]


def _ragged(solver: Solver, size: int) -> list[Problem]:
    """A problem of four groups, the last of them short by less than there are groups, so that the number of groups says their width."""
    if size <= 3:
        return []
    one = problem("a last group that is not full", 16, 4 * size - 3, 6 * size, seed=10)
    try:
        solver.solve([one.weight.clone()], one.hessian.clone())
    except Exception as error:  # the subject may refuse with any class
        if not str(error).strip():
            raise CheckFailed(f"{one.name}: {type(error).__name__} came without a message") from error
        return []
    return [one]


def wide_problem(solver: Solver) -> Problem:
    """Return a problem of more columns than a block, and of more than one small run within a block."""
    size = solver.group_size or 1
    columns = size * max(1, round(160 / size)) if solver.group_size else 163
    return problem("wide", 32, columns, 500, seed=4, mix=0.2)


def group_of(solved: Solved, columns: int) -> Tensor:
    """Return the group of each column, [C] long."""
    if solved.group_C is not None:
        return solved.group_C.to(torch.int64)
    groups = solved.quantized.scale.shape[-1] if solved.quantized.scale.ndim > 1 else 1
    return torch.arange(columns) // -(-columns // groups)


def per_value(solved: Solved) -> tuple[Tensor, Tensor]:
    """Return scale and zero point of each value, float64 [R, C]."""
    rows, columns = solved.quantized.codes.shape
    group_C = group_of(solved, columns)
    scale = _rows_of(solved.quantized.scale, rows)[:, group_C]
    if solved.quantized.global_scale is not None:
        scale = scale / solved.quantized.global_scale.to(torch.float64)
    zero = solved.quantized.zero_point
    return scale, torch.zeros_like(scale) if zero is None else _rows_of(zero, rows)[:, group_C]


def hold_values(solved: Solved) -> None:
    """Refuse values that are not (code - zero point) * scale of their group.

    Args:
        solved: a solution.

    Raises:
        CheckFailed: the first such value.
    """
    codes, (scale, zero) = solved.quantized.codes.to(torch.float64), per_value(solved)
    exact, values = (codes - zero) * scale, solved.values.to(torch.float64)
    limit = 3 * float(torch.finfo(solved.values.dtype).eps) * exact.abs()
    refuse((values - exact).abs() > limit, "a value is not (code - zero) * scale of its group", value=values, exact=exact)


def _rows_of(part: Tensor, rows: int) -> Tensor:
    wide = part.to(torch.float64).reshape(-1, part.shape[-1])
    return wide.expand(rows, -1)


def rounded(weight: Tensor, solved: Solved, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight to nearest on the scales of a solution.

    Args:
        weight: [R, C].
        solved: whose scales.
        grid: code values.

    Returns:
        Codes and values, float64.
    """
    scale, zero = per_value(solved)
    codes = nearest(weight.to(torch.float64) / scale + zero, grid)
    return codes, ((codes - zero) * scale).to(solved.values.dtype).to(torch.float64)


def solve(solver: Solver, weight: Tensor, hessian: Tensor, block_size: int | None = None, like: Quantized | None = None) -> Solved:
    """Solve for one weight, and refuse a solver that changes what it was given.

    Args:
        solver: the subject.
        weight: [R, C].
        hessian: [C, C].
        block_size: None for its own.
        like: scales that it must keep; None: it chooses.

    Returns:
        The solution.

    Raises:
        CheckFailed: it changed the weight or the Hessian, or codes of another shape came out.
        NothingToCheckError: it takes no scales from outside.
    """
    before = weight.detach().clone(), hessian.detach().clone()
    try:
        found = solver.solve([weight], hessian, block_size, like)[0]
    except NotImplementedError as error:
        raise NothingToCheckError("this solver takes no scales from outside") from error
    if not (torch.equal(before[0], weight) and torch.equal(before[1], hessian)):
        raise CheckFailed("the solver changed the weight or the Hessian that it was given")
    if found.quantized.codes.shape != weight.shape or found.values.shape != weight.shape:
        raise CheckFailed(f"codes {list(found.quantized.codes.shape)} came out of a weight {list(weight.shape)}")
    return found


def loss_of(solver: Solver, one: Problem, values: Tensor) -> float:
    """Return 1/2 tr(E H' E^T) of some values, with the damped Hessian."""
    return quadratic_loss(one.weight.to(torch.float64) - values.to(torch.float64), damped(one.hessian, solver.damp_frac))


def same_codes(one: Tensor, two: Tensor, what: str, max_share: float = MAX_SHARE) -> float:
    """Refuse codes that differ in more than a share of their places; one place is always allowed.

    Args:
        one: codes.
        two: codes.
        what: was changed between both, in words.
        max_share: the share.

    Returns:
        The share that differs.

    Raises:
        CheckFailed: more differ.
    """
    different = one.to(torch.float64) != two.to(torch.float64)
    share = float(different.double().mean())
    if int(different.sum()) > max(1, max_share * different.numel()):
        raise CheckFailed(f"{what}: {int(different.sum())} of {different.numel()} codes differ ({share:.2%}), at most {max_share:.1%} may")
    return share


def each_problem(solver: Solver, look: Callable[[Problem], str]) -> str:
    """Show a function every problem.

    Args:
        solver: the subject.
        look: returns what it saw.

    Returns:
        What it saw in all.

    Raises:
        CheckFailed: with the name of the problem.
    """
    seen = []
    for one in problems(solver):
        try:
            seen.append(f"{one.name}: {look(one)}")
        except CheckFailed as broken:
            raise CheckFailed(f"{one.name}: {broken}", broken.findings) from None
    return "; ".join(seen)


def permuted(one: Problem, order: Tensor) -> Problem:
    """Return a problem with its columns in another order."""
    return replace(
        one, weight=one.weight[:, order].contiguous(), x=one.x[:, order].contiguous(), hessian=one.hessian[order][:, order].contiguous()
    )


def must_raise(act: Callable[[], object], what: str) -> None:
    """Refuse a subject that goes on as if nothing had happened.

    Args:
        act: what it is asked.
        what: is wrong with that, in words.

    Raises:
        CheckFailed: no error came, or one without a message.
        NothingToCheckError: the subject cannot be asked.
    """
    try:
        act()
    except NothingToCheckError:
        raise
    except Exception as error:  # the subject may refuse with any class
        if not str(error).strip():
            raise CheckFailed(f"{what}: {type(error).__name__} came without a message") from error
        return
    raise CheckFailed(f"{what} was solved as if nothing had happened")
