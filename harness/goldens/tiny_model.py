"""The model of the fixture `tiny_model`: small, but a real Llama with all that modifiers, pipelines and loaders look for."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from compressor.random_state import random_numbers_kept

VOCABULARY, HIDDEN, LAYERS, POSITIONS = 128, 64, 2, 128


def build_tiny_model(seed: int = 0) -> LlamaForCausalLM:
    """Build the model; the caller's random numbers are left as they are.

    Args:
        seed: of the weights.

    Returns:
        A Llama in evaluation mode, float32 on the CPU. Its weights are drawn with `rand`, which unlike `randn` is the same on every
        instruction set.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    with random_numbers_kept(foreign=False):
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.rand(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(0.5 + drawn)
            else:
                parameter.copy_((drawn - 0.5) * (12.0 / parameter.shape[-1]) ** 0.5)
    return model.eval()
