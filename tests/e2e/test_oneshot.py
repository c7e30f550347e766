"""The main path from a folder to a folder: what transformers reads back is what was in memory, and equal runs give equal bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from compressor import oneshot
from compressor.nn import QuantizedLinear

PROBE = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(9))


def recipe(modifier: str, **settings: Any) -> dict[str, Any]:
    return {"quant_stage": {"quant_modifiers": {modifier: {"ignore": ["lm_head"], **settings}}}}


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(PROBE, use_cache=False).logits


RECIPES = {
    **{f"gptq-{scheme}": recipe("GPTQModifier", scheme=scheme) for scheme in ("W4A16", "W4A16_ASYM", "W3A16", "W8A8", "FP8")},
    **{f"rtn-{scheme}": recipe("QuantizationModifier", scheme=scheme) for scheme in ("W4A16", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC")},
}


@pytest.mark.filterwarnings("default")  # transformers and compressed-tensors warn on their own account while loading
@pytest.mark.parametrize("name", RECIPES)
def test_transformers_reads_back_the_same_logits(name: str, llama_dir: Path, tokens_file: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    result = oneshot(llama_dir, recipe=RECIPES[name], dataset=tokens_file, output_dir=out)
    assert result.output_dir == out
    assert len(result.report.modules) == 14
    assert all(0 < record.error < 0.2 for record in result.report.modules.values())
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype="auto")
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(logits_of(loaded), logits_of(result.model))
    record = json.loads((out / "compression.json").read_text())
    assert set(record) >= {"recipe", "data", "seed", "versions", "modules", "fallbacks", "base"}
    assert (out / "tokenizer.json").read_bytes() == (llama_dir / "tokenizer.json").read_bytes()
    assert (out / "generation_config.json").exists()


def test_two_runs_give_identical_bytes_and_the_input_stays(
    llama_dir: Path, tokens_file: Path, tmp_path: Path, w4a16: dict[str, Any]
) -> None:
    before = digest(llama_dir)
    first = oneshot(llama_dir, recipe=w4a16, dataset=tokens_file, output_dir=tmp_path / "a")
    second = oneshot(llama_dir, recipe=w4a16, dataset=tokens_file, output_dir=tmp_path / "b")
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert digest(llama_dir) == before
    assert first.record == second.record


def test_batch_size_changes_no_code(llama_dir: Path, tokens_file: Path, w4a16: dict[str, Any]) -> None:
    one = oneshot(llama_dir, recipe=w4a16, dataset=tokens_file, batch_size=1).model
    many = oneshot(llama_dir, recipe=w4a16, dataset=tokens_file, batch_size=5).model
    layers = [(a, b) for a, b in zip(one.modules(), many.modules(), strict=True) if isinstance(a, QuantizedLinear)]
    assert len(layers) == 14
    assert all(torch.equal(a.codes(), b.codes()) for a, b in layers)


def test_sequential_calibration_sees_the_error_of_earlier_layers(llama_dir: Path, tokens_file: Path, w4a16: dict[str, Any]) -> None:
    sequential = oneshot(llama_dir, recipe=w4a16, dataset=tokens_file, passes="two").model
    basic = oneshot(llama_dir, recipe=w4a16, dataset=tokens_file, pipeline="basic").model
    differs = {
        name: bool((module.codes() != basic.get_submodule(name).codes()).any())  # type: ignore[operator]
        for name, module in sequential.named_modules()
        if isinstance(module, QuantizedLinear)
    }
    assert not any(differs[name] for name in differs if ".layers.0." in name)
    assert any(differs[name] for name in differs if ".layers.1." in name)


def test_a_model_in_memory_is_compressed_in_place(llama_dir: Path, tokens_file: Path, w4a16: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype="auto")
    flags = (model.training, model.config.use_cache, torch.get_rng_state().clone())
    result = oneshot(model, recipe=w4a16, dataset=load_file(tokens_file)["input_ids"].long())
    assert result.model is model
    assert result.output_dir is None
    assert (model.training, model.config.use_cache) == flags[:2]
    assert torch.equal(torch.get_rng_state(), flags[2])
    from_folder = oneshot(llama_dir, recipe=w4a16, dataset=tokens_file).model
    assert torch.equal(logits_of(model), logits_of(from_folder))


class Stack(nn.Module):
    """A plain module: repeated blocks, no transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_a_plain_module_with_a_data_loader(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Stack()
    data = torch.rand(32, 10, 128)
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    with torch.no_grad():
        before = model(data)
    oneshot(
        model,
        recipe={"GPTQModifier": {"scheme": "W8A16", "fallback_budget": 9}},
        dataset=loader,
        output_dir=tmp_path / "out",
    )
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 6
    with torch.no_grad():
        after = model(data)
    assert 0 < (after - before).norm() / before.norm() < 0.01
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(model.state_dict())


def test_rounding_needs_no_data(llama_dir: Path) -> None:
    result = oneshot(llama_dir, recipe=recipe("QuantizationModifier", scheme="W4A16"))
    assert result.record["pipeline"] == "data_free"
    assert result.record["data"] is None
    assert len(result.report.modules) == 14
