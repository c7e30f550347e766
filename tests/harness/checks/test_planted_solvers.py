"""Solvers that are right but for one shape, place, magnitude or layout: each is told by what it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harness
from compressor.numerics import QuantizationArgs
from harness.checks.adapters.ours import OurSolver
from harness.checks.protocols import Quantized, Solved
from harness.reporting.verdict import Outcome

INT4 = QuantizationArgs(num_bits=4, group_size=16)


def as_it_is(x: Any) -> Any:
    return x


class Wrong(OurSolver):
    """Ours, with what it is given changed: each batch and its place, each weight and its place, and the Hessian of a weight."""

    def __init__(
        self,
        batch: Callable[[Tensor, int], Tensor] = lambda x, number: x,
        weight: Callable[[Tensor, int], Tensor] = lambda x, number: x,
        hessian: Callable[[Tensor], Tensor] = as_it_is,
        beside: Callable[[Tensor, Tensor], Tensor] = lambda weight, hessian: hessian,
    ) -> None:
        super().__init__(INT4)
        self._batch, self._weight, self._hessian, self._beside = batch, weight, hessian, beside

    def hessian(self, batches: Sequence[Tensor]) -> Tensor:
        return self._hessian(super().hessian([self._batch(x, number) for number, x in enumerate(batches)]))

    def solve(
        self, weights: Sequence[Tensor], hessian: Tensor, block_size: int | None = None, like: Quantized | None = None
    ) -> list[Solved]:
        ready = [self._weight(weight, number) for number, weight in enumerate(weights)]
        return [super(Wrong, self).solve([one], self._beside(one, hessian), block_size, like)[0] for one in ready]


class Afterwards(OurSolver):
    """Ours, with its solutions changed."""

    def __init__(self, change: Callable[[list[Solved]], list[Solved]]) -> None:
        super().__init__(INT4)
        self._change = change

    def solve(
        self, weights: Sequence[Tensor], hessian: Tensor, block_size: int | None = None, like: Quantized | None = None
    ) -> list[Solved]:
        return self._change(super().solve(weights, hessian, block_size, like))


def doubled_losses(found: list[Solved]) -> list[Solved]:
    """Of every weight but the first."""
    return [*found[:1], *(replace(one, loss=2 * (one.loss or 0)) for one in found[1:])]


def lost_values(found: list[Solved]) -> list[Solved]:
    """The last one of a weight with many columns."""
    for one in found:
        if one.values.shape[1] > 128:
            one.values[-1, -1] += 1
    return found


class Overlooks(OurSolver):
    """The scale of a row leaves out some columns."""

    def __init__(self, seen: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(QuantizationArgs(num_bits=4, strategy="channel"))
        self._seen = seen

    def solve(
        self, weights: Sequence[Tensor], hessian: Tensor, block_size: int | None = None, like: Quantized | None = None
    ) -> list[Solved]:
        scales = [super(Overlooks, self).solve([self._seen(one, hessian)], hessian, block_size)[0].quantized for one in weights]
        return [super(Overlooks, self).solve([w], hessian, block_size, s)[0] for w, s in zip(weights, scales, strict=True)]


class DampsByAll(OurSolver):
    """Dead columns count in the mean diagonal of which a share is added."""

    def solve(
        self, weights: Sequence[Tensor], hessian: Tensor, block_size: int | None = None, like: Quantized | None = None
    ) -> list[Solved]:
        alive = float((hessian.diagonal() != 0).double().mean())
        return OurSolver(self.args, damp_frac=self.damp_frac * alive).solve(weights, hessian, block_size, like)


def without_last(num_columns: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Of long rows."""
    return lambda w, H: torch.cat((w[:, :-num_columns], w[:, -num_columns:] * 0), 1) if len(H) > 64 else w


def finite(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, 0, 0, 0)


def as_rounding(when: Callable[[Tensor], bool]) -> Callable[[Tensor, Tensor], Tensor]:
    """Some weights are solved as if no column knew of another."""
    return lambda weight, hessian: torch.eye(len(hessian)) * hessian.diagonal().mean() if when(weight) else hessian


def more(when: Callable[[Tensor], bool]) -> Callable[[Tensor, int], Tensor]:
    return lambda x, number: x * 1.1 if when(x) else x


