"""GPTQ: round one column after another, and let the columns to come absorb the error of those behind.

Weights that read one input share its Hessian and are solved as one stack of rows, since rows are independent given H. Scales are fixed
before the first column is rounded, so a group's scale does not depend on the order of the columns; `scale_search` may choose them. The
column loop itself, in two forms of the same arithmetic, is in `babai`.

An input column that was zero on every calibration token is dead: it says nothing. Its weights are rounded to nearest and the columns
beside it are solved as if it were not there. The paper's code zeroes its weights, which is wrong wherever the column fires on other data.

Shapes: R rows (out features), C columns (in features), G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from compressor.algorithms.babai import Factor, Grid, GridColumns, can_search, search_scales, solve_r_form, solve_reference
from compressor.algorithms.hessian import relative_output_error
from compressor.errors import NumericsError
from compressor.numerics.observers import weight_qparams
from compressor.numerics.qparams import QParams
from compressor.numerics.quantize import values_as_read
from compressor.numerics.scheme import QuantizationArgs

Solver = Literal["r_form", "reference"]
ActOrder = Literal["static", "weight", "group"]
_MOVED_ROWS = 64


@dataclass(frozen=True)
class GPTQSolution:
    """Codes of one (possibly stacked) weight.

    Attributes:
        codes_RC: [R, C] in the storage dtype of the format, original order of the columns.
        loss_R: [R] float32, 1/2 * e H e^T per row, with the damped Hessian.
        num_dead: columns whose Hessian diagonal is zero; their weights are rounded to nearest.
    """

    codes_RC: Tensor
    loss_R: Tensor
    num_dead: int


@dataclass(frozen=True)
class GPTQWeight:
    """One quantized weight.

    Attributes:
        codes_RC: [R, C] in the storage dtype of the format.
        qparams: scale and zero point.
        g_idx_C: [C] group of each column where groups were formed in the order of activation, else None.
        loss: 1/2 * tr(E H E^T) with the damped Hessian.
        relative_error: relative squared error of the outputs, tr(E H E^T) / tr(W H W^T).
    """

    codes_RC: Tensor
    qparams: QParams
    g_idx_C: Tensor | None
    loss: float
    relative_error: float


class DampedHessian:
    """H + lambda I in the order in which columns are rounded, and its factor once somebody asks for it.

    Attributes:
        order_C: [C] long, the order of rounding.
        dead_C: [C] bool, columns whose diagonal entry of H is zero, in their own order.
        name: dotted module names, for errors only.
    """

    def __init__(self, hessian_CC: Tensor, order_C: Tensor | None, damp_frac: float, name: str) -> None:
        """`order_C` None keeps the columns' own order; a NumericsError where the diagonal is not finite."""
        self.name = name
        self._hessian_CC, self._damp_frac = hessian_CC, damp_frac
        self.order_C = order_C if order_C is not None else torch.arange(len(hessian_CC), device=hessian_CC.device)
        self.dead_C = hessian_CC.diagonal() == 0
        diagonal = hessian_CC.diagonal()
        if not bool(torch.isfinite(diagonal + damp_frac * diagonal.mean()).all()):  # a factor of infinity alone would pass for one
            raise NumericsError(f"{name}: the diagonal of its Hessian holds NaN or infinity; its inputs are too large for float32")

    def matrix(self) -> Tensor:
        """Return [C, C] float32 in the order of rounding, made anew: its factor takes its place."""
        return _damped(self._hessian_CC, self.order_C, self._damp_frac)

    @cached_property
    def factor(self) -> Factor:
        """Of the matrix; a NumericsError where it is not positive definite."""
        return Factor.of(self.matrix(), self.name)

    def ordered(self, weight_RC: Tensor) -> Tensor:
        """Return a weight as the column loop takes it, [C, R] float32; a copy."""
        return weight_RC.t().index_select(0, self.order_C).float().contiguous()

    def solve(self, work_CR: Tensor, columns: GridColumns, block_size: int, solver: Solver) -> tuple[Tensor, Tensor]:
        """Round all columns of `work_CR`, which is overwritten; return codes [R, C] in their own order, and losses [R]."""
        if solver == "r_form":
            codes_CR, loss_R = solve_r_form(work_CR, self.factor, columns, block_size)
        else:
            codes_CR, loss_R = solve_reference(work_CR, self.matrix(), columns, block_size, self.name)
        codes_RC = torch.empty_like(codes_CR)
        codes_RC[self.order_C] = codes_CR
        return codes_RC.t().contiguous(), loss_R


