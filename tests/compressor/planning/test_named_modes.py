"""Modes by name: one word in a recipe or on the command line, what it changes, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from compressor import GPTQModifier, oneshot
from compressor.cli.main import main
from compressor.errors import RecipeError
from compressor.modifiers.scale_tuning import ScaleTuningModifier
from compressor.planning import plan
from compressor.recipe import load_recipe
from tests import tiny

GPTQ: dict[str, Any] = {
    "ignore": ["lm_head"],
    "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}},
}
IDS = torch.randint(64, (16, 16), generator=torch.Generator().manual_seed(0))


def recipe(**settings: Any) -> dict[str, Any]:
    return {"quant_stage": {"quant_modifiers": {"GPTQModifier": GPTQ | settings}}}


def llama() -> LlamaForCausalLM:
    return tiny.llama(intermediate_size=48)


@pytest.mark.parametrize("by_option", [False, True])
def test_best_appends_the_tuning_of_scales_once(by_option: bool) -> None:
    found = load_recipe(recipe(), mode="best") if by_option else load_recipe(recipe(mode="best"))
    assert [type(modifier) for modifier in found.modifiers] == [GPTQModifier, ScaleTuningModifier]
    assert [(modifier.index, modifier.group) for modifier in found.modifiers] == [(0, "quant"), (1, "quant")]
    again = load_recipe(found.dump())
    assert again == found and len(again.modifiers) == 2
    own = recipe(mode="best")
    own["quant_stage"]["quant_modifiers"]["ScaleTuningModifier"] = {"steps": 3}
    assert [modifier.steps for modifier in load_recipe(own).modifiers if isinstance(modifier, ScaleTuningModifier)] == [3]


def test_what_is_set_by_itself_comes_before_the_mode() -> None:
    (modifier,) = load_recipe(recipe(mode="fast", target="base")).modifiers
    assert isinstance(modifier, GPTQModifier) and modifier.base_stream == "required"


def test_the_option_comes_before_the_word_in_the_recipe() -> None:
    (modifier,) = load_recipe(recipe(mode="best"), mode="fast").modifiers
    assert isinstance(modifier, GPTQModifier) and modifier.mode == "fast"


def test_an_option_that_would_do_nothing_is_refused() -> None:
    with pytest.raises(RecipeError, match="mode: 'best' was given with a recipe whose modifiers have none; leave it out"):
        load_recipe({"QuantizationModifier": {"scheme": "W4A16", "ignore": ["lm_head"]}}, mode="best")
    with pytest.raises(RecipeError, match="mode: 'fast' was given with modifier objects; set their field"):
        load_recipe(GPTQModifier(scheme="W4A16"), mode="fast")
    for mode in ("Fast", "best ", ""):
        with pytest.raises(RecipeError, match=f"^mode: '{mode}' does not exist; "):
            load_recipe(recipe(), mode=mode)


def test_each_mode_runs_and_says_what_it_did() -> None:
    notes = {}
    for mode in ("fast", "default", "best"):
        result = oneshot(llama(), recipe=recipe(), dataset=IDS, mode=mode)
        notes[mode] = {record.modifier for record in result.report.modules.values()}, str(result.report.to_dict())
    assert notes["fast"][0] == notes["default"][0] == {"GPTQModifier"}
    assert "ScaleTuningModifier" in notes["best"][1] and "ScaleTuningModifier" not in notes["default"][1]


def test_a_plan_shows_every_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama().save_pretrained(tmp_path)
    made = plan(tmp_path, recipe=recipe(), num_calibration_samples=64, max_seq_length=16)
    assert list(made.modes) == ["fast", "default", "best"]
    fast, default, best = made.modes.values()
    assert fast.seconds < default.seconds < best.seconds
    assert fast.peak_extra_bytes < default.peak_extra_bytes
    assert made.estimate.peak_bytes == default.peak_bytes
    assert not plan(tmp_path, recipe={"QuantizationModifier": {"scheme": "FP8_DYNAMIC"}}).modes
    assert main(["plan", str(tmp_path), "--recipe", json.dumps(recipe()), "--mode", "fast", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["forwards"] == "one" and set(printed["modes"]) == {"fast", "default", "best"}
    assert main(["plan", str(tmp_path), "--recipe", json.dumps(recipe())]) == 0
    assert "mode best (estimate): " in capsys.readouterr().out
