"""Each check sees a bug that is planted for it, by what it states: not by a crash, and not by the form of what comes out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harness
from compressor.numerics import QuantizationArgs, QuantizationScheme
from harness.checks.adapters.ours import OurLayer, OurObserver, OurPacker, OurQuantizer, OurSolver
from harness.checks.catalogue.registry import find_checks
from harness.checks.protocols import Quantized, Solved
from harness.mutants.family import find_family
from harness.reporting.verdict import Outcome
from tests.harness.checks.test_conditions_meet import REFUSALS
from tests.harness.checks.test_conditions_meet import WRONG as PAIRS

INT4 = QuantizationArgs(num_bits=4, group_size=16)
ASYM = QuantizationArgs(num_bits=4, group_size=16, symmetric=False)
TOKENS = QuantizationArgs(strategy="token", dynamic=True)
KINDS = ("quantizer", "packer", "observer", "layer", "solver")


class Wrong(OurQuantizer):
    """Ours, with what it returns changed."""

    def __init__(self, args: QuantizationArgs, change: Callable[[Wrong, Tensor, Quantized], Quantized]) -> None:
        super().__init__(args)
        self._change = change

    def quantize(self, weight: Tensor) -> Quantized:
        return self._change(self, weight, super().quantize(weight))


def _rescaled(subject: Wrong, weight: Tensor, found: Quantized, scale: Tensor) -> Quantized:
    return replace(found, scale=scale, codes=subject.encode(weight, replace(found, scale=scale)))


class WrongEncoder(OurQuantizer):
    """Ours, with its codes changed wherever values are encoded."""

    def __init__(self, args: QuantizationArgs, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(args)
        self._change = change

    def quantize(self, weight: Tensor) -> Quantized:
        found = super().quantize(weight)
        return replace(found, codes=self.encode(weight, found))

    def encode(self, values: Tensor, like: Quantized) -> Tensor:
        scale = like.scale.float().repeat_interleave(values.shape[1] // like.scale.shape[1], 1)
        return self._change(super().encode(values, like), values.float() / scale)


class NeighboursScale(OurQuantizer):
    """Gives each group the values of the group beside it."""

    def dequantize(self, quantized: Quantized) -> Tensor:
        return super().dequantize(replace(quantized, scale=quantized.scale.roll(1, 1)))


class StrideBlind(OurQuantizer):
    """Reads the memory of a weight as if it lay row by row."""

    def quantize(self, weight: Tensor) -> Quantized:
        return super().quantize(torch.as_strided(weight, weight.shape, (weight.shape[1], 1), weight.storage_offset()).clone())


class LastScaleOfANeighbour(OurSolver):
    """The last group is rounded with the scale of the one before."""

    def solve(
        self, weights: Sequence[Tensor], hessian: Tensor, block_size: int | None = None, like: Quantized | None = None
    ) -> list[Solved]:
        found = super().solve(weights, hessian, block_size, like)
        for one in found:
            scale, codes = one.quantized.scale, one.quantized.codes
            scale[:, -1] = scale[:, -2]
            wide = scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
            codes.copy_((one.values / wide).round().clamp(-8, 7))
            one.values.copy_(codes * wide)
        return found


class LoosePacker(OurPacker):
    """A word too many in each row."""

    def pack(self, codes: Tensor) -> Tensor:
        return nn.functional.pad(super().pack(codes), (0, 1))

    def unpack(self, packed: Tensor, shape: tuple[int, ...]) -> Tensor:
        return super().unpack(packed[..., :-1].contiguous(), shape)


class Forgetful(OurObserver):
    """Weighs the last batch most."""

    def observe(self, batches: Sequence[Tensor]) -> Quantized:
        found = super().observe(batches)
        last = next(x for x in reversed(batches) if x.numel())
        return replace(found, scale=found.scale + last.abs().float().mean() * 0.01)


class Mixing(nn.Module):
    """Adds the mean over the batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y + y.mean(0, keepdim=True)


