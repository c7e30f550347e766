"""How attention finds its mask in a step that is captured: never by looking at values on the host.

Given tokens alone, transformers looks at the positions on the host to find joined samples, which no capture can repeat. There are ways
around it: the kernel of torch that is causal by itself, which needs no mask at all; or the whole mask in four dimensions, plain or with
a sliding window. Which of them a model means is not believed but tried: it must give the logits that the model gives by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import ModelError
from compressor.model.loading.load import LOAD_ERRORS, quiet_transformers
from compressor.model.targets import text_config
from compressor.nn.attention.kv_cache import kv_scheme_of
from compressor.tracing.targets.out_of_memory import is_out_of_memory

# Of the largest logit: kernels may sum in another order; a wrong mask moves the logits of a trained model by tenths.
_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-8}
_TOLERANCE_OF_HALVES = 3e-2
# How far, relative to the logits, later tokens may move a prediction: experts' kernels round by number of tokens.
_SEEN_AHEAD = {torch.float32: 1e-4, torch.float64: 1e-4}
_SEEN_AHEAD_OF_HALVES = 2e-2
_CAUSAL_KERNEL = "sdpa_without_mask"


@dataclass(frozen=True)
class Attention:
    """A way to the mask.

    Attributes:
        words: what it is.
        arguments: further arguments of the model, the same for every batch.
        kernel: the attention of transformers to use, None for the model's own.
    """

    words: str
    arguments: dict[str, Any] = field(default_factory=dict)
    kernel: str | None = None

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Let a model compute so while the block runs. Changes the model's config, and back.

        Args:
            model: the model.

        Yields:
            Nothing.
        """
        if self.kernel is None:
            yield
            return
        own = _text_config(model)._attn_implementation
        _set_kernel(model, self.kernel)
        try:
            yield
        finally:
            _set_kernel(model, own)


OWN = Attention("found by the model in every step")


def causal_attention(model: nn.Module, input_ids: Tensor) -> Attention:
    """Find a way that gives the logits which a model gives by itself.

    Args:
        model: a causal language model of transformers; its training flags and config are as before afterwards.
        input_ids: as many blocks as a step takes, at least two of them where it takes several, [B, T], on the device of the model.

    Returns:
        The way; `OWN` where no other gives the model's own logits.

    Raises:
        ModelError: the model takes no token ids, gives no logits, or reads the tokens that it would have to predict.
    """
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            own = _own_logits(model, input_ids)
            _check_causal(model, input_ids, own)
            tried = [(_distance(model, input_ids, way, own), way) for way in _ways(model, input_ids)]
    finally:
        for module, training in flags:
            module.training = training
    distance, nearest = min(tried, key=lambda one: one[0])
    return nearest if distance <= _TOLERANCES.get(own.dtype, _TOLERANCE_OF_HALVES) * float(own.abs().max()) else OWN


def _own_logits(model: nn.Module, input_ids: Tensor) -> Tensor:
    where = type(model).__name__
    try:
        logits = model(input_ids=input_ids, use_cache=False).logits
    except (TypeError, AttributeError, ValueError) as error:  # an encoder with a decoder asks for more in its own way
        raise ModelError(f"{where}: it is no causal language model of transformers ({error}); train one that takes input_ids") from error
    if logits.dim() != 3 or logits.shape[:2] != input_ids.shape:
        raise ModelError(
            f"{where}: it gives {list(logits.shape)} for tokens {list(input_ids.shape)}; train a model that predicts each token"
        )
    return logits


def _check_causal(model: nn.Module, input_ids: Tensor, own: Tensor) -> None:
    """Refuse a model whose first predictions follow later tokens: an encoder, which would learn to copy."""
    half, other = input_ids.shape[1] // 2, input_ids.clone()
    other[:, half:] = (input_ids[:, half:] + 1) % (input_ids.max() + 1)
    first, moved = own[:, :half].float(), _moved(model, other, own, half)
    scale = (first - first.mean(-1, keepdim=True)).norm()
    if moved <= _SEEN_AHEAD.get(own.dtype, _SEEN_AHEAD_OF_HALVES) * scale:
        return
    if moved > 2 * _moved(model, input_ids, own, half):  # else it is the model that differs from forward to forward
        if (kv := kv_scheme_of(model)) is not None and kv.dynamic:
            raise ModelError(
                f"{type(model).__name__}: ranges of keys and values are those of whole sequences (a dynamic kv_cache_scheme), so what it "
                "predicts depends on later tokens, and it would learn to copy; train first, or give it a static kv_cache_scheme"
            )
        raise ModelError(
            f"{type(model).__name__}: what it predicts depends on later tokens, so it would learn to copy; only causal language models "
            "are trained, on the next token"
        )


def _moved(model: nn.Module, input_ids: Tensor, own: Tensor, half: int) -> float:
    return float((model(input_ids=input_ids, use_cache=False).logits[:, :half].float() - own[:, :half].float()).norm())


def _distance(model: nn.Module, input_ids: Tensor, way: Attention, own: Tensor) -> float:
    try:
        with way.applied(model):
            if way.kernel is not None and _text_config(model)._attn_implementation != way.kernel:
                return math.inf  # the model has attention of its own
            logits = model(input_ids=input_ids, **way.arguments, use_cache=False).logits
    except LOAD_ERRORS as error:  # the model knows no such mask, each in its own way
        if is_out_of_memory(error):
            raise
        return math.inf
    distance = float((logits - own).abs().max())
    return math.inf if math.isnan(distance) else distance


def _ways(model: nn.Module, input_ids: Tensor) -> Iterator[Attention]:
    config = _text_config(model)
    if config._attn_implementation == "sdpa":
        yield Attention("causal by its kernel", kernel=_CAUSAL_KERNEL)
    length = input_ids.shape[1]
    place = torch.arange(length, device=input_ids.device)
    causal = place[:, None] >= place
    as_taken = _additive if config._attn_implementation == "eager" else _boolean
    dtype = next(parameter.dtype for parameter in model.parameters())
    full = as_taken(causal, dtype)
    yield Attention("causal by a mask", {"attention_mask": full})
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int) and window < length:
        sliding = as_taken(causal & (place[:, None] - place < window), dtype)
        yield Attention(f"causal by a mask over {window} tokens", {"attention_mask": sliding})
        by_kind = {"full_attention": full, "sliding_attention": sliding}
        yield Attention(f"causal by a mask for each kind of layer, over {window} tokens where it slides", {"attention_mask": by_kind})


def _boolean(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    del dtype
    return allowed[None, None]


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)[None, None]


def _text_config(model: nn.Module) -> Any:
    return text_config(getattr(model, "config", None))


def _set_kernel(model: Any, kernel: str) -> None:
    from transformers import AttentionInterface

    known = AttentionInterface()
    if _CAUSAL_KERNEL not in known:  # without an entry for its mask, transformers makes none, and torch's kernel is causal by itself
        AttentionInterface.register(_CAUSAL_KERNEL, known["sdpa"])
    with quiet_transformers():
        model.set_attn_implementation(kernel)
