"""A checkpoint whose experts were pruned: compared with the base without them, and with nothing on trust."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

from compressor import QuantizationModifier, REAPPruningModifier, SmoothQuantModifier, oneshot
from harness.bisect import bisect
from harness.reporting.verdict import Outcome
from harness.validation.compare import validate
from tests import tiny

SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 8}
WEIGHTS = {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 16}}}
IDS = torch.randint(96, (24, 16), generator=torch.Generator().manual_seed(0))


def qwen3_moe() -> Any:  # whose files hold experts one by one
    return tiny.qwen3_moe(**SIZES, **EXPERTS, num_experts=6, intermediate_size=32)


def gpt_oss() -> Any:  # whose files hold them fused
    return GptOssForCausalLM(GptOssConfig(**SIZES, **EXPERTS, num_local_experts=6, intermediate_size=32))


@pytest.fixture(scope="module", params=[qwen3_moe, gpt_oss])
def pruned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pruned")
    torch.manual_seed(0)
    request.param().save_pretrained(folder / "base")
    oneshot(folder / "base", recipe=REAPPruningModifier(sparsity=0.34), dataset=IDS[:8], output_dir=folder / "out", device="cpu")
    return folder / "base", folder / "out"


def judged(base: Path, folder: Path) -> dict[str, Any]:
    return {record.name: record for record in validate(base, folder, IDS[8:]).records}


def test_every_tensor_is_that_of_the_base_without_those_experts(pruned: tuple[Path, Path]) -> None:
    records = judged(*pruned)
    for name in ("files.config", "files.tensors", "record.tensors", "format.loads"):
        assert records[name].outcome is Outcome.PASS, records[name].summary
    assert records["behaviour.transforms"].outcome is Outcome.SKIP


def edited(folder: Path, out: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The same checkpoint with another account of what was kept."""
    out.mkdir()
    for path in folder.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    record = json.loads((out / "compression.json").read_text())
    change(record["transforms"])
    (out / "compression.json").write_text(json.dumps(record))
    return out


def other_kept(entries: list[dict[str, Any]]) -> None:
    layer = entries[0]["layers"][1]
    layer["kept"][0] = next(place for place in range(6) if place not in layer["kept"])


ACCOUNTS: dict[str, tuple[Callable[[list[dict[str, Any]]], Any], str, str]] = {
    "another expert": (other_kept, "files.tensors", "layers.1.mlp"),
    "another order": (lambda one: one[0]["layers"][0]["kept"].reverse(), "files.tensors", "layers.0.mlp"),
    "one twice": (lambda one: one[0]["layers"][0].update(kept=[1, 1, 2, 3]), "behaviour.transforms", "are no experts of 6"),
    "one that is not there": (lambda one: one[0]["layers"][0].update(kept=[1, 2, 3, 6]), "behaviour.transforms", "are no experts of 6"),
    "half a number": (lambda one: one[0]["layers"][0]["kept"].append(1.5), "behaviour.transforms", "1.5 is no whole number"),
    "a flag": (lambda one: one[0].update(num_experts=True), "behaviour.transforms", "True is no whole number"),
    "layers of different sizes": (lambda one: one[0]["layers"][0].update(kept=[1, 2, 3]), "behaviour.transforms", "different numbers"),
    "no router": (lambda one: one[0]["layers"][0].update(tensors={}), "files.tensors", "layers.0.mlp"),
    "another axis": (
        lambda one: one[0]["layers"][0].update(tensors=dict.fromkeys(one[0]["layers"][0]["tensors"], 1)),
        "behaviour.transforms",
        "no 6 places along axis 1",
    ),
    "no such layer": (lambda one: one[0]["layers"][0].update(experts="model.nothing"), "behaviour.transforms", "holds no model.nothing"),
    "another number": (lambda one: one[0].update(num_experts=8), "behaviour.transforms", "8"),
    "another setting": (lambda one: one[0].update(setting=["nothing"]), "files.config", "nothing"),
    "no setting": (lambda one: one[0].update(setting=[]), "behaviour.transforms", "cannot be read"),
    "no list": (lambda one: one[0].update(layers=3), "behaviour.transforms", "cannot be read"),
    "more was moved": (
        lambda one: [layer.update(refit=[]) for layer in one[0]["layers"]],
        "files.tensors",
        "down_proj",
    ),
    "no word of what was moved": (lambda one: one[0]["layers"][0].pop("refit"), "behaviour.transforms", "cannot be read"),
    "a second time": (lambda one: one.append(one[0]), "behaviour.transforms", "before anything else"),
    "no account": (lambda one: one.clear(), "files.config", "num"),
}


@pytest.mark.parametrize("what", ACCOUNTS)
def test_a_wrong_account_of_experts_is_found(what: str, pruned: tuple[Path, Path], tmp_path: Path) -> None:
    change, name, said = ACCOUNTS[what]
    record = judged(pruned[0], edited(pruned[1], tmp_path / "edited", change))[name]
    assert record.outcome is Outcome.FAIL and said in record.summary + " ".join(record.findings)


def test_a_damaged_expert_is_found(pruned: tuple[Path, Path], tmp_path: Path) -> None:
    folder = edited(pruned[1], tmp_path / "edited", lambda one: None)
    tensors = load_file(folder / "model.safetensors")
    name = next(key for key in tensors if "experts" in key and ("gate" in key or "up_proj" in key) and "bias" not in key)
    tensors[name].view(-1)[5] *= 1.01
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    record = judged(pruned[0], folder)["files.tensors"]
    assert record.outcome is Outcome.FAIL and name in " ".join(record.findings)


@pytest.mark.filterwarnings("ignore:transformers 5.23 will not load these experts")
@pytest.mark.parametrize("make", [qwen3_moe, gpt_oss])
def test_with_scales_moved_and_weights_rounded_behind(make: Callable[[], Any], tmp_path: Path) -> None:
    base = tmp_path / "base"
    torch.manual_seed(0)
    make().save_pretrained(base)
    recipe = [REAPPruningModifier(sparsity=0.5), SmoothQuantModifier(), QuantizationModifier(config_groups=WEIGHTS, ignore=["lm_head"])]
    oneshot(base, recipe=recipe, dataset=IDS[:8], output_dir=tmp_path / "out", device="cpu")
    records = judged(base, tmp_path / "out")
    failed = {name: record.summary for name, record in records.items() if record.outcome is Outcome.FAIL}
    assert all(name.startswith("behaviour.") and name != "behaviour.transforms" for name in failed), failed  # half of the experts are gone
    assert records["behaviour.transforms"].outcome is Outcome.PASS and records["weights.decoded"].outcome is Outcome.PASS
    found = bisect(base, tmp_path / "out", IDS[8:10])
    assert found.answer == "found" and found.layers
