"""What a user is told of a training that diverged or was too short, of keys' scales that cannot be, and of configs inside a config."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compressor import train
from compressor.errors import NumericsError
from harness.validation.format.files import meaning
from harness.validation.policy import Policy
from harness.validation.weights import check_weights

IDS = torch.arange(64, dtype=torch.int64).reshape(4, 16)
PRUNE = {"MagnitudePruningModifier": {"final_sparsity": 0.5, "start": 0, "end": 2, "leave_enabled": True, "ignore": ["lm_head"]}}
QUANTIZE = {"QuantizationModifier": {"scheme": "W8A8", "start": 0, "ignore": ["lm_head"]}}


def recipe(modifiers: dict[str, Any]) -> str:
    return json.dumps({"quant_stage": {"quant_modifiers": modifiers}})


@pytest.mark.parametrize("modifiers", [PRUNE, QUANTIZE])
@pytest.mark.parametrize("settings", [{"learning_rate": 1e30}, {"weight_decay": 1e44}])
def test_weights_that_diverged_name_what_the_user_chose(modifiers: dict[str, Any], settings: dict[str, float], llama_dir: Path) -> None:
    with pytest.raises(NumericsError, match=f"^step .*{next(iter(settings))} "):
        train(llama_dir, dataset=IDS, recipe=recipe(modifiers), steps=3, batch_size=2, max_seq_length=16, mode="eager", **settings)


def test_a_pruning_that_was_cut_short_says_so(llama_dir: Path) -> None:
    cut = {"MagnitudePruningModifier": {**PRUNE["MagnitudePruningModifier"], "end": 50}}
    notes = train(llama_dir, dataset=IDS, recipe=recipe(cut), steps=1, batch_size=2, max_seq_length=16, mode="eager").report.notes
    assert any("the run was over before end=50: give a smaller end, or a longer run" in note for note in notes), notes


@pytest.mark.parametrize("value", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_scale_of_keys_that_cannot_be_is_named_without_a_record(value: float) -> None:
    scales = {"a.k_scale": torch.tensor([value]), "a.v_scale": torch.ones(1)}
    subject: Any = SimpleNamespace(
        base=SimpleNamespace(entries={}), compressed=SimpleNamespace(entries=scales, tensor=scales.__getitem__), modules={}
    )
    found = check_weights(subject, [], Policy(), is_as_written=True)[0].findings
    assert list(found) == ["a.k_scale: is not finite and above 0 everywhere"]


def test_who_wrote_a_config_inside_a_config_and_the_dtype_of_the_whole_are_no_difference() -> None:
    inner = {"attn": {"_name_or_path": "a", "x": 1, "dtype": None}, "parts": [{"transformers_version": "5", "dtype": "float32"}]}
    assert meaning(inner, "float32") == {"attn": {"x": 1}, "parts": [{}]}
    assert meaning(inner, "float16") == {"attn": {"x": 1}, "parts": [{"dtype": "float32"}]}
