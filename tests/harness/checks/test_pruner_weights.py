"""Pruners that are right but for one kind of weight: every kind that the protocol names is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import harness
from harness.checks.protocols import Pruner
from harness.reporting.verdict import Outcome, Verdict

Prune = Callable[[Tensor, Tensor], Tensor]


def row_mask(score: Tensor) -> Tensor:
    mask = torch.ones_like(score, dtype=torch.bool)
    return mask.scatter_(1, score.abs().sort(dim=1, stable=True).indices[:, : score.shape[1] // 2], False)


def block_mask(score: Tensor) -> Tensor:
    blocks = score.abs().reshape(-1, 4)
    return torch.ones_like(blocks, dtype=torch.bool).scatter_(1, blocks.sort(dim=1, stable=True).indices[:, :2], False).reshape(score.shape)


def kept(weight: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, weight, torch.zeros_like(weight))


def rows(weight: Tensor) -> Tensor:
    return kept(weight, row_mask(weight))


def blocks(weight: Tensor) -> Tensor:
    return kept(weight, block_mask(weight))


def is_square(weight: Tensor) -> bool:
    return weight.shape[0] == weight.shape[1]


def garbage(weight: Tensor) -> Tensor:
    """Reads memory as if it lay row by row."""
    return torch.as_strided(weight, weight.shape, (weight.shape[1], 1), weight.storage_offset()).clone()


def cached(key: Callable[[Tensor, Tensor], Any], mask: Callable[[Tensor], Tensor] = row_mask) -> Callable[[], Prune]:
    def make() -> Prune:
        masks: dict[Any, Tensor] = {}
        return lambda w, h: kept(w, masks.setdefault(key(w, h), mask(w)))

    return make


def middle_mirrored(weight: Tensor, hessian: Tensor) -> Tensor:
    mask = row_mask(weight)
    if len(weight) > 8:
        mask[len(weight) // 2] = mask[len(weight) // 2].flip(0)
    return kept(weight, mask)


def last_mask() -> Prune:
    """As a cache of one entry."""
    masks: dict[Any, Tensor] = {}

    def prune(weight: Tensor, hessian: Tensor) -> Tensor:
        key = weight.data_ptr(), tuple(weight.shape), weight.dtype
        if key not in masks:
            masks.clear()
        return kept(weight, masks.setdefault(key, row_mask(weight)))

    return prune


def cached_statistic() -> Prune:
    norms: dict[tuple[int, int], Tensor] = {}
    return lambda w, h: kept(w, row_mask(w * norms.setdefault((h.data_ptr(), len(h)), h.diagonal().sqrt().clone())))


def simple(function: Callable[[Tensor], Tensor]) -> Callable[[], Prune]:
    return lambda: lambda w, h: function(w)


ROWS = {
    "square, by columns": simple(lambda w: kept(w, row_mask(w.T.contiguous()).T) if is_square(w) else rows(w)),
    "tall, keeps the smallest": simple(lambda w: kept(w, ~row_mask(w)) if w.shape[0] > w.shape[1] and w.shape[1] % 2 == 0 else rows(w)),
    "rows after 128": simple(lambda w: torch.cat([rows(w[:128]), w[128:]])),
    "rows after 128 from the other end": simple(lambda w: torch.cat([rows(w[:128]), kept(w[128:], ~row_mask(w[128:]))])),
    "500 columns": simple(lambda w: rows(w) if w.shape[1] < 500 else w.clone()),
    "500 columns, the smallest kept": simple(lambda w: rows(w) if w.shape[1] < 500 else kept(w, ~row_mask(w))),
    "views": simple(lambda w: rows(w) if w.is_contiguous() else w.clone()),
    "views, read as they lie": simple(lambda w: rows(garbage(w))),
    "zeros give NaN": simple(lambda w: rows(w) if w.abs().max() > 0 else w * float("nan")),
    "a row of zeros gives NaN": simple(lambda w: rows(w) if bool((w.abs().amax(1) > 0).all()) else rows(w) / w.abs().amax(1, keepdim=True)),
    "large ones give infinity": simple(lambda w: rows(w) if w.abs().max() < 1e30 else w * float("inf")),
    "large ones by their squares": simple(lambda w: kept(w, row_mask(w.float() ** 2))),
    "subnormal ones are kept": simple(lambda w: rows(w) if w.abs().max() > 1e-37 else w.clone()),
    "subnormal ones are flushed": simple(lambda w: rows(w.masked_fill(w.abs() < 1.2e-38, 0))),
    "one column is doubled": simple(lambda w: rows(w) if w.shape[1] > 1 else w * 2),
    "one row is doubled": simple(lambda w: rows(w) if w.shape[0] > 1 else w * 2),
    "bfloat16 keeps the smallest": simple(lambda w: rows(w) if w.dtype != torch.bfloat16 else kept(w, ~row_mask(w))),
    "of float16 the square is not pruned": simple(lambda w: rows(w) if w.dtype != torch.float16 or w.shape[0] != 1 else w.clone()),
    "a constant is kept": simple(lambda w: w.clone() if bool((w == w[0, 0]).all()) and w.numel() > 1 else rows(w)),
    "negative ones are kept": simple(lambda w: w.clone() if bool((w < 0).all()) and w.numel() > 1 else rows(w)),
    "the last column stays": simple(lambda w: torch.cat([rows(w)[:, :-1], w[:, -1:]], 1) if w.shape[1] > 8 else rows(w)),
    "the middle row, mirrored": lambda: middle_mirrored,
    "one mask per shape": cached(lambda w, h: tuple(w.shape)),
    "one mask per shape and dtype": cached(lambda w, h: (tuple(w.shape), w.dtype)),
    "the last mask of an address": last_mask,
    "one mask per address": cached(lambda w, h: (w.data_ptr(), w._version, tuple(w.shape), w.dtype)),
    "one mask per first row": cached(lambda w, h: (tuple(w.shape), w.dtype, tuple(w[0].tolist()))),
    "one statistic per address": cached_statistic,
}  # fmt: skip
BLOCKS = {
    "square, by columns": simple(lambda w: kept(w, block_mask(w.T.contiguous()).T) if is_square(w) else blocks(w)),
    "500 columns": simple(lambda w: blocks(w) if w.shape[1] < 500 else w.clone()),
    "rows after 128": simple(lambda w: torch.cat([blocks(w[:128]), w[128:]])),
    "views": simple(lambda w: blocks(w) if w.is_contiguous() else w.clone()),
    "views, read as they lie": simple(lambda w: blocks(garbage(w))),
    "one mask per shape": cached(lambda w, h: tuple(w.shape), block_mask),
    "the last block keeps the smallest": simple(lambda w: torch.cat([blocks(w[:, :-4]), kept(w[:, -4:], ~block_mask(w[:, -4:]))], 1)),
    "the last block of a long row": simple(lambda w: blocks(w) if w.shape[1] < 1000 else torch.cat([blocks(w[:, :-4]), w[:, -4:]], 1)),
}
RIGHT: dict[str, tuple[Prune, dict[str, Any]]] = {
    "rows": (lambda w, h: rows(w), {}),
    "blocks": (lambda w, h: blocks(w), {"pattern": (2, 4)}),
    "Wanda": (lambda w, h: kept(w, row_mask(w.float() * h.diagonal().sqrt())), {}),
    "Wanda of blocks": (lambda w, h: kept(w, block_mask(w.float() * h.diagonal().sqrt())), {"pattern": (2, 4)}),
    "a third": (lambda w, h: w.scatter(1, w.abs().argsort(dim=1, stable=True)[:, : w.shape[1] // 3], 0.0), {"sparsity": 1 / 3}),
}  # fmt: skip


def of_inputs(weight: Tensor, norms: Tensor, pattern: tuple[int, int] | None) -> Tensor:
    """Wanda."""
    score = weight.float() * norms
    return kept(weight, block_mask(score) if pattern else row_mask(score))


# Where a pruner that reads the Hessian looks at weights alone.
FORGETS: dict[str, Callable[[Tensor, Tensor], bool]] = {
    "bfloat16": lambda w, norms: w.dtype == torch.bfloat16,
    "float16": lambda w, norms: w.dtype == torch.float16,
    "one row": lambda w, norms: len(w) == 1,
    "one row of float16": lambda w, norms: len(w) == 1 and w.dtype == torch.float16,
    "few rows": lambda w, norms: len(w) < 8,
    "more than 128 rows": lambda w, norms: len(w) > 128,
    "more than 64 columns": lambda w, norms: w.shape[1] > 64,
    "more than 500 columns": lambda w, norms: w.shape[1] > 500,
    "a square": lambda w, norms: is_square(w),
    "a row of zeros": lambda w, norms: bool((w == 0).all(1).any()),
    "zeros, but no row of them": lambda w, norms: bool((w == 0).any()) and not bool((w == 0).all(1).any()),
    "none below zero": lambda w, norms: bool((w >= 0).all()),
    "a dead input": lambda w, norms: bool((norms == 0).any()),
}
# What becomes of the norms of a dead input.
DEAD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "infinity": lambda w, norms: norms.masked_fill(norms == 0, torch.inf),
    "a large one": lambda w, norms: norms.masked_fill(norms == 0, 100 * float(norms.amax())),
}


@pytest.mark.parametrize("pattern", [None, (2, 4)])
@pytest.mark.parametrize("what", FORGETS)
def test_a_pruner_that_forgets_the_inputs_of_one_kind_of_weight_is_told(what: str, pattern: tuple[int, int] | None) -> None:
    def prune(weight: Tensor, hessian: Tensor) -> Tensor:
        norms = hessian.diagonal().sqrt()
        return of_inputs(weight, torch.ones_like(norms) if FORGETS[what](weight, norms) else norms, pattern)

    subject = Pruner(prune, pattern=pattern, tags=frozenset({"reads_hessian"}))
    (record,) = harness.check(subject, checks=["sparsifier.inputs_count"], draws=False).records
    assert record.outcome is Outcome.FAIL and "the sizes of inputs do not count as they should" in record.summary, record.summary


@pytest.mark.parametrize("pattern", [None, (2, 4)])
@pytest.mark.parametrize("what", DEAD)
def test_a_pruner_that_takes_a_dead_input_for_another_is_told(what: str, pattern: tuple[int, int] | None) -> None:
    """One that does not say that it reads the Hessian, too."""
    subject = Pruner(lambda w, h: of_inputs(w, DEAD[what](w, h.diagonal().sqrt()), pattern), pattern=pattern)
    (record,) = harness.check(subject, checks=["sparsifier.inputs_count"], draws=False).records
    assert record.outcome is Outcome.FAIL and "of a dead input, is kept" in record.summary, record.summary


@pytest.mark.parametrize("second_order", [False, True])
def test_a_floor_under_small_inputs_is_told(second_order: bool) -> None:
    def prune(weight: Tensor, hessian: Tensor) -> Tensor:
        return kept(weight, row_mask(weight.double().abs() * hessian.diagonal().double().clamp_min(floor).sqrt()))

    for floor, outcome in ((0.0, Outcome.PASS), (1e-6, Outcome.FAIL)):
        pruner = Pruner(prune, tags=frozenset({"reads_hessian"}), second_order=second_order)
        (record,) = harness.check(pruner, checks=["sparsifier.inputs_count"], draws=False).records
        assert record.outcome is outcome and ("2^-13 times the inputs" in record.summary) is bool(floor), record.summary


def test_a_pruner_that_gives_nan_beside_a_dead_input_is_told() -> None:
    def prune(weight: Tensor, hessian: Tensor) -> Tensor:
        return rows(weight) / (1.0 if bool((hessian.diagonal() > 0).all()) else torch.nan)

    (record,) = harness.check(Pruner(prune), checks=["sparsifier.inputs_count"], draws=False).records
    assert record.outcome is Outcome.FAIL and "a value is not finite" in record.summary, record.summary


SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as Wanda": lambda w, h: w.double().abs() * h.diagonal().double().sqrt(),
    "squared": lambda w, h: w.double() ** 2 * h.diagonal().double(),
    "of float32": lambda w, h: w.float().abs() * h.diagonal().sqrt(),
}


@pytest.mark.parametrize("pattern", [None, (2, 4), (1, 4), (5, 8)])
@pytest.mark.parametrize("what", SCORES)
def test_a_pruner_that_drops_all_scores_that_tie_is_told(what: str, pattern: tuple[int, int] | None) -> None:
    def prune(weight: Tensor, hessian: Tensor) -> Tensor:
        score = SCORES[what](weight, hessian).reshape(-1, pattern[1] if pattern else weight.shape[1])
        num_dropped = pattern[1] - pattern[0] if pattern else weight.shape[1] // 2
        threshold = score.kthvalue(max(1, num_dropped), 1, keepdim=True).values
        return kept(weight, ((score > threshold) | (num_dropped == 0)).reshape(weight.shape))

    sparsity = 1 - pattern[0] / pattern[1] if pattern else 0.5
    subject = Pruner(prune, sparsity, pattern, tags=frozenset({"reads_hessian"}))
    checks = ["sparsifier.target_met", *(["sparsifier.pattern"] if pattern else [])]
    for record in harness.check(subject, checks=checks, draws=False).records:
        assert record.outcome is Outcome.FAIL and "one score" in record.summary, record.summary


@pytest.mark.parametrize("what", ROWS)
def test_a_pruner_of_rows_that_is_wrong_for_one_kind_of_weight_is_told(what: str) -> None:
    report = harness.check(Pruner(ROWS[what]()), draws=False)
    assert report.verdict is Verdict.REGRESSION
    assert not any("could not be completed" in record.summary for record in report.records)


@pytest.mark.parametrize("what", BLOCKS)
def test_a_pruner_of_blocks_that_is_wrong_for_one_kind_of_weight_is_told(what: str) -> None:
    assert harness.check(Pruner(BLOCKS[what](), pattern=(2, 4)), draws=False).verdict is Verdict.REGRESSION


@pytest.mark.parametrize("what", RIGHT)
def test_a_right_pruner_passes(what: str) -> None:
    function, options = RIGHT[what]
    report = harness.check(Pruner(function, **options), draws=False)
    assert not [record for record in report.records if record.outcome is Outcome.FAIL], report.to_text()
