"""Shortcuts that numeric code takes, each planted in a subject of ours that is right without it, and each told by what it does."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harness
from compressor.numerics import QuantizationArgs, QuantizationScheme
from harness.checks.adapters.ours import OurLayer, OurObserver, OurQuantizer, OurSolver
from harness.checks.protocols import Quantized, Solved

INT4 = QuantizationArgs(num_bits=4, group_size=16)
TENSOR = QuantizationArgs(strategy="tensor")


class Together(OurSolver):
    """Solves what is all of one shape at once, and hands it out from the end."""

    def solve(
        self, weights: Sequence[Tensor], hessian: Tensor, block_size: int | None = None, like: Quantized | None = None
    ) -> list[Solved]:
        found = super().solve(weights, hessian, block_size, like)
        return found[::-1] if len({tuple(weight.shape) for weight in weights}) == 1 else found


class Floor(OurQuantizer):
    """No scale falls below a small constant, so that nothing is divided by zero."""

    least = 1e-12

    def quantize(self, weight: Tensor) -> Quantized:
        found = super().quantize(weight)
        raised = replace(found, scale=found.scale.clamp(min=self.least))
        return replace(raised, codes=self.encode(weight, raised))


class LowFloor(Floor):
    least = 1e-36


class Int32(OurQuantizer):
    """Codes go through int32, which wraps around."""

    def encode(self, values: Tensor, like: Quantized) -> Tensor:
        scale = like.scale.float().repeat_interleave(values.shape[1] // like.scale.shape[1], 1)
        return (values.float() / scale).round().to(torch.int32).clamp(-8, 7)


class DownTheColumns(OurQuantizer):
    """Takes the groups of a square weight along the other axis."""

    def quantize(self, weight: Tensor) -> Quantized:
        if weight.shape[0] != weight.shape[1]:
            return super().quantize(weight)
        turned = replace(super().quantize(weight.t().contiguous()), codes=weight)
        return replace(turned, codes=self.encode(weight, turned))


class ObserverFloor(OurObserver):
    def observe(self, batches: Sequence[Tensor]) -> Quantized:
        found = super().observe(batches)
        return replace(found, scale=found.scale.clamp(min=1e-12))


class WithoutFirstRow(OurObserver):
    def observe(self, batches: Sequence[Tensor]) -> Quantized:
        return super().observe([batch[1:] if batch.dim() > 1 and len(batch) > 1 else batch for batch in batches])


class WithoutLastRow(OurObserver):
    def observe(self, batches: Sequence[Tensor]) -> Quantized:
        return super().observe([batch[..., :-1, :] if batch.dim() > 1 and batch.shape[-2] > 1 else batch for batch in batches])


class WithoutSingleNumbers(OurObserver):
    def observe(self, batches: Sequence[Tensor]) -> Quantized:
        return super().observe([batch for batch in batches if batch.numel() != 1])


class Observes(OurObserver):
    """What it is shown is changed before."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(TENSOR)
        self._change = change

    def observe(self, batches: Sequence[Tensor]) -> Quantized:
        return super().observe([self._change(batch) for batch in batches])


class ReadsNaNBesideTheDiagonalAsZero(OurSolver):
    def solve(
        self, weights: Sequence[Tensor], hessian: Tensor, block_size: int | None = None, like: Quantized | None = None
    ) -> list[Solved]:
        rest = torch.nan_to_num(hessian - hessian.diag().diag(), nan=0.0, posinf=0.0, neginf=0.0)
        return super().solve(weights, rest + hessian.diag().diag(), block_size, like)


class AccumulatesWithoutNaN(OurSolver):
    """Reads NaN in batches of some ranks as 0."""

    def __init__(self, rank: int) -> None:
        super().__init__(INT4)
        self._rank = rank

    def hessian(self, batches: Sequence[Tensor]) -> Tensor:
        return super().hessian([x.nan_to_num(0, 0, 0) if x.dim() == self._rank else x for x in batches])


class KeepsReferences(OurObserver):
    def observe(self, batches: Sequence[Tensor]) -> Quantized:
        return super().observe(list(batches))


class Careless(OurQuantizer):
    """Does something beside its work."""

    def quantize(self, weight: Tensor) -> Quantized:
        found = super().quantize(weight.detach())
        self.also(weight)
        return found

    def also(self, weight: Tensor) -> None:
        raise NotImplementedError


class TrainsWhatItIsGiven(Careless):
    def also(self, weight: Tensor) -> None:
        if weight.is_floating_point():
            weight.requires_grad_(True)


