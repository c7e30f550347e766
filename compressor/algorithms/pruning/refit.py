"""Least squares for the experts that stay: their last projections are moved so that together they give what all experts gave.

Of a token n and the experts e that its router now chooses, with weights g_ne, the layer gives sum_e g_ne W_e z_ne. W is moved to the least
sum over tokens of the squared distance to the old output, kept near where it was by a ridge; one expert after another, in a few rounds.
Shapes: n tokens of an expert, N tokens, D inner columns, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SentTokens:
    """What one expert is sent.

    Attributes:
        rows_n: int64, numbers of its tokens.
        inputs_nD: float32, what its last projection reads, times the weight of the router.
    """

    rows_n: Tensor
    inputs_nD: Tensor


def refit(sent: Sequence[SentTokens], weights: Sequence[Tensor], missing_NC: Tensor, dampening_frac: float, rounds: int) -> list[Tensor]:
    """Move weights so that they give what is missing, too.

    Args:
        sent: to each expert.
        weights: [C, D] float32 of each; not modified.
        missing_NC: what the layer should give beyond what it gives with these weights, float32; changed to what is missing afterwards.
        dampening_frac: strength of the ridge, as a share of the mean diagonal of the moments of an expert's inputs.
        rounds: how often each expert takes its turn.

    Returns:
        New weights.
    """
    moved = [torch.zeros_like(weight) for weight in weights]
    sizes = [float(tokens.inputs_nD.square().sum(dtype=torch.float64)) for tokens in sent]
    turns = sorted(range(len(sent)), key=lambda place: -sizes[place])  # so that the numbers of the experts decide nothing
    turns = [place for place in turns if len(sent[place].rows_n)]
    solved = {place: _factor(sent[place].inputs_nD, dampening_frac) for place in turns}
    for place in rounds * turns:
        tokens, (factor_DD, ridge) = sent[place], solved[place]
        wanted_DC = tokens.inputs_nD.T @ missing_NC[tokens.rows_n] - ridge * moved[place].T
        step_CD = torch.cholesky_solve(wanted_DC, factor_DD).T
        moved[place] += step_CD
        missing_NC[tokens.rows_n] -= tokens.inputs_nD @ step_CD.T
    return [weight + step for weight, step in zip(weights, moved, strict=True)]


def _factor(inputs_nD: Tensor, dampening_frac: float) -> tuple[Tensor, float]:
    """Cholesky factor, [D, D] float32, of the moments with their ridge, and the ridge."""
    moments_DD = (inputs_nD.T @ inputs_nD).double()
    ridge = dampening_frac * float(moments_DD.diagonal().mean()) + torch.finfo(torch.float32).tiny
    moments_DD.diagonal().add_(ridge)
    return torch.linalg.cholesky(moments_DD).float(), ridge
