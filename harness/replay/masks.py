"""The causal mask of a model, given with its tokens: without one transformers looks at positions on the host, which no capture repeats."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}  # of the largest logit
_TOLERANCE_OF_HALVES = 3e-2
# What models raise that know no such mask.
_REFUSALS = (RuntimeError, TypeError, ValueError, KeyError, AttributeError, IndexError)


def causal_mask(model: nn.Module, input_ids: Tensor) -> dict[str, Any]:
    """Find the mask under which a model gives the very logits that it gives by itself.

    Args:
        model: of transformers; its training flags are as before afterwards.
        input_ids: tokens, [N, T]; the mask is for T of them.

    Returns:
        `attention_mask` as an argument of the model; nothing where the model predicts no tokens, or no such mask gives its logits.
    """
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        own = _logits(model, input_ids, {})
        if own is None:
            return {}
        tried = [(_distance(model, input_ids, mask, own), number, mask) for number, mask in enumerate(_candidates(model, input_ids))]
    finally:
        for module, training in flags:
            module.training = training
    distance, _, mask = min(tried, key=lambda one: one[:2])
    return mask if distance <= _TOLERANCE.get(own.dtype, _TOLERANCE_OF_HALVES) * float(own.abs().max()) else {}


@torch.no_grad()
def _logits(model: nn.Module, input_ids: Tensor, mask: dict[str, Any]) -> Tensor | None:
    try:
        logits = getattr(model(input_ids=input_ids, **mask), "logits", None)
    except _REFUSALS:
        return None
    return logits if isinstance(logits, Tensor) and logits.shape[:2] == input_ids.shape else None


def _distance(model: nn.Module, input_ids: Tensor, mask: dict[str, Any], own: Tensor) -> float:
    logits = _logits(model, input_ids, mask)
    distance = math.inf if logits is None else float((logits - own).abs().max())
    return math.inf if math.isnan(distance) else distance


def _candidates(model: nn.Module, input_ids: Tensor) -> Iterator[dict[str, Any]]:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    place = torch.arange(input_ids.shape[1], device=input_ids.device)
    causal = place[:, None] >= place
    added_to = next(model.parameters()).dtype if getattr(config, "_attn_implementation", None) == "eager" else None
    full = _spell(causal, added_to)
    yield {"attention_mask": full}
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int) and window < input_ids.shape[1]:
        sliding = _spell(causal & (place[:, None] - place < window), added_to)
        yield {"attention_mask": sliding}
        yield {"attention_mask": {"full_attention": full, "sliding_attention": sliding}}


def _spell(allowed: Tensor, added_to: torch.dtype | None) -> Tensor:
    """What kernels of torch take as booleans, attention in Python adds to its scores."""
    if added_to is None:
        return allowed[None, None]
    zeros = torch.zeros(allowed.shape, dtype=added_to, device=allowed.device)
    return zeros.masked_fill(~allowed, torch.finfo(added_to).min)[None, None]
