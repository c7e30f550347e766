"""Checks 37 to 40 pass correct pruners and catch the bugs that masks have."""

from __future__ import annotations

import pytest
import torch

from harness import check
from harness.checks.oracles import drop_dense
from harness.checks.protocols import Pruner
from harness.reporting.verdict import Outcome


def fake_int8(weight):
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-38) / 127
    return (weight / scale).round().clamp(-127, 127) * scale


class Pattern:
    """Keeps the two largest of four."""

    kind = "sparsifier"
    tags = frozenset()
    pattern = (2, 4)
    sparsity = 0.5
    scope = "row"
    second_order = False
    quantize = staticmethod(fake_int8)

    @property
    def name(self):
        return type(self).__name__

    def prune(self, weight, hessian):
        blocks = weight.reshape(-1, 4)
        order = blocks.abs().argsort(dim=1, stable=True)
        return blocks.scatter(1, order[:, :2], 0.0).reshape(weight.shape)


class Rows(Pattern):
    """Drops 60 % of every row."""

    pattern = None
    sparsity = 0.6

    def prune(self, weight, hessian):
        order = weight.abs().argsort(dim=1, stable=True)
        return weight.scatter(1, order[:, : round(self.sparsity * weight.shape[1])], 0.0)


class Whole(Rows):
    """Drops 60 % of the tensor."""

    scope = "tensor"

    def prune(self, weight, hessian):
        flat = weight.flatten()
        order = flat.abs().argsort(stable=True)
        return flat.scatter(0, order[: round(self.sparsity * len(flat))], 0.0).reshape(weight.shape)


class SparseGPT(Rows):
    """Drops by w^2 / [H^-1]_jj, block by block, and moves what is kept (optimal brain surgeon, one column after another)."""

    second_order = True
    pattern = (2, 4)
    sparsity = 0.5
    sign = 1.0
    block = 10_000
    """Columns behind which no update gets."""

    def prune(self, weight, hessian):
        work = weight.double().clone()
        columns = work.shape[1]
        damped = hessian.double() + 0.01 * hessian.double().diagonal().mean() * torch.eye(columns, dtype=torch.float64)
        factor = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
        for start in range(0, columns, 4):
            score = work[:, start : start + 4].square() / factor.diagonal()[start : start + 4].square()
            dropped = score.argsort(dim=1, stable=True)[:, :2] + start
            mask = torch.zeros_like(work, dtype=torch.bool).scatter(1, dropped, True)
            for j in range(start, start + 4):
                error = torch.where(mask[:, j], work[:, j], 0.0) / factor[j, j]
                end = (j // self.block + 1) * self.block
                work[:, j + 1 : end] -= self.sign * error[:, None] * factor[j, j + 1 : end]
                work[mask[:, j], j] = 0.0
        kept = work.to(weight.dtype)
        return torch.where((work != 0) & (kept == 0), torch.full_like(kept, torch.finfo(weight.dtype).tiny), kept)


class Wanda(Rows):
    """Drops by |w| times the norm of the input, and moves nothing."""

    sparsity = 0.5

    def norms(self, diagonal):
        return diagonal.sqrt()

    def prune(self, weight, hessian):
        score = weight.double().abs() * self.norms(hessian.double().diagonal())
        order = score.argsort(dim=1, stable=True)
        return weight.scatter(1, order[:, : round(self.sparsity * weight.shape[1])], 0.0)


@pytest.mark.parametrize(
    "change", [lambda d: d.flip(0), lambda d: d.roll(1), lambda d: d.roll(2), lambda d: d.sort().values, lambda d: 1 / d]
)
@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.8])
def test_norms_of_other_columns_are_told_of_a_pruner_that_moves_nothing(change, sparsity):
    class Others(Wanda):
        def norms(self, diagonal):
            return change(super().norms(diagonal))

    one, other = Wanda(), Others()
    one.sparsity = other.sparsity = sparsity
    records = [check(pruner, checks=["sparsifier.inputs_count"], draws=False).records[0] for pruner in (one, other)]
    assert records[0].outcome is Outcome.PASS, records[0].summary
    assert records[1].outcome is Outcome.FAIL and "the sizes of inputs do not count as they should" in records[1].summary


