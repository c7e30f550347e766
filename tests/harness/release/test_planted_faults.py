"""Faults of a runtime that no file shows, planted one by one in models that are loaded: each is found by the check that is there for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import one_hot

from harness.release import generation, invariance
from harness.release.candidate import Candidate
from harness.reporting.verdict import Outcome
from tests.harness.release.conftest import NUM_TOKENS, POLICY, Release
from tests.harness.release.test_planted_defects import DEFECTS

CHECKS = {check.claim.name: check for check in (*generation.CHECKS, *invariance.CHECKS)}
TOOL, LATE = NUM_TOKENS - 1, 40
Plant = Callable[[Candidate, pytest.MonkeyPatch], Any]


def in_logits(role: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """Change what a model of the candidate predicts."""

    def plant(candidate: Candidate, patch: pytest.MonkeyPatch) -> None:
        getattr(candidate, role).get_output_embeddings().register_forward_hook(lambda module, given, output: change(output))

    return plant


def in_inputs(role: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """Change what a model of the candidate makes of tokens [B, T]."""

    def plant(candidate: Candidate, patch: pytest.MonkeyPatch) -> None:
        getattr(candidate, role).get_input_embeddings().register_forward_hook(lambda module, given, output: change(output))

    return plant


def always(token: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda logits: logits + 100 * one_hot(torch.tensor(token), NUM_TOKENS).to(logits)


def each_time_otherwise() -> Callable[[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda logits: logits + 5 * torch.randn(logits.shape, generator=generator).to(logits)


def late_ones_swapped(hidden: torch.Tensor) -> torch.Tensor:
    return torch.cat([hidden[:, :LATE], hidden[:, LATE:].flip(1)], dim=1)


def our_head_shifted(candidate: Candidate, patch: pytest.MonkeyPatch) -> None:
    load = generation.load_with_our_layers

    def shifted(folder: Path, device: torch.device) -> torch.nn.Module:
        model: Any = load(folder, device=device)
        model.get_output_embeddings().register_forward_hook(lambda module, given, output: output.roll(1, -1))
        return model

    patch.setattr(generation, "load_with_our_layers", shifted)


def saved_otherwise(candidate: Candidate, patch: pytest.MonkeyPatch) -> None:
    save = invariance.save_again

    def lossy(source: Path, target: Path) -> None:
        save(source, target)
        (path,) = target.glob("*.safetensors")
        tensors = load_file(path)
        save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] * 1.5}, path, metadata={"format": "pt"})

    patch.setattr(invariance, "save_again", lossy)


FAULTS: dict[str, tuple[Plant, str, str]] = {
    "greedy text that is another each time": (in_logits("model", each_time_otherwise()), "generation.greedy", "wrote other tokens"),
    "logits that are not finite": (in_logits("model", lambda logits: logits * torch.nan), "generation.greedy", "are not finite"),
    "a seed that is not kept": (in_logits("model", each_time_otherwise()), "generation.sampled", "wrote other tokens"),
    "one token over and over": (in_logits("model", always(7)), "generation.loops", "ends in 1 tokens over and over"),
    "special token in a text": (in_logits("model", always(TOOL)), "generation.special_tokens", f"token {TOOL}, which is special"),
    "other text from our layers": (our_head_shifted, "generation.runtime", "token 0 is another"),
    "late positions swapped": (in_inputs("model", late_ones_swapped), "generation.long_context", "the last quarter is"),
    "the path of one token": (
        in_inputs("wide_model", lambda hidden: hidden.roll(1, 2) if hidden.shape[1] == 1 else hidden), "invariance.cache", "part by"
    ),
    "a prompt that sees its neighbours": (
        in_inputs("wide_model", lambda hidden: hidden + hidden.mean(0)), "invariance.batch", "part by"
    ),
    "padding behind a prompt that leaks": (
        in_inputs("wide_model", lambda hidden: hidden + hidden.mean(1, keepdim=True)), "invariance.padding_right", "part by"
    ),
    "another model in float32": (in_logits("wide_model", torch.neg), "invariance.dtype", "part by"),
    "saved otherwise than loaded": (saved_otherwise, "reload.logits", "logits are others"),
}  # fmt: skip
"""Name to how it is planted, the check that must find it, and what it says."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_of_a_runtime_is_found_by_the_check_that_is_there_for_it(
    name: str, made: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, check, told = FAULTS[name]
    rows = load_file(made.dataset)["input_ids"].tolist()
    candidate = Candidate(made.base, made.compressed, POLICY, rows, torch.device("cpu"), seed=0)
    plant(candidate, monkeypatch)
    record = CHECKS[check].record(candidate)
    assert record.outcome is Outcome.FAIL, record.summary
    assert any(told in finding for finding in record.findings), record.findings


def test_the_chapter_lists_all_that_was_planted_beside_its_check() -> None:
    chapter = (Path(__file__).parents[3] / "harness" / "release" / "README.md").read_text(encoding="utf-8")
    section = chapter.partition("## What was planted to test it")[2].partition("\n## ")[0]
    listed = {
        (" ".join(name.split()), check)
        for check, names in re.findall(r"^- `([a-z_.0-9]+)`: (.*?)(?=^- |^\Z)", section + "\n", re.MULTILINE | re.DOTALL)
        for name in names.split(";")
    }
    planted = {(name, check) for name, (_, check) in DEFECTS.items()} | {(name, check) for name, (_, check, _) in FAULTS.items()}
    assert listed == planted and f"{len(planted)} kinds of defects" in section
