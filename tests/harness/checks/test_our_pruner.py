"""Our magnitude pruning stands the catalogue's checks of pruners."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compressor.algorithms.pruning.magnitude import Pattern, pruned_weights
from compressor.algorithms.rtn import round_to_nearest
from compressor.numerics import QuantizationArgs, dequantize, weight_qparams
from harness import check
from harness.checks.protocols import Pruner
from harness.reporting.verdict import Outcome

ASYMMETRIC = QuantizationArgs(num_bits=4, strategy="channel", symmetric=False)


def rounded(weight: Tensor) -> Tensor:
    qparams = weight_qparams(weight, ASYMMETRIC)
    return dequantize(round_to_nearest(weight, qparams, ASYMMETRIC).codes_RC, qparams, ASYMMETRIC)


@pytest.mark.parametrize("pattern", [None, (2, 4), (1, 4), (5, 8)])
def test_magnitude_pruning_keeps_what_pruners_promise(pattern: tuple[int, int] | None) -> None:
    sparsity = 0.37 if pattern is None else 1 - pattern[0] / pattern[1]

    def magnitude(weight: Tensor, hessian: Tensor) -> Tensor:
        del hessian
        (mask,) = pruned_weights([weight], sparsity, None if pattern is None else Pattern(*pattern))
        return weight.masked_fill(mask, 0.0)

    report = check(Pruner(magnitude, sparsity=sparsity, pattern=pattern, scope="tensor" if pattern is None else "row", quantize=rounded))
    outcomes = {record.name: record.outcome for record in report.records}
    assert Outcome.FAIL not in outcomes.values(), str(report)
    assert sum(outcome is Outcome.PASS for outcome in outcomes.values()) >= (4 if pattern else 3), outcomes


def test_the_checks_see_a_threshold_that_takes_all_equals() -> None:
    def threshold(weight: Tensor, hessian: Tensor) -> Tensor:
        del hessian
        least = weight.abs().flatten().float().kthvalue(weight.numel() // 2).values
        return torch.where(weight.abs().float() > least, weight, torch.zeros_like(weight))

    outcomes = [record.outcome for record in check(Pruner(threshold, sparsity=0.5, scope="tensor")).records]
    assert Outcome.FAIL in outcomes


def _all(tail: Tensor) -> Tensor:
    return tail


def _all_but_the_largest(tail: Tensor) -> Tensor:
    return tail.scatter(1, tail.abs().argmax(1, keepdim=True), 0) if tail.shape[1] > 2 else tail


@pytest.mark.parametrize(("of_tail", "says"), [(_all, "the last 3 keep 3, not 2"), (_all_but_the_largest, "which is by far the largest")])
def test_what_is_left_of_a_row_is_held_to_the_pattern_too(of_tail: Callable[[Tensor], Tensor], says: str) -> None:
    def prune(weight: Tensor, hessian: Tensor) -> Tensor:
        whole = weight.shape[1] // 4 * 4
        blocks = weight[:, :whole].unflatten(1, (-1, 4))
        kept = blocks.scatter(-1, blocks.abs().argsort(stable=True)[..., :2], 0).flatten(1)
        return torch.cat([kept, of_tail(weight[:, whole:])], 1)

    (record,) = check(Pruner(prune, sparsity=0.5, pattern=(2, 4)), checks=["sparsifier.pattern"]).records
    assert record.outcome is Outcome.FAIL and says in record.summary, record.summary
