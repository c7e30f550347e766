"""Experts of Llama 4, which are handed one weighted copy of the tokens each: taken apart, calibrated on their own tokens, read back."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor import GPTQModifier, QuantizationModifier, REAPPruningModifier, load_compressed, oneshot
from compressor.errors import ModelError
from compressor.mappings import find_pairs
from compressor.model.experts.unfuse import unfused_experts
from compressor.nn.experts import SortedExperts
from harness.traceability.architectures import zoo

IDS = torch.randint(3, 128, (4, 12), generator=torch.Generator().manual_seed(0))
INT4 = {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 16}}}
REST = {"ignore": ["lm_head", "re:.*router$"]}


def llama4() -> Any:
    return zoo()["llama4"].build(0)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def test_taken_apart_it_computes_the_same_and_each_expert_sees_its_own_tokens() -> None:
    model = llama4()
    before, seen = logits(model), {}
    with unfused_experts(model, hold=True) as unfused:
        layers = {name: module for name, module in model.named_modules() if isinstance(module, SortedExperts)}
        assert layers and unfused.modules.keys() == layers.keys()
        for name, layer in layers.items():
            for index, expert in enumerate(layer.experts()):
                expert.register_forward_hook(lambda one, args, out, key=(name, index): seen.update({key: (one.token_rows, args[0])}))
        assert torch.allclose(logits(model), before, rtol=1e-5, atol=1e-6)
        for name, layer in layers.items():
            rows = [seen[name, index][0].rows for index, _ in enumerate(layer.experts())]
            assert sum(map(len, rows)) == IDS.numel() * model.config.num_experts_per_tok
            assert all(seen[name, index][1].any(-1).all() for index in range(len(rows)))
        assert find_pairs(model, {"input_ids": IDS}, torch.device("cpu")).pairs
        unfused.restore()
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    "recipe",
    [GPTQModifier(config_groups=INT4, fallback_budget=99, **REST), QuantizationModifier(scheme="W8A8", **REST)],
    ids=["GPTQ", "W8A8"],
)
def test_quantized_experts_are_read_back_by_both_readers(recipe: Any, tmp_path: Path) -> None:
    model = llama4()
    shared = nullcontext() if isinstance(recipe, GPTQModifier) else pytest.warns(UserWarning, match="share one scale of their inputs")
    with shared:  # a warning that it does not load were an error
        result = oneshot(model, recipe=recipe, dataset=IDS, output_dir=tmp_path / "out")
    records = {name: record for name, record in result.report.modules.items() if ".experts." in name}
    assert len(records) == 3 * sum(len(list(one.experts())) for one in model.modules() if isinstance(one, SortedExperts))
    if isinstance(recipe, GPTQModifier):
        tokens = sum(record.num_tokens or 0 for name, record in records.items() if name.endswith("1.feed_forward.experts.0.up_proj"))
        assert 0 < tokens < IDS.numel()
    assert torch.equal(logits(load_compressed(tmp_path / "out", device="cpu")), logits(model))
    theirs = logits(type(model).from_pretrained(tmp_path / "out"))
    torch.testing.assert_close(theirs, logits(model), rtol=0, atol=1e-6)  # in bits where their layers' kernels add up as ours do
    assert torch.equal(model(input_ids=IDS, use_cache=False).logits.detach(), logits(model))  # where gradients are on, too


@pytest.mark.parametrize(
    ("recipe", "settings", "why"),
    [
        (REAPPruningModifier(sparsity=0.5), {}, "tokens that its router has weighted already"),
        (QuantizationModifier(scheme="FP8", **REST), {"calibrate_all_experts": True}, "handed tokens that are weighted for each expert"),
    ],
    ids=["REAP", "all tokens"],
)
def test_what_needs_the_tokens_of_others_is_refused(recipe: Any, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        oneshot(llama4(), recipe=recipe, dataset=IDS, **settings)
