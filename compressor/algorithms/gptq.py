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

from compressor.algorithms.hessian import relative_output_error
from compressor.errors import NumericsError
from compressor.numerics.formats import rounding
from compressor.numerics.observers import weight_qparams
from compressor.numerics.qparams import QParams
from compressor.numerics.quantize import dequantize
from compressor.numerics.scheme import QuantizationArgs

# The column loop of GPTQ in two forms of the same arithmetic (Frantar et al. 2022, arXiv:2210.17323, algorithm 1).
#
# * R form, the default. With the reverse-order Cholesky H + lambda I = R R^T (R upper triangular) and R^ = R / diag(R) by column,
#       t_k = w_k + sum_{j<k} e_j R^_jk,   q_k = Q(t_k),   e_k = w_k - q_k,   loss = 1/2 sum_k ((t_k - q_k) R_kk)^2.
#   This is Babai's nearest-plane algorithm (Chen et al. 2025, arXiv:2507.18553): one factorization, no inverse, and E overwrites W.
# * reference form. Cholesky, inverse, Cholesky, then the column loop of the paper with its trailing update.
#
# The working set is transposed ([C, R]) so that a column of W is contiguous in memory.
#
# Shapes: R rows (out features), C columns (in features), G groups, B columns of one block.

SUB_BLOCK = 16  # columns that are updated one by one before the next small matrix product


@dataclass(frozen=True)
class Grid:
    """The values that a quantized weight may take, spread over rows and columns.

    Attributes:
        scale_RG: [R, G] in the dtype in which scales are stored; dequantized values are rounded to it.
        zero_RG: [R, G] integer zero points, None when symmetric.
        group_C: [C] long, the group of each column, in the original order of the columns.
        args: number format.
    """

    scale_RG: Tensor
    zero_RG: Tensor | None
    group_C: Tensor
    args: QuantizationArgs


class GridColumns:
    """Rounds one column at a time onto its grid; holds the scales transposed so that a column's scales are contiguous."""

    def __init__(self, grid: Grid, order_C: Tensor) -> None:
        """Transpose a grid; `order_C` is the order in which its columns will be asked for."""
        self.args = grid.args
        self._low, self._high, self._to_nearest = rounding(grid.args.type, grid.args.num_bits)  # once, not for every column
        self._scale_GR = grid.scale_RG.t().contiguous()
        self._scale32_GR = self._scale_GR.float()
        self._zero_GR = None if grid.zero_RG is None else grid.zero_RG.t().to(self._scale_GR.dtype).contiguous()
        self._zero32_GR = None if self._zero_GR is None else self._zero_GR.float()
        self._group = grid.group_C.index_select(0, order_C.to(grid.group_C.device)).tolist()

    def empty_codes(self, like_CR: Tensor) -> Tensor:
        """Return room for codes of the given shape, in the format's storage dtype."""
        return torch.empty_like(like_CR, dtype=self.args.storage_dtype)

    def round(self, column: int, t_R: Tensor, scratch_R: Tensor, codes_R: Tensor) -> Tensor:
        """Write the codes of t into `codes_R`; return the values that a loader will dequantize them to, in the scale's dtype."""
        group = self._group[column]
        torch.div(t_R, self._scale32_GR[group], out=scratch_R)
        if self._zero32_GR is not None:
            scratch_R.add_(self._zero32_GR[group])
        snapped_R = self._to_nearest(scratch_R.clamp_(self._low, self._high))
        codes_R.copy_(snapped_R)
        values_R = snapped_R.to(self._scale_GR.dtype, copy=True)
        if self._zero_GR is not None:
            values_R.sub_(self._zero_GR[group])
        return values_R.mul_(self._scale_GR[group])


def _cholesky(matrix_CC: Tensor, name: str, *, upper: bool = False) -> Tensor:
    factor, info = torch.linalg.cholesky_ex(matrix_CC, upper=upper)
    if int(info) != 0:
        raise NumericsError(
            f"{name}: its damped Hessian is not positive definite (minor {int(info)} of {len(matrix_CC)}); "
            "raise dampening_frac or add calibration samples"
        )
    return factor