def damped_on(weight: Tensor, hessian: Tensor) -> Tensor:
    """Ten times the damping where that of the recipe does not do, as solvers that raise it by themselves."""
    more = hessian + 0.1 * hessian.diagonal().mean() * torch.eye(len(hessian))
    return more if torch.linalg.eigvalsh(hessian)[0] < -0.01 * hessian.diagonal().mean() else hessian


WRONG: dict[str, tuple[OurSolver, str, str]] = {
    "a tail of columns": (Overlooks(without_last(44)), "solver.scales_fit", "a weight is cut off by more than a step"),
    "the last column": (Overlooks(without_last(1)), "solver.scales_fit", "a column that decides, 300 x 300"),
    "dead columns in no scale": (Overlooks(lambda w, H: w * (H.diagonal() != 0)), "solver.scales_fit", "a dead column that decides"),
    "more rows than columns": (Wrong(beside=as_rounding(lambda w: len(w) > w.shape[1])), "solver.dense_oracle", "more rows than columns: "),
    "square weights": (Wrong(beside=lambda w, H: H.flip(0, 1) if len(w) == w.shape[1] else H), "solver.dense_oracle", "square: "),
    "the loss of a later weight": (Afterwards(doubled_losses), "solver.batched", "a loss of"),
    "the last value of a wide weight": (Afterwards(lost_values), "solver.pieces", "a value is not (code - zero) * scale of its group"),
    "rows from 129 on": (Wrong(weight=lambda w, _: torch.cat((w[:128], w[128:] * 1.5))), "solver.pieces", "540 rows, piece"),
    "columns from 513 on": (
        Wrong(weight=lambda w, _: torch.cat((w[:, :512], w[:, 512:] * 1.5), 1)),
        "solver.pieces",
        "1056 columns, piece",
    ),
    "wide weights": (Wrong(beside=as_rounding(lambda w: w.shape[1] > 512)), "solver.pieces", "1056 columns, piece"),
    "dead columns in the damping": (DampsByAll(INT4), "solver.dead_columns", "of 48 columns are dead the reported loss is"),
    "NaN in a later weight": (Wrong(weight=lambda w, number: w if number == 0 else finite(w)), "solver.refuses_nonfinite", "weight 1 of 3"),
    "NaN in a later batch": (Wrong(batch=lambda x, number: x if number == 0 else finite(x)), "solver.refuses_nonfinite", "batch 1 of 5"),
    "NaN in bfloat16": (
        Wrong(weight=lambda w, _: finite(w) if w.dtype == torch.bfloat16 else w),
        "solver.refuses_nonfinite",
        "weight 2 of 3",
    ),
    "NaN behind 32 columns": (
        Wrong(weight=lambda w, _: torch.cat((w[:, :32], finite(w[:, 32:])), 1)),
        "solver.refuses_nonfinite",
        "the weight at [23, 47]",
    ),
    "NaN in H": (Wrong(beside=lambda w, H: finite(H)), "solver.refuses_nonfinite", "nan in H at [0, 0]"),
    "more damping where H is indefinite": (
        Wrong(beside=damped_on),
        "solver.refuses_nonfinite",
        "eigenvalue of minus twice what damping adds",
    ),
    "a constant on the diagonal": (
        Wrong(hessian=lambda H: H + 1e-6 * torch.eye(len(H))),
        "solver.hessian",
        "2^-30 times the inputs: H is not 2 * mean(x x^T)",
    ),
    "many columns": (
        Wrong(hessian=lambda H: H if len(H) < 512 else torch.diag(H.diagonal())),
        "solver.hessian",
        "of 1,000 columns H is not 2 * mean(x x^T)",
    ),
    "one half": (Wrong(hessian=lambda H: H.triu()), "solver.hessian", "H is not symmetric"),
    "four dimensions": (Wrong(batch=lambda x, _: x[0] if x.dim() == 4 else x), "solver.hessian", "H is not 2 * mean(x x^T)"),
    "long sequences": (
        Wrong(batch=lambda x, _: x[:, :64] if x.dim() == 3 else x),
        "solver.hessian",
        "H is not 2 * mean(x x^T)",
    ),
    "one dimension": (Wrong(batch=lambda x, _: x * 2 if x.dim() == 1 else x), "solver.hessian", "H is not 2 * mean(x x^T)"),
    "a batch without tokens": (
        Wrong(batch=lambda x, _: x if x.numel() else x.new_zeros(1, x.shape[-1])),
        "solver.hessian",
        "H is not 2 * mean(x x^T)",
    ),
    "tokens of zeros": (Wrong(batch=lambda x, _: x[x.any(-1)] if x.dim() == 2 else x), "solver.hessian", "H is not 2 * mean(x x^T)"),
    "views": (Wrong(batch=more(lambda x: not x.is_contiguous())), "solver.hessian", "a transposed view of [60, 401]"),
    "stride 0": (Wrong(batch=more(lambda x: 0 in x.stride() and x.dim() == 3)), "solver.hessian", "one row, expanded of [3, 20, 401]"),
    "a Parameter": (Wrong(batch=more(lambda x: isinstance(x, nn.Parameter))), "solver.hessian", "a Parameter of [60, 401]"),
    "no gradients": (Wrong(batch=more(lambda x: not torch.is_grad_enabled())), "solver.hessian", "where gradients are off"),
    "views of weights": (Wrong(weight=more(lambda w: w.stride(-1) == 2)), "solver.layouts", "every other column of the weight"),
    "weights that are Parameters": (Wrong(weight=more(lambda w: w.requires_grad)), "solver.layouts", "a Parameter of the weight"),
    "views of a Hessian": (
        Wrong(beside=lambda w, H: H if H.is_contiguous() else torch.eye(len(H))),
        "solver.layouts",
        "of the Hessian, where gradients are on",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_solver_is_told(name: str) -> None:
    subject, check, says = WRONG[name]
    record = harness.check(subject, checks=[check], draws=False).records[0]
    assert record.outcome is Outcome.FAIL and says in record.summary, record.summary


@pytest.mark.nightly
def test_the_same_solver_without_a_mistake_passes() -> None:
    report = harness.check(Wrong(), draws=False)
    assert report.passed, report.to_text()


def test_halves_of_a_hessian_may_be_rounded_apart() -> None:
    subject = Wrong(hessian=lambda H: H.double() * (1 + 1e-15 * torch.ones_like(H).triu(1)))
    record = harness.check(subject, checks=["solver.hessian"], draws=False).records[0]
    assert record.outcome is Outcome.PASS, record.summary


def zero_where_small(weight: Tensor, hessian: Tensor) -> Tensor:
    return weight * (hessian.diagonal() > 1e-6 * hessian.diagonal().max())


class DropsSmall(OurSolver):
    """Inputs that are small beside others count as dead."""

    def solve(
        self, weights: Sequence[Tensor], hessian: Tensor, block_size: int | None = None, like: Quantized | None = None
    ) -> list[Solved]:
        return super().solve([zero_where_small(one, hessian) for one in weights], hessian, block_size, like)


def test_small_inputs_that_count_as_dead_are_told() -> None:
    (record,) = harness.check(DropsSmall(INT4), checks=["solver.identity_rounds"], draws=False).records
    assert record.outcome is Outcome.FAIL and "not the nearest code" in record.summary, record.summary


class Ragged(OurSolver):
    """Groups are blocks of eight columns; where the last is not full something is done before."""

    def __init__(self, before: Callable[[Tensor], Tensor]) -> None:
        super().__init__(QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[5, 8]))
        self._before = before

    def solve(
        self, weights: Sequence[Tensor], hessian: Tensor, block_size: int | None = None, like: Quantized | None = None
    ) -> list[Solved]:
        return super().solve(weights, self._before(hessian) if len(hessian) % 8 else hessian, block_size, like)


def apart(hessian: Tensor) -> Tensor:
    """Of the last columns no error is handed on, and none comes to them."""
    start = len(hessian) // 8 * 8
    cut = hessian.clone()
    cut[:start, start:] = cut[start:, :start] = 0
    return cut


def without_a_word(hessian: Tensor) -> Tensor:
    raise ValueError


@pytest.mark.parametrize(
    ("before", "outcome", "said"),
    [(as_it_is, Outcome.PASS, "a last group that is not full"), (apart, Outcome.FAIL, "a last group that is not full"),
     (without_a_word, Outcome.FAIL, "a last group that is not full: ValueError came without a message")],
)  # fmt: skip
def test_a_last_group_that_is_not_full_is_solved_like_the_others(before: Callable[[Tensor], Tensor], outcome: Outcome, said: str) -> None:
    record = harness.check(Ragged(before), checks=["solver.dense_oracle"], draws=False).records[0]
    assert record.outcome is outcome and said in record.summary, record.summary
