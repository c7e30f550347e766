"""Quantizers that are right but for one way of handing a weight in, one dtype or one place: each is told by what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import harness
from compressor.numerics import QuantizationArgs
from harness.checks.adapters.ours import OurQuantizer
from harness.checks.protocols import Quantized
from harness.reporting.verdict import Outcome

CHANNEL = QuantizationArgs(strategy="channel")
ASYM = QuantizationArgs(num_bits=4, strategy="channel", symmetric=False)


class Zeroes(OurQuantizer):
    """Codes are zero for some weights."""

    def __init__(self, is_hit: Callable[[Tensor], bool]) -> None:
        super().__init__(CHANNEL)
        self._is_hit = is_hit

    def quantize(self, weight: Tensor) -> Quantized:
        found = super().quantize(weight.detach())
        return replace(found, codes=found.codes * 0) if self._is_hit(weight) else found


class LooksForNaN(OurQuantizer):
    """Looks for NaN in a part of the weight."""

    def __init__(self, seen: Callable[[Tensor], Tensor]) -> None:
        super().__init__(CHANNEL)
        self._seen = seen

    def quantize(self, weight: Tensor) -> Quantized:
        if self._seen(weight).numel() and not bool(self._seen(weight).isfinite().all()):
            raise ValueError("weight: NaN or infinity")
        return super().quantize(torch.nan_to_num(weight.detach(), 0, 0, 0))


class Encodes(OurQuantizer):
    """Ours, with the codes of what is encoded changed: codes, values, and positions between the codes."""

    def __init__(self, change: Callable[[Tensor, Tensor, Tensor], Tensor], args: QuantizationArgs = CHANNEL, drop: str = "") -> None:
        super().__init__(args)
        self._change, self.tags = change, self.tags - {drop}

    def encode(self, values: Tensor, like: Quantized) -> Tensor:
        zero = 0 if like.zero_point is None else like.zero_point.double()
        position = values.detach().double() / like.scale.double() + zero
        return self._change(super().encode(values.detach(), like), values, position)


class EncodesItself(Encodes):
    """And what it quantizes is encoded so, too."""

    def quantize(self, weight: Tensor) -> Quantized:
        found = super().quantize(weight)
        return replace(found, codes=self.encode(weight, found))


class Overlooks(OurQuantizer):
    """Some columns have no say in the scale of their row."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__(CHANNEL)
        self._columns = slice(first, last)

    def quantize(self, weight: Tensor) -> Quantized:
        seen = weight.detach().clone()
        if weight.shape[1] >= self._columns.stop:
            seen[:, self._columns] = 0
        found = super().quantize(seen)
        return replace(found, codes=self.encode(weight.detach(), found))


class WideForOneRow(OurQuantizer):
    """The scale of a single row is twice what it should be, where the row is long."""

    def quantize(self, weight: Tensor) -> Quantized:
        found = super().quantize(weight.detach())
        if len(weight) > 1 or weight.shape[1] < 512:
            return found
        wide = replace(found, scale=found.scale * 2)
        return replace(wide, codes=self.encode(weight.detach(), wide))


class LosesLastCode(OurQuantizer):
    """The last code of the longer side, which no weight gets under its own scale, is a zero."""

    def quantize(self, weight: Tensor) -> Quantized:
        found = super().quantize(weight.detach())
        wide = replace(found, scale=found.scale * 1.01)
        return replace(wide, codes=self.encode(weight.detach(), wide))

    def dequantize(self, quantized: Quantized) -> Tensor:
        return torch.where(quantized.codes == self.code_values[0], 0, super().dequantize(quantized))


class OneRowAlone(OurQuantizer):
    """A single row is encoded under scales of its own."""

    def encode(self, values: Tensor, like: Quantized) -> Tensor:
        own = len(values) == 1 and 0 < values.abs().max() < 1e9
        return super().encode(values, super().quantize(values) if own else like)


class ReadsCodesAsTheyLie(OurQuantizer):
    def dequantize(self, quantized: Quantized) -> Tensor:
        found = super().dequantize(quantized)
        return found if quantized.codes.is_contiguous() else found * 0


