"""On the trained model quantization shows: GPTQ predicts held-out text better than rounding, sequence by sequence, beyond its interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from compressor import oneshot
from compressor.nn import QuantizedLinear

NUM_HELDOUT, NUM_CALIBRATION = 24, 24


def losses(model: nn.Module, heldout: Tensor) -> Tensor:
    """Mean loss of each sequence, in nats per token."""
    result = []
    with torch.no_grad():
        for ids in heldout.split(8):
            scores = model(ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
            result.append(-scores.gather(-1, ids[:, 1:, None]).squeeze(-1).mean(1))
    return torch.cat(result).double()


def interval(difference: Tensor) -> tuple[float, float]:
    """95 % interval of the mean."""
    half = 1.96 * difference.std() / len(difference) ** 0.5
    return float(difference.mean() - half), float(difference.mean() + half)


def compressed(model: Path | nn.Module, name: str, **settings: Any) -> nn.Module:
    recipe = {"quant_stage": {"quant_modifiers": {name: {"ignore": ["lm_head"], "scheme": "W4A16"}}}}
    return oneshot(model, recipe=recipe, **settings).model


def loaded(folder: Path) -> nn.Module:
    """In float32: the arithmetic of bfloat16 takes many times as long on most CPUs."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.nightly
def test_gptq_beats_rounding_and_both_cost_something(reference_model: Path) -> None:
    heldout = load_file(reference_model / "heldout.safetensors")["input_ids"][:NUM_HELDOUT].long()
    data = {"dataset": reference_model / "calibration.safetensors", "num_calibration_samples": NUM_CALIBRATION}
    base = losses(loaded(reference_model), heldout)
    rounded = losses(compressed(loaded(reference_model), "QuantizationModifier"), heldout)
    solved = losses(compressed(loaded(reference_model), "GPTQModifier", **data), heldout)
    assert base.mean() < 3.0  # it has learned: a guess among 2,048 tokens costs 7.6 nats
    assert interval(rounded - base)[0] > 0
    assert interval(solved - rounded)[1] < 0


@pytest.mark.nightly
def test_the_split_into_batches_changes_no_code_of_the_trained_model(reference_model: Path) -> None:
    models = [
        compressed(
            reference_model,
            "GPTQModifier",
            dataset=reference_model / "calibration.safetensors",
            num_calibration_samples=12,
            batch_size=batch_size,
        )
        for batch_size in (1, 5)
    ]
    one, other = ([layer.codes() for layer in model.modules() if isinstance(layer, QuantizedLinear)] for model in models)
    assert len(one) == 42
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
