"""Packers that are right but for one layout, rank or place: each is told by what it does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import harness
from harness.checks.adapters.ours import OurFp4Packer, OurPacker
from harness.reporting.verdict import Outcome


class Looks(OurPacker):
    """Ours, but that it packs what a function leaves of the codes."""

    def __init__(self, before: Callable[[Tensor], Tensor], dim: int = 1) -> None:
        super().__init__(4, dim)
        self._before = before

    def pack(self, codes: Tensor) -> Tensor:
        return super().pack(self._before(codes))


class LooksAtWords(OurPacker):
    """Ours, but for words that begin within a larger tensor."""

    def unpack(self, packed: Tensor, shape: tuple[int, ...]) -> Tensor:
        return super().unpack(packed, shape) * (0 if packed.storage_offset() else 1)


class Backwards(OurPacker):
    """A tensor of one dimension is packed from its end."""

    def pack(self, codes: Tensor) -> Tensor:
        return super().pack(codes.flip(0) if codes.dim() == 1 else codes)

    def unpack(self, packed: Tensor, shape: tuple[int, ...]) -> Tensor:
        found = super().unpack(packed, shape)
        return found.flip(0) if len(shape) == 1 else found


class OfTwoDimensions(OurPacker):
    """Codes of one dimension become words of two."""

    def pack(self, codes: Tensor) -> Tensor:
        return super().pack(codes)[None] if codes.dim() == 1 else super().pack(codes)


class KeepsTheLowest(OurPacker):
    """Codes are packed from the lowest one on, which the packer keeps and no file holds."""

    def pack(self, codes: Tensor) -> Tensor:
        words = super().pack(codes)
        self._shift = int(codes.min()) if codes.numel() else 0
        return words ^ self._shift

    def unpack(self, packed: Tensor, shape: tuple[int, ...]) -> Tensor:
        return super().unpack(packed ^ self._shift, shape)


class HandsBack(OurPacker):
    """The last codes, whatever the words."""

    def pack(self, codes: Tensor) -> Tensor:
        self._last = codes.clone()
        return super().pack(codes) * 0

    def unpack(self, packed: Tensor, shape: tuple[int, ...]) -> Tensor:
        return self._last.clone()


class Hangs(OurPacker):
    """What unpacking needs hangs on the words, and is lost as they are saved."""

    def pack(self, codes: Tensor) -> Tensor:
        words = super().pack(codes) ^ 1
        words.own = 1  # type: ignore[attr-defined]
        return words

    def unpack(self, packed: Tensor, shape: tuple[int, ...]) -> Tensor:
        return super().unpack(packed ^ getattr(packed, "own", 0), shape)


class Saturating(OurFp4Packer):
    """What lies far beyond 6 becomes 6."""

    def pack(self, codes: Tensor) -> Tensor:
        wide = codes.float()
        return super().pack(torch.where(wide.abs() > 100, wide.clamp(-6, 6), wide).to(codes.dtype))


def zeroed(is_hit: Callable[[Tensor], bool]) -> Callable[[Tensor], Tensor]:
    return lambda codes: codes * 0 if is_hit(codes) else codes


def clamped(part: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Codes that do not fit are cut off in a part of the tensor."""

    def cut(codes: Tensor) -> Tensor:
        copy = codes.clone()
        view = part(copy)
        view.copy_(view.clamp(-8, 7))
        return copy

    return cut


def all_of_rank(rank: int) -> Callable[[Tensor], Tensor]:
    return lambda codes: codes if codes.dim() == rank else codes[:0]


