"""Checks of what must not matter to a second-order solver: 20 to 24 and 30."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.checks.catalogue.registry import CheckContext, CheckFailed, NothingToCheckError, register
from harness.checks.inputs.examine import refuse
from harness.checks.inputs.memory import hold_memory
from harness.checks.inputs.pairs import in_words, pairwise
from harness.checks.inputs.planted import POWERS, is_exact, middles_of, tied, tied_weights
from harness.checks.inputs.presentations import GRAD_MODES, HELD, LAYOUTS, WAYS, presentations
from harness.checks.inputs.solver_problems import (
    Problem,
    each_problem,
    group_of,
    hessian_of,
    hold_values,
    must_raise,
    per_value,
    permuted,
    problem,
    problems,
    same_codes,
    solve,
    wide_problem,
)
from harness.checks.oracles import damped, nearest, quadratic_loss, solve_dense
from harness.checks.protocols import Quantized, Solved, Solver
from harness.checks.strategies import NOT_FINITE, decisive


@register(
    20,
    "block_size",
    "block_size does not matter: <= 0.1 % of codes differ",
    kind="solver",
    caught_by=("mlx-lm#1880",),
)
def block_size(subject: Solver, context: CheckContext) -> str:
    """Solve with blocks of one column, of prime and round sizes, and with one block for everything."""
    one = wide_problem(subject)
    columns = one.weight.shape[1]
    whole = solve(subject, one.weight, one.hessian, columns)
    shares = []
    for size in (1, 7, 16, 32, 128, columns - 1):
        other = solve(subject, one.weight, one.hessian, size, whole.quantized if whole.group_C is None else None)
        shares.append(same_codes(other.quantized.codes, whole.quantized.codes, f"block_size={size} against {columns}"))
    return f"at most {max(shares):.3%} of the codes of {len(shares)} block sizes differ"


@register(21, "hessian_scale", "Scaling H by 1e-4 .. 1e4 changes <= 0.1 % of codes", kind="solver")
def hessian_scale(subject: Solver, context: CheckContext) -> str:
    """Multiply the Hessian."""

    def examined(one: Problem) -> str:
        codes = solve(subject, one.weight, one.hessian).quantized.codes
        for factor in (1e-4, 3.0, 1e4):
            same_codes(solve(subject, one.weight, one.hessian * factor).quantized.codes, codes, f"{factor:g} H")
        return "equal"

    return each_problem(subject, examined)


@register(22, "sample_order", "Sample order and batch split change <= 0.1 % of codes", kind="solver")
def sample_order(subject: Solver, context: CheckContext) -> str:
    """Accumulate the same tokens in other orders and batches, an empty one among them."""

    def examined(one: Problem) -> str:
        codes = solve(subject, one.weight, subject.hessian([one.x])).quantized.codes
        uneven = [one.x[:1], one.x[1:3], one.x[3:3], one.x[3:]]
        for name, batches in {"reversed": [one.x.flip(0)], "single tokens": list(one.x.split(1)), "uneven": uneven}.items():
            same_codes(solve(subject, one.weight, subject.hessian(batches)).quantized.codes, codes, f"tokens {name}")
        return "equal"

    return each_problem(subject, examined)


@register(23, "rows", "Permuting rows permutes the codes, bitwise", kind="solver", needs=("rows_apart",))
def rows(subject: Solver, context: CheckContext) -> str:
    """Turn the rows of the ordinary problem around, and rotate them."""
    one = problems(subject)[0]
    codes = solve(subject, one.weight, one.hessian).quantized.codes
    for name, order in {"reversed": torch.arange(len(codes)).flip(0), "rotated": torch.arange(len(codes)).roll(5)}.items():
        other = solve(subject, one.weight[order].contiguous(), one.hessian).quantized.codes
        if not torch.equal(other, codes[order]):
            raise CheckFailed(f"rows {name}: {int((other != codes[order]).sum())} of {codes.numel()} codes differ")
    return "2 permutations"


@register(24, "groups", "Permuting whole groups under act-order changes <= 0.1 % of codes", kind="solver", needs=("act_order",))
def groups(subject: Solver, context: CheckContext) -> str:
    """Move whole groups of columns."""
    if subject.group_size is None:
        raise NothingToCheckError("whole rows share a scale")

    def examined(one: Problem) -> str:
        size = subject.group_size or 1
        full, rest = torch.arange(one.weight.shape[1]).tensor_split([one.weight.shape[1] // size * size])
        order = torch.cat([full.reshape(-1, size).flip(0).flatten(), rest])
        codes = solve(subject, one.weight, one.hessian).quantized.codes
        other = permuted(one, order)
        same_codes(solve(subject, other.weight, other.hessian).quantized.codes, codes[:, order], "groups reversed")
        return "equal"

    return each_problem(subject, examined)


@register(7, "homogeneous", "2^k times the weight gives the same codes: <= 0.1 % differ", kind="solver")
def homogeneous(subject: Solver, context: CheckContext) -> str:
    """Multiply weights by powers of two that float32 and bfloat16 hold."""

    def examined(one: Problem) -> str:
        codes = solve(subject, one.weight, one.hessian).quantized.codes
        for power in (-20, -3, 12):
            other = solve(subject, one.weight * 2.0**power, one.hessian).quantized.codes
            same_codes(other, codes, f"2^{power} times the weight")
        return "equal"

    return each_problem(subject, examined)


@register(
    None,
    "scales_fit",
    "The scales of a group are those of its own columns: nothing is cut off by more than a step, and a third of the codes is used",
    kind="solver",
    needs=("fixed_scales",),
)
def scales_fit(subject: Solver, context: CheckContext) -> str:
    """Solve for groups of very different magnitudes, more rows and columns than a solver takes at once, and columns that decide a scale."""
    size = subject.group_size or 1
    square = 3 * size if subject.group_size else 40  # groups that run down the columns fit, too
    for rows, columns in ((12, 4 * size if subject.group_size else 40), (square, square), (150, -(-300 // size) * size)):
        one = problem("groups of very different magnitudes", rows, columns, 2 * columns, seed=7)
        weight = one.weight * 6.0 ** (torch.arange(columns) // size % 4 if subject.group_size else torch.arange(rows)[:, None] % 4)
        _hold_fit(subject, weight, one.hessian, f"{rows} x {columns}")
    unit = subject.group_size or columns
    weight = decisive((unit, columns), (1, unit), torch.Generator().manual_seed(0))
    weight[-1, -1] = 2.0  # the one that decides where a whole weight has one scale
    weight = weight.to(torch.float32)
    _hold_fit(subject, weight, one.hessian, f"a column that decides, {unit} x {columns}")
    if subject.dead_value is None:  # dead columns are rounded, so they need codes as others do
        is_alive = torch.arange(columns) % 4 == 1
        _hold_fit(subject, weight, one.hessian * is_alive * is_alive[:, None], f"a dead column that decides, {unit} x {columns}")
    return "groups of 4 magnitudes, and each column"


def _hold_fit(subject: Solver, weight: Tensor, hessian: Tensor, what: str) -> None:
    solved = solve(subject, weight, hessian)
    scale, zero = per_value(solved)
    grid, values = subject.code_values, weight.to(torch.float64) / scale
    last, widest = float(grid[-1] - grid[-2]), float(grid[-1] - grid[0])
    over = torch.maximum(values + zero - grid[-1], grid[0] - values - zero)
    refuse(over > last * 1.001, f"{what}: a weight is cut off by more than a step of its scale", steps=over)
    group_C = group_of(solved, weight.shape[1])
    for group in group_C.unique().tolist():
        used = values[:, group_C == group].abs().amax()
        if float(used) < widest / 6:
            raise CheckFailed(f"{what}: of the codes of group {group} only those up to {float(used):.3g} of {widest:g} are used")


@register(30, "batched", "Batched modules == one by one, bitwise", kind="solver")
def batched(subject: Solver, context: CheckContext) -> str:
    """Solve weights of one input together and apart: of mixed shapes, in several orders, and lists of one shape only, as q, k and v are."""
    one = problems(subject)[0]
    first, second, third = one.weight, one.weight.flip(0) * -0.3, one.weight.roll(3, 0) * 0.8
    few, row = one.weight[:5] * 3, one.weight[7:8] * -0.1
    lists = ([first, second, few, row], [first, second], [third, second, first], [row, first, few, third, second], [few, few * -0.5, row])
    for weights in lists:
        _hold_together(subject, weights, one.hessian)
    return f"{len(lists)} lists of 2 to 5 weights"


_SAME_LOSS = 1e-3  # of equal codes, in another order of additions


def _hold_together(subject: Solver, weights: list[Tensor], hessian: Tensor) -> None:
    together = subject.solve(weights, hessian)
    if len(together) != len(weights):
        raise CheckFailed(f"{len(together)} solutions for {len(weights)} weights")
    for number, (weight, found) in enumerate(zip(weights, together, strict=True)):
        alone = subject.solve([weight], hessian)[0]
        parts = (found.quantized.codes, found.values, *per_value(found)), (alone.quantized.codes, alone.values, *per_value(alone))
        if found.values.shape != weight.shape or not all(map(torch.equal, *parts)):
            rows = " and ".join(str(len(other)) for other in weights)
            what = f"weight {number} of {len(weights)} ({rows} rows)"
            if found.quantized.codes.shape != alone.quantized.codes.shape:
                raise CheckFailed(f"{what}: codes {list(found.quantized.codes.shape)}, alone {list(alone.quantized.codes.shape)}")
            share = float((found.quantized.codes.double() != alone.quantized.codes.double()).double().mean())
            raise CheckFailed(f"{what}: other scales, values or codes than alone ({share:.2%} of the codes)")
        if alone.loss is not None and (found.loss is None or abs(found.loss - alone.loss) > _SAME_LOSS * abs(alone.loss)):
            raise CheckFailed(f"weight {number} of {len(weights)}: a loss of {found.loss} is reported, alone {alone.loss}")


@register(
    None,
    "pieces",
    "Copies of one problem side by side, 1,000 columns wide or 520 rows high, have its codes: <= 0.1 % differ",
    kind="solver",
)
def pieces(subject: Solver, context: CheckContext) -> str:
    """Repeat a weight over columns that share nothing with those beside them, and over rows, for whoever goes through it in pieces."""
    one = problems(subject)[0]
    one = replace(one, weight=one.weight[:20].contiguous())  # so that blocks of rows fit
    alone = solve(subject, one.weight, one.hessian)
    high = solve(subject, one.weight.repeat(27, 1), one.hessian)
    hold_values(high)
    for number, rows in enumerate(torch.arange(27 * 20).split(20)):
        _hold_alike(_part(high, rows, slice(None)), alone, f"{27 * 20} rows, piece {number} of 27")
    if alone.group_C is not None:
        return f"{27 * 20} rows"  # groups are formed of what comes together, which copies change
    columns = one.weight.shape[1]
    count = -(-1031 // columns)
    wide = solve(subject, one.weight.repeat(1, count), torch.block_diag(*[one.hessian] * count))
    hold_values(wide)
    for number, part in enumerate(torch.arange(count * columns).split(columns)):
        _hold_alike(_part(wide, slice(None), part), alone, f"{count * columns} columns, piece {number} of {count}")
    return f"{count * columns} columns and {27 * 20} rows"


def _part(solved: Solved, rows: Tensor | slice, columns: Tensor | slice) -> Solved:
    """Codes and values of some rows and columns."""
    return replace(
        solved, quantized=replace(solved.quantized, codes=solved.quantized.codes[rows][:, columns]), values=solved.values[rows][:, columns]
    )


def _hold_alike(found: Solved, expected: Solved, what: str) -> None:
    """The same codes, and values that are the same but for those few that differ."""
    same_codes(found.quantized.codes, expected.quantized.codes, what)
    one, two = found.values.to(torch.float64), expected.values.to(torch.float64)
    if not float((one - two).norm()) <= 0.02 * float(two.norm()):
        raise CheckFailed(f"{what}: the same codes, but other values: relative error {float((one - two).norm() / two.norm()):.3g}")


@register(
    64,
    "layouts",
    "Weights and Hessians that are views, Parameters or results, and gradients off, change <= 0.1 % of codes, and used memory none",
    kind="solver",
)
def every_layout(subject: Solver, context: CheckContext) -> str:
    """Solve for one weight, and with one Hessian, in every presentation."""
    one, count = problems(subject)[0], 0
    alone = solve(subject, one.weight, one.hessian)
    for mode, grad in GRAD_MODES.items():
        for name, view, plain in presentations(one.weight):
            expected = alone if torch.equal(plain, one.weight) else solve(subject, plain, one.hessian)
            with grad():
                other = solve(subject, view, one.hessian)
            _hold_alike(other, expected, f"{name} of the weight, {mode}")
            count += 1
        for name, view, plain in presentations(one.hessian):
            if not torch.equal(plain, one.hessian):
                continue  # expanded rows are no Hessian
            with grad():
                other = solve(subject, one.weight, view)
            _hold_alike(other, alone, f"{name} of the Hessian, {mode}")
            count += 1
    _hold_memory(subject, one)
    return f"{count} presentations"


def _hold_memory(subject: Solver, one: Problem) -> None:
    weights, batches = [one.weight, one.weight.flip(0) * 3, one.weight.roll(5, 1)], [one.x, one.x.flip(1), one.x.roll(3, 1) * 0.5]
    hessians = [subject.hessian([x]) for x in batches]
    hold_memory(lambda x: subject.hessian([x, x[:3]]), "hessian", batches)
    hold_memory(subject.order, "order", hessians)
    hold_memory(lambda weight, hessian: subject.solve([weight], hessian), "solve", weights, hessians)


_LAID = ("as it is", "a transposed view", "every other column", "a part of a larger tensor")
_MEETING = {
    "asked": ("alone", "between two others", "on given scales"),
    "inputs": ("many tokens", "few tokens", "dead columns"),
    "values": ("drawn", "a row of zeros", "large", "small"),
    "held": tuple(HELD),
    "hessian": _LAID[::3],
    "hessian held": tuple(HELD),
    "planted": NOT_FINITE,
    "block": (None, 7),
    "dtype": (torch.float32, torch.bfloat16),
    "grad": tuple(GRAD_MODES),
}


@register(
    None,
    "conditions_meet",
    "Any two of rows, dtype, values, layouts, gradients, tokens and what is asked may meet: the oracle's loss, codes as always, and no NaN",
    kind="solver",
)
def conditions_meet(subject: Solver, context: CheckContext) -> str:
    """Solve for each pair of conditions, and for the same weight as an ordinary tensor, alone."""
    columns = problems(subject)[0].weight.shape[1]
    cases = pairwise({"laid": _LAID, "rows": (24, 1, columns, columns + 40, 520), **_MEETING})
    for case in cases:
        one = _met(columns, **case)
        alone = solve(subject, one.weight, one.hessian)
        _hold_oracle(subject, one, alone)
        asked = partial(_asked, subject, case, like=alone)
        with GRAD_MODES[case["grad"]]():
            found = asked(one.weight, one.hessian)
            weight, hessian = one.weight.clone(), one.hessian.clone()
            weight[-1, -1] = hessian[-1, -1] = case["planted"]
            must_raise(lambda: asked(weight, one.hessian), f"{case['planted']} in the weight, {one.name}")  # noqa: B023 - called at once
            must_raise(lambda: asked(one.weight, hessian), f"{case['planted']} in H, {one.name}")  # noqa: B023 - called at once
        _hold_alike(found, alone, one.name)
        if alone.loss is not None and (found.loss is None or not abs(found.loss - alone.loss) <= _NEAR_LOSS * abs(alone.loss)):
            raise CheckFailed(f"{one.name}: a loss of {found.loss} is reported, for an ordinary weight alone {alone.loss}")
    return f"{len(cases)} problems"


_NEAR_LOSS = 0.05  # of codes of which few may differ


def _met(columns: int, rows: int, inputs: str, values: str, dtype: torch.dtype, **others: object) -> Problem:
    """The problem of a case, with ordinary tensors; the other conditions are named."""
    name = ", ".join([f"{rows} x {columns}", inputs, values, str(dtype), *(f"{key} {value}" for key, value in others.items())])
    one = problem(name, rows, columns, columns // 2 if inputs == "few tokens" else 300, seed=11)
    if inputs == "dead columns":
        one.hessian[::7], one.hessian[:, ::7] = 0, 0
    if values == "a row of zeros":
        one.weight[rows // 2] = 0
    return replace(one, weight=(one.weight * {"large": 2.0**12, "small": 2.0**-30}.get(values, 1)).to(dtype))


def _asked(subject: Solver, case: Mapping[str, Any], plain: Tensor, plain_hessian: Tensor, *, like: Solved) -> Solved:
    """Solve as a case says; who takes no scales is asked as usual."""
    weight = HELD[case["held"]](WAYS[case["laid"]](plain))
    hessian = HELD[case["hessian held"]](WAYS[case["hessian"]](plain_hessian))
    block = case["block"]
    if case["asked"] == "between two others":
        others = like.values.to(weight.dtype)
        return subject.solve([others.flip(0) * -0.3, weight, others.roll(1, 0)], hessian, block)[1]
    given = like.quantized if case["asked"] == "on given scales" and like.group_C is None else None
    try:
        return solve(subject, weight, hessian, block, given)
    except NothingToCheckError:
        return solve(subject, weight, hessian, block)


_TOKENS: tuple[tuple[int, ...], ...] = ((40,), (1, 40), (1,), (), (2, 40), (1, 1), (2, 3, 20), (1, 1, 40), (1, 2, 20))
_NO_TOKENS: tuple[tuple[int, ...], ...] = ((0,), (3, 0), (0, 3), (2, 0, 3))
_BATCHES = {
    "shape": _TOKENS,
    "laid": ("as it is", *LAYOUTS),
    "held": tuple(HELD),
    "beside": ("alone", "before another", "behind another"),
    "dtype": (torch.float32, torch.bfloat16),
    "grad": tuple(GRAD_MODES),
}


@register(
    None,
    "batches_meet",
    "Any two of tokens, rank, dtype, layout, gradients and place of a batch may meet: H is 2 * mean(x x^T), and NaN or no token is refused",
    kind="solver",
)
def batches_meet(subject: Solver, context: CheckContext) -> str:
    """Accumulate batches for each pair of conditions, with and without a planted value, and batches without tokens."""
    generator = torch.Generator().manual_seed(13)
    columns = problems(subject)[0].weight.shape[1]
    other = torch.randn(10, columns, generator=generator) * 0.1
    cases = pairwise({**_BATCHES, "planted": NOT_FINITE}, {"shape": [shape for shape in _TOKENS if math.prod(shape) == 1]})
    for case in cases:
        x = torch.randn((*case["shape"], columns), generator=generator).to(case["dtype"])
        H, exact = _accumulated(subject, case, x, other).to(torch.float64), hessian_of(_together(case, x, other)).to(torch.float64)
        if not (error := float((H - exact).norm() / exact.norm())) <= 1e-5:
            raise CheckFailed(f"{in_words(case)}: H is not 2 * mean(x x^T): relative error {error:.3g}")
        x.view(-1)[-1] = case["planted"]
        weight = problems(subject)[0].weight
        must_raise(lambda: subject.solve([weight], _accumulated(subject, case, x, other)), in_words(case))  # noqa: B023 - called at once
    empty = pairwise({**_BATCHES, "shape": _NO_TOKENS, "beside": ("alone",)})
    for case in empty:
        x = torch.zeros((*case["shape"], columns), dtype=case["dtype"])
        must_raise(lambda: _accumulated(subject, case, x, other), f"no token at all, {in_words(case)}")  # noqa: B023 - called at once
    return f"{len(cases) + len(empty)} sets of batches"


def _accumulated(subject: Solver, case: Mapping[str, Any], x: Tensor, other: Tensor) -> Tensor:
    batch = HELD[case["held"]](WAYS[case["laid"]](x))
    with GRAD_MODES[case["grad"]]():
        return subject.hessian({"alone": [batch], "before another": [batch, other], "behind another": [other, batch]}[case["beside"]])


def _together(case: Mapping[str, Any], x: Tensor, other: Tensor) -> Tensor:
    """The tokens of all batches, in float32."""
    flat = x.reshape(-1, x.shape[-1]).float()
    return flat if case["beside"] == "alone" else torch.cat([flat, other])


def _hold_oracle(subject: Solver, one: Problem, solved: Solved) -> None:
    """No more loss than the dense oracle has on the same scales, in the columns that are not dead.

    Whether later columns make up for the rounding of values to their dtype is the solver's choice.
    """
    H, alive, kept = damped(one.hessian, subject.damp_frac), one.hessian.diagonal() != 0, solved.values.dtype
    on = (one.weight, H, *per_value(solved), subject.code_values, subject.order(one.hessian))
    oracles = [solve_dense(*on, dtype)[1].to(kept) for dtype in {torch.float64, kept}]
    own, *best = (quadratic_loss((one.weight.double() - x.double())[:, alive], H[alive][:, alive]) for x in (solved.values, *oracles))
    if not own <= (1.01 if len(one.weight) > 1 else 1.1) * max(best):  # one code of a single row counts
        raise CheckFailed(f"{one.name}: loss {own:.6g}, the oracle's is {max(best):.6g}")


# A check of the ties of second-order solvers: check 9, where no column moves another.


@register(
    9,
    "ties",
    "Under H = c I planted ties go to the even code, and what lies an ulp beside them to the nearest",
    kind="solver",
    needs=("half_even",),
)
def ties(subject: Solver, context: CheckContext) -> str:
    """Plant ties of the grid on scales that are powers of two: those that the solver chooses by itself, or those that it is given.

    Args:
        subject: a solver.
        context: how closely.

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
            exact = is_exact(scale, positions, torch.float32)
            expected = nearest(positions, subject.code_values)
            codes = solved.quantized.codes.to(torch.float64)
            where = f"H = {factor:g} I, {'on a tie' if not step else 'an ulp beside a tie'}"
            refuse(exact & (codes != expected), f"{where}: not half to even", code=codes, expected=expected, position=positions)
            count += int((exact & torch.isin(positions, middles_of(subject.code_values))).sum()) if not step else 0
    return count


