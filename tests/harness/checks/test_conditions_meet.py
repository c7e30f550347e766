"""Who is wrong only where two conditions meet is told: every pair of them is shown, in few cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

import harness
from compressor.numerics import QuantizationArgs
from harness.checks.adapters.modifiers import pruners
from harness.checks.adapters.ours import OurObserver, OurPacker, OurQuantizer, OurSolver
from harness.checks.inputs.pairs import pairwise
from harness.checks.protocols import Pruner, Quantized, Solved
from tests.harness.checks.test_observer_inputs import Whole
from tests.harness.checks.test_planted_layers import Int8, Subject, where
from tests.harness.checks.test_planted_solvers import Wrong


def test_every_two_values_of_two_factors_meet_in_few_cases() -> None:
    factors = {"a": range(9), "b": range(5), "c": "xyz", "d": (True, False), "e": range(4)}
    cases = pairwise(factors)
    for one, other in combinations(factors, 2):
        assert {(case[one], case[other]) for case in cases} == {(x, y) for x in factors[one] for y in factors[other]}
    assert len(cases) < 2 * 9 * 5 and cases == pairwise(factors)


def test_beside_a_masking_value_no_other_pair_counts() -> None:
    factors, masking = {"a": range(9), "b": range(5), "c": "xyz", "d": (True, False)}, {"b": (4,), "c": "yz"}
    cases = pairwise(factors, masking)
    for one, other in combinations(factors, 2):
        hidden = [{key for key in masking if case[key] in masking[key]} - {one, other} for case in cases]
        seen = {(case[one], case[other]) for case, beside in zip(cases, hidden, strict=True) if not beside}
        assert seen == {(x, y) for x in factors[one] for y in factors[other]}


class SquareViews(OurQuantizer):
    def quantize(self, weight: Tensor) -> Quantized:
        is_hit = weight.shape[0] == weight.shape[1] and not weight.is_contiguous()
        return super().quantize(weight * 0.5 if is_hit else weight)


class FlatParameters(OurQuantizer):
    """Reads what has a gradient as if it lay row by row."""

    def quantize(self, weight: Tensor) -> Quantized:
        is_hit = weight.requires_grad and not weight.is_contiguous()
        return super().quantize(weight.detach().as_strided(weight.shape, (weight.shape[1], 1)) if is_hit else weight)


class FloorInViews(OurQuantizer):
    """A floor under the scale that only what does not lie row by row meets."""

    def quantize(self, weight: Tensor) -> Quantized:
        is_hit = not weight.is_contiguous() and 0 < float(weight.detach().abs().max()) < 1e-10
        return super().quantize(weight * 0.5 if is_hit else weight)


class LongRowsOfOneSign(OurQuantizer):
    def quantize(self, weight: Tensor) -> Quantized:
        is_hit = weight.shape[0] == 1 and weight.shape[1] > 512 and bool((weight < 0).all())
        return super().quantize(weight * 0.5 if is_hit else weight)


class LosesTheLastWord(OurPacker):
    """Of long rows in three dimensions."""

    def pack(self, codes: Tensor) -> Tensor:
        words = super().pack(codes)
        if codes.dim() == 3 and codes.shape[-1] > 100:
            words[..., -1] = 0
        return words


class Mirrors(OurPacker):
    """Long rows in three dimensions, so that they come back, and do not lie in their places."""

    def pack(self, codes: Tensor) -> Tensor:
        return super().pack(codes.flip(-1) if codes.dim() == 3 and codes.shape[-1] > 100 else codes)

    def unpack(self, packed: Tensor, shape: tuple[int, ...]) -> Tensor:
        found = super().unpack(packed, shape)
        return found.flip(-1) if len(shape) == 3 and shape[-1] > 100 else found


class WideConstants(OurPacker):
    def pack(self, codes: Tensor) -> Tensor:
        is_hit = codes.shape[-1] > 512 and codes.numel() > 0 and bool((codes == codes.flatten()[0]).all())
        return super().pack(codes * 0 if is_hit else codes)


class PacksWithoutGradients(OurPacker):
    """Pack and unpack agree with each other, and not with what they do where gradients are on."""

    def pack(self, codes: Tensor) -> Tensor:
        return super().pack(codes if torch.is_grad_enabled() else codes.flip(-1))

    def unpack(self, packed: Tensor, shape: tuple[int, ...]) -> Tensor:
        return super().unpack(packed, shape) if torch.is_grad_enabled() else super().unpack(packed, shape).flip(-1)


class PositiveViews(OurObserver):
    def observe(self, batches: Sequence[Tensor]) -> Quantized:
        found = super().observe(batches)
        is_hit = any(not batch.is_contiguous() and bool((batch > 0).all()) for batch in batches)
        return Quantized(found.codes, found.scale * 2, found.zero_point) if is_hit else found


class Drops(OurObserver):
    """A batch where its dimensions, its place, and how many there are, say so."""

    def __init__(self, where: Callable[[int, int, int], bool]) -> None:
        super().__init__(STATIC)
        self._where = where

    def observe(self, batches: Sequence[Tensor]) -> Quantized:
        return super().observe([x for place, x in enumerate(batches) if not self._where(x.dim(), place, len(batches))])


class HalvesOneRow(OurObserver):
    """Its range is searched, so that no rule says what it is."""

    def observe(self, batches: Sequence[Tensor]) -> Quantized:
        found = super().observe(batches)
        return Quantized(found.codes, found.scale / 2, found.zero_point) if any(batch.shape[:1] == (1,) for batch in batches) else found


class RoundsWhere(OurSolver):
    """No column knows of another where a weight, its Hessian, and how many weights come together, say so."""

    def __init__(self, where: Callable[[Tensor, Tensor, int], bool]) -> None:
        super().__init__(INT4)
        self._where = where

    def solve(
        self, weights: Sequence[Tensor], hessian: Tensor, block_size: int | None = None, like: Quantized | None = None
    ) -> list[Solved]:
        flat = torch.eye(len(hessian)) * hessian.diagonal().mean()
        given = [flat if self._where(weight, hessian, len(weights)) else hessian for weight in weights]
        return [super(RoundsWhere, self).solve([one], H, block_size, like)[0] for one, H in zip(weights, given, strict=True)]


class AsTheWeight(OurSolver):
    """Its values have the dtype of the weight, as a loader has them; what that rounds off no later column makes up for."""

    def solve(
        self, weights: Sequence[Tensor], hessian: Tensor, block_size: int | None = None, like: Quantized | None = None
    ) -> list[Solved]:
        wide = super().solve([weight.float() for weight in weights], hessian, block_size, like)
        return [replace(one, values=one.values.to(weight.dtype)) for one, weight in zip(wide, weights, strict=True)]


def pruner(name: str, where: Callable[[Tensor, Tensor], bool], wrong: Callable[[Pruner, Tensor, Tensor], Tensor]) -> Pruner:
    """One of ours, that is wrong where a weight and its Hessian say so."""
    right = next(one for one in pruners() if one.name == name)

    def prune(weight: Tensor, hessian: Tensor) -> Tensor:
        return wrong(right, weight, hessian) if where(weight, hessian) else right.prune(weight, hessian)

    return Pruner(prune, right.sparsity, pattern=right.pattern, scope=right.scope, second_order=right.second_order, tags=right.tags)


def drops_the_largest(right: Pruner, weight: Tensor, hessian: Tensor) -> Tensor:
    stays = right.prune(1 / (weight.detach().double().abs() + 1e-9), hessian) != 0
    return weight.detach() * stays


def makes_up_for_nothing(right: Pruner, weight: Tensor, hessian: Tensor) -> Tensor:
    return weight.detach() * (right.prune(weight, hessian) != 0)


def above_the_threshold(right: Pruner, weight: Tensor, hessian: Tensor) -> Tensor:
    """Wanda, but that all scores go that tie with the last that has to."""
    score = weight.detach().double().abs() * hessian.detach().diagonal().double().sqrt()
    return weight.detach() * (score > score.kthvalue(int(right.sparsity * weight.shape[1]), 1, keepdim=True).values)


INT4 = QuantizationArgs(num_bits=4, group_size=16)
STATIC = QuantizationArgs(num_bits=8, strategy="tensor")
WRONG: dict[str, tuple[Any, str]] = {
    "a square weight that is a view": (SquareViews(INT4), "[32, 32]"),
    "a view of a Parameter": (FlatParameters(INT4), "as a Parameter"),
    "tiny values in a view": (FloorInViews(INT4), "small ["),
    "a long row of values below zero": (LongRowsOfOneSign(INT4), "negative [1, 1040]"),
    "long rows in three dimensions": (LosesTheLastWord(4), "[2, 3, 1031]: a code does not lie in its place"),
    "long rows in three dimensions, in other places": (Mirrors(4), "[2, 3, 1031]: a code does not lie in its place"),
    "later batches of three dimensions": (
        Drops(lambda dims, place, count: dims == 3 and place > 0),
        "shape (2, 3, 16)",
    ),
    "the first of two batches of five dimensions": (
        Drops(lambda dims, place, count: dims == 5 and place == 0 and count == 2),
        "first of two",
    ),
    "the ninth batch of numbers": (Drops(lambda dims, place, count: dims == 1 and place == 8), "the last of nine"),
    "scores that tie in a view": (
        pruner("wanda", lambda weight, H: not weight.is_contiguous(), above_the_threshold),
        "laid a transposed view",
    ),
    "equal codes of a long row": (WideConstants(4), "1031"),
    "words where gradients are off": (PacksWithoutGradients(4), "where gradients are off"),
    "values above zero in a view": (PositiveViews(STATIC), "values positive"),
    "a searched range of one row": (HalvesOneRow(QuantizationArgs(strategy="tensor", observer="mse")), "with the full range it is"),
    "several weights beside dead columns": (
        RoundsWhere(lambda weight, H, count: count > 1 and bool((H.diagonal() == 0).any())),
        "dead columns, small, torch.float32, laid a transposed view, asked between two others",
    ),
    "small weights beside a view": (
        RoundsWhere(lambda weight, H, count: float(weight.detach().abs().max()) < 1e-6 and not H.is_contiguous()),
        "small",
    ),
    "a square weight in bfloat16": (
        RoundsWhere(lambda weight, H, count: weight.shape[0] == weight.shape[1] and weight.dtype == torch.bfloat16),
        "48 x 48, many tokens, small, torch.bfloat16",
    ),
    "one row in bfloat16": (
        pruner("wanda-2of4", lambda weight, H: len(weight) == 1 and weight.dtype == torch.bfloat16, drops_the_largest),
        "shape (1, 96)",
    ),
    "a square weight beside a view": (
        pruner("magnitude", lambda weight, H: weight.shape[0] == weight.shape[1] and not H.is_contiguous(), drops_the_largest),
        "shape (96, 96)",
    ),
    "many rows in float16": (
        pruner("sparsegpt", lambda weight, H: len(weight) > 512 and weight.dtype == torch.float16, makes_up_for_nothing),
        "moves none of the weights that it keeps",
    ),
    "a view of one token": (Subject(where(lambda self, x: not x.is_contiguous() and x.shape[:-1].numel() == 1)), "an input of [1"),
    "small values without gradients": (
        Subject(where(lambda self, x: not torch.is_grad_enabled() and bool((x.abs() < 1e-6).all()))),
        "small, where gradients are off",
    ),
    "large values in four dimensions": (Subject(where(lambda self, x: x.dim() == 4 and bool((x.abs() > 1e4).any()))), "large"),
}


def test_values_may_be_rounded_to_the_dtype_of_their_weight() -> None:
    subject = AsTheWeight(QuantizationArgs(num_bits=8, strategy="channel"), damp_frac=0.001)
    report = harness.check(subject, checks=["solver.conditions_meet"], draws=False)
    assert report.verdict.value == "pass", report.to_text()


@pytest.mark.parametrize("name", WRONG)
def test_who_is_wrong_where_two_conditions_meet_is_told(name: str) -> None:
    subject, says = WRONG[name]
    report = harness.check(subject, checks=[f"{subject.kind}.conditions_meet"], draws=False)
    assert report.verdict.value == "regression" and says in report.records[0].summary, report.to_text()


class NoNaN(Int8):
    """Takes NaN for zero in a single token."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.nan_to_num(0.0) if x.shape[:-1].numel() == 1 else x)


