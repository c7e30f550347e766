"""A compressed folder whose config says something else than its tensors is not loaded: other readers would read it otherwise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compressor import load_compressed, oneshot
from compressor.entrypoints.inspection import inspect_checkpoint
from compressor.errors import ModelError
from tests import tiny

UP = "model.layers.0.mlp.up_proj"
WEIGHTS = {"num_bits": 4, "group_size": 8, "strategy": "group"}
RECIPE = {
    "modifiers": {"QuantizationModifier": {"ignore": ["lm_head"], "config_groups": {"g": {"targets": ["Linear"], "weights": WEIGHTS}}}}
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "out"
    oneshot(tiny.llama(), recipe=RECIPE, output_dir=folder)
    return folder


def says(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"].update(fields)
        (folder / "config.json").write_text(json.dumps(config))

    return change


def holds(name: str, change: Callable[[Tensor], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors[f"{UP}.{name}"])
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


CONTRADICTIONS: dict[str, tuple[Callable[[Path], None], str]] = {
    "floats where codes are said to be": (says(ignore=[]), r"1 modules are targets .* stored as floats \(lm_head\)"),
    "codes that are ignored": (says(ignore=["lm_head", "re:.*up_proj"]), "is stored quantized, but the quantization_config ignores it"),
    "a text in the place of a list": (says(ignore="lm_head"), "ignore is no list"),
    "not compressed": (says(quantization_status="calibration"), "quantization_status is 'calibration'"),
    "another weight's shape": (holds("weight_shape", lambda one: one.copy_(torch.tensor([64, 40]))), r"weight_shape is \[64, 40\]"),
    "no shape": (holds("weight_shape", lambda one: one.copy_(torch.tensor([64, -32]))), r"weight_shape is \[64, -32\]"),
    "scales that are no numbers": (holds("weight_scale", lambda one: one[3].fill_(float("nan"))), "weight_scale holds NaN or infinity"),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_a_folder_that_contradicts_itself_is_not_loaded(kind: str, sound: Path, tmp_path: Path) -> None:
    change, words = CONTRADICTIONS[kind]
    folder = shutil.copytree(sound, tmp_path / "other")
    load_compressed(folder, device="cpu")
    change(folder)
    for read in (load_compressed, inspect_checkpoint):
        with pytest.raises(ModelError, match=words):
            read(folder)
