"""What the accuracy bench measures of models with a head and of encoders of sentences, against the definition."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import BertModel, LlamaForCausalLM

from tests import tiny
from tests.bench.drive import divergence


@pytest.fixture(params=["encoder", "decoder"])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """A base, the same again as the model, and held-out tokens."""
    model = (
        tiny.bert(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
        if request.param == "encoder"
        else tiny.llama(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    )
    for name in ("base", "model"):
        model.save_pretrained(tmp_path / name)
    save_file({"input_ids": torch.randint(0, 32, (12, 6))}, tmp_path / "heldout.safetensors")
    found = {name: str(tmp_path / name) for name in ("base", "model")}
    return found | {"heldout": str(tmp_path / "heldout.safetensors"), "device": "cpu", "reader": "transformers"}


def test_a_model_is_no_way_from_itself_and_some_from_another(folders: dict[str, str]) -> None:
    same = divergence(folders)
    assert len(same["kl"]) == len(same["losses"]) == 12 and max(map(abs, same["kl"])) < 1e-6
    is_encoder = json.loads(Path(folders["base"], "config.json").read_text(encoding="utf-8"))["architectures"] == ["BertModel"]
    if is_encoder:  # a cosine distance; of tokens it is a loss
        assert max(map(abs, same["losses"])) < 1e-6
    kind = BertModel if is_encoder else LlamaForCausalLM
    changed = kind.from_pretrained(folders["base"])
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    changed.save_pretrained(folders["model"])
    other = divergence(folders)
    assert min(other["kl"]) > 0 and all(map(math.isfinite, other["losses"])) and other["losses"] != same["losses"]
