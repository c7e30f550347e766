"""One family of tiny models: a test that needs a real architecture takes it from here, and writes down only the sizes it is about.

What is no decoder of this family stands where it is needed: the models of many architectures in `harness/traceability`, and those that
`harness` gives to its users (`harness/goldens/tiny_model.py`, `harness/replay/hazards/torch_side/models.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

VOCABULARY = 64  # token ids of all defaults below
_ENDS = {"bos_token_id": 0, "eos_token_id": 0}  # the defaults of these architectures lie outside of the vocabulary
_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_DECODER = {**_SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _DECODER,
    "gemma2": {**_DECODER, "head_dim": 8},
    "mixtral": {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**_DECODER, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "opt": {**_SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "bert": {**_SIZES, "intermediate_size": 64, "max_position_embeddings": 64},
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **_ENDS},
    "t5": {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
}


def config(model_type: str, **settings: Any) -> PretrainedConfig:
    """The configuration of a tiny model, as transformers names its fields; `settings` stand above the sizes of the family."""
    return AutoConfig.for_model(model_type, **{**_DEFAULTS[model_type], **settings})


def _model(name: str, model_type: str, seed: int, settings: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(seed)
    return getattr(transformers, name)(config(model_type, **settings)).eval()


def llama(seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A Llama with grouped queries, in evaluation mode, float32; `seed` is that of all numbers of torch from here on."""
    return _model("LlamaForCausalLM", "llama", seed, settings)


def gemma2(seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A Gemma 2: norms before and after each block, bounded scores."""
    return _model("Gemma2ForCausalLM", "gemma2", seed, settings)


def mixtral(seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A Mixtral of four experts."""
    return _model("MixtralForCausalLM", "mixtral", seed, settings)


def qwen3_moe(seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A Qwen 3 of four experts."""
    return _model("Qwen3MoeForCausalLM", "qwen3_moe", seed, settings)


def opt(seed: int = 0, **settings: Any) -> PreTrainedModel:
    """An OPT: learned positions, biases, a norm that moves the mean."""
    return _model("OPTForCausalLM", "opt", seed, settings)


def gpt2(seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A GPT-2, whose Conv1D keeps weights transposed."""
    return _model("GPT2LMHeadModel", "gpt2", seed, settings)


def bert(seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A BERT without a head."""
    return _model("BertModel", "bert", seed, settings)


def t5(seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A T5: an encoder and a decoder."""
    return _model("T5ForConditionalGeneration", "t5", seed, settings)
