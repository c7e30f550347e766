"""Layers that are right but for one shape, one way of handing an input in, or one way of coming about: each is told by what it does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import harness
from harness.reporting.verdict import Outcome


class Int8(nn.Module):
    """A code of 8 bits and one scale a row, without anything of ours."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        weight, dtype = source.weight.detach().double(), source.weight.dtype
        scale = (weight.abs().amax(1, keepdim=True) / 127.5).to(dtype)
        self.scale: Tensor
        self.codes: Tensor
        self.register_buffer("scale", torch.where(scale == 0, torch.full_like(scale, torch.finfo(dtype).tiny), scale))
        self.register_buffer("codes", torch.round(weight / self.scale.double()).clamp(-128, 127).to(torch.int8))
        self.bias = None if source.bias is None else nn.Parameter(source.bias.detach().clone(), requires_grad=False)

    def values(self) -> Tensor:
        return (self.codes.double() * self.scale.double()).to(self.scale.dtype)

    def added(self, x: Tensor) -> Tensor | None:
        return None if self.bias is None else self.bias.to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.values().to(x.dtype), self.added(x))


class Subject:
    kind, tags, column_multiple = "layer", frozenset[str](), 1
    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def __init__(self, layer: type[Int8]) -> None:
        self.layer, self.name = layer, layer.__name__

    def build(self, source: nn.Linear) -> nn.Module:
        return self.layer(source)

    def weight(self, layer: Any) -> Tensor:
        values: Tensor = layer.values()
        return values

    def expected_weight(self, source: nn.Linear) -> Tensor:
        return Int8(source).values()

    def expected_input(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x


def where(is_hit: Callable[[Int8, Tensor], bool]) -> type[Int8]:
    """One and a half times the right output for some inputs."""

    class Wrong(Int8):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y * 1.5 if is_hit(self, x) else y

    return Wrong


class Square(Int8):
    """W in the place of W^T, where both fit."""

    def forward(self, x: Tensor) -> Tensor:
        if self.codes.shape[0] != self.codes.shape[1]:
            return super().forward(x)
        y = x @ self.values().to(x.dtype)
        return y if self.bias is None else y + self.bias.to(x.dtype)


class NoBiasForOneOutput(Int8):
    def added(self, x: Tensor) -> Tensor | None:
        return None if self.codes.shape[0] == 1 else super().added(x)


class StaleCache(Int8):
    """What was unpacked at the first forward is kept, whatever is loaded later."""

    def forward(self, x: Tensor) -> Tensor:
        self.unpacked = getattr(self, "unpacked", None)
        if self.unpacked is None:
            self.unpacked = self.values()
        return linear(x, self.unpacked.to(x.dtype), self.added(x))


class StaleAfterMoves(Int8):
    """What was unpacked is dropped when a state dict is loaded, and in copies; not when the layer goes to another dtype."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.pop("unpacked", None)
        super()._load_from_state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        new = object.__new__(type(self))
        new.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items() if key != "unpacked"})
        return new

    def forward(self, x: Tensor) -> Tensor:
        unpacked = self.__dict__.setdefault("unpacked", self.values())
        return linear(x, unpacked.to(x.dtype), self.added(x))


class StaleFromThere(StaleAfterMoves):
    """What was unpacked before the layer went is dropped; what was unpacked where it went to is kept."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16 or "unpacked" in self.__dict__:
            return super().forward(x)
        return Int8.forward(self, x)


class HoldsMoreThanItSays(Int8):
    """Multiplies with the values of its making, which its buffers no longer have after a move."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source)
        self.first = (self.values(),)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.first[0].to(x.dtype), self.added(x))


class KeepsFirstFilling(Int8):
    """The second state dict is not loaded into it."""

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "is_filled"):
            self.is_filled = True
            super().load_state_dict(state_dict)


class BiasNotSaved(Int8):
    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source)
        if self.bias is not None:
            bias = self.bias.data
            del self.bias
            self.register_buffer("bias", bias, persistent=False)


class BiasLostInCopy(Int8):
    def __deepcopy__(self, memo: Any) -> Any:
        new = object.__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        new._parameters["bias"] = None
        return new


class CopyShares(Int8):
    def __deepcopy__(self, memo: Any) -> Any:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new


class CopySharesTensors(CopyShares):
    def __deepcopy__(self, memo: Any) -> Any:
        new = super().__deepcopy__(memo)
        new._buffers, new._parameters = dict(self._buffers), dict(self._parameters)
        return new


class CopySharesTables(Int8):
    """A hook on the copy is one on the layer."""

    def __deepcopy__(self, memo: Any) -> Any:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new._buffers, new._parameters = copy.deepcopy(self._buffers, memo), copy.deepcopy(self._parameters, memo)
        return new


class CopyLosesMode(Int8):
    def __deepcopy__(self, memo: Any) -> Any:
        new = object.__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo), training=True)
        return new


class KeepsTensorsOfFirstFilling(Int8):
    """What fills it first is its own memory from then on, into which the second filling is written."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if not hasattr(self, "is_filled"):
            self.is_filled = True
            self.codes = state_dict[prefix + "codes"]
        super()._load_from_state_dict(state_dict, prefix, *args)


class BiasMoved(Int8):
    """Whatever moves it multiplies its bias."""

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        super()._apply(*args, **kwargs)
        if self.bias is not None:
            self.bias.data.mul_(1.5)
        return self


class BiasMovedToFloat16(Int8):
    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        super()._apply(*args, **kwargs)
        if self.bias is not None and self.bias.dtype == torch.float16:
            self.bias.data.zero_()
        return self


class Rows129(Int8):
    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source)
        self.scale[128:] *= 1.1


