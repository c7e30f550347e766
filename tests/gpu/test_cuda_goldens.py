"""Goldens on a GPU: a tensor there has a platform of its own, and one that was accepted on the CPU is held to its tier for elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.goldens.golden import Golden, GoldenMismatch, GoldenSettings
from harness.goldens.store.candidates import read_candidate
from harness.goldens.store.provenance import current_platform
from harness.goldens.store.writer import accept
from harness.tolerance import T1

pytestmark = pytest.mark.gpu


def test_a_golden_of_the_cpu_is_held_to_the_tier_for_elsewhere(tmp_path: Path, device: torch.device) -> None:
    def golden(update: str = "") -> Golden:
        return Golden(GoldenSettings(tmp_path / "golden", tmp_path / "cache", update), "t::t")  # type: ignore[arg-type]

    x = torch.randint(-512, 513, (64, 64), generator=torch.Generator().manual_seed(0)).float() / 512
    limits = {"elsewhere": T1(64, at="tensor"), "reason": "a GPU sums in another order", "inputs": {"x": x}}
    writing = golden("new")
    writing.check("product", x @ x, **limits)
    accept(tmp_path / "golden", [read_candidate(Path(writing.outcomes[0]["candidate"]))])
    there = golden()
    there.check("product", x.to(device) @ x.to(device), **limits)
    assert f"checked on {current_platform('cuda')}; held to the tier for elsewhere" in there.outcomes[0]["note"]
    with pytest.raises(GoldenMismatch, match="outputs regressed"):
        golden().check("product", (x.to(device) @ x.to(device)) * 1.001, **limits)
    with pytest.raises(GoldenMismatch, match="outputs regressed"):
        golden().check("product", (x @ x) + 1e-4, **limits)


def test_the_platform_of_a_gpu_names_its_capability() -> None:
    found = current_platform("cuda")
    assert found.device == "cuda"
    assert found.architecture.startswith("sm_")
