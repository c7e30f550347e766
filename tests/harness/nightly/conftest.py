"""What the tests of nights share: a project with a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from harness.goldens.tiny_model import build_tiny_model

RECIPE = "quant_stage:\n  quant_modifiers:\n    QuantizationModifier: {targets: [Linear], ignore: [lm_head], scheme: W8A8}\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, data and a recipe."""
    folder = tmp_path_factory.mktemp("project")
    build_tiny_model().save_pretrained(folder / "tiny")
    generator = torch.Generator().manual_seed(0)
    for name in ("calibration", "held_out"):
        save_file({"input_ids": torch.randint(0, 128, (24, 16), generator=generator)}, folder / f"{name}.safetensors")
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder
