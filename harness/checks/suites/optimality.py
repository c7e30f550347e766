"""Checks of second-order solvers against exact arithmetic: 17 to 19, 25 to 28, and what their parts say of each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from harness.checks.catalogue.registry import CheckContext, CheckFailed, NothingToCheckError, register
from harness.checks.inputs.examine import refuse
from harness.checks.inputs.presentations import GRAD_MODES, places, presentations
from harness.checks.inputs.solver_problems import (
    Problem,
    each_problem,
    group_of,
    hessian_of,
    hold_values,
    loss_of,
    must_raise,
    per_value,
    problem,
    problems,
    rounded,
    same_codes,
    solve,
    wide_problem,
)
from harness.checks.oracles import at_tie, damped, nearest, quadratic_loss, solve_dense
from harness.checks.protocols import Solved, Solver
from harness.tolerance import T3, compare, vacuous_decoys

_EPS = float(torch.finfo(torch.float32).eps)


@register(
    17,
    "hessian",
    "|H - H^T| <= 1e-6 of the diagonal, lambda_min >= -1e-6 lambda_max, and H is 2 * mean(x x^T): relative 1e-5",
    kind="solver",
)
def hessian(subject: Solver, context: CheckContext) -> str:
    """Accumulate inputs in batches of several sizes and dtypes."""
    one = problem("many columns", 2, 401, 96, seed=9)
    worst = 0.0
    narrow = one.x.to(torch.bfloat16)
    four = [one.x[:60].reshape(2, 3, 10, -1), one.x[60:].reshape(1, 1, -1, 401)]
    with_zeros = [one.x[:50], torch.zeros_like(one.x[:3]), torch.cat([torch.zeros_like(one.x[:2]), one.x[50:]])]  # tokens, too
    some_empty = [one.x[:0], one.x[:50], one.x[:0].reshape(0, 3, 401), one.x[:0].reshape(2, 0, 401), one.x[50:]]
    three = [one.x[:50].reshape(5, 10, -1), one.x[50:]]
    long = [torch.randn(5, 130, 401, generator=torch.Generator().manual_seed(9))]
    kinds = ([one.x], list(one.x.split(7)), three, four, list(one.x), some_empty, with_zeros, long, [narrow])
    for batches in kinds:
        H = subject.hessian(batches).to(torch.float64)
        sizes = H.diagonal().abs().sqrt()
        if not bool(((H - H.t()).abs() <= 1e-6 * sizes * sizes[:, None]).all()):  # BLAS may sum either half in its own order
            raise CheckFailed(f"H is not symmetric: |H - H^T| up to {float((H - H.t()).abs().max()):.3g}")
        tier = T3(max_relative_error=1e-5)
        if passed := vacuous_decoys(one.hessian, tier):
            raise CheckFailed(f"the limit measures nothing: {', '.join(passed)} would pass")
        expected = hessian_of(torch.cat([batch.reshape(-1, 401) for batch in batches]))
        result = compare(H.to(torch.float32), expected, tier, name="H")
        if not result.ok:
            raise CheckFailed(f"H is not 2 * mean(x x^T): {result.summary}")
        eigenvalues = torch.linalg.eigvalsh(H)
        if float(eigenvalues[0]) < -1e-6 * float(eigenvalues[-1]):
            raise CheckFailed(f"lambda_min {float(eigenvalues[0]):.3g} against lambda_max {float(eigenvalues[-1]):.3g}")
        worst = max(worst, result.distance.relative_error if result.distance else 0.0)
    _hold_few_tokens(subject, one.x)
    _hold_many_columns(subject)
    _hold_magnitudes(subject, one)
    _hold_presented(subject, one.x)
    return f"relative error up to {worst:.1e}"


def _hold_few_tokens(subject: Solver, x: Tensor) -> None:
    """A single token is enough for an H; none at all is an error, not an H of zeros."""
    single = subject.hessian([x[:1]]).to(torch.float64)
    exact = hessian_of(x[:1]).to(torch.float64)
    if float((single - exact).abs().max()) > 1e-5 * float(exact.abs().max()):
        raise CheckFailed("H of a single token is not 2 x x^T")
    must_raise(lambda: subject.hessian([x[:0]]), "no token at all")


def _hold_many_columns(subject: Solver) -> None:
    x = torch.randn(40, 1000, generator=torch.Generator().manual_seed(11))
    H, exact = subject.hessian([x]).to(torch.float64), hessian_of(x).to(torch.float64)
    if not (error := float((H - exact).norm() / exact.norm())) <= 1e-5:
        raise CheckFailed(f"of 1,000 columns H is not 2 * mean(x x^T): relative error {error:.3g}")


def _hold_magnitudes(subject: Solver, one: Problem) -> None:
    """Times a power of two, inputs give an H times its square: nothing is added to it."""
    plain = one.hessian.to(torch.float64)
    for power in (-30, -13, 13):
        H = subject.hessian([one.x * 2.0**power]).to(torch.float64) * 2.0 ** (-2 * power)
        if not (error := float((H - plain).norm() / plain.norm())) <= 1e-5:
            raise CheckFailed(f"2^{power} times the inputs: H is not 2 * mean(x x^T): relative error {error:.3g}")


def _hold_presented(subject: Solver, x: Tensor) -> None:
    """Batches that are views, Parameters or results, with gradients on and off, and batches of every rank that are."""
    for batch in (x[:60], x[:60].reshape(3, 20, -1), x[:60].reshape(3, 4, 5, -1), x[0]):
        for name, view, plain in presentations(batch):
            exact = hessian_of(plain.reshape(-1, x.shape[1])).to(torch.float64)
            for mode, grad in GRAD_MODES.items():
                with grad():
                    H = subject.hessian([view]).to(torch.float64)
                if not (error := float((H - exact).norm() / exact.norm())) <= 1e-5:
                    what = f"{name} of {list(batch.shape)}, {mode}"
                    raise CheckFailed(f"{what}: H is not 2 * mean(x x^T): relative error {error:.3g}")


@register(None, "parts_agree", "Values are (code - zero point) * scale of their group, and codes are codes", kind="solver")
def parts_agree(subject: Solver, context: CheckContext) -> str:
    """Compute the values of a loader from the codes."""

    def examined(one: Problem) -> str:
        solved = solve(subject, one.weight, one.hessian)
        codes = solved.quantized.codes.to(torch.float64)
        refuse(nearest(codes, subject.code_values) != codes, "a code is none", code=codes)
        hold_values(solved)
        counts = torch.bincount(group_of(solved, codes.shape[1])).tolist()
        wanted = [len(part) for part in torch.arange(codes.shape[1]).split(subject.group_size or codes.shape[1])]
        if sorted(counts) != sorted(wanted):
            raise CheckFailed(f"groups have {sorted(set(counts))} columns, not {subject.group_size}")
        return "equal"

    return each_problem(subject, examined)


@register(18, "beats_rounding", "Reconstruction loss <= 1.001 x the loss of round-to-nearest on the same scales", kind="solver")
def beats_rounding(subject: Solver, context: CheckContext) -> str:
    """Compare losses under the damped Hessian, in float64."""

    def examined(one: Problem) -> str:
        solved = solve(subject, one.weight, one.hessian)
        own = loss_of(subject, one, solved.values)
        other = loss_of(subject, one, rounded(one.weight, solved, subject.code_values)[1])
        if not own <= 1.001 * other:
            raise CheckFailed(f"loss {own:.6g}, where rounding to nearest has {other:.6g}")
        return f"{own / other:.3f} of the loss of rounding"

    size = subject.group_size or 1
    examined(problem("large", 150, -(-300 // size) * size, 700, seed=8))
    return each_problem(subject, examined)


@register(
    None,
    "search_pays",
    "Searched scales have no more loss than those of the range, where tokens outnumber columns",
    kind="solver",
    needs=("searches_scales",),
)
def search_pays(subject: Solver, context: CheckContext) -> str:
    """Solve with and without the search."""
    ratios = []

    def examined(one: Problem) -> str:
        if len(one.x) < one.x.shape[1]:
            return "not asked"
        searched = loss_of(subject, one, solve(subject, one.weight, one.hessian).values)
        plain = loss_of(subject, one, subject.unsearched().solve([one.weight], one.hessian)[0].values)
        # A single row may lose a little where the whole layer gains.
        limit = 1.05 if len(one.weight) == 1 else 1.001
        ratios.append(searched / plain)
        if not searched <= limit * plain:
            raise CheckFailed(f"loss {searched:.6g} with the search, {plain:.6g} without")
        return f"{searched / plain:.3f} of the loss without"

    seen = each_problem(subject, examined)
    if min(ratios) > 0.999:
        raise CheckFailed("the search never gains anything")
    return seen


@register(19, "identity_rounds", "H = c I, and any other diagonal, gives exactly round-to-nearest", kind="solver")
def identity_rounds(subject: Solver, context: CheckContext) -> str:
    """Solve with multiples of the identity, and with inputs of which some are much smaller than others: small is not dead."""

    def examined(one: Problem) -> str:
        columns = one.weight.shape[1]
        unequal = 2.0 ** -(torch.arange(columns) % 41)
        for diagonal in (*(torch.full((columns,), factor) for factor in (1.0, 1e-4, 37.0)), unequal):
            solved = solve(subject, one.weight, torch.diag(diagonal))
            _hold_nearest(subject, one.weight, solved.quantized.codes, *per_value(solved))
        return "nearest codes"

    return each_problem(subject, examined)


def _hold_nearest(subject: Solver, weight: Tensor, codes: Tensor, scale: Tensor, zero: Tensor) -> None:
    """Refuse codes that are not the nearest ones, but for those at a tie."""
    positions = weight.to(torch.float64) / scale + zero
    found, expected = codes.to(torch.float64), nearest(positions, subject.code_values)
    reach = torch.maximum(positions.abs(), (positions - zero).abs())
    wrong = (found != expected) & ~at_tie(positions, subject.code_values, _EPS, reach)
    refuse(wrong, "not the nearest code", code=found, nearest=expected, position=positions)


@register(
    None,
    "own_scales",
    "Under H = c I no group, be it the last and not full, has ten times the error of rounding over its own range",
    kind="solver",
)
def own_scales(subject: Solver, context: CheckContext) -> str:
    """Solve for groups of which each is 6 times smaller, or larger, than the one before; a width that is refused is not asked."""
    size = subject.group_size
    if size is None:
        raise NothingToCheckError("a whole row shares a scale")
    seen = []
    for left in dict.fromkeys((size, size - 1, size // 2 + 1, 1)):
        columns = 3 * size + left
        for power in (6.0, 1 / 6.0):
            weight = problem("", 12, columns, 1, seed=7).weight * power ** (torch.arange(columns) // size)
            try:
                solved = solve(subject, weight, torch.eye(columns))
            except Exception as error:  # the subject may refuse with any class
                if left == size or not str(error).strip():
                    raise
                break
            _hold_own_scales(solved, weight, size, subject.code_values)
            seen.append(columns)
    return f"{', '.join(map(str, dict.fromkeys(seen)))} columns"


def _hold_own_scales(solved: Solved, weight: Tensor, size: int, grid: Tensor) -> None:
    columns = weight.shape[1]
    group_C = torch.arange(columns) // size if solved.group_C is None else group_of(solved, columns)
    centred = grid - (grid[0] + grid[-1]) / 2
    for group in group_C.unique().tolist():
        exact, values = (part[:, group_C == group].to(torch.float64) for part in (weight, solved.values))
        scale = exact.abs().amax() / centred[-1]  # of all rows: some share a scale
        own, other = ((exact - found).square().sum() for found in (values, nearest(exact / scale, centred) * scale))
        if not own <= 10 * other + 1e-12 * exact.square().sum():
            raise CheckFailed(
                f"group {group} of {columns} columns: an error of {float(own):.3g}, rounded over its own range it is {float(other):.3g}"
            )


@register(25, "grid_is_fixed", "A weight already on the grid is a fixed point", kind="solver")
def grid_is_fixed(subject: Solver, context: CheckContext) -> str:
    """Solve for the values of a solution, on its scales."""

    def examined(one: Problem) -> str:
        solved = solve(subject, one.weight, one.hessian)
        again = solve(subject, solved.values.to(torch.float32), one.hessian, None, solved.quantized)
        refuse(
            again.quantized.codes.double() != solved.quantized.codes.double(), "a weight on the grid has moved", code=again.quantized.codes
        )
        return "unmoved"

    return each_problem(subject, examined)


@register(
    26,
    "dead_columns",
    "Dead columns (H_ii = 0) stay finite, take the declared value, and change nothing in the others, nor in the damping that a loss tells",
    kind="solver",
)
def dead_columns(subject: Solver, context: CheckContext) -> str:
    """Make the first, the last and a middle column of the input zero, or three of four; and the others small against any constant."""

    def examined(one: Problem) -> str:
        columns = one.weight.shape[1]
        few, most = torch.tensor([0, columns // 2, columns - 1]), torch.arange(columns)[torch.arange(columns) % 4 != 1]
        return f"{', '.join(with_dead(one, dead) for dead in (few, most))} dead columns"

    def with_dead(one: Problem, dead: Tensor) -> str:
        H = one.hessian * 1e-4
        H[dead], H[:, dead] = 0, 0
        solved = solve(subject, one.weight, H)
        values = solved.values.to(torch.float64)
        refuse(~values.isfinite(), "a value is not finite", value=values)
        if subject.dead_value is None:
            _hold_nearest(subject, one.weight[:, dead], solved.quantized.codes[:, dead], *(part[:, dead] for part in per_value(solved)))
        else:
            refuse(values[:, dead] != subject.dead_value, f"a dead column is not {subject.dead_value:g}", value=values[:, dead])
        alive = torch.ones(one.weight.shape[1], dtype=torch.bool)
        alive[dead] = False
        exact, order = damped(H, subject.damp_frac), subject.order(H)
        oracle = solve_dense(one.weight, exact, *per_value(solved), subject.code_values, order, solved.values.dtype)[1]
        own, best = (quadratic_loss((one.weight.double() - found)[:, alive], exact[alive][:, alive]) for found in (values, oracle))
        if not own <= 1.01 * best:
            raise CheckFailed(f"the other columns have a loss of {own:.6g}, the oracle's have {best:.6g}")
        _hold_loss_beside_dead(solved, one.weight, exact, alive, own)
        return str(len(dead))

    return each_problem(subject, examined)


def _hold_loss_beside_dead(solved: Solved, weight: Tensor, H: Tensor, alive: Tensor, of_alive: float) -> None:
    """A reported loss is damped by the mean diagonal of columns that are not dead; whether what dead ones lose counts is the solver's."""
    whole = quadratic_loss(weight.double() - solved.values.double(), H)
    if solved.loss is not None and not any(abs(solved.loss - one) <= 5e-3 * one for one in (whole, of_alive)):
        raise CheckFailed(
            f"where {int((~alive).sum())} of {len(alive)} columns are dead the reported loss is {solved.loss:.6g}, "
            f"that of the codes {whole:.6g}, {of_alive:.6g} without the dead ones"
        )


