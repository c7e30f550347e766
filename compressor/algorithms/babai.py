"""The column loop of GPTQ, and the search for scales that suit it: both round columns with one factor of the Hessian.

The loop has two forms of the same arithmetic (Frantar et al. 2022, arXiv:2210.17323, algorithm 1).

* R form, the default. With the reverse-order Cholesky H + lambda I = R R^T (R upper triangular) and R^ = R / diag(R) by column,
      t_k = w_k + sum_{j<k} e_j R^_jk,   q_k = Q(t_k),   e_k = w_k - q_k,   loss = 1/2 sum_k ((t_k - q_k) R_kk)^2.
  This is Babai's nearest-plane algorithm (Chen et al. 2025, arXiv:2507.18553): one factorization, no inverse, and E overwrites W.
* reference form. Cholesky, inverse, Cholesky, then the column loop of the paper with its trailing update.

The working set is transposed ([C, R]) and its columns lie in the order in which they are rounded, so that a column of W is contiguous in
memory. On a CPU with a C compiler at hand the columns of a block are rounded by `rounding.c`, which does the same several times faster,
and on CUDA with Triton at hand by `rounding_triton`.

Shapes: R rows (out features), C columns (in features), G groups, B columns of one block, S columns of one group, P candidates.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from compressor.algorithms.compiled import SCALE_DTYPES, RoundingKernel, compiled_kernel
from compressor.errors import NumericsError, UserInputError
from compressor.numerics.formats import rounding
from compressor.numerics.scheme import QuantizationArgs

SWITCH = "COMPRESSOR_KERNEL"
TURNED = {"cpu": 1 << 16, "cuda": 1 << 24}  # elements at once: what a core's cache holds, what is worth a launch
SUB_BLOCK = 16  # columns that are updated one by one before the next small matrix product


@dataclass(frozen=True)
class Grid:
    """The values that a quantized weight may take, spread over rows and columns.

    Attributes:
        scale_RG: [R, G] in the dtype in which scales are stored; dequantized values are rounded to it.
        zero_RG: [R, G] integer zero points, None when symmetric.
        group_C: [C] long, the group of each column, in the original order of the columns.
        args: number format.
        gone_RC: [R, C] bool, weights that become zero whatever they were; None where there are none.
    """

    scale_RG: Tensor
    zero_RG: Tensor | None
    group_C: Tensor
    args: QuantizationArgs
    gone_RC: Tensor | None = None


class GridColumns:
    """Rounds columns onto their grid; holds the scales transposed so that a column's scales are contiguous."""

    def __init__(self, grid: Grid, order_C: Tensor) -> None:
        """Transpose a grid; `order_C` is the order in which its columns will be asked for."""
        self.grid, self.args = grid, grid.args
        self.low, self.high, self._to_nearest = rounding(grid.args.type, grid.args.num_bits)  # once, not for every column
        self._scale_GR = grid.scale_RG.t().contiguous()
        self.scale32_GR = self._scale_GR.float()
        self._zero_GR = None if grid.zero_RG is None else grid.zero_RG.t().to(self._scale_GR.dtype).contiguous()
        self.zero32_GR = None if self._zero_GR is None else self._zero_GR.float()
        self.group_C = grid.group_C.index_select(0, order_C.to(grid.group_C.device))
        self.gone_CR = None if grid.gone_RC is None else grid.gone_RC.t().index_select(0, order_C.to(grid.gone_RC.device))

    @cached_property
    def _group(self) -> list[int]:
        return self.group_C.tolist()  # waits for the device, where no kernel reads the tensor itself

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored scales, to which dequantized values are rounded."""
        return self._scale_GR.dtype

    def empty_codes(self, like_CR: Tensor) -> Tensor:
        """Return room for codes of the given shape, in the format's storage dtype."""
        return torch.empty_like(like_CR, dtype=self.args.storage_dtype)

    def round(self, column: int, t_R: Tensor, scratch_R: Tensor, codes_R: Tensor) -> Tensor:
        """Write the codes of t into `codes_R`; return the values that a loader will dequantize them to, in the scale's dtype."""
        group = self._group[column]
        torch.div(t_R, self.scale32_GR[group], out=scratch_R)
        if self.zero32_GR is not None:
            scratch_R.add_(self.zero32_GR[group])
        snapped_R = self._to_nearest(scratch_R.clamp_(self.low, self.high))
        if self.gone_CR is not None:
            zero_R = torch.zeros_like(snapped_R) if self.zero32_GR is None else self.zero32_GR[group]
            snapped_R = torch.where(self.gone_CR[column], zero_R, snapped_R)
        codes_R.copy_(snapped_R)
        values_R = snapped_R.to(self._scale_GR.dtype, copy=True)
        if self._zero_GR is not None:
            values_R.sub_(self._zero_GR[group])
        return values_R.mul_(self._scale_GR[group])


