"""Faults of a runtime that no file shows, planted one by one in models that are loaded: each is found by the check that is there for it."""

from __future__ import annotations

import itertools
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
from tests.harness.release.conftest import NUM_TOKENS, POLICY, Release, change_steps_on
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


def mask_thrown_away(candidate: Candidate, patch: pytest.MonkeyPatch) -> None:
    """Pads are seen; transformers itself masks them where there is no cache either and positions start again."""
    candidate.wide_model.base_model.register_forward_pre_hook(  # type: ignore[union-attr, operator]
        lambda module, given, options: (given, options | {"attention_mask": None}), with_kwargs=True
    )


def in_steps_on(lengths: Callable[[int], bool]) -> Plant:
    return lambda candidate, patch: change_steps_on(candidate.wide_model, lengths)


def in_our_logits(patch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change what our layers predict."""
    load = generation.load_with_our_layers

    def changed(folder: Path, device: torch.device) -> torch.nn.Module:
        model: Any = load(folder, device=device)
        model.get_output_embeddings().register_forward_hook(lambda module, given, output: change(output))
        return model

    patch.setattr(generation, "load_with_our_layers", changed)


def our_head_shifted(candidate: Candidate, patch: pytest.MonkeyPatch) -> None:
    in_our_logits(patch, lambda logits: logits.roll(1, -1))


def before(first: int, second: int, gap: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Choose the first token everywhere, and the second one but for `gap` of the largest logit."""
    values = torch.tensor([100.0, 100 * (1 - gap)])
    return lambda logits: logits.float().index_copy(2, torch.tensor([first, second]), values.expand(*logits.shape[:2], 2))


def tied(gap: float) -> Plant:
    def plant(candidate: Candidate, patch: pytest.MonkeyPatch) -> None:
        in_logits("model", before(7, 8, gap))(candidate, patch)
        in_our_logits(patch, before(8, 7, gap))

    return plant


def our_fault_behind_a_tie(candidate: Candidate, patch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    in_logits("model", before(7, 8, 0.01))(candidate, patch)
    in_our_logits(patch, lambda logits: before(8 if next(calls) < candidate.num_new else 9, 7, 0.01)(logits))


def saved_otherwise(candidate: Candidate, patch: pytest.MonkeyPatch) -> None:
    save = invariance.save_again

    def lossy(source: Path, target: Path) -> dict[str, bool]:
        options = save(source, target)
        (path,) = target.glob("*.safetensors")
        tensors = load_file(path)
        save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] * 1.5}, path, metadata={"format": "pt"})
        return options

    patch.setattr(invariance, "save_again", lossy)


FAULTS: dict[str, tuple[Plant, str, str]] = {
    "greedy text that is another each time": (in_logits("model", each_time_otherwise()), "generation.greedy", "wrote other tokens"),
    "logits that are not finite": (in_logits("model", lambda logits: logits * torch.nan), "generation.greedy", "are not finite"),
    "a seed that is not kept": (in_logits("model", each_time_otherwise()), "generation.sampled", "wrote other tokens"),
    "one token over and over": (in_logits("model", always(7)), "generation.loops", "ends in 1 tokens over and over"),
    "special token in a text": (in_logits("model", always(TOOL)), "generation.special_tokens", f"token {TOOL}, which is special"),
    "other text from our layers": (our_head_shifted, "generation.runtime", "token 0 is another"),
    "tokens exchanged that are no tie": (tied(0.2), "generation.runtime", "token 0 is another, 2.0e-01 of the largest logit away"),
    "other text behind a tie": (our_fault_behind_a_tie, "generation.runtime", "token 1 is another"),
    "late positions swapped": (in_inputs("model", late_ones_swapped), "generation.long_context", "the last quarter is"),
    "the path of one token": (
        in_inputs("wide_model", lambda hidden: hidden.roll(1, 2) if hidden.shape[1] == 1 else hidden), "invariance.cache", "part by"
    ),
    "mask thrown away": (mask_thrown_away, "invariance.padding_left", "part by"),
    "mask thrown away, pads behind": (mask_thrown_away, "invariance.padding_right", "part by"),
    "caches of 40 tokens and more": (in_steps_on(lambda length: length >= 40), "invariance.cache", "part by"),
    "a cache of the last position": (in_steps_on(lambda length: length == 63), "invariance.cache", "part by"),
    "a cache behind a block of 32": (in_steps_on(lambda length: length == 32), "invariance.cache", "part by"),
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


def planted(made: Release, plant: Plant, patch: pytest.MonkeyPatch, *, new_tokens: int = 16) -> Candidate:
    rows = load_file(made.dataset)["input_ids"].tolist()
    policy = POLICY.model_copy(update={"generation": POLICY.generation.model_copy(update={"new_tokens": new_tokens})})
    candidate = Candidate(made.base, made.compressed, policy, rows, torch.device("cpu"), seed=0)
    plant(candidate, patch)
    return candidate


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_of_a_runtime_is_found_by_the_check_that_is_there_for_it(
    name: str, made: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, check, told = FAULTS[name]
    new_tokens = 4 if check == "generation.runtime" else 16  # each tie is written again from there on
    record = CHECKS[check].record(planted(made, plant, monkeypatch, new_tokens=new_tokens))
    assert record.outcome is Outcome.FAIL, record.summary
    assert any(told in finding for finding in record.findings), record.findings


@pytest.mark.parametrize(
    ("rounds", "gap", "limit", "outcome"),
    [(True, 0.05, "1.0e-01", Outcome.PASS), (False, 0.02, "3.1e-02", Outcome.PASS), (False, 0.05, "3.1e-02", Outcome.FAIL)],
)
def test_two_runtimes_may_choose_otherwise_at_a_tie(
    made: Release, monkeypatch: pytest.MonkeyPatch, rounds: bool, gap: float, limit: str, outcome: Outcome
) -> None:
    """The checkpoint rounds keys and values; without that, a step of bfloat16 is what two runtimes may part by."""
    candidate = planted(made, tied(gap), monkeypatch, new_tokens=4)
    candidate.prompts = candidate.prompts[:1]
    if not rounds:
        monkeypatch.setattr(generation, "rounding_modules", lambda model: {})
    record = CHECKS["generation.runtime"].record(candidate)
    assert record.outcome is outcome and record.limit == f"<= {limit} of the largest logit between two tokens"
    assert record.evidence["ties"] == (4 if outcome is Outcome.PASS else 0)
    assert ("but for 4 at a tie" if outcome is Outcome.PASS else f"token 0 is another, {gap:.1e} of the largest") in record.summary


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