@register(27, "last_column", "For the last column no step of +-1 code lowers the loss", kind="solver")
def last_column(subject: Solver, context: CheckContext) -> str:
    """Move the codes of the column that was rounded last."""
    grid = subject.code_values

    def examined(one: Problem) -> str:
        if one.weight.dtype != torch.float32:
            return "not asked"  # values that are rounded once more have other nearest ones
        solved = solve(subject, one.weight, one.hessian)
        H = damped(one.hessian, subject.damp_frac)
        last = int(subject.order(one.hessian)[-1])
        scale, zero = (part[:, last] for part in per_value(solved))
        error = one.weight.to(torch.float64) - solved.values.to(torch.float64)
        place = torch.searchsorted(grid, solved.quantized.codes[:, last].to(torch.float64))
        before = ((error @ H) * error).sum(1)
        for step in (-1, 1):
            moved = error.clone()
            code = grid[(place + step).clamp(0, len(grid) - 1)]
            moved[:, last] = one.weight[:, last].to(torch.float64) - (code - zero) * scale
            after = ((moved @ H) * moved).sum(1)
            refuse(after < before * (1 - 1e-4), f"a step of {step:+d} in the last column lowers the loss", before=before, after=after)
        return f"column {last}"

    return each_problem(subject, examined)


@register(
    28,
    "dense_oracle",
    "The loss is within 1 % of a dense optimal-brain solution in float64, and 95 % of the codes are its codes",
    kind="solver",
)
def dense_oracle(subject: Solver, context: CheckContext) -> str:
    """Solve small problems twice, on the scales that the subject chose."""
    kept = "no problem whose limit measures anything"
    is_measured = False
    for one in problems(subject):
        solved = solve(subject, one.weight, one.hessian)
        H = damped(one.hessian, subject.damp_frac)
        codes, values = solve_dense(one.weight, H, *per_value(solved), subject.code_values, subject.order(one.hessian), solved.values.dtype)
        own, exact = loss_of(subject, one, solved.values), loss_of(subject, one, values)
        naive = loss_of(subject, one, rounded(one.weight, solved, subject.code_values)[1])
        is_measured |= naive > 1.02 * exact  # else rounding to nearest, the decoy, would pass
        if not 0.99 * exact <= own <= 1.01 * exact:
            raise CheckFailed(f"{one.name}: loss {own:.6g}, the oracle's is {exact:.6g}")
        same_codes(solved.quantized.codes, codes, f"{one.name}, against the oracle", 0.05)
        kept = f"{one.name}: {own / exact:.5f} of the oracle's loss, rounding has {naive / exact:.2f}"
    if not is_measured:
        raise CheckFailed("rounding to nearest would pass this limit on every problem: it measures nothing")
    return kept


