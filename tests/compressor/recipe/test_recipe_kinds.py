"""What the project says it supports: every kind of recipe of the list loads as it stands, and runs on a tiny model of its architecture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from compressor import load_compressed, oneshot
from harness.traceability.architectures import zoo

KINDS: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("recipe_kinds.yaml").read_text(encoding="utf-8"))
IDS = torch.randint(3, 128, (8, 12), generator=torch.Generator().manual_seed(0))
WIDE = {"head_dim": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32, "q_lora_rank": 128, "kv_lora_rank": 128}


def wide_model(name: str) -> Any:
    """An architecture of the zoo with layers that divide into groups of 128, in bfloat16."""
    entry = zoo()[name]
    wide = {key: value for key, value in WIDE.items() if key in entry.config}
    inner = {key: 256 for key in entry.config if "intermediate" in key}
    model = replace(entry, config={**entry.config, **wide, **inner, "hidden_size": 256}).build(0)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()  # buffers of rotary angles stay what loaders make of them
    return model


def recipe_of(kind: str) -> dict[str, Any]:
    return {"quant_stage": {"quant_modifiers": KINDS[kind]["recipe"]}}


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of readers that pass over experts or rotations
def test_a_kind_of_recipe_runs_on_its_architecture_and_is_read_back(kind: str, tmp_path: Path) -> None:
    model, recipe = wide_model(KINDS[kind]["model"]), {"quant_stage": {"quant_modifiers": KINDS[kind]["recipe"]}}
    before = logits(model)
    oneshot(model, recipe=recipe, dataset=IDS, output_dir=tmp_path / "out", device="cpu")
    assert not torch.equal(logits(model), before)
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    read = load_compressed(tmp_path / "out", device="cpu") if "quantization_config" in config else None
    read = read or AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(logits(read), logits(model))
