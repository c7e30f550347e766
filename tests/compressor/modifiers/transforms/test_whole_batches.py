"""Models that take whole batches only, and such that a short one changes: both are run on parts of batches, and on made-up ones"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from compressor import oneshot
from compressor.errors import ModelError
from tests import tiny

CODEBOOKS, WIDTH = 4, 32
INT8 = {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}}, "ignore": ["head"]}
RECIPES: dict[str, dict[str, Any]] = {
    "awq": {"AWQModifier": {"n_grid": 3}, "QuantizationModifier": INT8},
    "smoothquant": {"SmoothQuantModifier": {}, "QuantizationModifier": INT8},
    "gptq": {"GPTQModifier": INT8},
    "wanda": {"WandaPruningModifier": {"sparsity": 0.5, "ignore": ["head"]}},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Codebooks(nn.Module):
    """Every sequence is a row for each codebook, as in MusicGen; short ones switch it over for good, as they do BigBird."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(64, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64)
        self.kind = "sparse"

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).view(-1, CODEBOOKS, input_ids.shape[1], WIDTH).sum(1)
        if input_ids.shape[1] < 24:
            self.kind = "full"
        for layer in self.layers:
            x = layer(x) * (1.0 if self.kind == "full" else 0.5)
        return self.head(self.norm(x))


@pytest.mark.parametrize("name", RECIPES)
def test_rows_that_belong_together_are_not_parted(name: str) -> None:
    draw = torch.Generator().manual_seed(1)
    batches = [{"input_ids": torch.randint(64, (2 * CODEBOOKS, length), generator=draw)} for length in (32, 40, 28)]
    model = Codebooks().eval()
    result = oneshot(model, recipe=RECIPES[name], dataset=DataLoader(batches, batch_size=None))  # type: ignore[call-overload]
    assert {f"layers.{index}.{part}" for index in range(2) for part in ("up", "down")} <= result.report.modules.keys()
    assert model.kind == "sparse"  # no part of a batch that was shorter has been left to change it


class Switching(LlamaForCausalLM):
    """A short batch changes it for good; `together` rows belong together."""

    kind, together = "sparse", 1

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        input_ids.view(-1, self.together, input_ids.shape[1])
        self.kind = self.kind if input_ids.shape[1] > 40 else "full"
        return super().forward(input_ids, **kwargs)


@pytest.mark.parametrize("name", ["QuIPModifier", "SpinQuantModifier"])
def test_batches_that_are_made_leave_the_model_as_it_was(name: str) -> None:
    model = Switching(tiny.llama().config).eval()
    settings = {"QuIPModifier": {"targets": ["Linear"], "ignore": ["lm_head"]}, "SpinQuantModifier": {"rotations": ["R4"]}}[name]
    oneshot(model, recipe={name: settings, "QuantizationModifier": {**INT8, "ignore": ["lm_head"]}})
    assert model.kind == "sparse"


def test_what_cannot_be_made_names_the_pipeline_that_reads_the_data() -> None:
    model = Switching(tiny.llama().config).eval()
    model.together = CODEBOOKS
    recipe = {"QuIPModifier": {"targets": ["Linear"], "ignore": ["lm_head"]}, "QuantizationModifier": {**INT8, "ignore": ["lm_head"]}}
    data = [{"input_ids": torch.zeros(CODEBOOKS, 48, dtype=torch.long)}]
    advice = r"QuIPModifier\[0\]: Switching: cannot run a text batch .*; give a dataset and pipeline='basic', which reads it"
    with pytest.raises(ModelError, match=advice):
        oneshot(model, recipe=recipe, dataset=DataLoader(data, batch_size=None))  # type: ignore[call-overload]
    assert oneshot(model, recipe=recipe, dataset=DataLoader(data, batch_size=None), pipeline="basic").report.modules  # type: ignore[call-overload]
