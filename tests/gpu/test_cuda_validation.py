"""Validation on a GPU: both models run there, and its verdict is the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor import oneshot
from harness.validation.compare import validate

pytestmark = pytest.mark.gpu

REFERENCE = Path(__file__).parents[2] / "golden" / "reference"


def test_the_verdict_is_that_of_the_cpu(tmp_path: Path) -> None:
    recipe = {"s_stage": {"s_modifiers": {"QuantizationModifier": {"scheme": "W4A16", "targets": ["Linear"], "ignore": ["lm_head"]}}}}
    oneshot(str(REFERENCE), recipe=recipe, output_dir=str(tmp_path / "w4"), device="cpu")
    here, there = (
        validate(REFERENCE, tmp_path / "w4", REFERENCE / "heldout.safetensors", device=device, num_samples=32) for device in ("cpu", "cuda")
    )
    assert [(record.name, record.outcome) for record in here.records] == [(record.name, record.outcome) for record in there.records]
    assert there.quality.kl.estimate == pytest.approx(here.quality.kl.estimate, rel=0.02)