def cholesky(matrix_CC: Tensor, name: str, *, upper: bool = False) -> Tensor:
    """Factorize a damped Hessian in its own memory, of which a wide layer has no second one to spare.

    Args:
        matrix_CC: [C, C] float32, symmetric, its rows or its columns contiguous; overwritten.
        name: dotted module name, for errors only.
        upper: return the upper factor U, with U^T U the matrix, in place of the lower L, with L L^T.

    Returns:
        [C, C], triangular, its columns contiguous; where the matrix was.

    Raises:
        NumericsError: it is not positive definite.
    """
    by_columns_CC = matrix_CC.t() if matrix_CC.is_contiguous() else matrix_CC
    info = torch.empty((), dtype=torch.int32, device=matrix_CC.device)
    factor, _ = torch.linalg.cholesky_ex(by_columns_CC, upper=upper, out=(by_columns_CC, info))
    if int(info) != 0:
        raise NumericsError(
            f"{name}: its damped Hessian is not positive definite (minor {int(info)} of {len(matrix_CC)}); "
            "raise dampening_frac or add calibration samples"
        )
    return factor


@dataclass(frozen=True)
class Factor:
    """H + lambda I = R R^T, R upper triangular, in the order in which columns are rounded.

    Attributes:
        unit_CC: [C, C] float32, R with each column divided by its diagonal entry.
        diag_C: [C] float32, the diagonal of R.
    """

    unit_CC: Tensor
    diag_C: Tensor

    @classmethod
    def of(cls, damped_CC: Tensor, name: str) -> Factor:
        """Factorize H + lambda I.

        Args:
            damped_CC: [C, C] float32, its columns in the order of rounding, contiguous; overwritten, the factor lies where it was.
            name: dotted module name, for errors only.

        Returns:
            The factor.

        Raises:
            NumericsError: it is not positive definite.
        """
        # Reverse the order, factorize lower, reverse back: the result is upper with R R^T = H.
        _turn_around(damped_CC)
        R_CC = cholesky(damped_CC, name)
        _turn_around(R_CC.t())
        diag_C = R_CC.diagonal().clone()
        return cls(R_CC.div_(diag_C), diag_C)

    def divide(self, columns_CR: Tensor) -> Tensor:
        """Return (H + lambda I)^-1 columns_CR, [C, R], rows in the order of rounding."""
        left_CR = torch.linalg.solve_triangular(self.unit_CC, columns_CR, upper=True, unitriangular=True)
        left_CR.div_(self.diag_C.square()[:, None])
        return torch.linalg.solve_triangular(self.unit_CC.t(), left_CR, upper=False, unitriangular=True)


def _turn_around(square_CC: Tensor) -> None:
    """Reverse the order of rows and of columns, in place; of contiguous memory that is the order of all elements."""
    flat = square_CC.view(-1)
    half = len(flat) // 2
    step = TURNED[square_CC.device.type]
    for start in range(0, half, step):
        stop = min(start + step, half)
        front, back = flat[start:stop], flat[len(flat) - stop : len(flat) - start]
        kept = front.flip(0)
        front.copy_(back.flip(0))
        back.copy_(kept)


def solve_r_form(E_CR: Tensor, factor: Factor, columns: GridColumns, block_size: int) -> tuple[Tensor, Tensor]:
    """Left-looking Babai rounding; `E_CR` holds W on entry and E = W - Q on exit."""
    codes_CR = columns.empty_codes(E_CR)
    loss_R = E_CR.new_zeros(E_CR.shape[1])
    kernel = kernel_for(columns.grid, E_CR.device)
    for start in range(0, len(E_CR), block_size):
        run = slice(start, min(start + block_size, len(E_CR)))
        T_BR = E_CR[run].clone()
        if start:
            T_BR.addmm_(factor.unit_CC[:start, run].t(), E_CR[:start])
        C_BB = factor.unit_CC[run, run].t().contiguous()
        if kernel is not None:
            kernel.round_block(T_BR, E_CR[run], C_BB, factor.diag_C[run], columns, start, codes_CR[run], loss_R)
            continue
        _round_block(T_BR, E_CR[run], C_BB, columns, start, codes_CR[run])
        loss_R += (T_BR * factor.diag_C[run, None]).square_().sum(0)
    return codes_CR, loss_R.mul_(0.5)


def rounding_kernel(device: torch.device | str) -> RoundingKernel | None:
    """Return what rounds columns in place of torch, built if need be.

    Args:
        device: where the weights are.

    Returns:
        None where COMPRESSOR_KERNEL=off, on devices for which there is none, or where it cannot be built.

    Raises:
        UserInputError: COMPRESSOR_KERNEL is something else.
    """
    chosen = os.environ.get(SWITCH, "")
    if chosen not in ("", "on", "off"):
        raise UserInputError(f"{SWITCH}: {chosen!r} means nothing; choose from on, off, or leave it unset")
    kinds = {"cpu": compiled_kernel, "cuda": _triton_kernel}
    kind = torch.device(device).type
    return kinds[kind]() if kind in kinds and chosen != "off" else None


@cache
def _triton_kernel() -> RoundingKernel | None:
    try:
        from compressor.algorithms.rounding_triton import CANNOT_LAUNCH, TritonKernel
    except ImportError:  # of triton, which not every torch brings
        return None
    try:
        return TritonKernel()
    except CANNOT_LAUNCH:
        return None


