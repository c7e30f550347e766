"""Keys and values of attention in 8 bits or fewer: what `kv_cache_scheme` asks for, and queries where attention itself is a target.

`attach_kv_quantizer` gives an attention module the scales `k_scale` and `v_scale`, under the names that compressed-tensors and vLLM read,
and a hook that puts a view in front of whatever cache the module is handed: keys and values are quantized and dequantized on their way into
it, operation for operation as compressed-tensors does in transformers. That holds for every kind of cache, and for none. With `queries` it
has a `q_scale` as well, and queries are quantized on their way into attention (see queries.py).
Where the cache is a `QuantizedKVCache` (below) the codes themselves are kept, one byte each, with the same results.

Scales are static (calibrated; one per tensor or per head) or dynamic (one per tensor or per head and batch row of each new piece).

Shapes: queries, keys and values are [batch, heads, sequence, D]; a scale is [1], or [heads, 1, 1] per head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from compressor.errors import CacheError, SchemeError, TargetError
from compressor.nn.attention.queries import see_queries
from compressor.nn.straight_through import through_rounding
from compressor.numerics.qparams import QParams, check_qparams
from compressor.numerics.quantize import dequantize, dynamic_qparams, quantize
from compressor.numerics.scheme import QuantizationArgs
from compressor.settings.kinds import MODULE
from compressor.settings.options import checked

# Attention modules are told by these names, as compressed-tensors tells them.
PROJECTIONS = ("k_proj", "v_proj", "qkv_proj", "kv_b_proj")
_CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "cache")  # the last from transformers 5.24 on, which takes the first as well
_ARGS_ATTRIBUTE, _HANDLE_ATTRIBUTE, _PARTS_ATTRIBUTE = "kv_cache_args", "_kv_cache_handle", "_quantized_parts"
_KV = ("k", "v")
_Transform = Callable[[str, Tensor], Tensor]
_HEADS = {"q": ("num_attention_heads",), **dict.fromkeys(_KV, ("num_key_value_heads", "num_attention_heads"))}
KV_SCALES = tuple(f"{part}_{what}" for part in _HEADS for what in ("scale", "zero_point"))  # the buffers of an attention module


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Find the attention modules whose keys and values go through a cache.

    Args:
        model: any module.

    Returns:
        Dotted name to module, in the order of the model.
    """
    return {name: module for name, module in model.named_modules() if _is_cached_attention(module)}


def cache_argument(module: nn.Module) -> str:
    """Name the argument by which a module of transformers takes its cache, and gives it back: `cache` from 5.24 on.

    Args:
        module: a model, or one of its attention modules.

    Returns:
        The name; `past_key_values` where the forward names none of those that there were.
    """
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in parameters), _CACHE_ARGUMENTS[0])


def parts_of(queries: bool) -> tuple[str, ...]:
    """Name what has a scale of its own.

    Args:
        queries: whether they are quantized as well.

    Returns:
        "q" for queries, "k" for keys and "v" for values.
    """
    return ("q", *_KV) if queries else _KV


def check_kv_args(args: QuantizationArgs, where: str = "kv_cache_scheme") -> None:
    """Refuse arguments that keys and values cannot have.

    Args:
        args: the format.
        where: whose it is, for the error.

    Raises:
        SchemeError: another strategy than per tensor, per head (static) or per token (dynamic), or fp4.
    """
    allowed = ("tensor", "token") if args.dynamic else ("tensor", "attn_head")
    if args.strategy not in allowed or args.dynamic == "local":
        raise SchemeError(
            f"{where}: strategy={args.strategy!r} with dynamic={args.dynamic} is not for keys and values; "
            "use 'tensor', 'attn_head' (static) or 'token' (dynamic)"
        )
    if args.type == "float" and args.num_bits != 8:
        raise SchemeError(f"{where}: float{args.num_bits} was given for keys and values; use fp8, or integers")
    if args.actorder is not None:
        raise SchemeError(f"{where}: actorder={args.actorder!r} is for weights; leave it out")


def attach_kv_quantizer(
    attention: nn.Module,
    args: QuantizationArgs,
    qparams: Mapping[str, QParams] | None = None,
    *,
    name: str = "",
    empty: bool = False,
    queries: bool = False,
) -> None:
    """Quantize the keys and values of an attention module from now on. Changes the module.

    Args:
        attention: as `attention_modules` finds it.
        args: the format.
        qparams: "k" and "v" to their scales, and "q" with `queries`; for static formats, unless `empty`.
        name: dotted name of the module, for errors.
        empty: register scales without values, for a loader to fill.
        queries: quantize them as well; of a module that `shows_queries`.

    Raises:
        SchemeError: the format is not for keys and values, scales are missing, or the module has a quantizer already.
        NumericsError: a scale is not finite and positive.
    """
    where = name or type(attention).__name__
    check_kv_args(args, where)
    if kv_args(attention) is not None:
        raise SchemeError(f"{where}: its keys and values are quantized already; detach that quantizer first")
    buffers: dict[str, Tensor] = {}
    for part in () if args.dynamic else parts_of(queries):
        found = _empty_scales(attention, args, part, where) if empty else (qparams or {}).get(part)
        buffers |= _scale_buffers(part, args, found, where, check=not empty)
    for key, value in buffers.items():
        attention.register_buffer(key, value)
    setattr(attention, _ARGS_ATTRIBUTE, args)
    setattr(attention, _PARTS_ATTRIBUTE, parts_of(queries))
    setattr(attention, _HANDLE_ATTRIBUTE, attention.register_forward_pre_hook(_quantize_on_the_way, with_kwargs=True))


