"""The measurements themselves: how far a weight is from another, and how far two models' predictions are from each other.

B batch, T positions, N scored tokens, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import torch

_ELEMENTS_AT_ONCE = 1 << 23  # of float32 logits; bounds the working memory


def sqnr_db(reference: torch.Tensor, approximation: torch.Tensor) -> float:
    """Return the signal-to-quantization-noise ratio 10 log10(|w|^2 / |w - w'|^2).

    Args:
        reference: the weight, any float dtype.
        approximation: what replaces it, of the same shape.
    Returns:
        Decibels; inf where both are equal, -inf where the reference is all zero and the approximation is not, nan where either holds one.
    """
    reference = reference.to(torch.float64)
    signal = float(reference.square().sum())
    noise = float((reference - approximation.to(torch.float64)).square().sum())
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
    step = max(1, _ELEMENTS_AT_ONCE // base_NV.shape[-1])
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
