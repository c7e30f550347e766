"""verify() tells hooks that change what others see, state in the wrong place, and what stays behind; it passes what only looks like it."""

from __future__ import annotations

import copy
import logging
import random
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy
import pytest
import torch
from pydantic import PrivateAttr
from torch import Tensor, nn

from compressor.errors import LifecycleError, ModelError
from compressor.lifecycle import Event, Modifier, State
from harness.lifecycle.checks.registry import CHECKS
from harness.lifecycle.driving.probes import TinyModel, masked_batch, tiny_batches
from harness.lifecycle.report import VerifyReport
from harness.lifecycle.verify import verify
from harness.reporting.verdict import Outcome

INPUTS = [*tiny_batches(1), masked_batch()]
Hook = Callable[..., Any]


class Base(Modifier):
    calibration = "sequential"

    def on_initialize(self, state: State) -> bool:
        return True

    def on_calibration_end(self, state: State, event: Event) -> None:
        self.remove_hooks()


def look(modifier: object, *checks: str, **options: Any) -> VerifyReport:
    names = [f"lifecycle.{check}" for check in checks] or None
    return verify(modifier, TinyModel(8), inputs=INPUTS, checks=names, profile="pr", **options)


def hooked(where: str, hook: Hook, kind: Any = "forward", **options: bool) -> type[Modifier]:
    """A modifier that hangs one hook up for the time of a calibration."""

    class Hooked(Base):
        def on_calibration_start(self, state: State, event: Event) -> None:
            self.register_hook(state.model.get_submodule(where), hook, kind, **options)

    return Hooked


def counting(number: int) -> Hook:
    """A hook that changes the output of one call of each run."""
    calls = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        calls.append(1)
        return output + 1 if len(calls) % 8 == number else None

    return hook


def _none(*values: object) -> None:
    return None


def _ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["input_ids"]


def _set_buffer(module: nn.Module, args: Any, output: Any) -> None:
    with torch.no_grad():
        module.bias.add_(1)  # type: ignore[operator]


def _no_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, {key: None if key == "attention_mask" else value for key, value in kwargs.items()}


WITH_KEYWORDS = {"with_kwargs": True}
# The module, the hook, its kind and options, and what the report says of it.
HOOKS: dict[str, tuple[str, Hook, str, dict[str, bool], str]] = {
    "an input in place": ("layers.0.up_proj", lambda m, a: _none(a[0].mul_(2)), "forward_pre", {}, "the input of layers.0.up_proj"),
    "another input": ("layers.0", lambda m, a: (a[0] + 1,), "forward_pre", {}, "the input of layers.0"),
    "another output": ("layers.0", lambda m, a, y: y * 1.001, "forward", {}, "the output of layers.0"),
    "an output in place": ("norm", lambda m, a, y: _none(y.clamp_(-1, 1)), "forward", {}, "the output of norm"),
    "an output rounded": ("norm", lambda m, a, y: y.bfloat16().float(), "forward", {}, "the output of norm"),
    "the last output": ("lm_head", lambda m, a, y: y.round(), "forward", {}, "the output of lm_head"),
    "a tuple": ("", lambda m, a, y: (y,), "forward", {}, "the output of the model"),
    "an equal output that requires gradients": ("norm", lambda m, a, y: y.clone().requires_grad_(), "forward", {}, "the output of norm"),
    "equal values that lie another way": (
        "norm",
        lambda m, a, y: y.transpose(0, 1).contiguous().transpose(0, 1),
        "forward",
        {},
        "the output of norm",
    ),
    "ids in place": ("", lambda m, a, k: _none(_ids(a, k).clamp_(max=1)), "forward_pre", WITH_KEYWORDS, "the input of the model"),
    "ids after the forward": ("", lambda m, a, k, y: _none(_ids(a, k).zero_()), "forward", WITH_KEYWORDS, "the output of the model"),
    "the dtype of ids": ("embed_tokens", lambda m, a: (a[0].int(),), "forward_pre", {}, "the input of embed_tokens"),
    "a keyword": ("layers.1", _no_mask, "forward_pre", WITH_KEYWORDS, "the input of layers.1"),
    "a keyword, taken away": ("", lambda m, a, k: _none(k.pop("attention_mask", None)), "forward_pre", WITH_KEYWORDS, "the input of the"),
    "only in training": ("norm", lambda m, a, y: y + 1 if m.training else None, "forward", {}, "in training mode"),
    "only in evaluation": ("norm", lambda m, a, y: None if m.training else y + 1, "forward", {}, "in evaluation mode"),
    "only the second batch": ("norm", counting(2), "forward", {}, "the output of norm"),
    "only the fifth batch": ("norm", counting(5), "forward", {}, "the output of norm"),
    "only with gradients": ("norm", lambda m, a, y: y + 1 if torch.is_grad_enabled() else None, "forward", {}, "the output of norm"),
    "a gradient that is there": (
        "norm",
        lambda m, a, y: _none(m.weight.grad is not None and m.weight.grad.mul_(2)),
        "forward",
        {},
        "norm.",
    ),
    "a parameter": ("norm", _set_buffer, "forward", {}, "norm.bias"),
    "the grad mode": ("norm", lambda m, a, y: _none(torch.set_grad_enabled(True)), "forward", {}, "grad mode"),
    "random numbers": ("norm", lambda m, a, y: _none(torch.rand(1)), "forward", {}, "a torch.Generator of your own"),
    "a seed": ("norm", lambda m, a, y: _none(torch.manual_seed(0)), "forward", {}, "seeded"),
    "Python's random numbers": ("norm", lambda m, a, y: _none(random.random()), "forward", {}, "random: rng"),
    "numpy's random numbers": ("norm", lambda m, a, y: _none(numpy.random.rand()), "forward", {}, "numpy: rng"),
    "an attribute": ("norm", lambda m, a, y: _none(setattr(m, "seen", 1)), "forward", {}, "norm.seen"),
    "the mode": ("norm", lambda m, a, y: _none(m.train(not m.training)), "forward", {}, "training changed"),
    "more hooks": ("norm", lambda m, a, y: _none(m.register_forward_hook(_none)), "forward", {}, "norm._forward_hooks"),
    "an error": ("norm", lambda m, a, y: _none(1 / (y.shape[1] - 21)), "forward", {}, "ZeroDivisionError"),
}


