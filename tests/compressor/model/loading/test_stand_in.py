"""A model for looking at: random weights where small, one number where large, fewer layers where very large; and it says which."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import JambaConfig, LlamaConfig, LlamaForCausalLM

from compressor.model.loading import stand_in as module
from compressor.model.loading.stand_in import stand_in
from tests import tiny

IDS = torch.arange(10).reshape(2, 5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config of six layers, without weights."""
    config = tiny.config("llama", intermediate_size=48, num_hidden_layers=6, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def _bytes(model: nn.Module) -> int:
    return sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())


def test_a_small_model_gets_random_weights_the_same_each_time(folder: Path) -> None:
    first, again = stand_in(folder), stand_in(folder)
    assert first.how == "random (the folder holds no weights)"
    assert all(torch.equal(left, right) for left, right in zip(first.model.parameters(), again.model.parameters(), strict=True))


def test_weights_of_the_folder_are_taken_where_they_are_small(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    own.save_pretrained(folder)
    taken = stand_in(folder)
    assert taken.how == "weights of the folder"
    assert torch.equal(taken.model.get_parameter("lm_head.weight"), own.lm_head.weight)
    monkeypatch.setattr(module, "MAX_LOADED_BYTES", 10)
    assert "were not read" in stand_in(folder).how


def test_a_large_model_has_all_layers_and_no_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RANDOM", 10)
    made = stand_in(folder)
    assert made.num_left_out == 0 and "every tensor is one number" in made.how
    assert len(made.model.model.layers) == 6  # type: ignore[arg-type, union-attr]
    assert _bytes(made.model) < 1000
    with torch.no_grad():
        plain = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).bfloat16().eval()
        for parameter in plain.parameters():
            parameter.fill_(0.01)
        assert torch.allclose(made.model(IDS).logits, plain(IDS).logits, rtol=0.05)


def test_of_a_very_large_model_layers_that_repeat_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RANDOM", 10)
    monkeypatch.setattr(module, "MAX_WHOLE", 10)
    made = stand_in(folder)
    assert made.num_left_out == 4 and "4 layers that repeat earlier ones are left out" in made.how
    assert made.model(IDS).logits.shape == (2, 5, 64)


def test_every_kind_of_layer_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 16,
    }
    mamba = {
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 3,
        "expert_layer_period": 2,
        "num_experts": 2,
    }
    JambaConfig(**sizes, **mamba, use_mamba_kernels=False, architectures=["JambaForCausalLM"]).save_pretrained(tmp_path)
    for name in ("MAX_RANDOM", "MAX_WHOLE", "MAX_WHOLE_WITH_EXPERTS"):
        monkeypatch.setattr(module, name, 10)
    made = stand_in(tmp_path)
    kinds = {type(layer).__name__ for layer in made.model.model.layers}  # type: ignore[union-attr]
    assert kinds == {"JambaMambaDecoderLayer", "JambaAttentionDecoderLayer"}
    assert made.num_left_out > 0


def test_a_model_in_memory_is_taken_as_it_is() -> None:
    model = nn.Linear(2, 2)
    assert stand_in(model).model is model