def shifted_weights(weight_RC: Tensor, shift_CC: Tensor, damped: DampedHessian) -> Tensor:
    """Move weights to where they give, from the inputs of the compressed model, nearly what they gave in the uncompressed one.

    W* = W + W D (H + lambda I)^-1 minimizes ||W* X - W X_base||^2, where D = 2 mean((x_base - x) x^T).

    Args:
        weight_RC: [R, C] float; not modified.
        shift_CC: [C, C] float32, D, or a share of it; not modified.
        damped: H + lambda I.

    Returns:
        [R, C] float32.

    Raises:
        NumericsError: the damped Hessian is not positive definite.

    Source: Li et al. 2025 (GPTAQ), arXiv:2504.02692; Arai and Ichikawa 2025 (QEP), arXiv:2504.09629.
    """
    weight_RC = weight_RC.float()
    ordered_CR = damped.factor.divide((shift_CC.t() @ weight_RC.t())[damped.order_C])
    step_CR = torch.empty_like(ordered_CR)
    step_CR[damped.order_C] = ordered_CR
    step_CR[damped.dead_C] = 0  # squares of tiny inputs vanish where their products with others do not
    return weight_RC + step_CR.t()


def quantize_gptq(
    weights: Sequence[Tensor],
    hessian_CC: Tensor,
    args: QuantizationArgs,
    *,
    shift_CC: Tensor | None = None,
    actorder: ActOrder | None = "static",
    block_size: int = 128,
    damp_frac: float = 0.01,
    solver: Solver = "r_form",
    scale_search: bool = True,
    keep_zeros: bool = False,
    names: Sequence[str] = ("weight",),
    global_scales: Sequence[Tensor | None] | None = None,
) -> tuple[list[GPTQWeight], int]:
    """Quantize all weights that read one input, as one stack of rows.

    Args:
        weights: [R_i, C] float each; not modified.
        hessian_CC: [C, C] float32, 2 * mean(x x^T) of their input; not modified.
        args: number format of all of them.
        shift_CC: [C, C] float32, a share of 2 * mean((x_base - x) x^T): weights are first moved by `shifted_weights`; None leaves them.
        actorder: round columns by decreasing activation, with groups as they lie (`static`, `weight`) or formed in that order (`group`);
            None keeps the columns' own order.
        block_size: columns between two large matrix products.
        damp_frac: share of the mean diagonal that is added to the diagonal; dimensionless, > 0.
        solver: `r_form` or `reference`.
        scale_search: choose the scales of integer groups by the error of GPTQ itself instead of by their range alone; groups formed in
            the order of activation gain nothing from it and keep theirs.
        keep_zeros: weights that are zero stay zero.
        names: dotted module names, for errors only.
        global_scales: one per weight, float32 [1], where the format has one and it is not to be the weight's own; else None.

    Returns:
        The quantized weights, and how many input columns are always zero (their weights were rounded to nearest).

    Raises:
        NumericsError: a weight is not finite, or the damped Hessian is not positive definite.

    Source: Frantar et al. 2022, arXiv:2210.17323.
    """
    weights, hessian_CC = [weight.detach() for weight in weights], hessian_CC.detach()  # Parameters, where gradients are on
    rows = [weight.shape[0] for weight in weights]
    stacked = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
    name = " + ".join(names)
    _check_finite(stacked, name)
    damped = DampedHessian(hessian_CC, None if actorder is None else activation_order(hessian_CC), damp_frac, name)
    gone_RC = stacked == 0 if keep_zeros else None
    if shift_CC is not None:
        stacked = shifted_weights(stacked, shift_CC, damped)
        kept = stacked if gone_RC is None else stacked.masked_fill(gone_RC, 0.0)
        # Scales are observed in the dtype in which they are stored.
        weights = [moved.to(weight.dtype) for moved, weight in zip(kept.split(rows), weights, strict=True)]
    group_C, in_groups = _groups(weights, args, damped.order_C if actorder == "group" else None)
    given = global_scales or [None] * len(weights)
    importance_C = hessian_CC.diagonal() if actorder != "group" else hessian_CC.diagonal()[damped.order_C]  # in_groups are in that order
    qparams = [
        weight_qparams(weight, args, own, scale, importance_C=importance_C)
        for weight, own, scale in zip(in_groups, names, given, strict=True)
    ]
    grid = Grid(*_stacked_qparams(qparams, rows, args)[:2], group_C, args, gone_RC)
    work_CR = damped.ordered(stacked)
    if scale_search and can_search(args) and actorder != "group":
        grid = replace(grid, scale_RG=search_scales(work_CR, damped.factor, grid, damped.order_C))
        qparams = [QParams(scale, own.zero_point) for scale, own in zip(grid.scale_RG.split(rows), qparams, strict=True)]
    codes_RC, loss_R = damped.solve(work_CR, GridColumns(grid, damped.order_C), block_size, solver)
    num_dead = int(damped.dead_C.sum())
    del work_CR, damped  # as large as all that follows
    g_idx_C = group_C if actorder == "group" else None
    results = []
    solved = zip(stacked.split(rows), weights, qparams, codes_RC.split(rows), loss_R.split(rows), strict=True)
    for wanted, weight, own, codes, loss in solved:
        error = relative_output_error(wanted, values_as_read(codes, own, args, weight.dtype, g_idx_C), hessian_CC)
        results.append(GPTQWeight(codes, own, g_idx_C, float(loss.sum(dtype=torch.float64)), error))
    return results, num_dead


