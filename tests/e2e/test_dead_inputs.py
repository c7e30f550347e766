"""A ReLU model, of which some hidden units never fire on the calibration data, goes through GPTQ as any other model does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor import oneshot
from compressor.errors import CalibrationError
from compressor.nn import QuantizedLinear
from tests import tiny

FC2 = "model.decoder.layers.1.fc2"
IDS = torch.randint(0, 256, (16, 48), generator=torch.Generator().manual_seed(3))


def opt(num_dead: int, value: float = -100.0) -> Any:
    """An OPT of two layers; the first units of the last layer's ReLU never fire."""

    model = tiny.opt(vocab_size=256, hidden_size=128, ffn_dim=256, word_embed_proj_dim=128, dropout=0.0)
    model.get_submodule("model.decoder.layers.1.fc1").bias.data[:num_dead] = value
    return model.eval()


def recipe(modifier: str, **settings: Any) -> dict[str, Any]:
    return {"quant_stage": {"quant_modifiers": {modifier: {"ignore": ["lm_head"], **settings}}}}


@pytest.mark.parametrize("num_dead", [73, 200])
@pytest.mark.parametrize(
    "settings",
    [{"scheme": "W4A16"}, {"scheme": "W4A16", "solver": "reference"}, {"scheme": "W8A8"}, {"scheme": "FP8"}, {"scheme": "NVFP4A16"}],
    ids=lambda settings: "-".join(settings.values()),
)
def test_relu_units_that_never_fire_are_rounded_and_noted(num_dead: int, settings: dict[str, Any], tmp_path: Path) -> None:
    result = oneshot(opt(num_dead), recipe=recipe("GPTQModifier", **settings), dataset=IDS, output_dir=tmp_path / "out")
    assert result.report.fallbacks == []
    record = json.loads((tmp_path / "out" / "compression.json").read_text())
    assert record["modules"][FC2]["details"]["dead_columns"] == num_dead
    assert [f"({FC2} most of them, {num_dead})" in note for note in record["notes"]] == [True]
    layer, weight = result.model.get_submodule(FC2), opt(num_dead).get_submodule(FC2).weight.detach()
    assert isinstance(layer, QuantizedLinear)
    error = (layer.dequantized_weight() - weight)[:, :num_dead].square().sum() / weight[:, :num_dead].square().sum()
    assert 0 < float(error) < 0.03


def test_they_fire_on_other_data_about_as_well_as_rounded_weights_do() -> None:
    found = {}
    for modifier in ("GPTQModifier", "QuantizationModifier"):
        layer = oneshot(opt(73), recipe=recipe(modifier, scheme="W4A16"), dataset=IDS).model.get_submodule(FC2)
        x = torch.zeros(64, 256)
        x[:, :73] = torch.rand(64, 73, generator=torch.Generator().manual_seed(1))
        exact = x @ opt(73).get_submodule(FC2).weight.detach().t()
        found[modifier] = float((x @ layer.dequantized_weight().t() - exact).square().sum() / exact.square().sum())
    assert found["GPTQModifier"] < 1.5 * found["QuantizationModifier"] < 0.05  # its scales were searched for the live columns


def test_a_layer_whose_whole_input_is_dead_is_a_fallback() -> None:
    with pytest.raises(
        CalibrationError, match=rf"{FC2}: its input was zero, or below 1e-22, on all 768 calibration tokens; .*fallback_budget=0"
    ):
        oneshot(opt(256), recipe=recipe("GPTQModifier", scheme="W4A16"), dataset=IDS)
    result = oneshot(opt(256), recipe=recipe("GPTQModifier", scheme="W4A16", fallback_budget=1), dataset=IDS)
    assert [(one.module, one.kind) for one in result.report.fallbacks] == [(FC2, "dead_input")]
    with pytest.raises(CalibrationError, match=rf"{FC2}: its input was zero on every calibration token, and a static range"):
        oneshot(opt(256), recipe=recipe("QuantizationModifier", scheme="FP8"), dataset=IDS)
