"""Quantizers of grids without a zero, and of scales that are stored in fewer bits than the weight: the right ones pass, others do not."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor

import harness
from harness.checks.oracles import int_grid
from harness.checks.protocols import Quantized
from harness.reporting.verdict import Outcome

BINARY, HALVES, INT4 = torch.tensor([-1.0, 1.0]).double(), torch.tensor([-1.5, -0.5, 0.5, 1.5]).double(), int_grid(4)


class Rows:
    """The largest |w| of a row over the last code, in float64; codes between two values go down at half way."""

    kind, name, column_multiple, scale_rule = "quantizer", "rows", 1, "max_code"
    dtypes: ClassVar = (torch.float32,)
    tags: ClassVar = frozenset({"local", "covers", "homogeneous"})

    def __init__(self, grid: Tensor, stored: torch.dtype | None = None, scale: torch.dtype = torch.float32) -> None:
        self.code_values, self.stored_scale, self._scale = grid, stored, scale

    def unit(self, shape: tuple[int, int]) -> tuple[int, int]:
        return 1, shape[1]

    def stored(self, scale: Tensor) -> Tensor:
        held = self.stored_scale or torch.float32
        return scale.clamp(torch.finfo(held).tiny, torch.finfo(held).max).to(held)

    def quantize(self, weight: Tensor) -> Quantized:
        if not bool(weight.isfinite().all()):
            raise ValueError("weight: NaN or infinity")
        wide = weight.detach().double()
        scale = self.stored(wide.abs().amax(1, keepdim=True) / self.code_values[-1]).to(self._scale)
        like = Quantized(wide, scale, None)
        return Quantized(self.encode(weight, like), scale, None)

    def encode(self, values: Tensor, like: Quantized) -> Tensor:
        middles = (self.code_values[1:] + self.code_values[:-1]) / 2
        places = torch.bucketize((values.detach().double() / like.scale.double()).contiguous(), middles)
        return self.code_values[places]

    def dequantize(self, quantized: Quantized) -> Tensor:
        return (quantized.codes.double() * quantized.scale.double()).to(quantized.scale.dtype)


class CoarseScales(Rows):
    def stored(self, scale: Tensor) -> Tensor:
        return super().stored(scale.to(torch.bfloat16).double())


class Upwards(Rows):
    """Takes the next code above where the nearest one is the one below, in one column."""

    def encode(self, values: Tensor, like: Quantized) -> Tensor:
        codes = super().encode(values, like)
        codes[:, 1] = codes[:, 1].clamp(min=self.code_values[len(self.code_values) // 2])
        return codes


RIGHT = {
    "binary": Rows(BINARY),
    "halves": Rows(HALVES),
    "float16, widened": Rows(INT4, torch.float16),
    "float16": Rows(INT4, torch.float16, torch.float16),
    "bfloat16, widened": Rows(INT4, torch.bfloat16),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_one_passes(name: str) -> None:
    report = harness.check(RIGHT[name], draws=False)
    assert report.passed and len(report.records) > 10, report.to_text()


@pytest.mark.parametrize(
    ("subject", "check", "says"),
    [
        (CoarseScales(INT4, torch.float16), "quantizer.scale_rule", "scales are not what their units ask for"),
        (Rows(INT4, torch.float16, torch.bfloat16), "quantizer.scale_rule", "scales are not what their units ask for"),
        (Upwards(BINARY), "quantizer.nearest_codes", "a code is not the nearest one"),
        (Upwards(HALVES), "quantizer.nearest_codes", "a code is not the nearest one"),
    ],
)
def test_a_wrong_one_is_told(subject: Rows, check: str, says: str) -> None:
    record = harness.check(subject, checks=[check], draws=False).records[0]
    assert record.outcome is Outcome.FAIL and says in record.summary, record.summary
