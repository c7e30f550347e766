"""SparseGPT: set weights to zero column by column, and let the columns to come make good what that costs the layer's outputs.

With H + lambda I = R R^T (R upper triangular, columns in their own order) and R^ = R / diag(R) by column, errors of earlier columns move
column k to t_k = w_k + sum_{j<k} e_j R^_jk, and setting it to zero there costs (t_k R_kk)^2 / 2: the form in which `babai` rounds, with
zero as the only code beside keeping t_k. Which weights go is chosen for a block of columns at a time, by that cost; the t_k of a whole
block, its own columns still free, are one triangular solve with its part of R^.

What the pass leaves is not the best that the kept weights can do: a column cannot make good what goes after it. So some steps of conjugate
gradients on the kept weights of every row follow.

Source: Frantar and Alistarh 2023, arXiv:2301.00774. Shapes: R rows (out features), C columns (in features), B columns of one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.algorithms.babai import SUB_BLOCK, Factor
from compressor.algorithms.gptq import DampedHessian, shifted_weights
from compressor.algorithms.hessian import relative_output_error
from compressor.algorithms.pruning.magnitude import Pattern, num_zeros, smallest
from compressor.errors import NumericsError


@dataclass(frozen=True)
class PrunedWeight:
    """One pruned weight.

    Attributes:
        weight_RC: [R, C] in the dtype of the weight that came in, zero where it was pruned.
        relative_error: relative squared error of the outputs, tr(E H E^T) / tr(W H W^T).
    """

    weight_RC: Tensor
    relative_error: float


@torch.no_grad()
def prune_sparsegpt(
    weights: Sequence[Tensor],
    hessian_CC: Tensor,
    sparsity: float,
    pattern: Pattern | None = None,
    *,
    shift_CC: Tensor | None = None,
    block_size: int = 128,
    damp_frac: float = 0.01,
    keep_zeros: bool = False,
    refining_steps: int = 8,
    names: Sequence[str] = ("weight",),
) -> list[PrunedWeight]:
    """Prune all weights that read one input.

    Args:
        weights: [R_i, C] float each; not modified.
        hessian_CC: [C, C] float32, 2 * mean(x x^T) of their input; not modified.
        sparsity: share of zeros in each, 0 to 1.
        pattern: of every run of neighbours in a row so many stay; None: any may go.
        shift_CC: [C, C] float32, a share of 2 * mean((x_base - x) x^T): weights are first moved by `shifted_weights`; None leaves them.
        block_size: columns of which the zeros are chosen at once.
        damp_frac: share of the mean diagonal that is added to the diagonal; dimensionless, > 0.
        keep_zeros: weights that are zero now stay zero, and count.
        refining_steps: of conjugate gradients at the end.
        names: dotted module names, for errors only.

    Returns:
        The pruned weights.

    Raises:
        NumericsError: a weight is not finite, its rows do not divide into runs of the pattern, or the damped Hessian is not positive
            definite.
    """
    name = " + ".join(names)
    damped = DampedHessian(hessian_CC, None, damp_frac, name)
    results = []
    for weight in weights:
        if not bool(torch.isfinite(weight).all()):
            raise NumericsError(f"{name}: a weight holds NaN or infinity; repair the model")
        if pattern is not None and weight.shape[1] % pattern.of:
            raise NumericsError(f"{name}: rows of {weight.shape[1]} do not divide into runs of {pattern.of}; leave the module out")
        wanted_RC = weight.float() if shift_CC is None else shifted_weights(weight, shift_CC, damped)
        zeros_CR = (weight == 0).t().contiguous() if keep_zeros else None
        kept_CR, gone_CR = _pass(wanted_RC.t().contiguous(), damped.factor, sparsity, pattern, block_size, zeros_CR)
        if refining_steps:
            kept_CR = refined(kept_CR, wanted_RC.t(), gone_CR, damped.matrix(), refining_steps)
        pruned_RC = kept_CR.t().to(weight.dtype).contiguous()
        results.append(PrunedWeight(pruned_RC, relative_output_error(wanted_RC, pruned_RC, hessian_CC)))
        del wanted_RC, kept_CR, gone_CR  # or they would lie beside those of the next one
    return results


def _pass(
    W_CR: Tensor, factor: Factor, sparsity: float, pattern: Pattern | None, block_size: int, zeros_CR: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Choose zeros block by block; return the weights that are left, and where they are zero."""
    E_CR, gone_CR = W_CR.clone(), torch.zeros_like(W_CR, dtype=torch.bool) if zeros_CR is None else zeros_CR
    done = 0
    for start in range(0, len(W_CR), block_size):
        run = slice(start, min(start + block_size, len(W_CR)))
        moved_BR = factor.unit_CC[:start, run].t() @ E_CR[:start]
        C_BB = factor.unit_CC[run, run].t().contiguous()
        if pattern is None:
            done += _choose(
                W_CR[run], moved_BR, C_BB, factor.diag_C[run], gone_CR[run], num_zeros(sparsity, W_CR[: run.stop].numel()) - done
            )
            _settle(E_CR[run], moved_BR, C_BB, gone_CR[run])
            continue
        for sub in range(0, len(moved_BR), pattern.of):
            own, at = slice(sub, sub + pattern.of), slice(start + sub, start + sub + pattern.of)
            moved_BR[own].addmm_(C_BB[own, :sub], E_CR[start : start + sub])
            _choose(W_CR[at], moved_BR[own], C_BB[own, own], factor.diag_C[at], gone_CR[at], pattern.of - pattern.keep, by_row=True)
            _settle(E_CR[at], moved_BR[own], C_BB[own, own], gone_CR[at])
    return (W_CR - E_CR).masked_fill_(gone_CR, 0.0), gone_CR