class MixingLayer(OurLayer):
    """Sequences of a batch see each other."""

    def build(self, linear: nn.Linear) -> nn.Module:
        return Mixing(super().build(linear))


class Unfillable(Mixing):
    """Multiplies with what it was built with, whatever it is filled with."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.kept = (copy.deepcopy(inner),)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.kept[0](x)
        return y


class UnfillableLayer(OurLayer):
    """What is loaded is not what runs."""

    def build(self, linear: nn.Linear) -> nn.Module:
        return Unfillable(super().build(linear))


class WrongSolver(OurSolver):
    """Solves for another weight than the one that was given."""

    def __init__(self, change: Callable[[Tensor], Tensor], args: QuantizationArgs = INT4) -> None:
        super().__init__(args)
        self._change = change

    def solve(
        self, weights: Sequence[Tensor], hessian: Tensor, block_size: int | None = None, like: Quantized | None = None
    ) -> list[Solved]:
        return super().solve([self._change(weight) for weight in weights], hessian, block_size, like)


class FirstBatchTwice(OurSolver):
    """Counts the first batch twice."""

    def hessian(self, batches: Sequence[Tensor]) -> Tensor:
        return super().hessian([batches[0], *batches])


class Zeroing(OurSolver):
    """Gives dead columns zeros, as the code of the paper does, and says so."""

    dead_value = 0.0

    def solve(
        self, weights: Sequence[Tensor], hessian: Tensor, block_size: int | None = None, like: Quantized | None = None
    ) -> list[Solved]:
        return super().solve([weight * (hessian.diagonal() != 0) for weight in weights], hessian, block_size, like)


class ClaimsToZero(OurSolver):
    """Says that it gives dead columns zeros, and rounds them."""

    dead_value = 0.0


def _half_a_step(weight: Tensor) -> Tensor:
    return weight + 0.5 * weight.abs().amax() / 7.5


def _by_row(weight: Tensor) -> Tensor:
    return weight * (1 + 0.05 * torch.arange(len(weight))[:, None])


def _shifted(found: Solved) -> Solved:
    return replace(found, values=found.values.roll(1, 1))


class Misreading(OurSolver):
    """Reports the values of the column to the left."""

    def solve(
        self, weights: Sequence[Tensor], hessian: Tensor, block_size: int | None = None, like: Quantized | None = None
    ) -> list[Solved]:
        return [_shifted(one) for one in super().solve(weights, hessian, block_size, like)]


PLANTED: dict[str, Any] = {
    "quantizer.zero_points_in_range": Wrong(ASYM, lambda _, w, found: replace(found, zero_point=found.zero_point + 0.25)),  # type: ignore[operator]
    "quantizer.covers": Wrong(INT4, lambda self, w, found: _rescaled(self, w, found, found.scale / 2)),
    "quantizer.dequantizes": NeighboursScale(INT4),
    "quantizer.half_step": Wrong(INT4, lambda _, w, found: replace(found, scale=found.scale.roll(1, 1))),
    "quantizer.homogeneous": Wrong(INT4, lambda self, w, found: _rescaled(self, w, found, found.scale.clamp(min=1e-2))),
    "quantizer.local": Wrong(INT4, lambda self, w, found: _rescaled(self, w, found, torch.maximum(found.scale, found.scale.roll(1, 1)))),
    "quantizer.per_token": Wrong(TOKENS, lambda self, w, found: _rescaled(self, w, found, found.scale.amax().expand_as(found.scale))),
    "quantizer.reported_error": Wrong(INT4, lambda _, w, found: replace(found, relative_error=2 * (found.relative_error or 0) + 1e-9)),
    "quantizer.zero": WrongEncoder(INT4, lambda codes, position: codes + (position == 0).to(codes.dtype)),
    "quantizer.codes_come_back": WrongEncoder(INT4, lambda codes, position: (codes + (codes == position)).clamp(-8, 7)),
    "quantizer.monotone": WrongEncoder(INT4, lambda codes, position: torch.where(codes == 2, 3, torch.where(codes == 3, 2, codes))),
    "quantizer.saturates": WrongEncoder(INT4, lambda codes, position: torch.where(position.abs() > 9, -codes, codes)),
    "quantizer.odd": WrongEncoder(INT4, lambda codes, position: torch.where((position > 0) & (position < 0.9), 1, codes)),
    "quantizer.ties": WrongEncoder(INT4, lambda codes, position: (position + 0.5).floor().clamp(-8, 7)),
    "quantizer.given_scales": WrongEncoder(INT4, lambda codes, position: torch.where(codes == 3, 2, codes)),
    "quantizer.shapes": StrideBlind(INT4),
    "packer.dense": LoosePacker(4),
    "observer.batch_order": Forgetful(QuantizationArgs(strategy="tensor")),
    "layer.shapes": MixingLayer(QuantizationScheme(targets=["Linear"], weights=INT4)),
    "layer.copies": UnfillableLayer(QuantizationScheme(targets=["Linear"], weights=INT4)),
    "solver.parts_agree": Misreading(INT4),
    "solver.pieces": WrongSolver(lambda weight: torch.cat((weight[:128], weight[128:] * 1.3))),
    "solver.layouts": WrongSolver(lambda weight: weight if weight.is_contiguous() else weight * 1.3),
    "solver.identity_rounds": WrongSolver(_half_a_step),
    "solver.grid_is_fixed": WrongSolver(_half_a_step),
    "solver.own_scales": LastScaleOfANeighbour(INT4),
    "solver.rows": WrongSolver(_by_row),
    "solver.sample_order": FirstBatchTwice(INT4),
}
# Bugs of `harness mutants` that the check sees beside others.
ALSO_SEEN = {
    "quantizer.scale_as_stored": "quantizers-nvfp4_scale_not_stored_so",
    "solver.batched": "solvers-all_take_the_first_scale",
    "solver.groups": "solvers-g_idx_not_filled",
    "solver.hessian_scale": "solvers-dampening_absolute",
    "solver.dense_oracle": "solvers-half_the_compensation",
    "solver.block_size": "solvers-stale_block",
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_check_sees_what_is_planted_for_it(name: str) -> None:
    record = harness.check(PLANTED[name], checks=[name], draws=False).records[0]
    assert record.outcome is Outcome.FAIL and "could not be completed" not in record.summary, record.summary


@pytest.mark.parametrize("name", ALSO_SEEN)
def test_a_check_sees_a_bug_that_others_see_first(name: str) -> None:
    family, _, key = ALSO_SEEN[name].partition("-")
    mutant = find_family(family).mutants[key]
    killer = next(one for one in find_family(family).killers(mutant) if one.name == name)
    with mutant.planted():
        seen = killer.look()
    assert seen and "could not be completed" not in seen, seen


def test_dead_columns_take_the_value_that_the_solver_declares() -> None:
    outcomes = {
        type(subject): harness.check(subject, checks=["solver.dead_columns"], draws=False).records[0].outcome
        for subject in (OurSolver(INT4), Zeroing(INT4), ClaimsToZero(INT4))
    }
    assert outcomes == {OurSolver: Outcome.PASS, Zeroing: Outcome.PASS, ClaimsToZero: Outcome.FAIL}


def test_no_check_is_left_without_a_bug() -> None:
    families = [find_family(name) for name in ("quantizers", "packers", "observers", "layers", "solvers")]
    named = {mutant.killer for family in families for mutant in family.mutants.values()}
    every = {check.name for kind in KINDS for check in find_checks(None, kind)}
    pairs = {f"{subject.kind}.conditions_meet" for subject, _ in PAIRS.values()}
    pairs |= {f"{subject.kind}.{check}" for subject, check, _ in REFUSALS.values()}
    assert every - named - PLANTED.keys() - ALSO_SEEN.keys() - pairs == set()
