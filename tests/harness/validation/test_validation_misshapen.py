"""Any entry of any file of JSON may be of any kind: `harness validate` gives a verdict, or an error of ours about the base."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor import oneshot
from compressor.errors import ModelError
from compressor.json_text import to_json
from harness.validation.compare import validate
from harness.validation.subject import read_subject
from tests import tiny
from tests.harness.validation.conftest import Workspace

DEEP = json.loads("[" * 60 + "]" * 60)
KINDS = (None, [], {}, 5, 0, -1, "x", "", True, float("inf"), float("nan"), 10**30, 10**400, [None], ["x"], {"x": {"y": []}}, DEEP)
QUANTIZED = {"ignore": ["lm_head"], "scheme": "W8A8"}
BLOCKS = {
    "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 16]},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 16, "dynamic": True},
}
WORDS = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
KEYS = {"num_bits": 8, "type": "float", "strategy": "tensor"}
RECIPES: dict[str, dict[str, Any]] = {
    "words": {"QuantizationModifier": {"ignore": ["lm_head"], "config_groups": {"a": {"targets": ["Linear"], "weights": WORDS}}}},
    "blocks": {"QuantizationModifier": {"ignore": ["lm_head"], "config_groups": {"a": {"targets": ["Linear"], **BLOCKS}}}},
    "keys and values": {"QuantizationModifier": {"ignore": ["lm_head"], "scheme": "FP8", "kv_cache_scheme": KEYS}},
    "moved scales": {"SmoothQuantModifier": {}, "QuantizationModifier": QUANTIZED},
    "rotations": {"SpinQuantModifier": {"rotations": ["R1", "R4"]}, "QuantizationModifier": QUANTIZED},
    "pruned": {"SparseGPTModifier": {"sparsity": 0.5, "mask_structure": "2:4"}, "QuantizationModifier": QUANTIZED},
    "fewer experts": {"REAPPruningModifier": {"sparsity": 0.5}, "QuantizationModifier": QUANTIZED},
}
INDEX = "model.safetensors.index.json"
CASES = [
    *((name, file) for name in RECIPES for file in ("config.json", "compression.json")),
    *(("moved scales", file) for file in (INDEX, "generation_config.json", "tokenizer_config.json")),
]
PER_FILE = 25  # of some thousand, drawn by a fixed seed


@pytest.fixture(scope="module")
def made(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Base and checkpoint by the name of a recipe."""

    @cache
    def make(name: str) -> tuple[Path, Path]:
        root = tmp_path_factory.mktemp("misshapen")
        shutil.copytree(workspace.base, root / "base")
        if name == "fewer experts":
            sizes = {"vocab_size": 96, "hidden_size": 64, "bos_token_id": 0, "eos_token_id": 0}
            tiny.mixtral(dtype="bfloat16", **sizes).bfloat16().save_pretrained(root / "base")
        data = torch.randint(96, (4, 24), generator=torch.Generator().manual_seed(5))
        with pytest.warns(UserWarning, match="will not load these experts") if name == "fewer experts" else nullcontext():
            oneshot(root / "base", recipe={"a_stage": {"a_modifiers": RECIPES[name]}}, dataset=data, output_dir=root / "out")
        weights = json.loads((root / "out" / "compression.json").read_text())["tensors"]
        if name == "moved scales":
            (root / "out" / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, "model.safetensors")}))
        return root / "base", root / "out"

    return make


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in JSON, inner ones too."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def spoilt(sound: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    found = holder = copy.deepcopy(sound)
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return found


def drawn(file: Path, num: int) -> Iterator[None]:
    """Spoil the file in one place after the other; most lie in tables of a hundred alike, so first a kind of place is drawn."""
    sound, rng = json.loads(file.read_text()), random.Random(file.name)
    alike: dict[Any, list[tuple[Any, ...]]] = {}
    for path in places(sound):
        alike.setdefault((path[:1], len(path), str(path[-1:]) if len(path) > 2 else ""), []).append(path)
    for _ in range(num):
        path = rng.choice(rng.choice(list(alike.values())))
        file.write_text(json.dumps(spoilt(sound, path, rng.choice(KINDS))))
        yield


@pytest.mark.parametrize(("name", "file"), CASES)
def test_whatever_the_checkpoint_says_there_is_a_verdict(
    name: str, file: str, made: Callable[[str], tuple[Path, Path]], workspace: Workspace, tmp_path: Path
) -> None:
    base, folder = made(name)
    shutil.copytree(folder, tmp_path / "out")
    for _ in drawn(tmp_path / "out" / file, PER_FILE):
        report = validate(base, tmp_path / "out", workspace.dataset, num_samples=2, max_seq_length=8)
        assert report.records and to_json(report.to_dict())


def test_whatever_the_base_says_there_is_a_verdict_or_an_error_of_ours(
    made: Callable[[str], tuple[Path, Path]], workspace: Workspace, tmp_path: Path
) -> None:
    base, folder = made("moved scales")
    shutil.copytree(base, tmp_path / "base")
    for _ in drawn(tmp_path / "base" / "config.json", PER_FILE):
        with suppress(ModelError):
            assert validate(tmp_path / "base", folder, workspace.dataset, num_samples=2, max_seq_length=8).records


QUANT, GROUP = "quantization_config", ("quantization_config", "config_groups", "group_0")
SPOILT: dict[str, tuple[str, str, tuple[str, ...], tuple[Any, ...], str]] = {
    "files.shards": ("moved scales", INDEX, ("metadata",), (None, [], 5, "x"), "metadata is "),
    "format.accepted": ("pruned", "config.json", (*GROUP, "format"), ([], {}), "quantization_config.config_groups.group_0.format: "),
    "serving.config": ("words", "config.json", (*GROUP, "weights", "num_bits"), (10**30, "x", None), "weights.num_bits: "),
    "files.tensors": ("keys and values", "config.json", (QUANT, "config_groups"), (5, []), "quantization_config.config_groups: "),
    "files.config": ("pruned", "config.json", ("num_hidden_layers",), (10**30,), "num_hidden_layers="),
}


@pytest.mark.parametrize("check", SPOILT)
def test_the_place_is_named(check: str, made: Callable[[str], tuple[Path, Path]], workspace: Workspace, tmp_path: Path) -> None:
    name, file, path, values, words = SPOILT[check]
    base, folder = made(name)
    shutil.copytree(folder, tmp_path / "out")
    for value in values:
        (tmp_path / "out" / file).write_text(json.dumps(spoilt(json.loads((folder / file).read_text()), path, value)))
        report = validate(base, tmp_path / "out", workspace.dataset, num_samples=2, max_seq_length=8)
        found = next(record for record in report.records if record.name == check)
        assert found.outcome.value == "fail" and words in "; ".join((found.summary, *found.findings))


def test_notes_of_another_kind_say_nothing(made: Callable[[str], tuple[Path, Path]], workspace: Workspace, tmp_path: Path) -> None:
    base, folder = made("pruned")
    shutil.copytree(folder, tmp_path / "out")
    record = json.loads((folder / "compression.json").read_text())
    (tmp_path / "out" / "compression.json").write_text(json.dumps({**record, "notes": 5}))
    report = validate(base, tmp_path / "out", workspace.dataset, num_samples=2, max_seq_length=8)
    assert next(record for record in report.records if record.name == "format.loads").outcome.value == "pass"


def test_blocks_may_be_spelt_as_one_text(made: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    base, folder = made("blocks")
    shutil.copytree(folder, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    config[QUANT]["config_groups"]["group_0"]["weights"]["block_structure"] = "16x16"
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert read_subject(base, tmp_path / "out").modules == read_subject(base, folder).modules
