"""GPTQ: round one column after another, and let the columns to come absorb the error of those behind.

Weights that read one input share its Hessian and are solved as one stack of rows, since rows are independent given H. Scales are fixed
before the first column is rounded, so a group's scale does not depend on the order of the columns; `scale_search` may choose them. The
column loop itself, in two forms of the same arithmetic, is in `gptq_forms`.

An input column that was zero on every calibration token is dead: it says nothing. Its weights are rounded to nearest and the columns
beside it are solved as if it were not there. The paper's code zeroes its weights, which is wrong wherever the column fires on other data.

Shapes: R rows (out features), C columns (in features), G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compressor.algorithms.gptq_forms import Grid, GridColumns, solve_r_form, solve_reference
from compressor.algorithms.hessian import relative_output_error
from compressor.algorithms.scale_search import can_search, search_scales
from compressor.errors import NumericsError
from compressor.numerics.observers import weight_qparams
from compressor.numerics.qparams import QParams
from compressor.numerics.quantize import dequantize
from compressor.numerics.scheme import QuantizationArgs

Solver = Literal["r_form", "reference"]
ActOrder = Literal["static", "weight", "group"]


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


def quantize_gptq(
    weights: Sequence[Tensor],
    hessian_CC: Tensor,
    args: QuantizationArgs,
    *,
    actorder: ActOrder | None = "static",
    block_size: int = 128,
    damp_frac: float = 0.01,
    solver: Solver = "r_form",
    scale_search: bool = True,
    names: Sequence[str] = ("weight",),
    global_scales: Sequence[Tensor | None] | None = None,
) -> tuple[list[GPTQWeight], int]:
    """Quantize all weights that read one input, as one stack of rows.

    Args:
        weights: [R_i, C] float each; not modified.
        hessian_CC: [C, C] float32, 2 * mean(x x^T) of their input; not modified.
        args: number format of all of them.
        actorder: round columns by decreasing activation, with groups as they lie (`static`, `weight`) or formed in that order (`group`);
            None keeps the columns' own order.
        block_size: columns between two large matrix products.
        damp_frac: share of the mean diagonal that is added to the diagonal; dimensionless, > 0.
        solver: `r_form` or `reference`.
        scale_search: choose the scales of integer groups by the error of GPTQ itself instead of by their range alone; groups formed in
            the order of activation gain nothing from it and keep theirs.
        names: dotted module names, for errors only.
        global_scales: one per weight, float32 [1], where the format has one and it is not to be the weight's own; else None.

    Returns:
        The quantized weights, and how many input columns are always zero (their weights were rounded to nearest).

    Raises:
        NumericsError: a weight is not finite, or the damped Hessian is not positive definite.

    Source: Frantar et al. 2022, arXiv:2210.17323.
    """
    order_C = None if actorder is None else activation_order(hessian_CC)
    group_C, scaled = _groups(weights, args, order_C if actorder == "group" else None)
    given = global_scales or [None] * len(weights)
    qparams = [weight_qparams(weight, args, name, scale) for weight, name, scale in zip(scaled, names, given, strict=True)]
    rows = [weight.shape[0] for weight in weights]
    stacked = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
    if scale_search and can_search(args) and actorder != "group":
        damped_CC, _ = _damped(hessian_CC, torch.arange(len(hessian_CC), device=hessian_CC.device), damp_frac)
        scales = search_scales(stacked, damped_CC, _stacked_qparams(qparams, rows, args), args, " + ".join(names)).scale.split(rows)
        qparams = [QParams(scale, own.zero_point) for scale, own in zip(scales, qparams, strict=True)]
    solution = solve_gptq(
        stacked,
        hessian_CC,
        Grid(*_stacked_qparams(qparams, rows, args)[:2], group_C, args),
        order_C=order_C,
        block_size=block_size,
        damp_frac=damp_frac,
        solver=solver,
        name=" + ".join(names),
    )
    g_idx_C = group_C if actorder == "group" else None
    results = []
    for weight, own, codes_RC, loss_R in zip(weights, qparams, solution.codes_RC.split(rows), solution.loss_R.split(rows), strict=True):
        error = relative_output_error(weight, dequantize(codes_RC, own, args, g_idx_C), hessian_CC)
        results.append(GPTQWeight(codes_RC, own, g_idx_C, float(loss_R.sum(dtype=torch.float64)), error))
    return results, solution.num_dead


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
    if not bool(torch.isfinite(weight_RC).all()):
        raise NumericsError(f"{name}: its weight holds NaN or infinity; repair the model before compressing it")
    order = order_C if order_C is not None else torch.arange(weight_RC.shape[1], device=weight_RC.device)
    damped_CC, num_dead = _damped(hessian_CC, order, damp_frac)
    work_CR = weight_RC.t().index_select(0, order).float().contiguous()
    columns = GridColumns(grid, order)
    solve = solve_r_form if solver == "r_form" else solve_reference
    codes_CR, loss_R = solve(work_CR, damped_CC, columns, block_size, name)
    codes_RC = torch.empty_like(codes_CR)
    codes_RC[order] = codes_CR
    return GPTQSolution(codes_RC.t().contiguous(), loss_R, num_dead)


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


def _damped(hessian_CC: Tensor, order_C: Tensor, damp_frac: float) -> tuple[Tensor, int]:
    """Return H + lambda I in the given order, lambda a share of the mean diagonal of live columns, and how many columns are dead."""
    H_CC = hessian_CC.index_select(0, order_C).index_select(1, order_C)
    diagonal = H_CC.diagonal()
    dead_C = diagonal == 0
    if num_dead := int(dead_C.sum()):
        # Squares may underflow where products with other columns do not.
        H_CC[dead_C] = 0
        H_CC[:, dead_C] = 0
    diagonal.add_(damp_frac * diagonal.mean() * (len(diagonal) / max(1, len(diagonal) - num_dead)))
    return H_CC, num_dead
