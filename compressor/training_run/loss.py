"""The loss of a causal language model, in a form that can be captured: nothing of it is decided by values on the host.

Without a mask, transformers looks at the positions on the host to find joined samples, which no capture can repeat. So blocks get the
whole mask in four dimensions. Which mask a model means (plain causal, a sliding window, one for each kind of layer) is not believed but
tried: it must give the logits that the model gives by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compressor.data.blocks import IGNORED
from compressor.errors import ModelError
from compressor.model.load import LOAD_ERRORS
from compressor.tracing.out_of_memory import is_out_of_memory

# Of the largest logit: kernels may sum in another order; a wrong mask moves the logits of a trained model by tenths.
_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-8}
_TOLERANCE_OF_HALVES = 3e-2


def next_token_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Compute the mean cross entropy of the next token.

    Args:
        model: a causal language model of transformers.
        batch: `labels` and the arguments of the model.

    Returns:
        The mean over all targets, in nats.
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits
    return cross_entropy(logits[:, :-1].float().flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)


def mask_arguments(model: nn.Module, input_ids: Tensor) -> tuple[dict[str, Any], str]:
    """Find the mask that a model would make for itself, so that it need not look for it in every step.

    Args:
        model: a causal language model of transformers; its training flags are as before afterwards.
        input_ids: one block, [1, T], on the device of the model.

    Returns:
        Arguments for every micro-batch, and what they are in words; no argument where no mask gives the model's own logits.

    Raises:
        ModelError: the model takes no token ids, or gives no logits.
    """
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            own = _own_logits(model, input_ids)
            tried = [(_distance(model, input_ids, mask, own), words, mask) for words, mask in _candidates(model, input_ids)]
    finally:
        for module, training in flags:
            module.training = training
    distance, words, mask = min(tried, key=lambda one: one[0])
    near = _TOLERANCES.get(own.dtype, _TOLERANCE_OF_HALVES) * float(own.abs().max())
    return ({"attention_mask": mask}, words) if distance <= near else ({}, "made by the model in every step")


def _own_logits(model: nn.Module, input_ids: Tensor) -> Tensor:
    where = type(model).__name__
    try:
        logits = model(input_ids=input_ids, use_cache=False).logits
    except (TypeError, AttributeError) as error:
        raise ModelError(f"{where}: it is no causal language model of transformers ({error}); train one that takes input_ids") from error
    if logits.dim() != 3 or logits.shape[:2] != input_ids.shape:
        raise ModelError(
            f"{where}: it gives {list(logits.shape)} for tokens {list(input_ids.shape)}; train a model that predicts each token"
        )
    return logits


def _distance(model: nn.Module, input_ids: Tensor, mask: Any, own: Tensor) -> float:
    try:
        logits = model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits
    except LOAD_ERRORS as error:  # the model knows no such mask, each in its own way
        if is_out_of_memory(error):
            raise
        return math.inf
    distance = float((logits - own).abs().max())
    return math.inf if math.isnan(distance) else distance


def _candidates(model: nn.Module, input_ids: Tensor) -> Iterator[tuple[str, Any]]:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    length = input_ids.shape[1]
    place = torch.arange(length, device=input_ids.device)
    causal = place[:, None] >= place
    as_taken = _additive if getattr(config, "_attn_implementation", None) == "eager" else _boolean
    dtype = next(parameter.dtype for parameter in model.parameters())
    full = as_taken(causal, dtype)
    yield "causal", full
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int) and window < length:
        sliding = as_taken(causal & (place[:, None] - place < window), dtype)
        yield f"causal, over {window} tokens", sliding
        yield f"causal, by kind of layer, over {window} tokens where it slides", {"full_attention": full, "sliding_attention": sliding}


def _boolean(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    del dtype
    return allowed[None, None]


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)[None, None]