def detach_kv_quantizer(attention: nn.Module) -> None:
    """Undo `attach_kv_quantizer`; a module without a quantizer stays as it is. Changes the module.

    Args:
        attention: any module.
    """
    if kv_args(attention) is None:
        return
    getattr(attention, _HANDLE_ATTRIBUTE).remove()
    for key in (_HANDLE_ATTRIBUTE, _ARGS_ATTRIBUTE, _PARTS_ATTRIBUTE):
        delattr(attention, key)
    for key in [key for key in KV_SCALES if key in attention._buffers]:
        delattr(attention, key)


def kv_args(attention: nn.Module) -> QuantizationArgs | None:
    """Return the format of a module's keys and values.

    Args:
        attention: any module.

    Returns:
        The format; None where they are not quantized.
    """
    return getattr(attention, _ARGS_ATTRIBUTE, None)


def quantized_parts(attention: nn.Module) -> tuple[str, ...]:
    """Name what of a module's attention is quantized.

    Args:
        attention: any module.

    Returns:
        As `parts_of` names it; empty where nothing is.
    """
    found: tuple[str, ...] = getattr(attention, _PARTS_ATTRIBUTE, ())
    return found


def kv_scheme_of(model: nn.Module) -> QuantizationArgs | None:
    """Return the format of all keys and values of a model.

    Args:
        model: any module.

    Returns:
        The format; None where none are quantized.

    Raises:
        SchemeError: some attention modules have another format than others, or none, or queries are quantized in some only.
    """
    found = {name: (kv_args(module), quantized_parts(module)) for name, module in attention_modules(model).items()}
    formats = list(found.values())
    if any(one != formats[0] for one in formats):
        other = next(name for name, one in found.items() if one != formats[0])
        raise SchemeError(f"{other}: its keys and values have another format than those of the first layer; give all layers one")
    return formats[0][0] if formats else None


def kv_qparams(attention: nn.Module, part: str, states: Tensor, args: QuantizationArgs) -> QParams:
    """Return the scale of queries, keys or values: the calibrated one, or one of their own.

    Args:
        attention: with a quantizer.
        part: "q", "k" or "v".
        states: [batch, heads, sequence, D].
        args: the module's format.

    Returns:
        Scale, and zero point if asymmetric.
    """
    if args.dynamic:
        return dynamic_qparams(states, args)
    return QParams(getattr(attention, f"{part}_scale"), getattr(attention, f"{part}_zero_point", None))


class CacheView:
    """What an attention module is handed in the place of its cache: everything is the cache's, but what goes in passes `transform`."""

    def __init__(self, cache: Any, transform: _Transform, queries_of: nn.Module | None = None, owner: str = "attention") -> None:
        """Take a cache of transformers, or None, what to do with "k" and "v", the module of which "q" passes it, too, and a name."""
        self._cache, self._transform, self._queries_of, self._owner = cache, transform, queries_of, owner

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Transform, then store in the cache; without one, give back what was transformed."""
        keys, values = self._transform("k", key_states), self._transform("v", value_states)
        if self._queries_of is not None:
            see_queries(self._queries_of, partial(self._transform, "q"))
        result: tuple[Tensor, Tensor] = (keys, values) if self._cache is None else self._cache.update(keys, values, *args, **kwargs)
        return result

    def get_seq_length(self, *args: Any) -> int:
        """Count the tokens in the cache."""
        return 0 if self._cache is None else self._cache.get_seq_length(*args)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the cache's."""
        if name.startswith("__"):
            raise AttributeError(name)
        if self._cache is None:
            asked = f"{self._owner}: {name} was asked of its cache, which keeps something else than keys and values"
            raise CacheError(f"{asked}; leave kv_cache_scheme out for this model")
        return getattr(self._cache, name)


