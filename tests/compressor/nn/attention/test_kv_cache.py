"""Keys and values in 8 bits: what compressed-tensors computes, in any cache of transformers, and in one that keeps the codes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

from compressor.errors import CacheError, NumericsError, SchemeError, TargetError
from compressor.nn.attention.kv_cache import (
    CacheView,
    QuantizedKVCache,
    attach_kv_quantizer,
    attention_modules,
    cache_argument,
    check_kv_args,
    detach_kv_quantizer,
    kv_args,
    kv_scheme_of,
    with_view,
)
from compressor.numerics import QParams, QuantizationArgs
from tests import tiny

IDS = torch.arange(24).reshape(2, 12) * 5 % 64
STATIC = {
    "int8": QuantizationArgs(),
    "int8 asymmetric": QuantizationArgs(symmetric=False),
    "fp8": QuantizationArgs(type="float"),
    "int8 per head": QuantizationArgs(strategy="attn_head"),
    "fp8 per head": QuantizationArgs(type="float", strategy="attn_head"),
    "int4 per head": QuantizationArgs(num_bits=4, strategy="attn_head", symmetric=False),
}
DYNAMIC = {
    "int8 dynamic": QuantizationArgs(strategy="tensor", dynamic=True),
    "fp8 tokens": QuantizationArgs(type="float", strategy="token", dynamic=True),
    "int8 tokens asymmetric": QuantizationArgs(strategy="token", dynamic=True, symmetric=False),
}
ALL = STATIC | DYNAMIC


def model_of(dtype: torch.dtype = torch.float32, **settings) -> LlamaForCausalLM:
    config = tiny.config("llama", intermediate_size=48, pad_token_id=0, bos_token_id=None, eos_token_id=None, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM._from_config(config, dtype=dtype).eval()


@pytest.mark.parametrize(
    ("said", "expected"), [("bfloat16", torch.bfloat16), ("torch.float16", torch.float16), ("none such", torch.float32)]
)
def test_a_config_may_name_its_dtype_as_text_as_saving_leaves_it(said: str, expected: torch.dtype) -> None:
    model = model_of()
    model.config.dtype = said
    for name, attention in attention_modules(model).items():
        attach_kv_quantizer(attention, QuantizationArgs(), name=name, empty=True)
    assert model.model.layers[0].self_attn.k_scale.dtype is expected


def scales(args: QuantizationArgs, dtype: torch.dtype) -> dict[str, QParams]:
    """Coarse and different for keys and values, heads and layers, so that a mix-up shows."""
    shape = (1,) if args.strategy == "tensor" else (2, 1, 1)
    steps = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)
    zero = None if args.symmetric else torch.full(shape, 3, dtype=torch.int8)
    return {"k": QParams((0.02 * steps).to(dtype), zero), "v": QParams((0.05 * steps).to(dtype), zero)}


def quantized_model(args: QuantizationArgs, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    model = model_of(dtype)
    for name, attention in attention_modules(model).items():
        attach_kv_quantizer(attention, args, None if args.dynamic else scales(args, dtype), name=name)
    return model


def their_model(args: QuantizationArgs, dtype: torch.dtype) -> nn.Module:
    """The same model as compressed-tensors quantizes it."""
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = model_of(dtype)
    config = QuantizationConfig(config_groups={}, kv_cache_scheme=args.model_dump(mode="json"), quantization_status="compressed")
    apply_quantization_config(model, config)
    for attention in attention_modules(model).values():
        for part, qparams in scales(args, dtype).items() if not args.dynamic else ():
            getattr(attention, f"{part}_scale").data.copy_(qparams.scale)
            if qparams.zero_point is not None:
                getattr(attention, f"{part}_zero_point").data.copy_(qparams.zero_point)
    return model


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_logits_are_those_of_compressed_tensors(name, dtype):
    model, theirs, plain = quantized_model(ALL[name], dtype), their_model(ALL[name], dtype), model_of(dtype)
    with torch.inference_mode():
        ours = model(IDS).logits
        assert torch.equal(ours, theirs(IDS).logits)
        assert not torch.equal(ours, plain(IDS).logits)
        assert torch.equal(model(IDS, use_cache=False).logits, ours)


def generate(model: nn.Module, cache: object = None, **settings) -> torch.Tensor:
    with torch.inference_mode():
        return model.generate(IDS, max_new_tokens=6, do_sample=False, **{cache_argument(model): cache}, **settings)


@pytest.mark.parametrize("name", ALL)
def test_generation_is_the_same_in_every_cache(name):
    model = quantized_model(ALL[name])
    tokens = generate(model)
    assert torch.equal(tokens, generate(their_model(ALL[name], torch.float32)))
    assert torch.equal(tokens, generate(model, DynamicCache(config=model.config)))
    assert torch.equal(tokens, generate(model, StaticCache(config=model.config, max_cache_len=32)))
    cache = QuantizedKVCache(model)
    assert torch.equal(tokens, generate(model, cache))
    assert cache.get_seq_length() == IDS.shape[1] + 5
    assert torch.equal(generate(model, num_beams=3), generate(model, QuantizedKVCache(model), num_beams=3))


@pytest.mark.parametrize("name", ALL)
def test_a_cache_of_codes_gives_the_values_that_were_written(name):
    model = quantized_model(ALL[name])
    plain, codes, key = DynamicCache(config=model.config), QuantizedKVCache(model), cache_argument(model)
    with torch.inference_mode():
        for piece in (IDS[:, :7], IDS[:, 7:8], IDS[:, 8:]):
            assert torch.equal(model(piece, **{key: plain}).logits, model(piece, **{key: codes}).logits)
        for cache in (plain, codes):
            cache.crop(-3)
            cache.batch_select_indices(torch.tensor([1, 0]))
            cache.batch_repeat_interleave(2)
            cache.reorder_cache(torch.tensor([3, 0, 2, 1]))
        more = IDS[:1, :2].expand(4, 2)
        assert torch.equal(model(more, **{key: plain}).logits, model(more, **{key: codes}).logits)
        codes.reset()
        assert codes.get_seq_length() == 0
        assert torch.equal(model(IDS, **{key: codes}).logits, model(IDS).logits)


def test_a_cache_of_codes_takes_a_byte_per_value():
    model = quantized_model(STATIC["fp8"], torch.bfloat16)
    plain, codes, key = DynamicCache(config=model.config), QuantizedKVCache(model), cache_argument(model)
    with torch.inference_mode():
        model(IDS, **{key: plain}), model(IDS, **{key: codes})
    floats = sum(layer.keys.nbytes + layer.values.nbytes for layer in plain.layers)
    assert codes.num_bytes() * 2 == floats == 2 * 2 * 2 * 2 * 12 * 8 * 2


def test_scales_have_the_names_of_the_format_and_move_with_the_model():
    model = quantized_model(STATIC["int8 asymmetric"])
    names = {"k_scale", "v_scale", "k_zero_point", "v_zero_point"}
    own = {key for key in model.state_dict() if "scale" in key or "zero" in key}
    assert own == {f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in names}
    twin = copy.deepcopy(model)
    twin.model.layers[0].self_attn.k_scale.mul_(4)
    with torch.inference_mode():
        assert not torch.equal(twin(IDS).logits, model(IDS).logits)
        before = model(IDS).logits
        assert model.to(torch.bfloat16).model.layers[0].self_attn.k_scale.dtype == torch.bfloat16
    again = quantized_model(STATIC["int8 asymmetric"])
    again.load_state_dict(quantized_model(STATIC["int8 asymmetric"]).state_dict())
    with torch.inference_mode():
        assert torch.equal(again(IDS).logits, before)


def test_detaching_leaves_nothing():
    model, plain = quantized_model(STATIC["fp8"]), model_of()
    assert kv_scheme_of(model) == STATIC["fp8"]
    for attention in attention_modules(model).values():
        detach_kv_quantizer(attention)
        detach_kv_quantizer(attention)
        assert kv_args(attention) is None and not attention._forward_pre_hooks
    assert kv_scheme_of(model) is None and model.state_dict().keys() == plain.state_dict().keys()
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (QuantizationArgs(group_size=32), "strategy='group' with dynamic=False is not for keys and values"),
        (QuantizationArgs(strategy="channel"), "strategy='channel'"),
        (QuantizationArgs(type="float", num_bits=4, group_size=32), "strategy='group'"),
        (QuantizationArgs(actorder="weight"), "actorder"),
    ],
)
def test_formats_that_keys_and_values_cannot_have_are_refused(args, message):
    with pytest.raises(SchemeError, match=f"kv_cache_scheme: .*{message}"):
        check_kv_args(args)


def test_missing_bad_and_double_scales_are_refused_by_name():
    attention = model_of().model.layers[1].self_attn
    with pytest.raises(SchemeError, match=r"^layers\.1: k_scale is missing"):
        attach_kv_quantizer(attention, STATIC["fp8"], name="layers.1")
    bad = {**scales(STATIC["fp8"], torch.float32), "v": QParams(torch.tensor([float("nan")]), None)}
    with pytest.raises(NumericsError, match=r"^layers\.1\.v: 1 of 1 scales"):
        attach_kv_quantizer(attention, STATIC["fp8"], bad, name="layers.1")
    assert not attention._buffers and not attention._forward_pre_hooks and kv_args(attention) is None


def test_a_second_quantizer_and_two_formats_are_refused():
    model = quantized_model(STATIC["fp8"])
    with pytest.raises(SchemeError, match="quantized already"):
        attach_kv_quantizer(model.model.layers[0].self_attn, STATIC["fp8"], scales(STATIC["fp8"], torch.float32))
    detach_kv_quantizer(model.model.layers[1].self_attn)
    with pytest.raises(SchemeError, match=r"layers\.1\.self_attn: its keys and values have another format"):
        kv_scheme_of(model)


def test_a_cache_of_codes_needs_quantizers_and_full_attention():
    with pytest.raises(SchemeError, match="no quantized keys and values"):
        QuantizedKVCache(model_of())
    model = quantized_model(STATIC["fp8"])
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(SchemeError, match="sliding_attention"):
        QuantizedKVCache(model)


def test_a_view_is_the_cache_but_for_what_goes_in():
    cache = DynamicCache()
    view = CacheView(cache, lambda part, states: states + (1 if part == "k" else 2))
    keys, values = view.update(torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 3), 0)
    assert keys.unique().tolist() == [1] and values.unique().tolist() == [2]
    assert view.get_seq_length() == 2 and view.layers is cache.layers
    alone = CacheView(None, lambda part, states: states * 2, owner="Lightning")
    assert not hasattr(alone, "get_linear_cache")
    with pytest.raises(CacheError, match=r"Lightning: get_linear_cache was asked of its cache.*leave kv_cache_scheme out"):
        alone.get_linear_cache(0)
    assert alone.update(torch.ones(1), torch.ones(1), 0)[1].tolist() == [2]
    with pytest.raises(AttributeError, match="layers was asked"):
        alone.layers  # noqa: B018


def test_a_cache_of_encoder_and_decoder_is_refused():
    from transformers import EncoderDecoderCache

    attention = quantized_model(STATIC["fp8"]).model.layers[0].self_attn
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with pytest.raises(TargetError, match="encoder and decoder"):
        attention(torch.zeros(1, 2, 32), (torch.zeros(1, 2, 8),) * 2, attention_mask=None, **{cache_argument(attention): cache})


class AttentionWithCache(nn.Module):
    """As attention of transformers takes its cache from 5.24 on."""

    def __init__(self) -> None:
        super().__init__()
        self.k_proj = nn.Linear(4, 4)

    def forward(self, states, cache=None, **kwargs):
        return (kwargs.get("past_key_values") if cache is None else cache).update(states, states, 0)


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((None,), {}), ((), {"cache": None}), ((), {"past_key_values": None})])
def test_a_cache_is_found_under_every_name_that_it_had(args, kwargs):
    attention, states = AttentionWithCache(), torch.ones(1, 1, 2, 4)
    assert attention_modules(attention) == {"": attention} and cache_argument(attention) == "cache"
    args, kwargs = with_view(attention, (states, *args), kwargs, lambda part, given: given * {"k": 2, "v": 3}[part])
    keys, values = attention(*args, **kwargs)
    assert torch.equal(keys, 2 * states) and torch.equal(values, 3 * states)