# Checks of what a second-order solver reports and refuses: 29, its order, and values that are not finite.


@register(29, "float64", "float32 against float64: the loss is within 0.5 %, and so is the loss that the solver reports", kind="solver")
def float64_loss(subject: Solver, context: CheckContext) -> str:
    """Hold a larger problem against the oracle, and every reported loss against its own codes."""
    reported = 0
    for one in (*problems(subject), wide_problem(subject)):
        solved = solve(subject, one.weight, one.hessian)
        own = loss_of(subject, one, solved.values)
        _hold_relative_error(one, solved)
        if solved.loss is not None:
            reported += 1
            if not abs(solved.loss - own) <= 5e-3 * own:
                raise CheckFailed(f"{one.name}: the reported loss is {solved.loss:.6g}, that of the codes {own:.6g}")
    _hold_many_rows(subject)
    H = damped(one.hessian, subject.damp_frac)
    values = solve_dense(one.weight, H, *per_value(solved), subject.code_values, subject.order(one.hessian), solved.values.dtype)[1]
    exact = quadratic_loss(one.weight.to(torch.float64) - values, H)
    if not abs(own - exact) <= 5e-3 * exact:
        raise CheckFailed(f"{one.name}: loss {own:.6g}, in float64 it is {exact:.6g}")
    return f"{own / exact:.5f} of the loss in float64; {reported} reported losses are right"


