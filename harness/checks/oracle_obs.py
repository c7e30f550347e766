"""The slow oracle of second-order solvers: optimal brain surgery with a dense inverse, in float64, without a line of what it judges.

After a column is rounded, all columns to come absorb its error in proportion to their row of the inverse Hessian, and the column is
eliminated from the inverse by one step of Gauss. That is the textbook form: no Cholesky factor, no block, no batch of rows.

Source: Hassibi and Stork 1992, Second order derivatives for network pruning; Frantar and Alistarh 2022, arXiv:2208.11580.
Shapes: R rows, C columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.checks.nearest import nearest


def damped(hessian_CC: Tensor, damp_frac: float) -> Tensor:
    """Return H + lambda I, lambda a share of the mean diagonal of the columns that are not dead.

    Args:
        hessian_CC: [C, C].
        damp_frac: the share.

    Returns:
        float64.
    """
    H_CC = hessian_CC.to(torch.float64).clone()
    diagonal = H_CC.diagonal()
    diagonal += damp_frac * diagonal[diagonal != 0].mean()
    return H_CC


def quadratic_loss(error_RC: Tensor, H_CC: Tensor) -> float:
    """Return 1/2 tr(E H E^T).

    Args:
        error_RC: W - Q.
        H_CC: float64.

    Returns:
        The loss in float64.
    """
    wide = error_RC.to(torch.float64)
    return 0.5 * float(((wide @ H_CC) * wide).sum())


def solve_dense(
    weight_RC: Tensor,
    H_CC: Tensor,
    scale_RC: Tensor,
    zero_RC: Tensor,
    grid: Tensor,
    order_C: Tensor,
    value_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Round one column after another, and let the columns to come absorb the error.

    Args:
        weight_RC: the weight.
        H_CC: float64, damped.
        scale_RC: scale of each value, float64.
        zero_RC: zero point of each value, float64.
        grid: code values, float64, rising.
        order_C: in which columns are rounded.
        value_dtype: in which a loader has the values.

    Returns:
        Codes and values, float64 [R, C].
    """
    W_RC = weight_RC.to(torch.float64).clone()
    inverse_CC = torch.linalg.inv(H_CC)
    codes_RC, values_RC = torch.zeros_like(W_RC), torch.zeros_like(W_RC)
    left = torch.ones(W_RC.shape[1], dtype=torch.bool)
    for column in order_C.tolist():
        code_R = nearest(W_RC[:, column] / scale_RC[:, column] + zero_RC[:, column], grid)
        codes_RC[:, column] = code_R
        values_RC[:, column] = ((code_R - zero_RC[:, column]) * scale_RC[:, column]).to(value_dtype).to(torch.float64)
        pivot = inverse_CC[column, column].clone()
        error_R = (W_RC[:, column] - values_RC[:, column]) / pivot
        left[column] = False
        W_RC[:, left] -= error_R[:, None] * inverse_CC[column, left]
        inverse_CC = inverse_CC - inverse_CC[:, column, None] * inverse_CC[column] / pivot
    return codes_RC, values_RC
