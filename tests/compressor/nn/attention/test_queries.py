"""Queries in 8 bits: what compressed-tensors computes, with every function of attention, and nothing of it stays on the module."""

from __future__ import annotations

import copy
import pickle
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, XGLMConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.xglm.modeling_xglm import XGLMAttention

from compressor.errors import SchemeError, TargetError
from compressor.nn.attention.kv_cache import QuantizedKVCache, attach_kv_quantizer, attention_modules, detach_kv_quantizer, kv_scheme_of
from compressor.nn.attention.queries import see_queries, shows_queries
from compressor.numerics import QParams, QuantizationArgs
from tests.compressor.nn.attention.test_kv_cache import ALL, DYNAMIC, IDS, STATIC, generate, model_of, quantized_model, scales


def all_scales(args: QuantizationArgs, dtype: torch.dtype) -> dict[str, QParams]:
    heads = torch.arange(1, 2 if args.strategy == "tensor" else 5).reshape(-1, *[1] * 2 * (args.strategy != "tensor"))
    zero = None if args.symmetric else torch.full_like(heads, 5, dtype=torch.int8)
    return {"q": QParams((0.03 * heads).to(dtype), zero), **scales(args, dtype)}


def attended_model(args: QuantizationArgs, dtype: torch.dtype = torch.float32) -> Any:
    model = model_of(dtype)
    for name, attention in attention_modules(model).items():
        attach_kv_quantizer(attention, args, None if args.dynamic else all_scales(args, dtype), name=name, queries=True)
    return model


def their_model(args: QuantizationArgs, dtype: torch.dtype) -> nn.Module:
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = model_of(dtype)
    group = {"targets": ["LlamaAttention"], "input_activations": args.model_dump(mode="json"), "format": "dense"}
    apply_quantization_config(model, QuantizationConfig(config_groups={"g": group}, quantization_status="compressed"), show_progress=False)
    for attention in attention_modules(model).values():
        for part, qparams in all_scales(args, dtype).items() if not args.dynamic else ():
            getattr(attention, f"{part}_scale").data.copy_(qparams.scale)
            if qparams.zero_point is not None:
                getattr(attention, f"{part}_zero_point").data.copy_(qparams.zero_point)
    return model


def logits(model: nn.Module, **settings: Any) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(IDS, **settings).logits
        return found


@pytest.mark.parametrize("name", ALL)
def test_logits_are_those_of_compressed_tensors(name: str) -> None:
    model = attended_model(ALL[name], torch.bfloat16)
    ours = logits(model)
    assert torch.equal(ours, logits(their_model(ALL[name], torch.bfloat16)))
    assert not torch.equal(ours, logits(quantized_model(ALL[name], torch.bfloat16)))  # keys and values alone
    assert torch.equal(logits(model, use_cache=False), ours)
    tokens = generate(model)
    assert torch.equal(tokens, generate(model, QuantizedKVCache(model)))


def test_every_function_of_attention_is_called_as_it_would_be() -> None:
    seen: list[str] = []

    def fast(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(module.config._attn_implementation)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *args, **kwargs)

    model = attended_model(STATIC["fp8"])
    expected = logits(model)
    ALL_ATTENTION_FUNCTIONS.register("fast", fast)
    model.config._attn_implementation = "fast"  # of which transformers knows no mask
    found = logits(model, attention_mask=torch.ones(2, 1, 12, 12, dtype=torch.bool).tril())
    assert torch.equal(found, expected) and seen == ["fast", "fast"]
    model.set_attn_implementation("eager")
    eager = logits(model)
    assert not torch.equal(eager, logits(model_of(attn_implementation="eager")))
    assert torch.allclose(eager, expected, atol=0.02)


def test_nothing_stays_on_the_module() -> None:
    model, before = attended_model(DYNAMIC["fp8 tokens"]), model_of()
    expected = logits(model)
    attention = model.model.layers[0].self_attn
    assert attention.config is model.config and model.config._attn_implementation == before.config._attn_implementation
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin), expected)
    with pytest.raises(SchemeError, match="another format than those of the first layer"):
        detach_kv_quantizer(attention)
        kv_scheme_of(model)
    detach_kv_quantizer(model.model.layers[1].self_attn)
    assert torch.equal(logits(model), logits(before)) and model.state_dict().keys() == before.state_dict().keys()


def test_forwards_that_are_halfway_through_a_module_get_queries_of_their_own() -> None:
    attention = model_of().model.layers[0].self_attn
    own, query = attention.config, torch.ones(1, 4, 2, 8)
    for factor in (2.0, 3.0):
        see_queries(attention, lambda states, factor=factor: states * factor)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, lambda *args: None)
    seen: list[float] = []
    own._attn_implementation = "mean"
    ALL_ATTENTION_FUNCTIONS.register("mean", lambda module, states, *args, **kwargs: seen.append(float(states.mean())))
    for place in range(2):
        assert attention.config is not own, place
        attend(attention, query, query, query, None)
    assert seen == [2.0, 3.0] and attention.config is own


def test_attention_that_hides_its_queries_is_told() -> None:
    assert shows_queries(model_of().model.layers[0].self_attn)
    assert not shows_queries(XGLMAttention(8, 2)) and not shows_queries(nn.Linear(2, 2))

    class Early(nn.Module):
        config = XGLMConfig()

        def forward(self, states: Tensor, past_key_values: Any) -> Tensor:
            found: Tensor = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", print)(self, states, *past_key_values.update(states, states))
            return found

    assert not shows_queries(Early())
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 128}
    twice = DiffLlamaForCausalLM(DiffLlamaConfig(**sizes, num_key_value_heads=2))
    attach_kv_quantizer(twice.model.layers[0].self_attn, DYNAMIC["fp8 tokens"], queries=True)
    with pytest.raises(TargetError, match="DiffLlamaAttention: multiplies queries and keys more than once"):
        logits(twice)


def test_queries_need_a_scale_of_their_own() -> None:
    attention = model_of().model.layers[0].self_attn
    with pytest.raises(SchemeError, match="q_scale is missing"):
        attach_kv_quantizer(attention, STATIC["fp8"], scales(STATIC["fp8"], torch.float32), queries=True)
    assert isinstance(attention.config, type(model_of().config)) and not isinstance(attention.forward, types.FunctionType)
