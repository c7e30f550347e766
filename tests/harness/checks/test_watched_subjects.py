"""What a call does beside its result, and what it keeps for the next one, is told once, whatever the check is about."""

from __future__ import annotations

import copy
import gc
import math
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

import harness
from compressor.numerics import QuantizationArgs, QuantizationScheme
from harness.checks import protocols
from harness.checks.adapters.ours import OurFp4Packer, OurLayer, OurObserver, OurPacker, OurQuantizer, OurSolver
from harness.checks.catalogue.kinds import KINDS
from harness.checks.protocols import InPlaceTransform, Pruner, Quantized, Solved, members

INT4 = QuantizationArgs(num_bits=4, group_size=16)
SCHEME = QuantizationScheme(targets=["Linear"], weights=INT4)


class Draws(OurQuantizer):
    def encode(self, values: Tensor, like: Quantized) -> Tensor:
        random.random()
        return super().encode(values, like)


class Catches(OurQuantizer):
    def encode(self, values: Tensor, like: Quantized) -> Tensor:
        signal.signal(signal.SIGUSR1, lambda *given: None)
        return super().encode(values, like)


class Counts(OurQuantizer):
    def encode(self, values: Tensor, like: Quantized) -> Tensor:
        gc.callbacks.append(lambda *given: None)
        return super().encode(values, like)


class ExchangesRoots(OurQuantizer):
    def encode(self, values: Tensor, like: Quantized) -> Tensor:
        math.sqrt = lambda x: 0.0
        return super().encode(values, like)


class WritesBack(OurQuantizer):
    def encode(self, values: Tensor, like: Quantized) -> Tensor:
        return values.copy_(super().encode(values, like))


class OneBuffer(OurPacker):
    held: dict[Any, Tensor] = {}  # noqa: RUF012

    def pack(self, codes: Tensor) -> Tensor:
        words = super().pack(codes)
        return self.held.setdefault(tuple(words.shape), words.clone()).copy_(words)


class Clips(OurObserver):
    def observe(self, batches: Sequence[Tensor]) -> Quantized:
        return super().observe([batch.clamp_(-0.1, 0.1) for batch in batches])


class Seeds(OurSolver):
    def hessian(self, batches: Sequence[Tensor]) -> Tensor:
        torch.manual_seed(0)
        return super().hessian(batches)


class ForgetsInRefusals(OurSolver):
    """Declares another damping from its first refusal on."""

    def solve(
        self, weights: Sequence[Tensor], hessian: Tensor, block_size: int | None = None, like: Quantized | None = None
    ) -> list[Solved]:
        kept, self.damp_frac = self.damp_frac, 0.02
        found = OurSolver(self.args, damp_frac=kept).solve(weights, hessian, block_size, like)
        self.damp_frac = kept
        return found


class OneScale(OurSolver):
    """Gives weights of one shape the scales of the first of them."""

    def solve(
        self, weights: Sequence[Tensor], hessian: Tensor, block_size: int | None = None, like: Quantized | None = None
    ) -> list[Solved]:
        found = super().solve(weights[:1], hessian, block_size, like)
        for weight in weights[1:]:
            kept = found[0].quantized if weight.shape == weights[0].shape else None
            found += super().solve([weight], hessian, block_size, kept)
        return found


class HooksTheFloatLayer(OurLayer):
    def build(self, linear: nn.Linear) -> nn.Module:
        linear.register_forward_hook(lambda *args: None)
        return super().build(linear)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0


class Drawing(Around):
    def forward(self, x: Tensor) -> Any:
        torch.rand(1)
        return self.inner(x)


class Drifting(Around):
    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.inner(x) * (1 + 1e-3 * (self.calls > 5))


class Unpacked(OurLayer):
    """Its weight is unpacked once, and no state dict is read after that."""

    def build(self, linear: nn.Linear) -> nn.Module:
        layer: Any = super().build(linear)
        layer.register_forward_hook(lambda module, args, out: module.__dict__.setdefault("kept", OurLayer.weight(self, module)))
        return layer

    def weight(self, layer: nn.Module) -> Tensor:
        return layer.__dict__.get("kept", super().weight(layer))


