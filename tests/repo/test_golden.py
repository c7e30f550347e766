"""The data in golden/ is whole and small: tests that need it skip where it is missing, so here its absence is a failure."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
from safetensors import safe_open

_REFERENCE = ("README.md", "arrays.json", "config.json", "quality.json", "recipe.yaml", "tokenizer.json", "training.json")


@pytest.mark.parametrize("name", [*_REFERENCE, "model.safetensors", "calibration.safetensors", "heldout.safetensors"])
def test_the_reference_model_is_complete(repo_root: Path, name: str) -> None:
    assert (repo_root / "golden" / "reference" / name).is_file()


@pytest.mark.parametrize("name", ["opt", "qwen3_moe"])
@pytest.mark.parametrize("file", ["training.json", "model.safetensors", "calibration.safetensors", "heldout.safetensors"])
def test_the_judging_models_are_complete_and_small(repo_root: Path, name: str, file: str) -> None:
    assert 0 < (repo_root / "golden" / "judges" / name / file).stat().st_size <= 8_000_000


def test_the_reference_model_is_small_and_bf16(reference_model: Path) -> None:
    path = reference_model / "model.safetensors"
    assert path.stat().st_size <= 12_000_000
    with safe_open(path, "pt") as weights:
        slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118 (no mapping)
        assert {tensor.get_dtype() for tensor in slices.values()} == {"BF16"}
        num_parameters = sum(prod(tensor.get_shape()) for tensor in slices.values())
    assert 4_000_000 <= num_parameters <= 6_000_000


def test_nobody_put_a_large_file_into_golden(repo_root: Path) -> None:
    assert sum(path.stat().st_size for path in (repo_root / "golden").rglob("*") if path.is_file()) <= 32_000_000