def _weights(subject: Solver) -> Iterator[Tensor]:
    columns = problems(subject)[0].weight.shape[1]
    for weight in tied_weights(subject.code_values, 8, columns, subject.group_size or columns):
        yield weight.to(torch.float32)


def _given(subject: Solver) -> Iterator[tuple[Tensor, Quantized]]:
    """Ties of the whole grid with the scales that go with them; none where the solver takes no scales."""
    grid, one = subject.code_values, problems(subject)[0]
    rows, columns = one.weight.shape
    solved = solve(subject, one.weight, one.hessian)
    if solved.group_C is not None:
        return
    # An even one: whether codes are rounded before or after it is added must not decide which neighbour is even.
    zero = None if solved.quantized.zero_point is None else torch.full_like(solved.quantized.zero_point, float(grid[0]))
    for power in POWERS:
        wide = torch.full_like(solved.quantized.scale, 2.0**power)
        whole = None if solved.quantized.global_scale is None else torch.ones_like(solved.quantized.global_scale)
        like = replace(solved.quantized, scale=wide, zero_point=zero, global_scale=whole)
        weight = ((tied(grid, rows, columns) - (0.0 if zero is None else float(grid[0]))) * 2.0**power).to(torch.float32)
        try:
            solve(subject, weight, torch.eye(columns), None, like)
        except NothingToCheckError:
            return
        yield weight, like