@pytest.mark.parametrize("what", HOOKS)
def test_a_hook_that_changes_a_forward_is_told(what: str) -> None:
    where, hook, kind, options, says = HOOKS[what]
    record = look(hooked(where, hook, kind, **options), "hooks_watch").records[-1]
    assert record.outcome is Outcome.FAIL
    assert says in record.summary


def test_gradients_that_a_forward_was_shown_are_gone_behind_it() -> None:
    class Looks(Base):
        def on_calibration_start(self, state: State, event: Event) -> None:
            self.register_hook(state.model.get_submodule("norm"), lambda m, a, y: None, "forward")

        def on_calibration_end(self, state: State, event: Event) -> None:
            assert all(parameter.grad is None for parameter in state.model.parameters())
            super().on_calibration_end(state, event)

    assert look(Looks, "hooks_watch", "completes").passed


def test_a_tag_says_that_a_forward_is_meant_to_change() -> None:
    record = look(hooked("norm", lambda m, a, y: y * 2), "hooks_watch", tags=["changes_forward"]).records[-1]
    assert record.outcome is Outcome.SKIP


class WatchesByTheMask(Base):
    """What it does with the mask of the batch that runs."""

    def on_calibration_start(self, state: State, event: Event) -> None:
        self.register_hook(state.model.get_submodule("norm"), lambda m, a, y: self.use(state, a[0]), "forward")

    def use(self, state: State, x: Tensor) -> None:
        raise NotImplementedError


class WritesIntoTheMask(WatchesByTheMask):
    def use(self, state: State, x: Tensor) -> None:
        if state.token_mask is not None:
            state.token_mask[..., -2:] = False


class TakesTheMaskAway(WatchesByTheMask):
    def use(self, state: State, x: Tensor) -> None:
        state.token_mask = None


class CountsTokens(WatchesByTheMask):
    _num_tokens: int = 0

    def use(self, state: State, x: Tensor) -> None:
        self._num_tokens += x.shape[:-1].numel() if state.token_mask is None else len(x[state.token_mask])