@pytest.mark.parametrize("pruner", [Pattern, Rows, Whole, SparseGPT, Wanda])
def test_correct_pruners_pass(pruner):
    report = check(pruner())
    assert not [record for record in report.records if record.outcome is Outcome.FAIL], report.to_text()


class Threshold(Pattern):
    """Keeps what is larger than the third largest: with ties, too many or too few."""

    def prune(self, weight, hessian):
        blocks = weight.reshape(-1, 4)
        limit = blocks.abs().kthvalue(2, dim=1, keepdim=True).values
        return torch.where(blocks.abs() > limit, blocks, 0.0).reshape(weight.shape)


class AcrossRows(Pattern):
    """Takes its blocks along the rows."""

    def prune(self, weight, hessian):
        rows = weight.shape[0] // 4 * 4
        blocks = weight[:rows].t().reshape(-1, 4)
        order = blocks.abs().argsort(dim=1, stable=True)
        done = blocks.scatter(1, order[:, :2], 0.0).reshape(weight.shape[1], rows).t()
        return torch.cat([done, weight[rows:]])


class OffByOne(Rows):
    """Drops two too many."""

    def prune(self, weight, hessian):
        order = weight.abs().argsort(dim=1, stable=True)
        return weight.scatter(1, order[:, : round(self.sparsity * weight.shape[1]) + 2], 0.0)


class GlobalThreshold(Whole):
    """Promises rows, and thresholds the tensor."""

    scope = "row"


class InPlace(Pattern):
    """Prunes the weight that it was given."""

    def prune(self, weight, hessian):
        weight.copy_(super().prune(weight, hessian))
        return weight


class Rescales(Pattern):
    """Scales what it keeps."""

    def prune(self, weight, hessian):
        return super().prune(weight, hessian) * 1.01


class Ragged(Pattern):
    """Leaves a row alone that does not divide into blocks."""

    def prune(self, weight, hessian):
        return weight.clone() if weight.shape[1] % 4 else super().prune(weight, hessian)


class NothingBehindWholeBlocks(Pattern):
    """Drops all that is left of a row."""

    def prune(self, weight, hessian):
        whole = weight.shape[1] // 4 * 4
        return torch.cat((super().prune(weight[:, :whole].contiguous(), hessian), torch.zeros_like(weight[:, whole:])), 1)


def no_zero(weight):
    """The range of the values, with a zero point that is not rounded: zero is no code."""
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    scale = ((high - low) / 255).clamp(min=1e-38)
    return ((weight - low) / scale).round() * scale + low


class LosesZeros(Pattern):
    """A quantizer comes behind it that has no code for zero."""

    quantize = staticmethod(no_zero)


class WrongSign(SparseGPT):
    """Moves what it keeps the wrong way."""

    sign = -1.0


class Moved(SparseGPT):
    """Moves what it keeps as far as `share` says, a number or [R, C]."""

    def share(self, moves):
        return 1.0

    def prune(self, weight, hessian):
        pruned = super().prune(weight, hessian)
        moves = torch.where(pruned != 0, pruned - weight, 0.0)
        return torch.where(pruned != 0, weight + self.share(moves) * moves, pruned).to(weight.dtype)


class MovesNothing(Moved):
    def share(self, moves):
        return 0.0


class HalfAsFar(Moved):
    def share(self, moves):
        return 0.5


class TwiceAsFar(Moved):
    def share(self, moves):
        return 1.9


