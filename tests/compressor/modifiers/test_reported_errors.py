"""The error that a report gives of a module is that of the weight its layer multiplies with, whatever the format and the model's dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compressor import oneshot
from tests import tiny

IDS = torch.randint(0, 96, (8, 12), generator=torch.Generator().manual_seed(0))
NAME = "model.layers.0.self_attn.q_proj"  # its input is the embedding's, which nothing changes


def weight_error(wanted: Tensor, found: Tensor, inputs_NC: Tensor) -> float:
    del inputs_NC
    return float((wanted - found).square().sum() / wanted.square().sum())


def output_error(wanted: Tensor, found: Tensor, inputs_NC: Tensor) -> float:
    return weight_error(inputs_NC @ wanted.t(), inputs_NC @ found.t(), inputs_NC)


MODIFIERS: dict[str, tuple[dict[str, Any], Any]] = {
    "QuantizationModifier": ({}, weight_error),
    "AutoRoundModifier": ({"iters": 2}, weight_error),
    "GPTQModifier": ({}, output_error),
}
SCHEMES = ["W4A16_ASYM", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16", "MXFP8A16"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("modifier", MODIFIERS)
def test_the_reported_error_is_that_of_the_weight_in_use(modifier: str, scheme: str, dtype: torch.dtype) -> None:
    settings, error = MODIFIERS[modifier]
    model = tiny.llama(vocab_size=96, hidden_size=128, initializer_range=0.2).to(dtype)
    with torch.no_grad():  # equal weights are exact in codes, and all of their error comes from how scales are read
        model.get_submodule(NAME).weight[:8] = 0.37
    wanted, seen = model.get_submodule(NAME).weight.detach().double(), []
    with model.get_submodule(NAME).register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1).double())), torch.no_grad():
        model(IDS)
    recipe = {modifier: {"targets": [NAME], "scheme": scheme, **settings}}
    result = oneshot(model, recipe=recipe, dataset=None if modifier == "QuantizationModifier" else IDS)
    found = result.model.get_submodule(NAME).dequantized_weight().double()
    assert result.report.modules[NAME].error == pytest.approx(error(wanted, found, seen[0]), rel=2e-4)