class NarrowRange(OurQuantizer):
    """The range is taken in the dtype of the weight, and ends at its largest number."""

    def quantize(self, weight: Tensor) -> Quantized:
        found = super().quantize(weight.detach())
        far = torch.isinf(weight.amax(1, keepdim=True).clamp(min=0) - weight.amin(1, keepdim=True).clamp(max=0))
        assert found.zero_point is not None
        scale = torch.where(far, torch.full_like(found.scale, torch.finfo(weight.dtype).max / 15), found.scale)
        given = Quantized(found.codes, scale, torch.where(far, torch.full_like(found.zero_point, 7), found.zero_point))
        return replace(given, codes=self.encode(weight.detach(), given))


class NegativeZeros(OurQuantizer):
    """Gives -0 for 0."""

    def dequantize(self, quantized: Quantized) -> Tensor:
        values = super().dequantize(quantized)
        return torch.where(values == 0, -values.abs(), values)


class TransposesBlocks(OurQuantizer):
    """Hands out the scales of its blocks transposed where there are as many down as across, perhaps only where edges cut them short."""

    def __init__(self, rows: int, columns: int, only_cut: bool = False) -> None:
        super().__init__(QuantizationArgs(type="float", strategy="block", block_structure=(rows, columns)))
        self._only_cut = only_cut

    def quantize(self, weight: Tensor) -> Quantized:
        found = super().quantize(weight.detach())
        whole = weight.shape[1] % self.unit(weight.shape)[1] == 0
        if found.scale.shape[0] != found.scale.shape[1] or (whole and self._only_cut):
            return found
        given = replace(found, scale=found.scale.T.contiguous())
        return replace(given, codes=self.encode(weight.detach(), given))


