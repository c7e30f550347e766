"""Checks of what a second-order solver reports and refuses: 29, its order, and values that are not finite."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from harness.checks.catalogue import Broken, Look, register
from harness.checks.oracle_obs import damped, quadratic_loss, solve_dense
from harness.checks.protocols import Solved, Solver
from harness.checks.solver_problems import Problem, loss_of, must_raise, per_value, problems, solve, wide_problem


@register(29, "float64", "float32 against float64: the loss is within 0.5 %, and so is the loss that the solver reports", kind="solver")
def float64_loss(subject: Solver, look: Look) -> str:
    """Hold a larger problem against the oracle, and every reported loss against its own codes."""
    reported = 0
    for one in (*problems(subject), wide_problem(subject)):
        solved = solve(subject, one.weight, one.hessian)
        own = loss_of(subject, one, solved.values)
        _hold_relative_error(one, solved)
        if solved.loss is not None:
            reported += 1
            if not abs(solved.loss - own) <= 5e-3 * own:
                raise Broken(f"{one.name}: the reported loss is {solved.loss:.6g}, that of the codes {own:.6g}")
    _hold_many_rows(subject)
    H = damped(one.hessian, subject.damp_frac)
    values = solve_dense(one.weight, H, *per_value(solved), subject.code_values, subject.order(one.hessian), solved.values.dtype)[1]
    exact = quadratic_loss(one.weight.to(torch.float64) - values, H)
    if not abs(own - exact) <= 5e-3 * exact:
        raise Broken(f"{one.name}: loss {own:.6g}, in float64 it is {exact:.6g}")
    return f"{own / exact:.5f} of the loss in float64; {reported} reported losses are right"


def _hold_relative_error(one: Problem, solved: Solved) -> None:
    """Our problems have at most 128 rows, so that all of them count."""
    if solved.relative_error is None:
        return
    H, weight = one.hessian.to(torch.float64), one.weight.to(torch.float64)
    exact = quadratic_loss(weight - solved.values.to(torch.float64), H) / quadratic_loss(weight, H)
    if not abs(solved.relative_error - exact) <= 5e-3 * exact:
        raise Broken(f"{one.name}: the reported relative error is {solved.relative_error:.6g}, that of the codes {exact:.6g}")


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
        raise Broken(f"{one.name}: the reported relative error is {solved.relative_error:.6g}, that of the codes {exact:.6g}")


@register(
    None,
    "reported_order",
    "Under act-order the columns are taken by decreasing H_ii, equal ones in their own order",
    kind="solver",
    needs=("act_order",),
)
def reported_order(subject: Solver, look: Look) -> str:
    """Ask for the order of some diagonals, with ties."""
    one = problems(subject)[0]
    diagonal = one.hessian.diagonal().clone()
    diagonal[5], diagonal[9] = diagonal[2], diagonal[2]
    order = subject.order(torch.diag(diagonal))
    expected = sorted(range(len(diagonal)), key=lambda column: (-float(diagonal[column]), column))
    if order.tolist() != expected:
        raise Broken(f"the order begins with {order.tolist()[:6]}, by decreasing H_ii it is {expected[:6]}")
    return f"{len(expected)} columns"


@register(
    None,
    "refuses_nonfinite",
    "NaN or infinity in a weight or a Hessian, and an indefinite H, raise an error",
    kind="solver",
)
def solver_refuses(subject: Solver, look: Look) -> str:
    """Plant NaN and infinity in the weight and in the inputs, and a negative eigenvalue in the Hessian."""
    one = problems(subject)[0]
    for value in (float("nan"), float("inf"), float("-inf")):
        weight, x = one.weight.clone(), one.x.clone()
        weight[0, -1], x[-1, 0] = value, value
        must_raise(partial(subject.solve, [weight], one.hessian), f"{value} in the weight")
        must_raise(partial(_accumulate_and_solve, subject, one.weight, x), f"{value} in the inputs")
    indefinite = one.hessian.clone()
    indefinite[0, 1] = indefinite[1, 0] = 5 * float(one.hessian.diagonal().max())
    must_raise(partial(subject.solve, [one.weight], indefinite), "an H with a negative eigenvalue")
    return "6 planted values, and an H that is no Hessian, were refused"


def _accumulate_and_solve(subject: Solver, weight: Tensor, x: Tensor) -> None:
    subject.solve([weight], subject.hessian([x]))