class PatchesForwardForATime(Base):
    def on_calibration_start(self, state: State, event: Event) -> None:
        forward = state.model.norm.forward  # type: ignore[union-attr]
        state.model.norm.forward = lambda x: forward(x) * 1.5  # type: ignore[method-assign, union-attr]

    def on_calibration_end(self, state: State, event: Event) -> None:
        del state.model.norm.forward  # type: ignore[union-attr]


class MutesOthers(Base):
    _kept: dict[nn.Module, dict[int, Any]] = PrivateAttr(default_factory=dict)

    def on_calibration_start(self, state: State, event: Event) -> None:
        for module in state.model.modules():
            self._kept[module] = dict(module._forward_hooks)
            module._forward_hooks.clear()

    def on_calibration_end(self, state: State, event: Event) -> None:
        for module, hooks in self._kept.items():
            module._forward_hooks.update(hooks)
        self._kept.clear()


class ChangesTheOrderOfHooks(Base):
    def on_calibration_start(self, state: State, event: Event) -> None:
        for module in state.model.modules():
            if len(module._forward_hooks) > 1:
                module._forward_hooks.move_to_end(next(iter(module._forward_hooks)))  # type: ignore[attr-defined]


class OfTraining(Modifier):
    contract_tags: ClassVar[frozenset[str]] = frozenset({"session_hooks"})

    def on_initialize(self, state: State) -> bool:
        return True

    def on_end(self, state: State, event: Event) -> None:
        self.remove_hooks()


class ScalesGradients(OfTraining):
    def on_start(self, state: State, event: Event) -> None:
        hook = lambda module, ins, outs: tuple(one * 2 for one in ins)  # noqa: E731
        self.register_hook(state.model.get_submodule("layers.0.up_proj"), hook, "full_backward")


class HalvesTheLoss(OfTraining):
    def on_event(self, state: State, event: Event) -> None:
        if event.loss is not None:
            event.loss.mul_(0.5)


class Detaches(OfTraining):
    def on_start(self, state: State, event: Event) -> None:
        self.register_hook(state.model.get_submodule("layers.0"), lambda m, a, y: y.detach(), "forward")


class KeepsActivations(Base):
    _seen: list[Tensor] = PrivateAttr(default_factory=list)

    def on_calibration_start(self, state: State, event: Event) -> None:
        self.register_hook(state.model.get_submodule("norm"), lambda m, a, y: self._seen.append(y[0, :1].detach()), "forward")


_LARGEST: dict[str, float] = {}


class SharesARunningMaximum(Base):
    def on_calibration_start(self, state: State, event: Event) -> None:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            _LARGEST["x"] = max(_LARGEST.get("x", 0.0), float(args[0].abs().max()))

        self.register_hook(state.model.get_submodule("lm_head"), hook, "forward")

    def on_calibration_end(self, state: State, event: Event) -> None:
        super().on_calibration_end(state, event)
        with torch.no_grad():
            state.model.get_parameter("norm.bias").fill_(_LARGEST["x"])


class ChangesAClass(Base):
    def on_calibration_end(self, state: State, event: Event) -> None:
        state.model.get_submodule("norm").__class__ = type("Norm", (nn.LayerNorm,), {})


class AddsAParameter(Base):
    def on_calibration_end(self, state: State, event: Event) -> None:
        state.model.get_submodule("norm").register_parameter("extra", nn.Parameter(torch.ones(1)))


class AddsAGenerationConfig(Base):
    def on_calibration_end(self, state: State, event: Event) -> None:
        state.model.generation_config = types.SimpleNamespace(do_sample=True)  # type: ignore[assignment]


class ChangesTheConfig(Base):
    def on_calibration_end(self, state: State, event: Event) -> None:
        state.model.config.use_cache = False  # type: ignore[union-attr]


class FiltersWarnings(Base):
    def on_initialize(self, state: State) -> bool:
        warnings.simplefilter("ignore")
        return True


class SilencesLogs(Base):
    def on_initialize(self, state: State) -> bool:
        logging.disable(logging.ERROR)
        return True


class PatchesLinalg(Base):
    def on_initialize(self, state: State) -> bool:
        own = torch.linalg.cholesky
        torch.linalg.cholesky = lambda *args, **options: own(*args, **options)
        return True


class SetsABackend(Base):
    def on_initialize(self, state: State) -> bool:
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        return True


