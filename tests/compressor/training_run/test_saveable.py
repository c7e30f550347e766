"""What transformers would not read back is refused before the first step, as oneshot refuses it; in memory it is trained"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from compressor import train
from compressor.errors import SchemeError
from tests import tiny

RECIPE = {
    "QuantizationModifier": {"config_groups": {"g": {"targets": ["Conv1D"], "weights": {"num_bits": 4, "group_size": 16}}}, "start": 1}
}


def gpt2() -> transformers.GPT2LMHeadModel:
    return tiny.gpt2(n_positions=32, n_layer=1, n_head=2)


def test_a_checkpoint_that_transformers_could_not_load_is_refused_before_the_first_step(tmp_path: Path) -> None:
    model, rows = gpt2(), torch.arange(256).reshape(16, 16) % 64
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(SchemeError, match="no quantized form of Conv1D"):
        train(model, dataset=rows, recipe=RECIPE, steps=2, batch_size=2, output_dir=tmp_path / "out")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert list(tmp_path.iterdir()) == []
    assert len(train(model, dataset=rows, recipe=RECIPE, steps=2, batch_size=2).losses) == 2


def test_what_transformers_does_not_load_is_said_before_the_first_step(tmp_path: Path) -> None:
    size = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
    model, rows = transformers.FalconForCausalLM(transformers.FalconConfig(**size)), torch.arange(64).reshape(4, 16)
    recipe = {"QuantizationModifier": {**RECIPE["QuantizationModifier"], "ignore": ["lm_head"]}}
    recipe["QuantizationModifier"]["config_groups"] = {"g": {"targets": ["re:.*dense.*"], "weights": {"num_bits": 4, "group_size": 16}}}
    with pytest.warns(UserWarning, match="transformers does not load quantized layers of FalconForCausalLM"):
        train(model, dataset=rows, recipe=recipe, steps=2, batch_size=2, max_seq_length=16, output_dir=tmp_path / "out")
    assert "transformers does not load quantized layers" in (tmp_path / "out" / "compression.json").read_text()