class Columns513(Int8):
    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source)
        self.codes[:, 512:] = 0


class BuiltWithoutGradients(Int8):
    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source)
        if not torch.is_grad_enabled() and self.bias is not None:
            self.bias.data.mul_(2)


class SaturatesForMany(Int8):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-3, 3) if x.shape[:-1].numel() > 64 else x)


def _has_large_sums(self: Int8, x: Tensor) -> bool:
    """Whether codes times a 64th of the inputs add up to more than float16 has."""
    sums = (x.detach().double() @ self.codes.double().t()).abs()
    return x.dtype == torch.float16 and bool((sums > 64 * 65504).any()) and bool(x.isfinite().all())


def _is_square_view(self: Int8, x: Tensor) -> bool:
    return self.codes.shape[0] == self.codes.shape[1] and not x.is_contiguous()


WRONG: dict[str, tuple[type[Int8], str, str]] = {
    "a square weight": (Square, "layer.product", "weight [32, 32]"),
    "no bias for one output": (NoBiasForOneOutput, "layer.product", "an input of [130, 1031]"),
    "one column": (where(lambda self, x: self.codes.shape[1] == 1), "layer.product", "an input of [130, 1]"),
    "one row and one column": (where(lambda self, x: self.codes.numel() == 1), "layer.product", "weight [1, 1]"),
    "one token": (where(lambda self, x: x.dim() == 2 and len(x) == 1), "layer.product", "an input of [1, 37]"),
    "one step": (where(lambda self, x: x.dim() == 3 and x.shape[1] == 1 and len(x) > 1), "layer.product", "an input of [3, 1, 37]"),
    "four dimensions": (where(lambda self, x: x.dim() == 4), "layer.product", "an input of [2, 3, 2, 37]"),
    "many tokens of the size of hidden states": (SaturatesForMany, "layer.product", "130 tokens"),
    "gradients on": (where(lambda self, x: torch.is_grad_enabled()), "layer.product", "where gradients are on, another output"),
    "gradients off": (where(lambda self, x: not torch.is_grad_enabled()), "layer.product", "where gradients are on, another output"),
    "stride 0": (where(lambda self, x: x.dim() == 2 and x.stride(0) == 0 and len(x) > 1), "layer.product", "one row, expanded"),
    "an offset": (where(lambda self, x: x.storage_offset() > 0 and x.is_contiguous()), "layer.product", "the last rows of a larger tensor"),
    "a step": (where(lambda self, x: x.dim() > 1 and x.stride(-1) == 2), "layer.product", "every other column"),
    "a view, where the weight is square": (where(_is_square_view), "layer.product", "rows that lie apart: another output"),
    "sums of codes": (where(_has_large_sums), "layer.product", "largest"),
    "a Parameter": (where(lambda self, x: isinstance(x, nn.Parameter)), "layer.product", "a Parameter, where gradients"),
    "a result": (where(lambda self, x: x.grad_fn is not None), "layer.product", "a result that has a gradient, where gradients"),
    "a cache": (StaleCache, "layer.copies", "filled after it had run: another output"),
    "a second filling": (KeepsFirstFilling, "layer.copies", "filled again: another output"),
    "a bias that is not saved": (BiasNotSaved, "layer.copies", "filled from a state dict: another output"),
    "a bias that is not copied": (BiasLostInCopy, "layer.copies", "a deepcopy: another output"),
    "a copy that is none": (CopyShares, "layer.copies", "the state dict of the layer has changed with it"),
    "a copy of the same tensors": (CopySharesTensors, "layer.copies", "the copy was filled, and the state dict of the layer has changed"),
    "tables of hooks that a copy shares": (CopySharesTables, "layer.copies", "the layer and its copy share one _"),
    "a copy in training mode": (CopyLosesMode, "layer.copies", "the copy of a layer in eval mode is in training mode"),
    "memory of the first filling": (KeepsTensorsOfFirstFilling, "layer.copies", "the one filled from it was filled, and the state dict"),
    "a bias that grows": (BiasMoved, "layer.copies", "moved to the dtype that it has: another output"),
    "a bias that grows on the way": (BiasMoved, "layer.moves", "of a layer that went from float32 to torch.bfloat16"),
    "a bias that float16 has not": (BiasMovedToFloat16, "layer.moves", "of a layer that went from float32 to torch.float16"),
    "a cache that outlives a move": (StaleAfterMoves, "layer.moves", "and has run before it went: another output than one that"),
    "a cache of where it went": (StaleFromThere, "layer.moves", "and has run there: another output than one that was only moved"),
    "values of its making": (HoldsMoreThanItSays, "layer.moves", "of the weight that it holds when back from torch.bfloat16"),
    "built without gradients": (BuiltWithoutGradients, "layer.copies", "built where gradients are off"),
    "rows from 129 on": (Rows129, "layer.weight_as_calibrated", "[521, 3] torch.float32"),
    "columns from 513 on": (Columns513, "layer.weight_as_calibrated", "[3, 1031] torch.float32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_layer_is_told(name: str) -> None:
    layer, check, says = WRONG[name]
    record = harness.check(Subject(layer), checks=[check], draws=False).records[0]
    assert record.outcome is Outcome.FAIL and says in record.summary, record.summary


@pytest.mark.nightly
def test_the_right_layer_passes() -> None:
    report = harness.check(Subject(Int8), draws=False)
    assert report.passed, report.to_text()
