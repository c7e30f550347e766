"""The measurements themselves: how far a weight is from another, and how far two models' predictions are from each other.

B batch, T positions, N scored tokens, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

ELEMENTS_AT_ONCE = 1 << 23  # of float32 logits; bounds the working memory
LARGEST_NLL = 300.0
"""Nats of a token beyond which a perplexity grows no more: a ruined model must get a verdict, not an overflow."""


def perplexity(nll: Any) -> Any:
    """Return exp of a mean negative log-likelihood, held at `exp(LARGEST_NLL)`.

    Args:
        nll: nats per token, a float or an array of them.
    Returns:
        The perplexity, likewise.
    """
    return np.exp(np.minimum(nll, LARGEST_NLL)) if isinstance(nll, np.ndarray) else math.exp(min(nll, LARGEST_NLL))


def shown(value: float, digits: int = 4) -> str:
    """Return a measured number for readers: with fixed digits, or in powers of ten where those would run away.

    Args:
        value: the number.
        digits: behind the point.
    Returns:
        The text.
    """
    return f"{value:.{digits}f}" if not abs(value) >= 1e6 else f"{value:.3g}"


@dataclass(frozen=True)
class Closeness:
    """How a weight stands to the one that it replaces.

    Rounding errors are nearly orthogonal to the weight, so the gain <w, w'> / <w, w> of each scale's group lies close to 1, within about
    sqrt(noise-to-signal ratio / group size). A wrong scale stretches its group and nothing else does, however noisy the format: this finds
    scales that belong to another group, which the SQNR of a whole module forgives.

    Attributes:
        sqnr_db: 10 log10(|w|^2 / |w - w'|^2); inf where equal, -inf where only w is zero, nan where either holds one.
        gain: of the whole weight; 1 for a faithful one, 0 for an unrelated one.
        mismatch: mean over groups of the squared excess of |gain - 1| over GAIN_BIAS, in units of its expected variance; below 1 when sane.
        worst_group: row and place in the row of the group that is farthest off.
        worst_gain: its gain.
        worst_deviation: its excess in standard deviations.
    """

    sqnr_db: float
    gain: float
    mismatch: float
    worst_group: tuple[int, int]
    worst_gain: float
    worst_deviation: float


GAIN_BIAS = 0.03
"""A group's gain may be off by this much for reasons of the format alone (clipping, rounding of few bits)."""


def compare_weights(reference: torch.Tensor, approximation: torch.Tensor, groups_per_row: int | None) -> Closeness:
    """Compare a decoded weight with the weight that it replaces.

    Args:
        reference: the weight [R, C], any float dtype.
        approximation: what replaces it.
        groups_per_row: scales of a row; None for one scale of the whole tensor.
    Returns:
        The comparison, in float64 by blocks of rows.
    """
    sums = [_group_sums(*rows, groups_per_row or 1) for rows in zip(_row_blocks(reference), _row_blocks(approximation), strict=True)]
    signal, product, energy, noise = torch.cat(sums, dim=1)
    if groups_per_row is None:
        signal, product, energy, noise = (total.sum(0, keepdim=True) for total in (signal, product, energy, noise))
        size = reference.numel()
    else:
        size = reference.shape[1] // groups_per_row
    gain = torch.where(signal > 0, product / signal, 1.0)
    noise_ratio = (energy / signal - gain.square()).clamp_min(1e-12)  # of what is left when the gain is taken out
    excess = ((gain - 1).abs() - GAIN_BIAS).clamp_min(0)
    deviation = torch.where(signal > 0, excess * (max(1, size - 1) / noise_ratio).sqrt(), 0.0).nan_to_num(nan=math.inf)
    worst = int(deviation.argmax())
    total = float(signal.sum())
    return Closeness(
        sqnr_db=_decibels(total, float(noise.sum())),
        gain=float(product.sum()) / total if total else 1.0,
        mismatch=float(deviation.square().mean()),
        worst_group=divmod(worst, groups_per_row or 1),
        worst_gain=float(gain[worst]),
        worst_deviation=float(deviation[worst]),
    )


def _row_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return weight.split(max(1, ELEMENTS_AT_ONCE // weight.shape[1]))


def _group_sums(reference: torch.Tensor, approximation: torch.Tensor, groups_per_row: int) -> torch.Tensor:
    """Return |w|^2, <w, w'>, |w'|^2 and |w - w'|^2 of every group, float64 [4, groups]."""
    w, v = (tensor.to(torch.float64).reshape(len(tensor) * groups_per_row, -1) for tensor in (reference, approximation))
    return torch.stack([(w * w).sum(1), (w * v).sum(1), (v * v).sum(1), (w - v).square().sum(1)])


def _decibels(signal: float, noise: float) -> float:
    if math.isnan(signal + noise):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and math.isfinite(noise) else -math.inf


@dataclass(frozen=True)
class TokenScores:
    """What both models said at every scored token; arrays [N].

    Attributes:
        nll_base: negative log likelihood of the token that came, nats.
        nll_compressed: the same of the compressed model.
        kl: KL(base || compressed), nats.
        agrees: both models prefer the same token.
        is_base_right: the base's preferred token came.
        is_compressed_right: the compressed model's preferred token came.
    """

    nll_base: np.ndarray
    nll_compressed: np.ndarray
    kl: np.ndarray
    agrees: np.ndarray
    is_base_right: np.ndarray
    is_compressed_right: np.ndarray

    @classmethod
    def concatenate(cls, pieces: list[TokenScores]) -> TokenScores:
        """Return the tokens of all pieces, in order."""
        return cls(*(np.concatenate([getattr(piece, field.name) for piece in pieces]) for field in fields(cls)))

    def __len__(self) -> int:
        return len(self.kl)


def score_tokens(base_NV: torch.Tensor, compressed_NV: torch.Tensor, targets_N: torch.Tensor) -> TokenScores:
    """Compare two models' predictions token by token.

    Args:
        base_NV: logits of the base model, any float dtype.
        compressed_NV: logits of the compressed model.
        targets_N: the tokens that came.
    Returns:
        The scores, computed in float32 by blocks of tokens.
    """
    step = max(1, ELEMENTS_AT_ONCE // base_NV.shape[-1])
    blocks = zip(base_NV.split(step), compressed_NV.split(step), targets_N.split(step), strict=True)
    return TokenScores.concatenate([_score_block(*block) for block in blocks])


def _score_block(base_NV: torch.Tensor, compressed_NV: torch.Tensor, targets_N: torch.Tensor) -> TokenScores:
    log_p, log_q = base_NV.float().log_softmax(-1), compressed_NV.float().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).nan_to_num(nan=0.0, posinf=math.inf).sum(-1).clamp_min(0)
    kl = torch.where(log_p.isnan().any(-1) | log_q.isnan().any(-1), torch.nan, kl)
    best_p, best_q = log_p.argmax(-1), log_q.argmax(-1)
    picked = targets_N[:, None]
    tensors = (-log_p.gather(-1, picked)[:, 0], -log_q.gather(-1, picked)[:, 0], kl)
    flags = (best_p == best_q, best_p == targets_N, best_q == targets_N)
    return TokenScores(*(tensor.cpu().double().numpy() for tensor in tensors), *(flag.cpu().numpy() for flag in flags))