def solve_r_form(E_CR: Tensor, damped_CC: Tensor, columns: GridColumns, block_size: int, name: str) -> tuple[Tensor, Tensor]:
    """Left-looking Babai rounding; `E_CR` holds W on entry and E = W - Q on exit."""
    # Reverse the order, factorize lower, reverse back: the result is upper with R R^T = H.
    R_CC = _cholesky(damped_CC.flip(0, 1), name).flip(0, 1)
    diag_C = R_CC.diagonal().clone()
    R_CC.div_(diag_C)
    codes_CR = columns.empty_codes(E_CR)
    loss_R = E_CR.new_zeros(E_CR.shape[1])
    scratch_R = torch.empty_like(loss_R)
    num_columns = E_CR.shape[0]
    for start in range(0, num_columns, block_size):
        stop = min(start + block_size, num_columns)
        T_BR = E_CR[start:stop].clone()
        if start:
            T_BR.addmm_(R_CC[:start, start:stop].t(), E_CR[:start])
        C_BB = R_CC[start:stop, start:stop].t().contiguous()
        _round_block(T_BR, E_CR[start:stop], C_BB, columns, start, scratch_R, codes_CR[start:stop])
        loss_R += (T_BR * diag_C[start:stop, None]).square_().sum(0)
    return codes_CR, loss_R.mul_(0.5)


def _round_block(T_BR: Tensor, E_BR: Tensor, C_BB: Tensor, columns: GridColumns, first: int, scratch_R: Tensor, codes_BR: Tensor) -> None:
    """Round the columns of one block in place: T becomes t - q, E becomes w - q."""
    for sub in range(0, len(T_BR), SUB_BLOCK):
        end = min(sub + SUB_BLOCK, len(T_BR))
        if sub:
            T_BR[sub:end].addmm_(C_BB[sub:end, :sub], E_BR[:sub])
        for k in range(sub, end):
            t_R = T_BR[k]
            if k > sub:
                t_R.addmv_(E_BR[sub:k].t(), C_BB[k, sub:k])
            values_R = columns.round(first + k, t_R, scratch_R, codes_BR[k])
            t_R.sub_(values_R)
            E_BR[k].sub_(values_R)


def solve_reference(W_CR: Tensor, damped_CC: Tensor, columns: GridColumns, block_size: int, name: str) -> tuple[Tensor, Tensor]:
    """The paper's form: right-looking updates with the upper Cholesky factor of the inverse."""
    inverse_CC = torch.cholesky_inverse(_cholesky(damped_CC, name))
    U_CC = _cholesky(inverse_CC, name, upper=True)
    codes_CR = columns.empty_codes(W_CR)
    loss_R = W_CR.new_zeros(W_CR.shape[1])
    scratch_R = torch.empty_like(loss_R)
    num_columns = W_CR.shape[0]
    for start in range(0, num_columns, block_size):
        stop = min(start + block_size, num_columns)
        error_BR = torch.empty_like(W_CR[start:stop])
        for k in range(start, stop):
            values_R = columns.round(k, W_CR[k], scratch_R, codes_CR[k])
            error_R = error_BR[k - start]
            torch.sub(W_CR[k], values_R, out=error_R)
            error_R.div_(U_CC[k, k])
            loss_R.add_(error_R.square())
            W_CR[k + 1 : stop].addr_(U_CC[k, k + 1 : stop], error_R, alpha=-1)
        W_CR[stop:].addmm_(U_CC[start:stop, stop:].t(), error_BR, alpha=-1)
    return codes_CR, loss_R.mul_(0.5)


# Group scales that suit GPTQ: for each row and group, the multiple of the observed scale with which GPTQ itself errs least.
#
# The range of a group says which scale avoids clipping, not which one gives the least error once the columns compensate each other. So the
# columns of one group are rounded by Babai's algorithm against the group's own block of the Hessian, for a handful of shrunken scales at
# once (the candidates are stacked as further rows), and each row keeps the scale with the least loss. The zero point stays: shrinking both
# ends of a range by one factor does not move it.
#
# Only groups are searched. A whole row as one group would cost a full solve per candidate, and a scale shared by rows cannot be chosen row
# by row. Measured on the reference model, W4A16: the loss that GPTQ adds falls by about a third, for 0.6 s more in a run of 5 s.
#
# Shapes: R rows, C columns, G groups, S columns of one group, P candidates.

NUM_CANDIDATES = 10
# Bits -> the largest and the smallest multiple of the observed scale that is tried: the fewer codes, the more clipping pays.
SEARCHED_MULTIPLES = {2: (1.0, 0.3), 3: (1.0, 0.45), 4: (1.05, 0.6), 5: (1.0, 0.7), 6: (1.0, 0.8), 7: (1.0, 0.85), 8: (1.0, 0.9)}


def can_search(args: QuantizationArgs) -> bool:
    """Tell whether scales of this format are searched: integers in groups.

    Args:
        args: number format.

    Returns:
        True for integer formats with a scale per group.
    """
    return args.type == "int" and args.strategy == "group"


