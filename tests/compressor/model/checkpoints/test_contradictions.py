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

UP, DOWN, ATTENTION = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "model.layers.1.self_attn"
WEIGHTS = {"num_bits": 4, "group_size": 8, "strategy": "group"}
KEYS_AND_VALUES = {"num_bits": 8, "type": "float", "dynamic": False}
GROUPS = {"g": {"targets": ["Linear"], "weights": WEIGHTS}}
RECIPE = {
    "modifiers": {
        "SpinQuantModifier": {"rotations": ["R4"]},
        "QuantizationModifier": {"ignore": ["lm_head"], "config_groups": GROUPS, "kv_cache_scheme": KEYS_AND_VALUES},
    }
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "out"
    oneshot(tiny.llama(), recipe=RECIPE, dataset=torch.arange(32).view(2, 16), output_dir=folder)
    return folder


def says(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"].update(fields)
        (folder / "config.json").write_text(json.dumps(config))

    return change


def holds(name: str, change: Callable[[Tensor], Any], module: str = UP) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors[f"{module}.{name}"])
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def turns(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Changes R4's group of transform_config: the input is turned, and so is the weight, back."""

    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config["quantization_config"]["transform_config"]["config_groups"]["R4"])
        (folder / "config.json").write_text(json.dumps(config))

    return edit


def lies_twice(folder: Path) -> None:
    """A norm in two shards, in the second with other values; the index names the first."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    norm = "model.norm.weight"
    shards = {"model-1.safetensors": tensors, "model-2.safetensors": {norm: tensors[norm] + 1}}
    for name, held in shards.items():
        save_file(held, folder / name, metadata={"format": "pt"})
    places = dict.fromkeys(tensors, "model-1.safetensors") | {"of_the_second": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


BACK = "the input and the weight are not turned to take each other back"
CONTRADICTIONS: dict[str, tuple[Callable[[Path], None], str]] = {
    "floats where codes are said to be": (says(ignore=[]), r"1 modules are targets .* stored as floats \(lm_head\)"),
    "codes that are ignored": (says(ignore=["lm_head", "re:.*up_proj"]), "is stored quantized, but the quantization_config ignores it"),
    "a text in the place of a list": (says(ignore="lm_head"), "ignore is no list"),
    "not compressed": (says(quantization_status="calibration"), "quantization_status is 'calibration'"),
    "another weight's shape": (holds("weight_shape", lambda one: one.copy_(torch.tensor([64, 40]))), r"weight_shape is \[64, 40\]"),
    "no shape": (holds("weight_shape", lambda one: one.copy_(torch.tensor([64, -32]))), r"weight_shape is \[64, -32\]"),
    "scales that are no numbers": (holds("weight_scale", lambda one: one[3].fill_(float("nan"))), "weight_scale holds NaN or infinity"),
    "scales of keys that are no numbers": (
        holds("k_scale", lambda one: one.fill_(float("inf")), ATTENTION),
        "k_scale holds NaN or infinity",
    ),
    "an input that is not turned": (turns(lambda one: one["apply"][0]["targets"].pop()), f"of {DOWN[:13]}.*{BACK}"),
    "no input that is turned": (turns(lambda one: one["apply"][0]["targets"].clear()), BACK),
    "a weight alone": (turns(lambda one: one["apply"].pop(0)), BACK),
    "an input alone": (turns(lambda one: one["apply"].pop(1)), BACK),
    "twice the same way": (turns(lambda one: one["apply"][1].update(inverse=False)), BACK),
    "twice an input": (turns(lambda one: one["apply"][1].update(location="input")), BACK),
    "nothing is turned": (turns(lambda one: one["apply"].clear()), "the files hold its matrices, and it turns nothing"),
    "no location": (turns(lambda one: one["apply"][0].pop("location")), "does not say where it turns"),
    "a list for a location": (turns(lambda one: one["apply"][0].update(location=["input"])), "does not say where it turns"),
    "a number for a name": (turns(lambda one: one["apply"][0].update(targets=[5])), "names no modules"),
    "a text for a size": (turns(lambda one: one.update(head_dim="64")), "head_dim no number"),
    "a tensor in two files": (lies_twice, "model.norm.weight lies in model-2.safetensors and in another file, with other values"),
    "a matrix that turns nothing": (holds("R4_input.weight", lambda one: one[1].copy_(one[0]), DOWN), "of 64 x 64 is no rotation"),
    "a matrix of another sign": (holds("R4_input.weight", lambda one: one[3, 5].neg_(), DOWN), "of 64 x 64 is no rotation"),
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