def activation_order(hessian_CC: Tensor) -> Tensor:
    """Return the columns by decreasing diagonal of H, equal ones in their own order.

    Args:
        hessian_CC: [C, C].

    Returns:
        [C] long, a permutation.
    """
    return torch.argsort(hessian_CC.diagonal(), descending=True, stable=True)


def solve_gptq(
    weight_RC: Tensor,
    hessian_CC: Tensor,
    grid: Grid,
    *,
    order_C: Tensor | None = None,
    block_size: int = 128,
    damp_frac: float = 0.01,
    solver: Solver = "r_form",
    name: str = "weight",
) -> GPTQSolution:
    """Quantize one weight, or several stacked weights with one input, against a Hessian.

    Args:
        weight_RC: [R, C] float; not modified.
        hessian_CC: [C, C] float32, 2 * mean(x x^T); not modified.
        grid: scales, zero points and format.
        order_C: the order in which columns are rounded; None keeps their own.
        block_size: columns between two large matrix products; changes speed, not the result beyond rounding.
        damp_frac: share of the mean diagonal that is added to the diagonal; dimensionless, > 0.
        solver: `r_form` or `reference`.
        name: dotted module name, for errors only.

    Returns:
        The codes and their loss.

    Raises:
        NumericsError: the weight is not finite, or the damped Hessian is not positive definite.

    Source: Frantar et al. 2022, arXiv:2210.17323; R form after Chen et al. 2025, arXiv:2507.18553. Differs from the paper in that the
    scales are fixed before the first column is rounded, so that a group's scale does not depend on the order of the columns, and in that
    weights of dead columns are rounded, not zeroed.
    """
    _check_finite(weight_RC, name)
    damped = DampedHessian(hessian_CC.detach(), order_C, damp_frac, name)
    codes_RC, loss_R = damped.solve(damped.ordered(weight_RC.detach()), GridColumns(grid, damped.order_C), block_size, solver)
    return GPTQSolution(codes_RC, loss_R, int(damped.dead_C.sum()))


def _check_finite(weight_RC: Tensor, name: str) -> None:
    if not bool(torch.isfinite(weight_RC).all()):
        raise NumericsError(f"{name}: its weight holds NaN or infinity; repair the model before compressing it")


def _groups(weights: Sequence[Tensor], args: QuantizationArgs, order_C: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """Return the group of each column, and the weights with their columns sorted so that groups are runs of them."""
    columns = weights[0].shape[1]
    size = args.group_size if args.is_grouped and args.group_size else columns
    size = args.block_structure[1] if args.block_structure is not None else size
    group_C = torch.arange(columns, device=weights[0].device) // size
    if order_C is None:
        return group_C, list(weights)
    sorted_group_C, group_C = group_C, torch.empty_like(group_C)
    group_C[order_C] = sorted_group_C
    return group_C, [weight.index_select(1, order_C) for weight in weights]


def _stacked_qparams(qparams: Sequence[QParams], rows: Sequence[int], args: QuantizationArgs) -> QParams:
    """Spread scales of any strategy over [rows, groups] and stack them; each already divided by the global scale above it."""
    height = 1 if args.block_structure is None else args.block_structure[0]

    def stacked(tensors: list[Tensor]) -> Tensor:
        spread = [tensor.reshape(-1, tensor.shape[-1]).repeat_interleave(height, 0) for tensor in tensors]
        return torch.cat([tensor.expand(max(num, len(tensor)), -1)[:num] for tensor, num in zip(spread, rows, strict=True)])

    zeros = [own.zero_point for own in qparams if own.zero_point is not None]
    scales = [own.scale if own.global_scale is None else own.scale / own.global_scale for own in qparams]
    return QParams(stacked(scales), stacked(zeros) if zeros else None)


def _damped(hessian_CC: Tensor, order_C: Tensor, damp_frac: float) -> Tensor:
    """Return H + lambda I in the given order, lambda a share of the mean diagonal of live columns."""
    H_CC = torch.empty_like(hessian_CC, memory_format=torch.contiguous_format)
    for rows, own in zip(order_C.split(_MOVED_ROWS), H_CC.split(_MOVED_ROWS), strict=True):  # all at once would be one square more
        torch.index_select(hessian_CC.index_select(0, rows), 1, order_C, out=own)
    diagonal = H_CC.diagonal()
    dead_C = diagonal == 0
    if num_dead := int(dead_C.sum()):
        # Squares may underflow where products with other columns do not.
        H_CC[dead_C] = 0
        H_CC[:, dead_C] = 0
    diagonal.add_(damp_frac * diagonal.mean() * (len(diagonal) / max(1, len(diagonal) - num_dead)))
    return H_CC
