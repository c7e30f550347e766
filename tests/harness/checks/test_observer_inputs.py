"""Observers that leave out a part of what they meet are told, whatever the rank, the size and the layout of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import harness
from harness.checks.oracles import int_grid
from harness.checks.protocols import Quantized


class Whole:
    """Half the range over 127.5, of all values."""

    kind, name, scale_rule = "observer", "own", "half_range"
    tags = frozenset({"covers", "refuses_nonfinite"})
    code_values = int_grid(8)

    def see(self, batch: Tensor) -> Tensor:
        return batch

    def most(self, values: Tensor) -> Tensor:
        return values.double().abs().max()

    def is_sound(self, batch: Tensor) -> bool:
        return bool(torch.isfinite(batch).all())

    def observe(self, batches: Any) -> Quantized:
        most = None
        for batch in batches:
            if not self.is_sound(batch):
                raise ValueError("activation: NaN or infinity")
            if batch.numel():
                own = self.most(self.see(batch))
                most = own if most is None else torch.maximum(most, own)
        if most is None:
            raise ValueError("activation: no value at all")
        scale = (most / 127.5).float().reshape(1)
        least = torch.full_like(scale, torch.finfo(scale.dtype).tiny if most > 0 else 1.0)
        return Quantized(torch.empty(0), torch.where(scale == 0, least, scale))


class FirstSequence(Whole):
    def see(self, batch: Tensor) -> Tensor:
        return batch[0] if batch.dim() == 3 else batch


class FirstOfFour(Whole):
    def see(self, batch: Tensor) -> Tensor:
        return batch[:, 0] if batch.dim() == 4 else batch


class FirstOfOne(Whole):
    def see(self, batch: Tensor) -> Tensor:
        return batch[:1] if batch.dim() == 1 else batch


class Largest(Whole):
    def most(self, values: Tensor) -> Tensor:
        largest = values.double().max()
        return largest if largest > 0 else values.double().abs().max()


class FewRows(Whole):
    def see(self, batch: Tensor) -> Tensor:
        return batch[:128] if batch.dim() == 2 else batch


class ShortSequences(Whole):
    def see(self, batch: Tensor) -> Tensor:
        return batch[:, :128] if batch.dim() == 3 else batch


class FewNumbers(Whole):
    def see(self, batch: Tensor) -> Tensor:
        return batch.flatten()[:10_000]


class Contiguous(Whole):
    def see(self, batch: Tensor) -> Tensor:
        return batch if batch.is_contiguous() else batch[..., :1]


class SeesNaNEarly(Whole):
    def is_sound(self, batch: Tensor) -> bool:
        return bool(torch.isfinite(batch.flatten()[:64]).all())

    def most(self, values: Tensor) -> Tensor:
        return torch.nan_to_num(values.double(), 0, 0, 0).abs().max()


class TakesNaNAlone(Whole):
    """In a batch without dimensions."""

    def observe(self, batches: Any) -> Quantized:
        return super().observe(x if x.dim() else x.nan_to_num(0, 0, 0) for x in batches)


class FindsNaNInTheFirst(Whole):
    """Of the batches of three dimensions."""

    def observe(self, batches: Any) -> Quantized:
        return super().observe(x.nan_to_num(0, 0, 0) if place and x.dim() == 3 else x for place, x in enumerate(batches))


class Remembers(Whole):
    left = 0.0

    def observe(self, batches: Any) -> Quantized:
        try:
            found = super().observe(batches)
        except ValueError:
            self.left = max([self.left, *(float(torch.nan_to_num(batch, 0, 0, 0).abs().max()) for batch in batches if batch.numel())])
            raise
        scale = found.scale.clamp_min(self.left / 127.5)
        self.left = 0.0
        return Quantized(found.codes, scale)


class AHundred(Whole):
    def observe(self, batches: Any) -> Quantized:
        return super().observe([batches[place] for place in range(min(100, len(batches)))])


class WidthInItsDtype(Whole):
    """Twice the largest value over 255, computed in the dtype of the batch: infinite, or the largest number where that saturates."""

    def most(self, values: Tensor) -> Tensor:
        return ((values.abs().max() * 2).clamp(max=torch.finfo(values.dtype).max) / 2).double()


class CoarseWidth(Whole):
    def most(self, values: Tensor) -> Tensor:
        return (values.abs().max() * 1.001).to(torch.bfloat16).double()


class Cut(Whole):
    """Widens the range of batches that come in some form."""

    form: Callable[[list[Tensor]], bool]

    def observe(self, batches: Any) -> Quantized:
        found = super().observe(batches)
        return Quantized(found.codes, found.scale * 2) if isinstance(batches, list) and self.form(batches) else found


class BySequence(Cut):
    form = staticmethod(lambda batches: all(len(batch) == 1 for batch in batches))


class AllAtOnce(Cut):
    form = staticmethod(lambda batches: len(batches) == 1)


class CountsEmptyBatches(Cut):
    form = staticmethod(lambda batches: any(batch.numel() == 0 for batch in batches))


class LastIsSmaller(Cut):
    form = staticmethod(lambda batches: bool(batches[0].abs().sum() > batches[-1].abs().sum()))


WRONG = [
    FirstSequence,
    FirstOfFour,
    FirstOfOne,
    Largest,
    FewRows,
    ShortSequences,
    FewNumbers,
    Contiguous,
    SeesNaNEarly,
    TakesNaNAlone,
    FindsNaNInTheFirst,
    Remembers,
    AHundred,
    WidthInItsDtype,
    CoarseWidth,
]
# What comes out of other orders and cuts differs, and by nothing but this is it told.
PLACED = {BySequence: "one by one", AllAtOnce: "in one batch", CountsEmptyBatches: "with an empty batch", LastIsSmaller: "reversed"}


def test_a_right_one_passes() -> None:
    report = harness.check(Whole(), draws=False)
    assert report.verdict.value == "pass", report.to_text()


@pytest.mark.parametrize("wrong", WRONG, ids=lambda one: one.__name__)
def test_a_wrong_one_is_told(wrong: type[Whole]) -> None:
    assert harness.check(wrong(), draws=False).verdict.value == "regression"


@pytest.mark.parametrize("wrong", PLACED, ids=lambda one: one.__name__)
def test_other_orders_and_cuts_are_told(wrong: type[Cut]) -> None:
    record = harness.check(wrong(), checks=["observer.batch_order"], draws=False).records[0]
    assert record.outcome == "fail" and f", {PLACED[wrong]}: scale" in record.summary, record.summary