def ties_up(is_hit: Callable[[Tensor], Tensor | bool]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """What lies in the middle goes up, where so it is."""

    def change(codes: Tensor, values: Tensor, position: Tensor) -> Tensor:
        up = (position.floor() + 1).clamp(codes.min(), codes.max()).to(codes.dtype)
        hit = torch.as_tensor(is_hit(values)).expand(codes.shape)
        return torch.where((position - position.floor() == 0.5) & hit, up, codes)

    return change


def late_rows(values: Tensor) -> Tensor:
    return (torch.arange(len(values)) >= 8)[:, None]


def first_code(codes: Tensor, values: Tensor, position: Tensor) -> Tensor:
    return torch.where(values > 1e15, codes * 0 - 128, codes) if values.dtype == torch.bfloat16 else codes


WRONG: dict[str, tuple[OurQuantizer, str, str]] = {
    "NaN behind 256 columns": (LooksForNaN(lambda w: w[:, :256]), "quantizer.refuses_nonfinite", "of a weight [3, 1031]"),
    "NaN behind 128 rows": (LooksForNaN(lambda w: w[:128]), "quantizer.refuses_nonfinite", "of a weight [521, 3]"),
    "NaN in the first row": (LooksForNaN(lambda w: w[1:]), "quantizer.refuses_nonfinite", "nan at [0, 36] of a weight [5, 37]"),
    "NaN in views": (LooksForNaN(lambda w: w if w.is_contiguous() else w[:0]), "quantizer.refuses_nonfinite", "NaN in a transposed view"),
    "NaN in Parameters": (LooksForNaN(lambda w: w[:0] if w.requires_grad else w), "quantizer.refuses_nonfinite", "NaN in a Parameter"),
    "NaN without gradients": (
        LooksForNaN(lambda w: w if torch.is_grad_enabled() else w[:0]),
        "quantizer.refuses_nonfinite",
        "where gradients are off",
    ),
    "stride 0": (Zeroes(lambda w: 0 in w.stride() and len(w) > 1), "quantizer.shapes", "one row, expanded: other codes"),
    "a step": (Zeroes(lambda w: w.stride(1) == 2 and w.shape[1] > 1 and len(w) > 2), "quantizer.shapes", "every other column: other codes"),
    "an offset": (
        Zeroes(lambda w: w.storage_offset() > 0 and w.is_contiguous()),
        "quantizer.shapes",
        "a part of a larger tensor: other codes",
    ),
    "a Parameter": (Zeroes(lambda w: isinstance(w, nn.Parameter)), "quantizer.shapes", "a Parameter: other codes"),
    "a result": (Zeroes(lambda w: w.grad_fn is not None), "quantizer.shapes", "a result that has a gradient: other codes"),
    "no gradients": (Zeroes(lambda w: not torch.is_grad_enabled()), "quantizer.shapes", "where gradients are off: other codes"),
    "codes as they lie": (ReadsCodesAsTheyLie(CHANNEL), "quantizer.shapes", "codes as a transposed view"),
    "ties in bfloat16": (Encodes(ties_up(lambda v: v.dtype == torch.bfloat16)), "quantizer.ties", "torch.bfloat16, on a tie"),
    "ties in float16": (Encodes(ties_up(lambda v: v.dtype == torch.float16)), "quantizer.ties", "torch.float16, on a tie"),
    "ties of zero points": (Encodes(ties_up(lambda v: v.dtype == torch.bfloat16), ASYM), "quantizer.ties", "torch.bfloat16, on a tie"),
    "ties in late rows": (Encodes(ties_up(late_rows)), "quantizer.ties", "on a tie: not half to even"),
    "ties in one row": (Encodes(ties_up(lambda v: len(v) == 1)), "quantizer.ties", "on a tie: not half to even"),
    "ties without odd": (Encodes(ties_up(lambda v: True), drop="odd"), "quantizer.ties", "torch.float32, on a tie"),
    "ties of one's own": (
        EncodesItself(ties_up(lambda v: v.shape[1] == 60 and v.dtype == torch.float16)),
        "quantizer.ties",
        "torch.float16, on a tie, under a scale of its own",
    ),
    "saturation in bfloat16": (Encodes(first_code), "quantizer.saturates", "torch.bfloat16: 1e+20 times the last code"),
    "one row alone": (OneRowAlone(CHANNEL), "quantizer.given_scales", "[1, 1] torch.float32: a code is not the nearest"),
    "a step that is encoded": (
        Encodes(lambda codes, values, _: codes * 0 if values.stride(-1) == 2 else codes),
        "quantizer.given_scales",
        "every other column",
    ),
    "a Parameter that is encoded": (
        Encodes(lambda codes, values, _: codes * 0 if values.requires_grad else codes),
        "quantizer.given_scales",
        "a Parameter, where gradients are on",
    ),
    "columns from 513 on": (
        Encodes(lambda codes, values, _: torch.where(torch.arange(values.shape[1]) < 512, codes, 0)),
        "quantizer.given_scales",
        "[3, 1031] torch.float32",
    ),
    "a tail of columns": (Overlooks(1024, 1031), "quantizer.covers", "a column that decides [1031, 1031] torch.float32"),
    "one column": (Overlooks(500, 501), "quantizer.scale_rule", "a column that decides [1031, 1031] torch.float32"),
    "one long row": (WideForOneRow(CHANNEL), "quantizer.scale_rule", "spread groups [1, 1031] torch.float32"),
    "the last code": (LosesLastCode(CHANNEL), "quantizer.dequantizes", "torch.float32: a code does not come back"),
    "square blocks": (TransposesBlocks(128, 128), "quantizer.scale_rule", "spread units [256, 256] torch.float32: scales"),
    "low blocks": (TransposesBlocks(4, 8), "quantizer.local", "outside of the unit [0, 1]"),
    "blocks cut short": (TransposesBlocks(32, 64, only_cut=True), "quantizer.covers", "spread units [48, 65] torch.float32"),
    "negative zeros": (NegativeZeros(CHANNEL), "quantizer.zero", "0 comes back as -0"),
    "a range beyond the dtype": (NarrowRange(ASYM), "quantizer.scale_rule", "widest [5, 37] torch.float32: scales"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_quantizer_is_told(name: str) -> None:
    subject, check, says = WRONG[name]
    record = harness.check(subject, checks=[check], draws=False).records[0]
    assert record.outcome is Outcome.FAIL and says in record.summary, record.summary


@pytest.mark.parametrize(
    "subject", [Zeroes(lambda w: False), Encodes(lambda codes, values, position: codes), EncodesItself(ties_up(lambda v: False), ASYM)]
)
def test_the_same_quantizers_without_a_mistake_pass(subject: OurQuantizer) -> None:
    report = harness.check(subject, draws=False)
    assert report.passed, report.to_text()


class LongTail(OurQuantizer):
    """A last group that is more than half full, but not full, has the codes of the first one."""

    def quantize(self, weight: Tensor) -> Quantized:
        found = super().quantize(weight)
        start = weight.shape[1] // 64 * 64
        if start and weight.shape[1] - start > 32:
            found.codes[:, start:] = found.codes[:, : weight.shape[1] - start]
        return found


def test_a_last_group_that_is_nearly_full_is_told() -> None:
    subject = LongTail(QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[1, 64]))
    (record,) = harness.check(subject, checks=["quantizer.nearest_codes"], draws=False).records
    assert record.outcome is Outcome.FAIL and "[2, 97]" in record.summary, record.summary


def test_of_many_units_some_of_each_place_are_changed() -> None:
    """A thousand rows that are changed one by one took half a minute, and told no more."""
    (record,) = harness.check(OurQuantizer(CHANNEL), checks=["quantizer.local"], draws=False).records
    assert record.outcome is Outcome.PASS and int(record.summary.split()[0]) < 100, record.summary


def test_a_quantizer_without_a_mistake_is_odd() -> None:
    record = harness.check(Zeroes(lambda w: False), checks=["quantizer.odd"], draws=False).records[0]
    assert record.outcome is Outcome.PASS, record.summary


def _after(values: Tensor, zero: Tensor) -> Tensor:
    return (values + zero).round()


def _before(values: Tensor, zero: Tensor) -> Tensor:
    return values.round() + zero


def _up_where_odd(values: Tensor, zero: Tensor) -> Tensor:
    return torch.where(zero % 2 == 0, (values + zero).round(), (values + zero + 0.5).floor())


def _in_turn(values: Tensor, zero: Tensor) -> Tensor:
    """Another neighbour in each second column."""
    return torch.where(torch.arange(values.shape[1]) % 2 == 0, _after(values, zero), _before(values, zero))


@pytest.mark.parametrize(("rounds", "passes"), [(_after, True), (_before, True), (_up_where_odd, False), (_in_turn, False)])
def test_under_an_odd_zero_point_ties_are_even_in_codes_or_in_values(rounds: Callable[[Tensor, Tensor], Tensor], passes: bool) -> None:
    class Rounds(OurQuantizer):
        def encode(self, values: Tensor, like: Quantized) -> Tensor:
            codes = super().encode(values, like)
            if like.zero_point is None or like.scale.shape[1] != 1:
                return codes
            found = rounds(values.detach().double() / like.scale.double(), like.zero_point.double())
            return found.clamp(self.code_values[0], self.code_values[-1]).to(codes.dtype)

    (record,) = harness.check(Rounds(ASYM), checks=["quantizer.ties"], draws=False).records
    assert (record.outcome is Outcome.PASS) is passes, record.summary
    assert passes or "under an odd zero point, neither of codes nor of values" in record.summary


class TiesUp(OurQuantizer):
    """A tie goes to the higher code in values of one kind."""

    def __init__(self, is_hit: Callable[[Tensor], bool]) -> None:
        super().__init__(QuantizationArgs(num_bits=4, group_size=16))
        self._is_hit = is_hit

    def encode(self, values: Tensor, like: Quantized) -> Tensor:
        above = torch.nextafter(values, torch.full_like(values, torch.inf))
        return super().encode(above if self._is_hit(values) else values, like)


@pytest.mark.parametrize(
    "is_hit", [lambda w: len(w) > 500, lambda w: w.shape[1] > 500, lambda w: w.shape[0] == w.shape[1]], ids=["high", "wide", "square"]
)
def test_a_tie_that_is_not_half_to_even_in_one_shape_is_told(is_hit: Callable[[Tensor], bool]) -> None:
    (record,) = harness.check(TiesUp(is_hit), checks=["quantizer.ties"], draws=False).records
    assert record.outcome is Outcome.FAIL and "on a tie: not half to even" in record.summary, record.summary