class KeepsStateInAField(Base):
    count: int = 0

    def on_calibration_start(self, state: State, event: Event) -> None:
        self.count += 1


class DrawsForNoModule(Base):
    def on_calibration_end(self, state: State, event: Event) -> None:
        torch.rand(1)


class KeepsAnInitialWeight(Base):
    contract_tags: ClassVar[frozenset[str]] = frozenset({"idempotent"})

    def on_calibration_end(self, state: State, event: Event) -> None:
        state.replace_module("lm_head", nn.Linear(8, 32, bias=False))


class ChangesWithoutAWord(Base):
    def on_calibration_end(self, state: State, event: Event) -> None:
        with torch.no_grad():
            state.model.get_parameter("norm.bias").add_(1)


WRONG: dict[type[Modifier], tuple[str, str]] = {
    WritesIntoTheMask: ("hooks_watch", "state.token_mask: batch changed: bool[3, 21] holds other values; others read it"),
    TakesTheMaskAway: ("hooks_watch", "state.token_mask: batch changed: bool[3, 21] -> None"),
    PatchesForwardForATime: ("hooks_watch", "the output of norm"),
    MutesOthers: ("hooks_watch", "on the model before the run"),
    ChangesTheOrderOfHooks: ("surroundings", "hooks"),
    KeepsActivations: ("nothing_left", "activations are still held"),
    SharesARunningMaximum: ("repeatable", "norm.bias"),
    ChangesAClass: ("completes", "norm.__class__"),
    AddsAParameter: ("completes", "norm.extra: tensor appeared"),
    AddsAGenerationConfig: ("completes", "generation_config"),
    ChangesTheConfig: ("completes", "in use_cache: True -> False"),
    FiltersWarnings: ("completes", "warnings"),
    SilencesLogs: ("completes", "logging"),
    PatchesLinalg: ("completes", "torch.linalg: process changed: cholesky"),
    SetsABackend: ("completes", "torch.backends.cudnn"),
    KeepsStateInAField: ("surroundings", "KeepsStateInAField.count: settings changed: 0 -> 1; fields are settings"),
    DrawsForNoModule: ("completes", "rand was called at test_hooks_watch.py:"),
    KeepsAnInitialWeight: ("repeatable", "lm_head.weight"),
    ChangesWithoutAWord: ("claims", "norm.bias: 1 tensors"),
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Take back what the wrong ones leave in the process."""
    cholesky, benchmark = torch.linalg.cholesky, torch.backends.cudnn.benchmark
    with warnings.catch_warnings():
        yield
    torch.linalg.cholesky, torch.backends.cudnn.benchmark = cholesky, benchmark
    logging.disable(logging.NOTSET)
    torch.set_grad_enabled(True)


@pytest.mark.parametrize(("modifier", "expected"), WRONG.items(), ids=[cls.__name__ for cls in WRONG])
def test_a_wrong_modifier_is_told_by_name(modifier: type[Modifier], expected: tuple[str, str]) -> None:
    check, says = expected
    record = look(modifier, check).records[-1]
    assert record.outcome is Outcome.FAIL
    assert says in record.summary


def test_a_loss_that_a_callback_writes_into_is_told() -> None:
    record = look(HalvesTheLoss(start=1.0, end=3.0), "completes").records[-1]
    assert record.outcome is Outcome.FAIL
    assert "HalvesTheLoss.on_event wrote into event.loss" in record.summary


@pytest.mark.parametrize("modifier", [ScalesGradients(start=1.0, end=3.0), Detaches(start=1.0, end=3.0)], ids=lambda one: one.label)
def test_a_hook_that_changes_gradients_is_told(modifier: Modifier) -> None:
    record = look(modifier, "hooks_watch").records[-1]
    assert record.outcome is Outcome.FAIL


# What is right, although it looks like one of the wrong ones.


class Drawn(nn.Module):
    """Draws all that a module may when it is made."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scratch = nn.ModuleList([nn.Embedding(3, 4), nn.MultiheadAttention(8, 2), nn.LSTM(2, 2)])
        self.noise = nn.Parameter(torch.randn(2))
        nn.init.normal_(self.noise)
        del self.scratch, self.noise
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class MakesModules(Base):
    def on_initialize(self, state: State) -> bool:
        if isinstance(state.model.lm_head, Drawn):
            raise ModelError("MakesModules: the model has such a head already; give one that has none")
        return True

    def on_calibration_end(self, state: State, event: Event) -> None:
        old = state.model.get_submodule("lm_head")
        assert isinstance(old, nn.Linear)
        state.claim(["lm_head"], self.label)
        state.replace_module("lm_head", Drawn(old))


class UsesAScratchNetwork(Base):
    def on_initialize(self, state: State) -> bool:
        self._net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        return True


class KeepsStatistics(Base):
    def on_initialize(self, state: State) -> bool:
        self._sums: dict[str, Tensor] = {}
        return True

    def on_calibration_start(self, state: State, event: Event) -> None:
        for name, module in state.model.named_modules():
            if isinstance(module, nn.Linear):
                self.register_hook(module, self._adding(name), "forward")

    def _adding(self, name: str) -> Hook:
        def add(module: nn.Module, args: Any, output: Tensor) -> None:
            x = args[0].detach().flatten(0, -2)
            self._sums[name] = self._sums.get(name, torch.zeros(())) + x.T @ x

        return add


class KeepsInputsForATime(Base):
    _kept: list[Tensor] = PrivateAttr(default_factory=list)

    def on_calibration_start(self, state: State, event: Event) -> None:
        self.register_hook(state.model.get_submodule("lm_head"), lambda m, a: self._kept.append(a[0]), "forward_pre")

    def on_calibration_end(self, state: State, event: Event) -> None:
        super().on_calibration_end(state, event)
        self._kept.clear()


class LooksAtKeywords(Base):
    _masks: int = 0

    def on_calibration_start(self, state: State, event: Event) -> None:
        def count(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self._masks += kwargs.get("attention_mask") is not None

        self.register_hook(state.model, count, "forward_pre", with_kwargs=True)


class CopiesAndTrainsATwin(Base):
    def on_calibration_end(self, state: State, event: Event) -> None:
        super().on_calibration_end(state, event)
        twin = copy.deepcopy(state.model)
        with torch.enable_grad():
            twin(torch.ones(1, 4, dtype=torch.long)).sum().backward()


class RunsTheModelItself(Base):
    def on_calibration_start(self, state: State, event: Event) -> None:
        mode = state.model.training
        state.model.eval()
        with torch.no_grad(), self.disable_hooks():
            state.model(torch.ones(1, 4, dtype=torch.long))
        state.model.train(mode)


class SeedsForItselfOnly(Base):
    def on_calibration_end(self, state: State, event: Event) -> None:
        super().on_calibration_end(state, event)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            torch.rand(3)


class HasAGenerator(Base):
    contract_tags: ClassVar[frozenset[str]] = frozenset({"in_place"})
    seed: int = 3

    def on_calibration_end(self, state: State, event: Event) -> None:
        super().on_calibration_end(state, event)
        weight = state.model.get_parameter("lm_head.weight")
        state.touch(["lm_head"])
        keep = torch.rand(weight.shape, generator=torch.Generator().manual_seed(self.seed)) > 0.1
        with torch.no_grad():
            weight.mul_(keep)


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class AddsAdaptersForATime(Base):
    def on_initialize(self, state: State) -> bool:
        state.swap_module("lm_head", Lora(state.model.get_submodule("lm_head")))  # type: ignore[arg-type]
        return True

    def on_finalize(self, state: State) -> bool:
        state.replace_module("lm_head", state.model.lm_head.base)  # type: ignore[union-attr, arg-type]
        return True


class WatchesGradients(OfTraining):
    _norms: list[float] = PrivateAttr(default_factory=list)

    def on_start(self, state: State, event: Event) -> None:
        head = state.model.get_submodule("lm_head")
        self.register_hook(head, lambda m, ins, outs: self._norms.append(float(outs[0].norm())), "full_backward")
        self.register_hook(head, lambda m, a, y: self._norms.append(float(y.detach().norm())), "forward", always_call=True)


class Annotates(Base):
    contract_tags: ClassVar[frozenset[str]] = frozenset({"annotates"})

    def on_calibration_end(self, state: State, event: Event) -> None:
        super().on_calibration_end(state, event)
        head = state.model.get_submodule("lm_head")
        state.touch(["lm_head"])
        head.scheme = "int4"  # type: ignore[assignment]
        head.register_buffer("scale", torch.ones(1))


RIGHT = [
    *(MakesModules, UsesAScratchNetwork, KeepsStatistics, KeepsInputsForATime, LooksAtKeywords, CountsTokens, CopiesAndTrainsATwin),
    *(RunsTheModelItself, SeedsForItselfOnly, HasAGenerator, AddsAdaptersForATime, Annotates, WatchesGradients(start=1.0, end=3.0)),
]


@pytest.mark.parametrize("modifier", RIGHT, ids=lambda one: one.__name__ if isinstance(one, type) else one.label)
def test_a_right_modifier_passes(modifier: Any) -> None:
    others = ("state_machine", "start_and_end", "hooks", "recipe", "illegal_calls")
    report = look(modifier, *(name.removeprefix("lifecycle.") for name in CHECKS if not name.endswith(others)))
    assert report.passed, report.to_text()


def test_a_model_that_draws_and_counts_by_itself_is_no_fault_of_the_hooks() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y: Tensor = self.body(x)
            return y

    def given(hook: Hook) -> VerifyReport:
        return verify(hooked("body", hook), Stateful(), inputs=[torch.rand(3, 4)], checks=["lifecycle.hooks_watch"], tags=["annotates"])

    assert given(_none).passed, given(_none).to_text()
    assert not given(lambda m, a, y: _none(torch.rand(1))).passed
    assert not given(lambda m, a, y: y + 1 if m.training else None).passed


# How it is told.


def test_one_cause_is_told_once() -> None:
    class LeavesAnAttribute(Base):
        def on_calibration_end(self, state: State, event: Event) -> None:
            state.model.lm_head.seen = 1  # type: ignore[union-attr, assignment]

    report = look(LeavesAnAttribute, "completes", "repeatable", "illegal_calls", "surroundings", "rolls_back")
    failed = [record.name for record in report.records if record.outcome is Outcome.FAIL]
    assert len(failed) > 3
    assert [[record.name for record in group] for group in report.causes()] == [failed]
    text = " ".join(report.to_text().split())
    assert text.count("declare 'annotates'") == 2  # in the table, and below it
    assert f"seen by {len(failed)} checks: {', '.join(failed)}" in text
    assert report.to_dict()["causes"] == [{"found": report.records[1].summary, "checks": failed}]


def test_two_causes_are_told_apart() -> None:
    class HasTwoFaults(KeepsStateInAField):
        def on_calibration_end(self, state: State, event: Event) -> None:
            super().on_calibration_end(state, event)
            torch.rand(1)

    class HasAnotherFault(KeepsActivations):
        def on_finalize(self, state: State) -> bool:
            state.model.norm.seen = True  # type: ignore[union-attr, assignment]
            return True

    assert len(look(HasTwoFaults, "completes", "illegal_calls").causes()) == 1
    report = look(HasAnotherFault, "completes", "hooks_watch", "nothing_left")
    assert {cause for group in report.causes() for record in group for cause in record.evidence["causes"]} >= {"attribute norm.seen"}


def test_state_goes_under_private_names() -> None:
    modifier = KeepsStateInAField()
    with pytest.raises(LifecycleError, match=r"KeepsStateInAField\.seen: it has no such field.*self\._seen"):
        modifier.seen = {}  # type: ignore[attr-defined]
    modifier._seen = {"a": 1}  # type: ignore[attr-defined]
    assert modifier == KeepsStateInAField()
    assert modifier != KeepsStateInAField(count=1)


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_the_tiny_model_gets_batches_of_one_row_of_some_and_padded_ones(rows) -> None:
    class Hooked(Base):
        def on_calibration_start(self, state: State, event: Event) -> None:
            hook = lambda module, args: _none(args[0].data.mul_(1.01) if len(args[0]) == rows else None)  # noqa: E731
            self.register_hook(state.model.get_submodule("norm"), hook, "forward_pre")

    *_, record = verify(Hooked(), checks=["lifecycle.hooks_watch"], profile="pr").records
    assert record.outcome is Outcome.FAIL
    assert "the input of norm is not what it is without" in record.summary