def _choose(W_BR: Tensor, moved_BR: Tensor, C_BB: Tensor, diag_B: Tensor, gone_BR: Tensor, count: int, *, by_row: bool = False) -> int:
    """Choose the cheapest `count` of a block, or of each row of it; those that have gone count. Return how many went; fills `gone_BR`."""
    # t_k of all columns while none of them has gone: the error of those before k is w_j - t_j.
    running_BR = W_BR + torch.linalg.solve_triangular(C_BB, moved_BR, upper=False, unitriangular=True)
    cost_BR = running_BR.mul_(diag_B[:, None]).square_().masked_fill_(gone_BR, -1.0)
    if by_row:
        gone_BR.scatter_(0, cost_BR.sort(dim=0, stable=True).indices[:count], True)
    else:
        gone_BR.logical_or_(smallest(cost_BR, max(0, min(count, cost_BR.numel()))))
    return int(gone_BR.sum()) if not by_row else 0


def _settle(E_BR: Tensor, moved_BR: Tensor, C_BB: Tensor, gone_BR: Tensor) -> None:
    """Turn weights into errors: e_k = w_k where it goes, and -sum_{j<k} e_j R^_jk where t_k is kept. Changes both."""
    for sub in range(0, len(E_BR), SUB_BLOCK):
        end = min(sub + SUB_BLOCK, len(E_BR))
        if sub:
            moved_BR[sub:end].addmm_(C_BB[sub:end, :sub], E_BR[:sub])
        for k in range(sub, end):
            moved_R = moved_BR[k]
            if k > sub:
                moved_R.addmv_(E_BR[sub:k].t(), C_BB[k, sub:k])
            torch.where(gone_BR[k], E_BR[k], moved_R.neg_(), out=E_BR[k])


def refined(kept_CR: Tensor, wanted_CR: Tensor, gone_CR: Tensor, matrix_CC: Tensor, steps: int) -> Tensor:
    """Move the kept weights of each row towards the least error of the outputs, by conjugate gradients.

    Args:
        kept_CR: [C, R] float32, zero where weights are gone.
        wanted_CR: [C, R] float32, what they stand for.
        gone_CR: [C, R] bool.
        matrix_CC: [C, C] float32, damped Hessian.
        steps: at most.

    Returns:
        [C, R], zeros as they were.
    """
    scale_C1 = matrix_CC.diagonal().rsqrt()[:, None]  # of a system whose diagonal is one
    scaled_CC = matrix_CC * scale_C1 * scale_C1.t()
    residual_CR = (scaled_CC @ ((wanted_CR - kept_CR) / scale_C1)).masked_fill_(gone_CR, 0.0)
    step_CR, direction_CR = torch.zeros_like(kept_CR), residual_CR.clone()
    energy_R = residual_CR.square().sum(0)
    tiny = torch.finfo(torch.float32).tiny
    for _ in range(steps):
        product_CR = (scaled_CC @ direction_CR).masked_fill_(gone_CR, 0.0)
        length_R = energy_R / (direction_CR * product_CR).sum(0).clamp_min(tiny)
        step_CR.addcmul_(direction_CR, length_R.expand_as(step_CR))
        residual_CR.addcmul_(product_CR, length_R.expand_as(step_CR), value=-1)
        following_R = residual_CR.square().sum(0)
        direction_CR.mul_(following_R / energy_R.clamp_min(tiny)).add_(residual_CR)
        energy_R = following_R
    return kept_CR + step_CR * scale_C1