class OneRowStays(Moved):
    def share(self, moves):
        return (torch.arange(len(moves)) != len(moves) // 2)[:, None]


class LastColumnsStay(Moved):
    def share(self, moves):
        return torch.arange(moves.shape[1]) < moves.shape[1] // 2


class TwoLastColumnsStay(Moved):
    def share(self, moves):
        return torch.arange(moves.shape[1]) < moves.shape[1] - 2


class ColumnsFrom512OnStay(Moved):
    def share(self, moves):
        return torch.arange(moves.shape[1]) < 512


class BlocksOf128(SparseGPT):
    """Updates what is in its block, and forgets what comes behind."""

    block = 128


class BlocksApart(SparseGPT):
    """Takes 256 columns at a time, as if they were all."""

    def prune(self, weight, hessian):
        parts = [slice(start, start + 256) for start in range(0, len(hessian), 256)]
        return torch.cat([SparseGPT.prune(self, weight[:, part], hessian[part, part]) for part in parts], 1)


class FirstHessian(SparseGPT):
    """Keeps the factor of a shape."""

    def __init__(self):
        self.first = {}

    def prune(self, weight, hessian):
        return super().prune(weight, self.first.setdefault(weight.shape, hessian.clone()))


class NextRow(Moved):
    def share(self, moves):
        return moves.roll(1, 0) / torch.where(moves == 0, 1.0, moves)


class SmallestKept(SparseGPT):
    """Drops the largest, makes up for nothing."""

    def prune(self, weight, hessian):
        blocks = weight.reshape(-1, 4)
        return blocks.scatter(1, blocks.abs().argsort(dim=1, stable=True, descending=True)[:, :2], 0.0).reshape(weight.shape)


class ForgetsTheSign(Pattern):
    """Sorts the weights themselves, and so drops the most negative ones."""

    def prune(self, weight, hessian):
        blocks = weight.reshape(-1, 4)
        return blocks.scatter(1, blocks.argsort(dim=1, stable=True)[:, :2], 0.0).reshape(weight.shape)


class RowByMagnitude(Wanda):
    """Of one row the inputs do not count."""

    tags = frozenset({"reads_hessian"})

    def prune(self, weight, hessian):
        pruned = super().prune(weight, hessian)
        if len(weight) > 5:
            pruned[5] = weight[5].scatter(0, weight[5].abs().argsort(stable=True)[: round(self.sparsity * weight.shape[1])], 0.0)
        return pruned


class Nothing(SparseGPT):
    """Prunes everything: no mask is wrong, and nothing is left."""

    def prune(self, weight, hessian):
        return torch.zeros_like(weight)


class LastRowByPlace(Rows):
    """Drops the first columns of the last row of many, whatever they hold."""

    def prune(self, weight, hessian):
        pruned = super().prune(weight, hessian)
        if len(weight) > 100:
            pruned[-1] = weight[-1]
            pruned[-1, : round(self.sparsity * weight.shape[1])] = 0
        return pruned


PLANTS = [
    (LastRowByPlace, "sparsifier.beats_random"),
    (Threshold, 37), (AcrossRows, 37), (Nothing, 37), (Ragged, 37), (LosesZeros, 38), (OffByOne, 39), (GlobalThreshold, 39), (InPlace, 37),
    *((plant, "sparsifier.makes_up") for plant in (MovesNothing, HalfAsFar, TwiceAsFar, OneRowStays, LastColumnsStay, NextRow, WrongSign)),
    *((plant, "sparsifier.makes_up") for plant in (TwoLastColumnsStay, ColumnsFrom512OnStay, BlocksOf128, BlocksApart, FirstHessian)),
    (NothingBehindWholeBlocks, 37), (RowByMagnitude, "sparsifier.inputs_count"),
    (Rescales, "sparsifier.kept_weights"), (ForgetsTheSign, "sparsifier.beats_random"), (WrongSign, 40), (SmallestKept, 40), (Nothing, 40),
]  # fmt: skip


@pytest.mark.parametrize(("pruner", "number"), PLANTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_planted_bug_is_caught(pruner, number):
    record = check(pruner(), checks=[number]).records[0]
    assert record.outcome is Outcome.FAIL, record.summary
    assert "could not be completed" not in record.summary, record.summary


def by_inputs(norms_of, sparsity, pattern):
    """Wanda, its norms as `norms_of` puts them beside a weight."""

    def prune(weight, hessian):
        scores = weight.abs() * norms_of(weight, hessian.diagonal().sqrt())
        runs = scores.unflatten(-1, (-1, pattern[1] if pattern else weight.shape[1]))
        count = pattern[1] - pattern[0] if pattern else round(sparsity * weight.shape[1])
        gone = torch.zeros_like(runs, dtype=torch.bool).scatter_(-1, runs.sort(dim=-1, stable=True).indices[..., :count], True)
        return weight.masked_fill(gone.flatten(-2), 0.0)

    return Pruner(prune, sparsity=sparsity, pattern=pattern)


NORMS = {
    "right": (lambda weight, norms: norms, Outcome.PASS),
    "of rows, where square": (lambda weight, norms: norms[:, None] if len(weight) == len(norms) else norms, Outcome.FAIL),
    "of the next column": (lambda weight, norms: norms.roll(1), Outcome.FAIL),
    "of as many rows": (lambda weight, norms: norms if len(weight) < len(norms) else norms.flip(0), Outcome.FAIL),
    "none": (lambda weight, norms: 1.0, Outcome.SKIP),
}


@pytest.mark.parametrize(
    ("sparsity", "pattern"), [(0.5, None), (0.9, None), (0.1, None), (0.25, (3, 4)), (0.75, (1, 4)), (0.5, (1, 2))], ids=str
)
@pytest.mark.parametrize("norms", NORMS)
def test_sizes_of_inputs_belong_to_columns(norms, sparsity, pattern):
    """Of a pruner that does not say that it reads the Hessian, too."""
    norms_of, outcome = NORMS[norms]
    record = check(by_inputs(norms_of, sparsity, pattern), checks=["sparsifier.inputs_count"]).records[0]
    assert record.outcome is outcome, record.summary


def test_what_does_not_apply_is_skipped():
    subject = Rows()
    subject.quantize = None
    skipped = {record.name for record in check(subject).records if record.outcome is Outcome.SKIP}
    assert skipped == {
        "sparsifier.pattern",
        "sparsifier.zeros_survive",
        "sparsifier.beats_magnitude",
        "sparsifier.makes_up",
        "sparsifier.inputs_count",
    }


@pytest.mark.parametrize("by_diagonal", [False, True])
@pytest.mark.parametrize("damping", [0.0, 0.01, 0.1])
def test_order_and_damping_are_the_pruners_choice(by_diagonal, damping):
    class Sorted(SparseGPT):
        pattern, sparsity = (1, 2), 0.5

        def prune(self, weight, hessian):
            order = hessian.diagonal().argsort(descending=True, stable=True) if by_diagonal else torch.arange(len(hessian))
            wide = hessian.double()[order][:, order]
            gone = torch.zeros_like(weight, dtype=torch.bool).scatter_(1, weight.abs().argsort(1)[:, : len(wide) // 2], True)[:, order]
            damped = wide + damping * wide.diagonal().mean() * torch.eye(len(wide))
            return drop_dense(weight[:, order], damped, gone, torch.arange(len(wide)))[:, order.argsort()].to(weight.dtype)

    record = check(Sorted(), checks=["sparsifier.makes_up"]).records[0]
    assert record.outcome is Outcome.PASS, record.summary


def test_a_pruner_that_moves_nothing_is_told_so():
    record = check(MovesNothing(), checks=["sparsifier.makes_up"]).records[0]
    assert "moves none of the weights that it keeps" in record.summary, record.summary


def test_a_pruner_that_says_that_it_reads_has_to():
    def half(weight, hessian):
        return weight.scatter(1, weight.abs().argsort(dim=1, stable=True)[:, : weight.shape[1] // 2], 0.0)

    record = check(Pruner(half, tags=frozenset({"reads_hessian"})), checks=["sparsifier.inputs_count"]).records[0]
    assert record.outcome is Outcome.FAIL, record.summary


def test_a_plain_function_is_a_subject():
    def half(weight, hessian):
        return weight.scatter(1, weight.abs().argsort(dim=1, stable=True)[:, : weight.shape[1] // 2], 0.0)

    report = check(Pruner(half))
    assert report.verdict.value == "pass", report.to_text()
    assert report.subject == "half"
    assert check(Pruner(half, sparsity=0.75), checks=[39]).records[0].outcome is Outcome.FAIL