def search_scales(weight_RC: Tensor, damped_CC: Tensor, qparams: QParams, args: QuantizationArgs, name: str) -> QParams:
    """Choose a scale for each row and group.

    Args:
        weight_RC: [R, C] float, groups are runs of columns; not modified.
        damped_CC: [C, C] float32, damped Hessian in the same order of columns; not modified.
        qparams: observed scale and zero point, [R, G] each.
        args: number format, integers in groups.
        name: dotted module name, for errors only.

    Returns:
        The chosen scales, in the dtype of the observed ones, with the same zero points.

    Raises:
        NumericsError: a block of the damped Hessian is not positive definite.
    """
    largest, smallest = SEARCHED_MULTIPLES[args.num_bits]
    multiples_P = torch.linspace(largest, smallest, NUM_CANDIDATES, dtype=torch.float32, device=weight_RC.device)
    scale_RG = qparams.scale.clone()
    size = weight_RC.shape[1] // scale_RG.shape[1]
    for group in range(scale_RG.shape[1]):
        run = slice(group * size, (group + 1) * size)
        candidates_PR = (multiples_P[:, None] * scale_RG[:, group].float()).to(scale_RG.dtype)
        zero_R = None if qparams.zero_point is None else qparams.zero_point[:, group]
        loss_PR = _losses(weight_RC[:, run], damped_CC[run, run], candidates_PR, zero_R, args, name)
        # A candidate that rounds to zero in the scale's dtype is no scale.
        loss_PR.masked_fill_(candidates_PR <= 0, torch.inf)
        scale_RG[:, group] = candidates_PR.gather(0, loss_PR.argmin(0, keepdim=True))[0]
    return QParams(scale_RG, qparams.zero_point)


def _losses(
    weight_RS: Tensor, damped_SS: Tensor, candidates_PR: Tensor, zero_R: Tensor | None, args: QuantizationArgs, name: str
) -> Tensor:
    """Round one group with every candidate scale; return the loss of each, [P, R]."""
    num_candidates, rows = candidates_PR.shape
    columns = torch.arange(weight_RS.shape[1], device=weight_RS.device)
    zeros = None if zero_R is None else zero_R.repeat(num_candidates)[:, None]
    grid = Grid(candidates_PR.reshape(-1, 1), zeros, torch.zeros_like(columns), args)
    work = weight_RS.t().float().repeat(1, num_candidates)
    _, loss = solve_r_form(work, damped_SS, GridColumns(grid, columns), len(columns), name)
    return loss.view(num_candidates, rows)


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


def shifted_weights(weights: Sequence[Tensor], hessian_CC: Tensor, shift_CC: Tensor, damp_frac: float, name: str) -> list[Tensor]:
    """Move weights to where they give, from the inputs of the compressed model, nearly what they gave in the uncompressed one.

    W* = W + W D (H + lambda I)^-1 minimizes ||W* X - W X_base||^2, where D = 2 mean((x_base - x) x^T).

    Args:
        weights: [R_i, C] float each; not modified.
        hessian_CC: [C, C] float32, 2 * mean(x x^T); not modified.
        shift_CC: [C, C] float32, D, or a share of it; not modified.
        damp_frac: share of the mean diagonal that is added to the diagonal.
        name: dotted module names, for errors only.

    Returns:
        [R_i, C] float32 each.

    Raises:
        NumericsError: the damped Hessian is not positive definite.

    Source: Li et al. 2025 (GPTAQ), arXiv:2504.02692; Arai and Ichikawa 2025 (QEP), arXiv:2504.09629.
    """
    damped_CC, num_dead = _damped(hessian_CC, torch.arange(len(hessian_CC), device=hessian_CC.device), damp_frac)
    factor_CC = _cholesky(damped_CC, name)
    stacked = torch.cat([weight.float() for weight in weights])
    moved_RC = stacked + torch.cholesky_solve((stacked @ shift_CC).t(), factor_CC).t()
    if num_dead:  # squares of tiny inputs vanish where their products with others do not
        dead_C = hessian_CC.diagonal() == 0
        moved_RC[:, dead_C] = stacked[:, dead_C]
    return list(moved_RC.split([len(weight) for weight in weights]))


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
        names: dotted module names, for errors only.
        global_scales: one per weight, float32 [1], where the format has one and it is not to be the weight's own; else None.

    Returns:
        The quantized weights, and how many input columns are always zero (their weights were rounded to nearest).

    Raises:
        NumericsError: a weight is not finite, or the damped Hessian is not positive definite.

    Source: Frantar et al. 2022, arXiv:2210.17323.
    """
    order_C = None if actorder is None else activation_order(hessian_CC)
    dtypes = [weight.dtype for weight in weights]
    if shift_CC is not None and all(bool(torch.isfinite(weight).all()) for weight in weights):
        weights = shifted_weights(weights, hessian_CC, shift_CC, damp_frac, " + ".join(names))
    group_C, scaled = _groups(weights, args, order_C if actorder == "group" else None)
    scaled = [weight.to(dtype) for weight, dtype in zip(scaled, dtypes, strict=True)]
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
