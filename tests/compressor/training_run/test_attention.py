"""The way to the mask that a capture takes gives the model's own logits, for every kind of attention; a wrong mask is never taken"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from compressor import QuantizationModifier, SpinQuantModifier, oneshot
from compressor.errors import ModelError, OutOfMemoryError, TargetError
from compressor.training import Trainer, TrainStep, adamw
from compressor.training_run import attention
from compressor.training_run.attention import OWN, Attention, causal_attention
from compressor.training_run.phases import next_token_loss
from tests import tiny

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
HEADS = {"num_key_value_heads": 1}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "head_dim": 16}


def llama(**settings: Any) -> nn.Module:
    return tiny.llama(**SIZES, **HEADS, **settings)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama": (llama, "causal by its kernel"),
    "llama, eager": (lambda: llama(attn_implementation="eager"), "causal by a mask"),
    "mistral": (
        lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, **HEADS, sliding_window=8)),
        "causal by a mask over 8 tokens",
    ),
    "gemma3": (
        lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SIZES, **HEADS, **KINDS)),
        "causal by a mask for each kind of layer, over 8 tokens where it slides",
    ),
    "gpt2": (
        lambda: tiny.gpt2(n_head=2),
        "causal by its kernel",
    ),
    "bloom": (
        lambda: transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2)),
        OWN.words,
    ),
}


def made(name: str) -> nn.Module:
    """Weights large enough that attention matters, as in a trained model."""
    torch.manual_seed(0)
    model = MODELS[name][0]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def ids(seed: int, rows: int = 2) -> torch.Tensor:
    return torch.randint(0, 64, (rows, 16), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", MODELS)
def test_the_way_is_the_models_own_and_can_be_replayed(name: str) -> None:
    losses = {}
    for mode in ("eager", "replay"):
        model = made(name).train()
        kernel = model.config._attn_implementation
        own = model.eval()(input_ids=ids(1), use_cache=False).logits
        model.train()
        way = causal_attention(model, ids(9, rows=1))
        assert way.words == MODELS[name][1] and model.training and model.config._attn_implementation == kernel
        with way.applied(model):
            torch.testing.assert_close(model.eval()(input_ids=ids(1), **way.arguments, use_cache=False).logits, own, rtol=0, atol=1e-4)
            trainer = Trainer(TrainStep(model.train(), next_token_loss, adamw(model.parameters(), 1e-3)), mode, audit_every=0)
            extra = way.arguments
            losses[mode] = trainer.fit(lambda step, extra=extra: {"input_ids": ids(step), "labels": ids(step), **extra}, 6)
        assert model.config._attn_implementation == kernel
    assert losses["eager"] == losses["replay"] and trainer.last_action == "replay"


def test_a_mask_that_the_model_does_not_mean_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.ones(1, 1, 16, 16, dtype=torch.bool)
    narrow = full.tril() & ~full.tril(-4)
    for wrong in (full, narrow):
        monkeypatch.setattr(attention, "_ways", lambda model, ids, wrong=wrong: [Attention("wrong", {"attention_mask": wrong})])
        assert causal_attention(made("llama"), ids(9, rows=1)) is OWN
    right = Attention("right", {"attention_mask": full.tril()})
    monkeypatch.setattr(attention, "_ways", lambda model, ids: [Attention("wrong", {"attention_mask": narrow}), right])
    assert causal_attention(made("llama"), ids(9, rows=1)) is right


def test_memory_that_runs_out_is_not_taken_for_an_unknown_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = made("llama"), []
    forward = model.forward

    def starving(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")
        return forward(*given, **named)

    monkeypatch.setattr(model, "forward", starving)
    with pytest.raises((RuntimeError, OutOfMemoryError), match="99 bytes"):
        causal_attention(model, ids(9, rows=1))


_BERT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
_BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("BertForMaskedLM", _BERT), ("BertLMHeadModel", _BERT), ("BartForConditionalGeneration", {"vocab_size": 64, **_BART})],
)
def test_models_that_read_what_they_would_predict_are_refused(name: str, sizes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    with pytest.raises(ModelError, match=f"{name}: what it predicts depends on later tokens"):
        causal_attention(kind(kind.config_class(**sizes)), ids(1))
    if name == "BertLMHeadModel":
        causal_attention(kind(kind.config_class(**sizes, is_decoder=True)), ids(1))


def test_ranges_of_whole_sequences_are_named_as_the_cause() -> None:
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": True}
    model = oneshot(tiny.llama(**SIZES, **HEADS), recipe=QuantizationModifier(kv_cache_scheme=scheme)).model
    with pytest.raises(ModelError, match=r"ranges of keys and values are those of whole sequences \(a dynamic kv_cache_scheme\)"):
        causal_attention(model, ids(1))
    with pytest.raises(TargetError, match="R2: keys and values are quantized already"):
        oneshot(model, recipe=SpinQuantModifier(rotations=["R2"]), dataset=torch.zeros(2, 8, dtype=torch.int64))


def test_a_mask_is_tried_on_as_many_blocks_as_a_step_takes() -> None:
    """XGLM wants a mask for each block."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "ffn_dim": 64, "num_layers": 1, "attention_heads": 2}
    model = transformers.XGLMForCausalLM(transformers.XGLMConfig(**sizes))
    assert causal_attention(model, ids(1)) is OWN


def test_models_that_do_not_predict_every_token_are_refused() -> None:
    t5 = tiny.t5(d_model=32, d_ff=64, num_layers=1, d_kv=16)
    with pytest.raises(ModelError, match="no causal language model"):
        causal_attention(t5, ids(1))
    encoder = transformers.LlamaModel(tiny.config("llama", **SIZES, **HEADS))
    with pytest.raises(ModelError, match="no causal language model"):
        causal_attention(encoder, ids(1))
    classifier = transformers.LlamaForSequenceClassification(tiny.config("llama", **SIZES, **HEADS, pad_token_id=0))
    with pytest.raises(ModelError, match=r"gives \[2, 2\] for tokens \[2, 16\]"):
        causal_attention(classifier, ids(1))