def _hold_relative_error(one: Problem, solved: Solved) -> None:
    """Of at most 128 rows all count."""
    if solved.relative_error is None or len(one.weight) > 128:
        return
    H, weight = one.hessian.to(torch.float64), one.weight.to(torch.float64)
    exact = quadratic_loss(weight - solved.values.to(torch.float64), H) / quadratic_loss(weight, H)
    if not abs(solved.relative_error - exact) <= 5e-3 * exact:
        raise CheckFailed(f"{one.name}: the reported relative error is {solved.relative_error:.6g}, that of the codes {exact:.6g}")


def _hold_many_rows(subject: Solver) -> None:
    """Of many rows some may stand for all, as long as they lie everywhere: here all but the last third are rounded without an error."""
    small = problems(subject)[0]
    weight = small.weight.repeat(13, 1)
    weight[: 2 * len(weight) // 3] = 0
    one = replace(small, name="many rows", weight=weight)
    solved = solve(subject, one.weight, one.hessian)
    if solved.relative_error is None:
        return
    H, wide = one.hessian.to(torch.float64), one.weight.to(torch.float64)
    exact = quadratic_loss(wide - solved.values.to(torch.float64), H) / quadratic_loss(wide, H)
    if not exact / 2 <= solved.relative_error <= 2 * exact:
        raise CheckFailed(f"{one.name}: the reported relative error is {solved.relative_error:.6g}, that of the codes {exact:.6g}")


@register(
    None,
    "reported_order",
    "Under act-order the columns are taken by decreasing H_ii, equal ones in their own order",
    kind="solver",
    needs=("act_order",),
)
def reported_order(subject: Solver, context: CheckContext) -> str:
    """Ask for the order of some diagonals, with ties."""
    one = problems(subject)[0]
    diagonal = one.hessian.diagonal().clone()
    diagonal[5], diagonal[9] = diagonal[2], diagonal[2]
    order = subject.order(torch.diag(diagonal))
    expected = sorted(range(len(diagonal)), key=lambda column: (-float(diagonal[column]), column))
    own = order.tolist()
    if own != expected:
        place = next((at for at, column in enumerate(expected) if own[at : at + 1] != [column]), len(expected))
        there, right = own[place : place + 6], expected[place : place + 6]
        raise CheckFailed(f"from place {place} on the order is {there}, by decreasing H_ii, equal ones in their own order, it is {right}")
    return f"{len(expected)} columns"


@register(
    None,
    "refuses_nonfinite",
    "NaN or infinity in a weight or a Hessian, and an H that has a negative eigenvalue even when damped, raise an error",
    kind="solver",
)
def solver_refuses(subject: Solver, context: CheckContext) -> str:
    """Plant NaN and infinity in every weight, batch and place, and in the Hessian itself; and a large and a small negative eigenvalue."""
    one = problems(subject)[0]
    count = 0
    for value in (float("nan"), float("inf"), float("-inf")):
        for what, act in _with_planted(subject, one, value):
            must_raise(act, f"{value} in {what}")
            count += 1
    indefinite = one.hessian.clone()
    indefinite[0, 1] = indefinite[1, 0] = 5 * float(one.hessian.diagonal().max())
    must_raise(partial(subject.solve, [one.weight], indefinite), "an H with a negative eigenvalue")
    barely = _barely_indefinite(one.hessian, subject.damp_frac)
    must_raise(partial(subject.solve, [one.weight], barely), "an H with an eigenvalue of minus twice what damping adds")
    return f"{count} planted values, and two H that are no Hessians, were refused"


def _barely_indefinite(hessian: Tensor, damp_frac: float) -> Tensor:
    """The same H, its smallest eigenvalue put to minus twice what damping adds: a little more damping would hide it."""
    values, vectors = torch.linalg.eigh(hessian.to(torch.float64))
    wanted = -2 * max(damp_frac, _LEAST_DAMPING) * float(values.mean())  # the mean eigenvalue is the mean of the diagonal
    return (hessian + (wanted - values[0]) * torch.outer(vectors[:, 0], vectors[:, 0])).to(hessian.dtype)


_LEAST_DAMPING = 1e-3
"""Share of the mean diagonal below which an eigenvalue of a float32 matrix comes near its rounding."""


def _with_planted(subject: Solver, one: Problem, value: float) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls that must not go well, and where the value stands in them."""
    for number in range(3):
        weights = [one.weight.clone(), one.weight[:5] * 3, one.weight.to(torch.bfloat16)]
        weights[number][-1, 0] = value
        yield f"weight {number} of 3", partial(subject.solve, weights, one.hessian)
    for number in range(5):
        batches = [one.x[:100].clone(), one.x[100:200].reshape(2, 50, -1).clone(), one.x[200:].to(torch.bfloat16)]
        batches += [one.x[0].clone(), one.x[:48].reshape(2, 3, 8, -1).clone()]
        batches[number].view(-1)[-1] = value
        what = f"batch {number} of 5, of {batches[number].dim()} dimensions in {batches[number].dtype}"
        yield what, partial(_accumulate_and_solve, subject, one.weight, batches)
    for place in places((one.weight.shape[0], one.weight.shape[1])):
        weight, x = one.weight.clone(), one.x.clone()
        weight[place] = x[place] = value
        yield f"the weight at {list(place)}", partial(subject.solve, [weight], one.hessian)
        yield f"the inputs at {list(place)}", partial(_accumulate_and_solve, subject, one.weight, [x])
    # Of a diagonal H, because one of which a value beside the diagonal is read as 0 may be refused as indefinite, for the wrong reason.
    for name, whole in {"H": one.hessian, "a diagonal H": torch.diag(one.hessian.diagonal())}.items():
        for row, column in ((0, 0), (-1, -1), (1, -2), (0, 1), (-1, 0)):
            hessian = whole.clone()
            hessian[row, column] = hessian[column, row] = value
            yield f"{name} at {[row, column]}", partial(subject.solve, [one.weight], hessian)


def _accumulate_and_solve(subject: Solver, weight: Tensor, batches: Sequence[Tensor]) -> None:
    subject.solve([weight], subject.hessian(batches))
