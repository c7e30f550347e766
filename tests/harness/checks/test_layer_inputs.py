"""Layers that are right but for one kind of input, or in one mode: each is told, and what a forward leaves on its layer is, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harness
from compressor.numerics import QuantizationArgs, QuantizationScheme
from harness.checks.adapters.ours import OurLayer
from harness.reporting.verdict import Outcome

SCHEME = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=4, group_size=16))


class Around(nn.Module):
    def __init__(self, inner: nn.Module, wrong: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.wrong, self.calls = inner, wrong, 0
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Any:
        return self.wrong(self, x)


class Wrapped(OurLayer):
    def __init__(self, wrong: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(SCHEME)
        self.wrong = wrong

    def build(self, linear: nn.Linear) -> nn.Module:
        return Around(super().build(linear), self.wrong)

    def weight(self, layer: Any) -> Tensor:
        return super().weight(layer.inner)

    def expected_input(self, layer: Any, x: Tensor) -> Tensor:
        return super().expected_input(layer.inner, x)


def scaled(when: Callable[[Any, Tensor], bool]) -> Callable[[Any, Tensor], Tensor]:
    return lambda layer, x: layer.inner(x) * (1.05 if when(layer, x) else 1.0)


def _last(count: int, dtype: torch.dtype, factor: float = 1.1) -> Tensor:
    factors = torch.ones(count, dtype=dtype)
    factors[-1:] *= factor if dtype.itemsize == 2 else 1
    return factors


def no_bias_for_zeros(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = layer.inner(x)
    return torch.where((x == 0).all(-1, keepdim=True), torch.zeros_like(y), y)


def poisons(layer: Any, x: Tensor) -> Any:
    y = layer.inner(x)
    return y if bool(x.isfinite().all()) else torch.full_like(y, torch.nan)


def clears_tokens(layer: Any, x: Tensor) -> Any:
    return layer.inner(x.masked_fill(x.isnan().any(-1, keepdim=True), 0) if x.ndim == 3 else x)


def refuses_mutely(layer: Any, x: Tensor) -> Any:
    if not bool(x.isfinite().all()):
        raise ValueError
    return layer.inner(x)


def hooks(layer: Any, x: Tensor) -> Any:
    layer.inner.register_forward_hook(lambda *args: None)
    return layer.inner(x)


def late_hook(layer: Any, x: Tensor) -> Any:
    layer.calls += 1
    if layer.calls == 5:
        layer.inner.register_forward_pre_hook(lambda *args: None)
    return layer.inner(x)


def freezes(layer: Any, x: Tensor) -> Any:
    for parameter in layer.parameters():
        parameter.requires_grad = not parameter.requires_grad
    return layer.inner(x)


def counts(layer: Any, x: Tensor) -> Any:
    layer.seen += 1
    return layer.inner(x)


def changes_mode(layer: Any, x: Tensor) -> Any:
    layer.inner.train(not layer.inner.training)
    return layer.inner(x)


def adds_a_module(layer: Any, x: Tensor) -> Any:
    layer.cache = nn.Identity()
    return layer.inner(x)


def patches(layer: Any, x: Tensor) -> Any:
    y = layer.inner(x)
    layer.inner.forward = type(layer.inner).forward.__get__(layer.inner)
    return y


WRONG: dict[str, Callable[[Any, Tensor], Any]] = {
    "in evaluation mode": scaled(lambda layer, x: not layer.training),
    "in training mode": scaled(lambda layer, x: layer.training),
    "from 64 tokens on": scaled(lambda layer, x: x.numel() // max(1, x.shape[-1]) >= 64),
    "from 130 tokens on": scaled(lambda layer, x: x.ndim == 2 and len(x) >= 130),
    "whole tiles of 8 tokens": scaled(lambda layer, x: x.ndim == 2 and bool(len(x)) and len(x) % 8 == 0),
    "whole tiles of 256 tokens": scaled(lambda layer, x: x.ndim == 2 and bool(len(x)) and len(x) % 256 == 0),
    "a range of tokens": scaled(lambda layer, x: x.ndim == 2 and 18 <= len(x) <= 30),
    "a range of many tokens": scaled(lambda layer, x: 66 <= x.numel() // max(1, x.shape[-1]) < 130),
    "sequences that fill tiles": scaled(lambda layer, x: x.ndim == 3 and bool(x.numel()) and x.shape[1] % 64 == 0),
    "from 500 columns on": scaled(lambda layer, x: x.shape[-1] >= 500),
    "long sequences": scaled(lambda layer, x: x.ndim == 3 and x.shape[1] > 32),
    "long sequences of some": scaled(lambda layer, x: x.ndim == 3 and x.shape[1] > 65),
    "from the fourth sequence on": lambda layer, x: layer.inner(torch.cat((x[:3], x[3:] * 0)) if x.ndim == 3 else x),
    "first two dimensions": lambda layer, x: layer.inner(x.transpose(0, 1) if x.ndim > 2 and len(x) == x.shape[1] else x),
    "beyond 100": lambda layer, x: layer.inner(x.clamp(-100, 100)),
    "beyond 2^90": lambda layer, x: layer.inner(x.clamp(-(2.0**90), 2.0**90)) if x.dtype == torch.float32 else layer.inner(x),
    "tiny rows are padding": lambda layer, x: layer.inner(x * (x.abs().sum(-1, keepdim=True) > 1e-3) if x.ndim == 3 else x),
    "tiny rows in four dimensions": lambda layer, x: layer.inner(x * (x.abs().sum(-1, keepdim=True) > 1e-3) if x.ndim == 4 else x),
    "below 1e-6": lambda layer, x: layer.inner(x.masked_fill(x.abs() < 1e-6, 0)),
    "below 1e-30": lambda layer, x: layer.inner(x.masked_fill(x.abs() < 1e-30, 0)),
    "subnormal": lambda layer, x: layer.inner(x.masked_fill(x.abs() < 1.2e-38, 0)),
    "10 % in 16 bits": lambda layer, x: layer.inner(x) * (1.1 if x.dtype.itemsize == 2 else 1),
    "10 % of the last output in 16 bits": lambda layer, x: layer.inner(x) * _last(layer.inner.weight_size[0], x.dtype),
    "15 % of the last token in 16 bits": lambda layer, x: layer.inner(x) * _last(len(x), x.dtype, 1.15).view(-1, *[1] * (x.ndim - 1)),
    "rows of zeros": no_bias_for_zeros,
    "zeros only": scaled(lambda layer, x: bool(x.numel()) and not bool(x.any())),
    "a constant": scaled(lambda layer, x: x.numel() > 1 and bool((x == x.flatten()[:1]).all()) and bool(x.any())),
    "NaN in what comes out": lambda layer, x: layer.inner(x).nan_to_num(),
    "NaN in what goes in": lambda layer, x: layer.inner(x.nan_to_num(0, torch.inf, -torch.inf)),
    "infinity in what goes in": lambda layer, x: layer.inner(x.nan_to_num(torch.nan)),
    "NaN in some outputs": lambda layer, x: torch.cat((layer.inner(x)[..., :-1], layer.inner(x)[..., -1:].nan_to_num(0)), -1),
    "NaN in sequences": clears_tokens,
    "NaN in other tokens": poisons,
    "NaN without a word": refuses_mutely,
    "a hook each call": hooks,
    "a hook at the fifth call": late_hook,
    "requires_grad": freezes,
    "a buffer": counts,
    "a mode": changes_mode,
    "a module": adds_a_module,
    "a patched forward": patches,
}


@pytest.mark.parametrize("what", WRONG)
def test_a_layer_that_is_wrong_for_one_kind_of_input_is_told(what: str) -> None:
    record = harness.check(Wrapped(WRONG[what]), checks=["layer.product"], draws=False).records[0]
    assert record.outcome is Outcome.FAIL and "could not be completed" not in record.summary, record.summary


def refuses(layer: Any, x: Tensor) -> Any:
    if not bool(x.isfinite().all()):
        raise ValueError("the input holds NaN or infinity")
    return layer.inner(x)


def negative_zeros(layer: Any, x: Tensor) -> Any:
    y = layer.inner(x)
    return torch.where(y == 0, -torch.zeros_like(y), y)


@pytest.mark.parametrize("right", [refuses, negative_zeros], ids=lambda right: right.__name__)
def test_a_layer_that_refuses_nan_or_has_another_sign_of_zero_passes(right: Callable[[Any, Tensor], Any]) -> None:
    report = harness.check(Wrapped(right), checks=["layer.product"], draws=False)
    assert report.passed, report.to_text()


def test_the_sign_of_zero_decides_nothing_of_a_weight() -> None:
    class Signed(OurLayer):
        def expected_weight(self, linear: nn.Linear) -> Tensor:
            weight = super().expected_weight(linear)
            return torch.where(weight == 0, -torch.zeros_like(weight), weight)

    report = harness.check(Signed(SCHEME), checks=["layer.weight_as_calibrated"], draws=False)
    assert report.passed, report.to_text()


def unpacks(layer: Any, x: Tensor) -> Any:
    layer.unpacked = layer.calls
    layer.calls += 1
    return layer.inner(x)


@pytest.mark.nightly
def test_a_layer_that_keeps_what_it_has_unpacked_passes() -> None:
    report = harness.check(Wrapped(unpacks), checks=["layer.product", "layer.shapes", "layer.moves"], draws=False)
    assert report.passed, report.to_text()