class ForgetsFullWords(OurPacker):
    """Cuts bits off where rows end with a word."""

    def pack(self, codes: Tensor) -> Tensor:
        return super().pack((codes + 8) % 16 - 8 if codes.shape[-1] % 8 == 0 else codes)


class OfOneBatch(Whole):
    """Has a scale for a single batch without values."""

    def observe(self, batches: Any) -> Quantized:
        is_hit = len(batches) == 1 and batches[0].dim() == 3 and not batches[0].numel()
        return super().observe([torch.ones(1)] if is_hit else batches)


class Shifted(Whole):
    """Codes of a symmetric rule get a zero point."""

    def observe(self, batches: Any) -> Quantized:
        return replace(super().observe(batches), zero_point=torch.full((1,), 50.0))


class Divided(Whole):
    """The scale is right, and is divided by another one."""

    def observe(self, batches: Any) -> Quantized:
        return replace(super().observe(batches), global_scale=torch.full((1,), 2.0))


class NoTokens(OurSolver):
    """H of no token is zeros, for one batch in three dimensions."""

    def hessian(self, batches: Sequence[Tensor]) -> Tensor:
        is_hit = len(batches) == 1 and batches[0].dim() == 3 and not batches[0].numel()
        return torch.zeros(batches[0].shape[-1], batches[0].shape[-1]) if is_hit else super().hessian(batches)