def kernel_for(grid: Grid, device: torch.device) -> RoundingKernel | None:
    """Return the compiled kernel that rounds such scales and codes on a device; None where torch does."""
    kernel = rounding_kernel(device) if grid.scale_RG.dtype in SCALE_DTYPES else None
    return kernel if kernel is not None and grid.args.type in kernel.number_types else None


def _round_block(T_BR: Tensor, E_BR: Tensor, C_BB: Tensor, columns: GridColumns, first: int, codes_BR: Tensor) -> None:
    """Round the columns of one block in place: T becomes t - q, E becomes w - q."""
    scratch_R = torch.empty_like(T_BR[0])
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
    """The paper's form: right-looking updates with the upper Cholesky factor of the inverse; `damped_CC` is overwritten."""
    U_CC = cholesky(torch.cholesky_inverse(cholesky(damped_CC, name)), name, upper=True)
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
# columns of one group are rounded as the solve will round them, with their part of its factor: what columns of other groups, rounded
# later, will make good does not count. Each row keeps the scale with the least loss among a handful of shrunken ones. The zero point
# stays: shrinking both ends of a range by one factor does not move it.
#
# Only groups are searched. A whole row as one group would cost a full solve per candidate, and a scale shared by rows cannot be chosen row
# by row.

NUM_CANDIDATES = 6
_LEAST_BITS_WITH_ZERO_POINT = 4
# Bits -> the largest and the smallest multiple of the observed scale that is tried. What is smaller still lowers the error of the group,
# but no longer that of the model: shrunken scales add up over layers.
SEARCHED_MULTIPLES = {2: (1.0, 0.5), 3: (1.0, 0.8), 4: (1.05, 0.8), 5: (1.0, 0.8), 6: (1.0, 0.85), 7: (1.0, 0.9), 8: (1.0, 0.9)}


def can_search(args: QuantizationArgs) -> bool:
    """Tell whether scales of this format are searched: integers in groups.

    Args:
        args: number format.

    Returns:
        True for integer formats with a scale per group; below 4 bits for symmetric ones alone, for others lose by it.
    """
    return args.type == "int" and args.strategy == "group" and (args.symmetric or args.num_bits >= _LEAST_BITS_WITH_ZERO_POINT)


def search_scales(work_CR: Tensor, factor: Factor, grid: Grid, order_C: Tensor) -> Tensor:
    """Choose a scale for each row and group.

    Args:
        work_CR: [C, R] float32, the weight, its columns in the order of rounding; not modified.
        factor: of the damped Hessian, in the same order.
        grid: observed scales and zero points, integers in groups.
        order_C: [C] long, the order of rounding.

    Returns:
        [R, G], the chosen scales in the dtype of the observed ones.
    """
    largest, smallest = SEARCHED_MULTIPLES[grid.args.num_bits]
    multiples_P = torch.linspace(largest, smallest, NUM_CANDIDATES, dtype=torch.float32, device=work_CR.device)
    kernel = kernel_for(grid, work_CR.device)
    if kernel is not None:
        chosen_GR = kernel.search(work_CR, factor.unit_CC.t(), factor.diag_C, GridColumns(grid, order_C), multiples_P)
        return chosen_GR.t().to(grid.scale_RG.dtype).contiguous()
    scale_RG = grid.scale_RG.clone()
    group_C = grid.group_C.index_select(0, order_C)
    for group in range(scale_RG.shape[1]):
        own_S = (group_C == group).nonzero()[:, 0]
        candidates_PR = (multiples_P[:, None] * scale_RG[:, group].float()).to(scale_RG.dtype)
        part = Factor(factor.unit_CC[own_S][:, own_S], factor.diag_C[own_S])
        zero_R = None if grid.zero_RG is None else grid.zero_RG[:, group]
        gone_RS = None if grid.gone_RC is None else grid.gone_RC[:, order_C[own_S]]
        loss_PR = _losses(work_CR[own_S], part, candidates_PR, zero_R, gone_RS, grid.args)
        # A candidate that rounds to zero in the scale's dtype is no scale.
        loss_PR.masked_fill_(candidates_PR <= 0, torch.inf)
        scale_RG[:, group] = candidates_PR.gather(0, loss_PR.argmin(0, keepdim=True))[0]
    return scale_RG


def _losses(
    work_SR: Tensor, factor: Factor, candidates_PR: Tensor, zero_R: Tensor | None, gone_RS: Tensor | None, args: QuantizationArgs
) -> Tensor:
    """Round one group with every candidate scale; return the loss of each, [P, R]."""
    num_candidates, rows = candidates_PR.shape
    columns = torch.arange(len(work_SR), device=work_SR.device)
    zeros = None if zero_R is None else zero_R.repeat(num_candidates)[:, None]
    gone = None if gone_RS is None else gone_RS.repeat(num_candidates, 1)
    grid = Grid(candidates_PR.reshape(-1, 1), zeros, torch.zeros_like(columns), args, gone)
    _, loss = solve_r_form(work_SR.repeat(1, num_candidates), factor, GridColumns(grid, columns), len(columns))
    return loss.view(num_candidates, rows)
