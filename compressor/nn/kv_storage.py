"""QuantizedKVCache: a cache of transformers that keeps codes, one byte per key and value, in the place of floats.

    cache = QuantizedKVCache(model)                      # a model whose attention has quantizers, see kv_cache.py
    model.generate(**inputs, past_key_values=cache)

What comes out is what the quantizers give with any other cache. Half the bytes of a bfloat16 cache, plus the scales where they are dynamic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from compressor.errors import SchemeError
from compressor.nn.kv_cache import attention_modules, kv_args, kv_qparams, kv_scheme_of
from compressor.numerics.qparams import QParams
from compressor.numerics.quantize import dequantize, quantize


class QuantizedKVCache(Cache):
    """A cache that stores 8-bit codes, for models with full attention in every layer.

    Attributes:
        stores_codes: tells the quantizers of attention modules that this cache quantizes by itself.
    """

    stores_codes = True

    def __init__(self, model: nn.Module) -> None:
        """Make an empty cache for a model.

        Args:
            model: of transformers; its attention modules have quantizers.

        Raises:
            SchemeError: keys and values are not quantized, or some layers have no cache of keys and values that only grows.
        """
        if kv_scheme_of(model) is None:
            raise SchemeError("QuantizedKVCache: the model has no quantized keys and values; compress it with a kv_cache_scheme first")
        found = attention_modules(model)
        by_layer = {int(module.layer_idx): module for module in found.values() if hasattr(module, "layer_idx")}  # type: ignore[arg-type]
        config: Any = model.config
        text = config.get_text_config(decoder=True)
        kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
        if sorted(by_layer) != list(range(text.num_hidden_layers)) or kinds != {"full_attention"} or len(found) != len(by_layer):
            raise SchemeError(
                f"QuantizedKVCache: {type(model).__name__} has layers without full attention of their own ({', '.join(sorted(kinds))}); "
                "use another cache"
            )
        super().__init__(layers=[CodesLayer(by_layer[index]) for index in sorted(by_layer)])

    def num_bytes(self) -> int:
        """Return the bytes of all codes and of the scales that are stored with them."""
        return sum(layer.num_bytes() for layer in self.layers if isinstance(layer, CodesLayer))


class CodesLayer(DynamicLayer):
    """Codes of one layer's keys and values; `keys` and `values` hold bytes, so that all that moves them about stays as it is."""

    def __init__(self, attention: nn.Module) -> None:
        """Make an empty layer that takes format and scales from an attention module."""
        super().__init__()
        args = kv_args(attention)
        assert args is not None, "QuantizedKVCache looked"
        self._attention, self._args = attention, args
        self._scales: dict[str, QParams] = {}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note dtype and device."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (_bytes(states[..., :0, :].to(self._args.storage_dtype)) for states in (key_states, value_states))
        self._scales = {}
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Quantize and append; give back all keys and values, dequantized.

        Args:
            key_states: [batch, heads, sequence, D] of the new tokens.
            value_states: the same.
            *args: of transformers; not used.
            **kwargs: of transformers; not used.

        Returns:
            Keys and values of all tokens so far.
        """
        del args, kwargs
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        self.keys = torch.cat([self.keys, self._append("k", key_states)], dim=-2)
        self.values = torch.cat([self.values, self._append("v", value_states)], dim=-2)
        return self._floats("k", self.keys), self._floats("v", self.values)

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self._scales = {}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams, scales too."""
        super().reorder_cache(beam_idx)
        self._move_scales(lambda part: part.index_select(0, beam_idx.to(part.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch, scales too."""
        super().batch_repeat_interleave(repeats)
        self._move_scales(lambda part: part.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows of the batch, scales too."""
        super().batch_select_indices(indices)
        self._move_scales(lambda part: part[indices, ...])

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, scales too."""
        super().crop(tokens_to_remove)
        if tokens_to_remove:
            self._move_scales(lambda part: part[..., : -abs(tokens_to_remove), :])

    def num_bytes(self) -> int:
        """Return the bytes of codes and of the scales that are stored with them."""
        tensors = [self.keys, self.values, *(part for scale in self._scales.values() for part in scale)]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def _append(self, part: str, states: Tensor) -> Tensor:
        qparams = kv_qparams(self._attention, part, states, self._args)
        if self._args.dynamic:
            shape = (*states.shape[:-1], 1)
            spread = qparams.map(lambda each: each.expand(shape))
            before = self._scales.get(part)
            self._scales[part] = spread if before is None else _joined(before, spread)
            states = states + 0.0  # as fake_quantize: -0.0 becomes 0.0 under dynamic scales
        return _bytes(quantize(states, qparams, self._args))

    def _floats(self, part: str, stored: Tensor) -> Tensor:
        qparams = self._scales[part] if self._args.dynamic else kv_qparams(self._attention, part, stored, self._args)
        return dequantize(stored.view(self._args.storage_dtype), qparams, self._args).to(self.dtype)

    def _move_scales(self, move: Callable[[Tensor], Tensor]) -> None:
        self._scales = {part: qparams.map(move) for part, qparams in self._scales.items()}


def _bytes(codes: Tensor) -> Tensor:
    return codes if codes.dtype == torch.int8 else codes.view(torch.uint8)


def _joined(before: QParams, after: QParams) -> QParams:
    zeros = None if before.zero_point is None or after.zero_point is None else torch.cat([before.zero_point, after.zero_point], dim=-2)
    return QParams(torch.cat([before.scale, after.scale], dim=-2), zeros)
