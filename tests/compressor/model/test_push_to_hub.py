"""`push_to_hub` of a compressed model uploads what `save_pretrained` writes, and the model comes back by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoModelForCausalLM

from compressor import load_compressed, oneshot
from tests import tiny

IDS = torch.arange(24).reshape(2, 12)


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the client's own
def test_what_is_pushed_is_what_is_saved(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # files go to the hub itself
    model = tiny.llama(hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2)
    recipe = {"quant_modifiers": {"QuantizationModifier": {"scheme": "W8A16", "targets": ["Linear"], "ignore": ["lm_head"]}}}
    result = oneshot(model, recipe=recipe)
    with pytest.raises(HfHubHTTPError, match="401"):  # no token
        result.model.push_to_hub("owner/pushed")
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    result.model.push_to_hub("owner/pushed", private=True)
    result.model.save_pretrained(tmp_path / "saved", save_compressed=True)
    pushed = hub.repos["models", "owner/pushed"].revisions["main"]
    assert b"library_name: transformers" in pushed.pop("README.md")
    assert pushed == {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    assert "compression.json" in pushed
    with torch.no_grad():
        logits = result.model(IDS).logits
        assert torch.equal(load_compressed("owner/pushed")(IDS).logits, logits)
        assert torch.equal(AutoModelForCausalLM.from_pretrained("owner/pushed")(IDS).logits, logits)