def _wrapped(around: type[Around]) -> OurLayer:
    class Wraps(OurLayer):
        def build(self, linear: nn.Linear) -> nn.Module:
            return around(super().build(linear))

        def weight(self, layer: Any) -> Tensor:
            return super().weight(layer.inner)

        def expected_input(self, layer: Any, x: Tensor) -> Tensor:
            return super().expected_input(layer.inner, x)

    return Wraps(SCHEME)


def _half(weight: Tensor, hessian: Tensor) -> Tensor:
    return weight.scatter(1, weight.abs().argsort(dim=1, stable=True)[:, : weight.shape[1] // 2], 0.0)


def _draws(weight: Tensor, hessian: Tensor) -> Tensor:
    torch.randperm(3)
    return _half(weight, hessian)


def _fold(model: Any, batches: Sequence[Tensor]) -> None:
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(layer.self_attn, name).weight.mul_(layer.input_layernorm.weight)
        layer.input_layernorm.weight.fill_(1)


def _trains(model: Any, batches: Sequence[Tensor]) -> None:
    _fold(model, batches)
    model.train()


def _freezes(model: Any, batches: Sequence[Tensor]) -> None:
    _fold(model, batches)
    model.requires_grad_(False)


def _empties(model: Any, batches: Sequence[Tensor]) -> None:
    _fold(model, batches)
    batches[0].zero_()


def _patches(model: Any, batches: Sequence[Tensor]) -> None:
    _fold(model, batches)
    turn = modeling_llama.rotate_half
    modeling_llama.rotate_half = lambda x: turn(x)


def _transform(function: Any) -> InPlaceTransform:
    return InPlaceTransform(function, ["*.input_layernorm.weight"], architectures=["llama"])


WRONG: dict[str, tuple[Any, str]] = {
    "a quantizer draws": (Draws(INT4), "encode() has changed something of the process: random"),
    "a quantizer catches signals": (Catches(INT4), "encode() has changed something of the process: handlers of signals: process changed"),
    "a quantizer watches the collector": (Counts(INT4), "callbacks of garbage collection: process changed: "),
    "a quantizer exchanges a function": (
        ExchangesRoots(INT4),
        "encode() has changed something of the process: math: process changed: sqrt",
    ),
    "encode writes into values": (WritesBack(INT4), "encode() has changed the values that it was given"),
    "words in one buffer": (OneBuffer(4), "pack() has changed what pack() returned before"),
    "an observer clips": (Clips(QuantizationArgs(strategy="tensor")), "observe() has changed the batches that it was given"),
    "a solver seeds": (Seeds(INT4), "hessian() has changed something of the process: torch"),
    "a refusal changes a declaration": (ForgetsInRefusals(INT4), "() has changed the subject's damp_frac: changed: "),
    "a solver keeps scales": (OneScale(INT4), "weight 1 of 4 (24 and 24 and 5 and 1 rows): other scales, values or codes than alone"),
    "a hook on the float layer": (HooksTheFloatLayer(SCHEME), "build() has changed the linear that it was given: _forward_hooks"),
    "a layer draws": (_wrapped(Drawing), "the forward has changed something of the process: torch"),
    "a layer drifts": (_wrapped(Drifting), "a later forward gives another output than the first one"),
    "a layer keeps its weight": (Unpacked(SCHEME), "from a state dict: the weight is another one"),
    "a pruner draws": (Pruner(_draws), "prune() has changed something of the process: torch"),
    "a transform leaves training mode": (_transform(_trains), "apply() has changed the model that it was given: lm_head: training"),
    "a transform freezes": (_transform(_freezes), "requires_grad changed: True -> False"),
    "a transform patches": (_transform(_patches), "the module transformers.models.llama.modeling_llama: process changed: rotate_half"),
    "a transform empties its batches": (_transform(_empties), "apply() has changed the batches that it was given"),
}


@pytest.mark.parametrize("name", WRONG)
def test_it_is_told_and_told_once(name: str) -> None:
    subject, says = WRONG[name]
    turn = modeling_llama.rotate_half
    report = harness.check(subject, draws=False)
    assert modeling_llama.rotate_half is turn
    told = [group[0].summary for group in report.causes()]
    assert sum(says in text for text in told) == 1, report.to_text()
    assert not [text for text in told if "could not be completed" in text], told


def test_an_error_of_the_subject_is_told_once() -> None:
    report = harness.check(InPlaceTransform(_fold, ["*"], architectures=["llama_9"]))
    assert len(report.causes()) == 1 and report.to_text().count("no architecture of the zoo") == 2


def test_what_is_right_stays_right() -> None:
    for subject in (Pruner(_half), _transform(_fold)):
        assert harness.check(subject, draws=False).passed


class Nf4(OurQuantizer):
    """A table of 16 values, whose thresholds were rounded to half precision, as kernels hold them."""

    TABLE = (-1.0, -0.69619280, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.07958030, 0.16093020,
             0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0)  # fmt: skip
    name, tags, scale_rule, column_multiple = "nf4", frozenset({"zero", "local"}), "max_code", 1
    code_values = torch.tensor(TABLE, dtype=torch.float32).double()
    dtypes, stored_scale = (torch.float32,), None
    threshold_dtype = torch.float64

    def __init__(self) -> None:
        """It has no settings."""

    def unit(self, shape: tuple[int, int]) -> tuple[int, int]:
        return 1, shape[1]

    def quantize(self, weight: Tensor) -> Quantized:
        scale = weight.abs().amax(1, keepdim=True)
        like = Quantized(weight, torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale))
        return Quantized(self.encode(weight, like), like.scale)

    def encode(self, values: Tensor, like: Quantized) -> Tensor:
        middles = ((self.code_values[1:] + self.code_values[:-1]) / 2).to(self.threshold_dtype).double()
        return self.code_values[torch.searchsorted(middles, values.double() / like.scale.double())].float()

    def dequantize(self, quantized: Quantized) -> Tensor:
        return quantized.codes * quantized.scale


def test_thresholds_are_held_in_more_than_half_precision() -> None:
    exact, rounded = Nf4(), Nf4()
    rounded.threshold_dtype = torch.float16
    records = [harness.check(one, checks=["quantizer.nearest_codes"], draws=False).records[0] for one in (exact, rounded)]
    assert records[0].outcome == "pass", records[0].summary
    assert "a code is not the nearest one" in records[1].summary


def _with_gradient(result: Any) -> Any:
    """The same values, as something that was computed from what trains."""
    if isinstance(result, list):
        return [_with_gradient(one) for one in result]
    if isinstance(result, Quantized | Solved):
        return replace(result, **{field.name: _with_gradient(getattr(result, field.name)) for field in fields(result)})
    return result.detach().clone().requires_grad_() if isinstance(result, Tensor) and result.is_floating_point() else result


def _trains_all(subject: Any) -> Any:
    for name in set(members(getattr(protocols, KINDS[subject.kind]))) & set(RESULTS):
        method = getattr(subject, name)
        setattr(subject, name, lambda *args, method=method, **kwargs: _with_gradient(method(*args, **kwargs)))
    return subject


RESULTS = (
    "quantize",
    "encode",
    "dequantize",
    "pack",
    "unpack",
    "hessian",
    "solve",
    "observe",
    "weight",
    "expected_weight",
    "expected_input",
)
TRAINED = (
    OurQuantizer(INT4),
    OurFp4Packer(),
    OurObserver(QuantizationArgs(strategy="tensor", symmetric=False)),
    OurObserver(QuantizationArgs(strategy="tensor", observer="mse")),
    OurLayer(SCHEME),
    OurSolver(INT4),
)


@pytest.fixture
def warned_always() -> Iterator[None]:
    """Torch says once in a process that a number is read from a tensor with a gradient; warnings are errors here."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.usefixtures("warned_always")
@pytest.mark.parametrize("subject", TRAINED, ids=lambda subject: subject.name)
def test_results_may_have_gradients(subject: Any) -> None:
    report = harness.check(_trains_all(copy.deepcopy(subject)), draws=False)
    assert report.passed, report.to_text()


@pytest.mark.usefixtures("warned_always")
def test_pruned_weights_may_have_gradients() -> None:
    report = harness.check(Pruner(lambda weight, hessian: _half(weight, hessian).requires_grad_()), draws=False)
    assert report.passed, report.to_text()
