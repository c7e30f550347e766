"""The column loop of GPTQ in two forms of the same arithmetic (Frantar et al. 2022, arXiv:2210.17323, algorithm 1).

* R form, the default. With the reverse-order Cholesky H + lambda I = R R^T (R upper triangular) and R^ = R / diag(R) by column,
      t_k = w_k + sum_{j<k} e_j R^_jk,   q_k = Q(t_k),   e_k = w_k - q_k,   loss = 1/2 sum_k ((t_k - q_k) R_kk)^2.
  This is Babai's nearest-plane algorithm (Chen et al. 2025, arXiv:2507.18553): one factorization, no inverse, and E overwrites W.
* reference form. Cholesky, inverse, Cholesky, then the column loop of the paper with its trailing update.

The working set is transposed ([C, R]) so that a column of W is contiguous in memory.

Shapes: R rows (out features), C columns (in features), G groups, B columns of one block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.errors import NumericsError
from compressor.numerics.formats import snap_
from compressor.numerics.scheme import QuantizationArgs

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
        snapped_R = snap_(scratch_R, self.args.type, self.args.num_bits)
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