WRONG: dict[str, tuple[OurPacker | OurFp4Packer, str, str]] = {
    "the lowest code in itself": (KeepsTheLowest(4), "packer.round_trip", "a code does not come back"),
    "the last codes in itself": (HandsBack(4), "packer.round_trip", "a code does not come back"),
    "an attribute of the words": (Hangs(4), "packer.round_trip", "a code does not come back"),
    "a slice": (Looks(zeroed(lambda x: bool(x.storage_offset()))), "packer.dense", "every other column of [13]"),
    "a contiguous slice": (
        Looks(zeroed(lambda x: bool(x.storage_offset()) and x.dim() > 1 and x.is_contiguous())),
        "packer.dense",
        "the last rows of a larger tensor of [3, 13]",
    ),
    "stride 0": (Looks(zeroed(lambda x: 0 in x.stride() and x.dim() == 2)), "packer.dense", "one row, expanded of [3, 13]"),
    "stride 0 of rows": (
        Looks(zeroed(lambda x: x.dim() == 3 and x.stride(-1) == 0), 0),
        "packer.dense",
        "one column, expanded of [3, 13, 3]",
    ),
    "a slice of words": (LooksAtWords(4), "packer.dense", "of words unpacks to other codes than its copy"),
    "backwards": (Backwards(4), "packer.layout", "[2]: a code does not lie in its place"),
    "another rank": (OfTwoDimensions(4), "packer.dense", "pack to words of [1, "),
    "far beyond": (Looks(lambda x: torch.where(x.abs() > 15, x * 0, x)), "packer.refuses_unfit", "127 at "),
    "wrapped around": (Looks(lambda x: torch.where((x > 20) & (x < 30), x - 16, x)), "packer.refuses_unfit", "23 at "),
    "the last row": (Looks(clamped(lambda x: x[-1:] if x.dim() > 1 else x[:0])), "packer.refuses_unfit", "8 at [2, "),
    "the last column": (Looks(clamped(lambda x: x[..., -1:])), "packer.refuses_unfit", "8 at [12] of [13]"),
    "one dimension": (Looks(clamped(all_of_rank(1))), "packer.refuses_unfit", " of [13] was packed"),
    "three dimensions": (Looks(clamped(all_of_rank(3))), "packer.refuses_unfit", " of [3, 2, 13] was packed"),
    "rows from 129 on": (Looks(clamped(lambda x: x[128:] if x.dim() == 2 else x[:0])), "packer.refuses_unfit", " of [521, 13] was packed"),
    "columns from 513 on": (Looks(clamped(lambda x: x[..., 512:])), "packer.refuses_unfit", " of [2, 1031] was packed"),
    "one row of any rank": (
        Looks(clamped(lambda x: x if x.dim() > 1 and x.shape[-2] == 1 else x[:0])),
        "packer.refuses_unfit",
        "[1, 13] was packed",
    ),
    "one column": (Looks(clamped(lambda x: x if x.shape[-1] == 1 else x[:0])), "packer.refuses_unfit", ", 1] was packed"),
    "long rows of three dimensions": (
        Looks(clamped(lambda x: x if x.dim() == 3 and x.shape[-1] > 64 else x[:0])),
        "packer.refuses_unfit",
        "[2, 3, 1031] was packed",
    ),
    "one row that is a view": (
        Looks(lambda x: x.clamp(-8, 7) if x.dim() > 1 and x.shape[-2] == 1 and x.storage_offset() else x),
        "packer.refuses_unfit",
        "1, 13] was packed",
    ),
    "views": (Looks(lambda x: x if x.is_contiguous() else x.clamp(-8, 7)), "packer.refuses_unfit", "at the beginning of a transposed view"),
    "fp4 far beyond": (Saturating(), "packer.refuses_unfit", "448 at "),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_packer_is_told(name: str) -> None:
    subject, check, says = WRONG[name]
    record = harness.check(subject, checks=[check], draws=False).records[0]
    assert record.outcome is Outcome.FAIL and says in record.summary, record.summary


class OtherWords(OurPacker):
    """The same bytes in words of 8 bits."""

    def pack(self, codes: Tensor) -> Tensor:
        return super().pack(codes).contiguous().view(torch.uint8)

    def unpack(self, packed: Tensor, shape: tuple[int, ...]) -> Tensor:
        return super().unpack(packed.contiguous().view(torch.int32), shape)


def test_words_of_another_size_are_the_same_bytes() -> None:
    record = harness.check(OtherWords(4), checks=["packer.layout"], draws=False).records[0]
    assert record.outcome is Outcome.PASS, record.summary


@pytest.mark.parametrize("subject", [Looks(lambda x: x), Looks(lambda x: x, 0), OurFp4Packer()], ids=["columns", "rows", "fp4"])
def test_the_right_packers_pass(subject: OurPacker | OurFp4Packer) -> None:
    report = harness.check(subject, draws=False)
    assert report.passed, report.to_text()
