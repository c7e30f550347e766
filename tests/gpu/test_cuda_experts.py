"""Experts on a GPU: taken apart they compute what they computed, and a compressed mixture of experts reads back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig

from compressor import load_compressed, oneshot
from compressor.model.experts.unfuse import UnfusedModel, unfuse_into

pytestmark = pytest.mark.gpu

IDS = torch.arange(40).reshape(2, 20)


def _mixtral(device: torch.device) -> nn.Module:
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_local_experts": 4}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # Not .bfloat16(), which would round the rotary frequencies too, as no loader does.
        config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, dtype=torch.bfloat16)
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model.eval().to(device)


@torch.no_grad()
def test_unfused_experts_equal_fused_ones_up_to_rounding(device: torch.device) -> None:
    model = _mixtral(device)
    before = model(IDS.to(device)).logits
    unfuse_into(UnfusedModel(model))
    assert torch.allclose(model(IDS.to(device)).logits, before, atol=0.02)


@torch.no_grad()
def test_a_mixture_of_experts_is_compressed_and_read_back(device: torch.device, tmp_path: Path) -> None:
    recipe = {"quant_stage": {"quant_modifiers": {"GPTQModifier": {"scheme": "W4A16", "ignore": ["lm_head"], "fallback_budget": 99}}}}
    model = _mixtral(device)
    oneshot(model, recipe=recipe, dataset=[row.tolist() for row in IDS], output_dir=tmp_path / "out", calibrate_all_experts=True)
    loaded = load_compressed(tmp_path / "out", device=device)
    assert torch.equal(loaded(IDS.to(device)).logits, model(IDS.to(device)).logits)