class NotesOnWhatItIsGiven(Careless):
    def also(self, weight: Tensor) -> None:
        weight.largest = 1.0  # type: ignore[attr-defined]


class NotesOnAllTensors(Careless):
    def also(self, weight: Tensor) -> None:
        torch.Tensor.largest = 1.0  # type: ignore[attr-defined]


class FlushesDenormals(Careless):
    def also(self, weight: Tensor) -> None:
        torch.set_flush_denormal(True)


class SetsTheEnvironment(Careless):
    def also(self, weight: Tensor) -> None:
        os.environ["QUANTIZED"] = str(len(os.environ))


class SwitchesGradientsOff(Careless):
    def also(self, weight: Tensor) -> None:
        torch.set_grad_enabled(False)


class HooksAllModules(Careless):
    def also(self, weight: Tensor) -> None:
        nn.modules.module.register_module_module_registration_hook(lambda *args: None)


class Around(nn.Module):
    """A layer around one of ours: it has neither a bias nor anything else of nn.Linear's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.kept: dict[Any, Tensor] = {}

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class GradientsOff(Around):
    def forward(self, x: Tensor) -> Any:
        torch.set_grad_enabled(False)
        return self.inner(x)


class OneBuffer(Around):
    def forward(self, x: Tensor) -> Any:
        y = self.inner(x).detach()
        return self.kept.setdefault((x.shape, x.dtype), torch.empty_like(y)).copy_(y)


class ByAddress(Around):
    def forward(self, x: Tensor) -> Any:
        key = (x.data_ptr(), x._version, x.shape, x.dtype, x.stride())
        if key not in self.kept:
            self.kept[key] = self.inner(x)
        return self.kept[key]


class ContiguousOnly(Around):
    def forward(self, x: Tensor) -> Any:
        return self.inner(x) if x.is_contiguous() else self.inner(x) * 1.1


class WithoutItsBias(Around):
    def forward(self, x: Tensor) -> Any:
        return self.inner(x) - self.inner(torch.zeros_like(x))


class Wraps(OurLayer):
    """Layers of ours inside others."""

    def __init__(self, around: type[Around]) -> None:
        super().__init__(QuantizationScheme(targets=["Linear"], weights=INT4))
        self._around = around

    def build(self, linear: nn.Linear) -> nn.Module:
        return self._around(super().build(linear))

    def weight(self, layer: Any) -> Tensor:
        return super().weight(layer.inner)

    def expected_input(self, layer: Any, x: Tensor) -> Tensor:
        return super().expected_input(layer.inner, x)


class TransposesBlocks(OurLayer):
    """Stores the scales of its blocks transposed where there are as many down as across."""

    def __init__(self, rows: int, columns: int) -> None:
        blocks = QuantizationArgs(type="float", strategy="block", block_structure=(rows, columns))
        super().__init__(QuantizationScheme(targets=["Linear"], weights=blocks))

    def build(self, linear: nn.Linear) -> nn.Module:
        layer = super().build(linear)
        scale = layer.weight_scale
        if scale.shape[0] == scale.shape[1]:
            scale.data.copy_(scale.data.T.clone())
        return layer


PLANTED: dict[str, tuple[Any, str, str]] = {
    "equal shapes swapped": (Together(INT4), "solver.batched", "weight 0 of 2 (24 and 24 rows): other scales"),
    "a floor under scales": (Floor(INT4), "quantizer.scale_rule", "small [5, 48] torch.float32: scales are not what"),
    "a floor near the smallest normal number": (LowFloor(INT4), "quantizer.scale_rule", "tiny [5, 48] torch.float32: scales are not what"),
    "a range that covers too much": (Floor(INT4), "quantizer.covers", "the scale is too wide"),
    "codes in int32": (Int32(INT4), "quantizer.saturates", "3e+09 times the last code does not become it"),
    "groups down the columns": (DownTheColumns(INT4), "quantizer.scale_rule", "spread groups [32, 32] torch.float32: scales are not"),
    "a floor of an observer": (ObserverFloor(TENSOR), "observer.scale_rule", "tiny in torch.float32"),
    "no first row": (WithoutFirstRow(TENSOR), "observer.scale_rule", "first row in torch.float32"),
    "no last row": (WithoutLastRow(TENSOR), "observer.scale_rule", "falling in torch.float32"),
    "no single numbers": (WithoutSingleNumbers(TENSOR), "observer.scale_rule", "one number in torch.float32"),
    "no batches of no dimension": (Observes(lambda x: x if x.dim() else x.new_empty(0)), "observer.scale_rule", "no dimension in torch"),
    "the first of five dimensions": (Observes(lambda x: x[0] if x.dim() > 4 else x), "observer.scale_rule", "five dimensions in torch"),
    "the last of six dimensions": (Observes(lambda x: x[:-1] if x.dim() > 5 else x), "observer.scale_rule", "six dimensions in torch"),
    "NaN in bfloat16": (
        Observes(lambda x: x.nan_to_num(0, 0, 0) if x.dtype == torch.bfloat16 else x),
        "observer.refuses_nonfinite",
        "nan in batch 0 in torch.bfloat16",
    ),
    "infinity in float16": (
        Observes(lambda x: x.nan_to_num(float("nan"), 0, 0) if x.dtype == torch.float16 else x),
        "observer.refuses_nonfinite",
        "inf in batch 0 in torch.float16",
    ),
    "NaN beside a diagonal": (ReadsNaNBesideTheDiagonalAsZero(INT4), "solver.refuses_nonfinite", "nan in H at ["),
    "NaN in single tokens": (AccumulatesWithoutNaN(1), "solver.refuses_nonfinite", "nan in batch 3 of 5, of 1 dimensions"),
    "NaN in four dimensions": (AccumulatesWithoutNaN(4), "solver.refuses_nonfinite", "nan in batch 4 of 5, of 4 dimensions"),
    "references of batches": (KeepsReferences(TENSOR), "observer.batch_order", "all in one piece of memory, reversed"),
    "requires_grad of a weight": (TrainsWhatItIsGiven(INT4), "quantizer.zero", "the weight that it was given: changed in requires_grad"),
    "a note on a weight": (NotesOnWhatItIsGiven(INT4), "quantizer.zero", "the weight that it was given: changed in attribute largest"),
    "a note on all tensors": (NotesOnAllTensors(INT4), "quantizer.zero", "of the process: the class Tensor: process changed: largest"),
    "denormal numbers": (FlushesDenormals(INT4), "quantizer.zero", "of the process: denormal numbers"),
    "the environment": (SetsTheEnvironment(INT4), "quantizer.zero", "environment: process changed in QUANTIZED, which appeared"),
    "gradients off": (SwitchesGradientsOff(INT4), "quantizer.zero", "of the process: grad mode"),
    "a hook of all modules": (HooksAllModules(INT4), "quantizer.zero", "of every module._global_module_registration_hooks"),
    "a layer that leaves gradients off": (Wraps(GradientsOff), "layer.product", "grad mode: torch changed: True -> False"),
    "a layer with one buffer": (Wraps(OneBuffer), "layer.product", "a later forward has changed the output of an earlier one"),
    "a layer that looks at addresses": (Wraps(ByAddress), "layer.product", "an input that was changed in place gives another output"),
    "a layer for contiguous inputs": (Wraps(ContiguousOnly), "layer.product", "another output than for a contiguous input"),
    "a layer of square blocks": (TransposesBlocks(128, 128), "layer.weight_as_calibrated", "spread groups [256, 256] torch.float32"),
    "a layer of wide blocks": (TransposesBlocks(32, 64), "layer.weight_as_calibrated", "spread groups [128, 256] torch.float32"),
    "a layer without its bias": (Wraps(WithoutItsBias), "layer.product", "relative error"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_shortcut_is_told(name: str) -> None:
    subject, check, says = PLANTED[name]
    record = harness.check(subject, checks=[check], draws=False).records[0]
    assert record.outcome == "fail" and says in record.summary, record.summary


@pytest.mark.nightly
def test_a_layer_needs_nothing_of_a_linear_one() -> None:
    assert not hasattr(Around(nn.Identity()), "bias")
    report = harness.check(Wraps(Around), draws=False)
    assert report.passed, report.to_text()


def test_nothing_stays_in_the_process() -> None:
    for subject in (NotesOnAllTensors, FlushesDenormals, SetsTheEnvironment, HooksAllModules):
        harness.check(subject(INT4), checks=["quantizer.zero"], draws=False)
    assert not hasattr(torch.Tensor, "largest") and "QUANTIZED" not in os.environ
    assert torch.tensor(1e-320, dtype=torch.float64) * 1 != 0
    assert not nn.modules.module._global_module_registration_hooks


@cache
def _compiled() -> Any:
    return torch.compile(lambda x: x + 0, backend="eager")


class Compiled(OurQuantizer):
    def quantize(self, weight: Tensor) -> Quantized:
        return super().quantize(_compiled()(weight))


def test_what_torch_does_at_its_first_compilation_is_nobodys_fault() -> None:
    report = harness.check(Compiled(INT4), checks=["quantizer.zero"], draws=False)
    assert report.passed, report.to_text()