class NoLoss(OurSolver):
    """Reports NaN where scales are given."""

    def solve(
        self, weights: Sequence[Tensor], hessian: Tensor, block_size: int | None = None, like: Quantized | None = None
    ) -> list[Solved]:
        found = super().solve(weights, hessian, block_size, like)
        return found if like is None else [replace(one, loss=float("nan")) for one in found]


def quiet(x: Tensor) -> Tensor:
    return x.detach().nan_to_num(0.0, 0.0, 0.0)


REFUSALS: dict[str, tuple[Any, str, str]] = {
    "H of one sequence": (Wrong(batch=lambda x, place: x * 2 if x.dim() == 3 and len(x) == 1 else x), "batches_meet", "shape (1, 40)"),
    "H of four dimensions in bfloat16": (
        Wrong(batch=lambda x, place: x * 2 if x.dim() == 4 and x.dtype == torch.bfloat16 else x),
        "batches_meet",
        "torch.bfloat16",
    ),
    "NaN in a view of inputs": (Wrong(batch=lambda x, place: x if x.is_contiguous() else quiet(x)), "batches_meet", "planted"),
    "no token in three dimensions": (NoTokens(INT4), "batches_meet", "no token at all"),
    "NaN in a view of a weight": (Wrong(weight=lambda x, place: x if x.is_contiguous() else quiet(x)), "conditions_meet", "in the weight"),
    "NaN in one row": (Wrong(weight=lambda x, place: quiet(x) if len(x) == 1 else x), "conditions_meet", "in the weight, 1 x 48"),
    "infinity in a view of H": (Wrong(beside=lambda x, H: H if H.is_contiguous() else quiet(H)), "conditions_meet", "in H"),
    "the loss on given scales": (NoLoss(INT4), "conditions_meet", "a loss of nan is reported"),
    "NaN in a single token": (Subject(NoNaN), "conditions_meet", "outputs of these tokens are numbers"),
    "codes that do not fit full words": (ForgetsFullWords(4), "refuses_unfit", "was packed into 4 bits"),
    "a batch without values": (OfOneBatch(), "refuses_nothing", "as if nothing had happened"),
    "a zero point where there is none": (Shifted(), "scale_rule", "zero point 50"),
    "a scale of scales": (Divided(), "scale_rule", "the rule half_range says"),
    "inputs of another unit in bfloat16": (
        pruner(
            "wanda",
            lambda weight, H: weight.dtype == torch.bfloat16 and not 1e-6 < float(H.detach().diagonal().max()) < 1e6,
            lambda right, weight, H: right.prune(weight, torch.eye(len(H))),
        ),
        "inputs_count",
        "torch.bfloat16",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_must_be_refused_or_counts_is_so_under_every_condition(name: str) -> None:
    subject, check, says = REFUSALS[name]
    report = harness.check(subject, checks=[f"{subject.kind}.{check}"], draws=False)
    assert report.verdict.value == "regression" and says in report.records[0].summary, report.to_text()