def with_view(
    attention: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    transform: _Transform,
    *,
    queries: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put a view in front of the cache among the arguments of an attention module's forward.

    Args:
        attention: the module.
        args: positional arguments of its forward.
        kwargs: keyword arguments of its forward; not changed.
        transform: what keys ("k") and values ("v") pass on their way.
        queries: they ("q") pass it on theirs.

    Returns:
        The arguments with the view.

    Raises:
        TargetError: the cache is one of an encoder and a decoder, which a module picks apart before it uses it.
    """
    key = next((name for name in _CACHE_ARGUMENTS if name in kwargs), None) or cache_argument(attention)
    position = len(args) if key in kwargs else list(inspect.signature(attention.forward).parameters).index(key)
    cache = args[position] if position < len(args) else kwargs.get(key)
    if hasattr(cache, "cross_attention_cache"):
        owner = type(attention).__name__
        raise TargetError(f"{owner}: a cache of encoder and decoder cannot be quantized; leave kv_cache_scheme out for this model")
    view = CacheView(cache, transform, attention if queries else None, type(attention).__name__)
    if position < len(args):
        return (*args[:position], view, *args[position + 1 :]), kwargs
    return args, {**kwargs, key: view}


def _quantize_on_the_way(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook. A function of the module, not of an object, so that a copy of the model has a quantizer of its own."""
    kv = kv_args(attention)
    assert kv is not None, "attach_kv_quantizer sets both"
    # Those of a QuantizedKVCache, which does the same and keeps the codes.
    kept = _KV if any(getattr(kwargs.get(key), "stores_codes", False) for key in _CACHE_ARGUMENTS) else ()

    def quantized(part: str, states: Tensor) -> Tensor:
        return through_rounding(states, kv_qparams(attention, part, states, kv), kv) if states.numel() and part not in kept else states

    return with_view(attention, args, kwargs, quantized, queries="q" in quantized_parts(attention))


def _scale_buffers(part: str, args: QuantizationArgs, qparams: QParams | None, where: str, *, check: bool) -> dict[str, Tensor]:
    if qparams is None:
        raise SchemeError(f"{where}: {part}_scale is missing, and the format is static; calibrate it, or give dynamic=true")
    if check:
        check_qparams(qparams, f"{where}.{part}", args)
    buffers = {f"{part}_scale": qparams.scale.clone()}
    return buffers if qparams.zero_point is None else buffers | {f"{part}_zero_point": qparams.zero_point.clone()}


def _empty_scales(attention: nn.Module, args: QuantizationArgs, part: str, where: str) -> QParams:
    weight = [*attention.parameters(), *attention.buffers()][0]
    shape = (1,) if args.strategy == "tensor" else (num_heads(attention, part, where), 1, 1)
    said = getattr(getattr(attention, "config", None), "dtype", None)  # of a model that was saved a text
    dtype: Any = getattr(torch, said.removeprefix("torch."), None) if isinstance(said, str) else said
    zeros = None if args.symmetric else torch.empty(shape, dtype=torch.int8, device=weight.device)
    return QParams(torch.empty(shape, dtype=dtype if isinstance(dtype, torch.dtype) else weight.dtype, device=weight.device), zeros)


def kv_scale_bytes(attention: nn.Module, args: QuantizationArgs, name: str, *, queries: bool = False) -> int:
    """Say what the static scales and zero points of an attention module take in a checkpoint.

    Args:
        attention: without a quantizer, its weights still floats.
        args: the format of keys and values.
        name: dotted name of the module, for errors.
        queries: they are quantized as well.

    Returns:
        Bytes; 0 where scales are computed from each token.
    """
    itemsize = next(attention.parameters()).element_size() + (not args.symmetric)
    found = [] if args.dynamic else [_empty_scales(attention, args, part, name) for part in parts_of(queries)]
    return sum(itemsize * one.scale.numel() for one in found)


def num_heads(attention: nn.Module, part: str, where: str) -> int:
    """Return how many heads the queries, keys or values of an attention module have.

    Args:
        attention: a module of transformers, with its config.
        part: "q", "k" or "v".
        where: its name, for the error.

    Returns:
        The number of heads.

    Raises:
        SchemeError: the module does not say.
    """
    config = getattr(attention, "config", None)
    heads = next(filter(None, (getattr(config, name, None) for name in _HEADS[part])), None)
    if not heads:
        raise SchemeError(f"{where}: its config names no number of heads, which strategy='attn_head' needs; use 'tensor'")
    return int(heads)


def _is_cached_attention(module: nn.Module) -> bool:
    if "attention" not in type(module).__name__.lower() or not any(hasattr(module, name) for name in PROJECTIONS):
        return False
    return any(name in inspect.signature(module.forward).parameters for name in _CACHE_ARGUMENTS)


# QuantizedKVCache: a cache of transformers that keeps codes, one byte per key and value, in the place of floats.
#
#     cache = QuantizedKVCache(model)                      # a model whose attention has quantizers, see above
#     model.generate(**inputs, past_key_values=cache)      # cache=cache from transformers 5.24 on
#
# What comes out is what the quantizers give with any other cache.
# Half the bytes of a bfloat16 cache, plus the scales where they are dynamic.


class QuantizedKVCache(Cache):
    """A cache that stores 8-bit codes, for models with full attention in every layer.

    Attributes:
        stores_codes: tells the quantizers of attention modules that this cache quantizes by itself.
    """

    stores_codes = True

    @checked(model=MODULE)
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
        # Before 5.23 transformers fills them with zeros, behind which the next tokens would be put.
        self.keys = self.values = None  # type: ignore[assignment]
        self.is_initialized, self._scales = False, {}
        super().reset()

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
