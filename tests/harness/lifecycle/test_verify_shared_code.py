"""What a run leaves in the code that all models share, or for the next run, is told by its name and put back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from compressor import oneshot
from compressor.errors import RecipeError, TargetError
from compressor.lifecycle import Event, Modifier, State
from harness.lifecycle.driving.probes import TinyModel, tiny_batches
from harness.lifecycle.driving.snapshot import freeze
from harness.lifecycle.verify import verify
from harness.reporting.verdict import Outcome
from tests import tiny

SUMS: dict[str, float] = {}


def linear_layers(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]


class Halves(Modifier):
    """Halves all weights, and watches what flows on the way."""

    contract_tags = {"in_place"}  # noqa: RUF012 - as its author writes it

    def on_initialize(self, state: State) -> bool:
        state.touch(name for name, _ in linear_layers(state.model))
        return True

    def on_calibration_start(self, state: State, event: Event) -> None:
        for name, module in linear_layers(state.model):
            self.register_hook(module, lambda _, args, name=name: self.see(name, args[0]), "forward_pre")

    def see(self, name: str, x: Tensor) -> None:
        """Nothing is kept."""

    def on_calibration_end(self, state: State, event: Event) -> None:
        self.remove_hooks()
        for name, module in linear_layers(state.model):
            module.weight.data.mul_(self.factor(name))

    def factor(self, name: str) -> float:
        return 0.5


class SumsInItsFile(Halves):
    """Sums of an aborted run go into the next one."""

    def see(self, name: str, x: Tensor) -> None:
        SUMS[name] = SUMS.get(name, 0.0) + float(x.double().abs().sum())

    def factor(self, name: str) -> float:
        return 1 / (1 + SUMS.get(name, 0.0))

    def on_calibration_end(self, state: State, event: Event) -> None:
        super().on_calibration_end(state, event)
        SUMS.clear()


class _Store:
    """Something that is no plain data."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}


STORE = _Store()


class SumsInAnObject(Halves):
    def see(self, name: str, x: Tensor) -> None:
        STORE.sums[name] = STORE.sums.get(name, 0.0) + float(x.double().abs().sum())

    def factor(self, name: str) -> float:
        return 1 / (1 + STORE.sums.pop(name, 0.0))


class WatchesOn(Halves):
    """A hook that is made when the training part is over."""

    def on_end(self, state: State, event: Event) -> None:
        self.register_hook(state.model, lambda *args: None, "forward")


class Static(Modifier):
    """Callbacks that need no self are as good as others."""

    contract_tags = {"in_place"}  # noqa: RUF012 - as its author writes it

    @staticmethod
    def on_initialize(state: State) -> bool:  # type: ignore[override]
        state.touch(name for name, _ in linear_layers(state.model))
        return True

    @classmethod
    def on_calibration_end(cls, state: State, event: Event) -> None:  # type: ignore[override]
        for _, module in linear_layers(state.model):
            module.weight.data.mul_(0.5)


class Leaves(Halves):
    """Changes something at its end that other models use."""

    def on_finalize(self, state: State) -> bool:
        self.leave()
        return True

    def leave(self) -> None:
        raise NotImplementedError


class Rotary(Leaves):
    def leave(self) -> None:
        transformers.models.llama.modeling_llama.apply_rotary_pos_emb = lambda q, k, *args, **kwargs: (q, k)


class Attention(Leaves):
    def leave(self) -> None:
        known = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
        plain = known["sdpa"]
        known["sdpa"] = lambda module, q, k, v, *args, **kwargs: plain(module, q * 2, k, v, *args, **kwargs)


class Activation(Leaves):
    def leave(self) -> None:
        transformers.activations.ACT2FN["silu"] = nn.ReLU


class AddsActivation(Leaves):
    def leave(self) -> None:
        transformers.activations.ACT2FN["another"] = nn.ReLU


class RegistersAttention(Leaves):
    def leave(self) -> None:
        transformers.AttentionInterface.register("another", lambda *args, **kwargs: None)


class RegistersItsOwn(Leaves):
    """As a library does that loads more of itself."""

    def leave(self) -> None:
        transformers.activations.ACT2FN["its own"] = transformers.activations.NewGELUActivation


class Cache(Leaves):
    def leave(self) -> None:
        transformers.DynamicCache.update = lambda self, key, value, *args, **kwargs: (key, value)


class Config(Leaves):
    def leave(self) -> None:
        transformers.LlamaConfig.to_dict = lambda self: {}


class Compile(Leaves):
    def leave(self) -> None:
        import torch._dynamo

        torch._dynamo.config.suppress_errors = True


class Logs(Leaves):
    def leave(self) -> None:
        logging.getLogger("transformers").setLevel(logging.CRITICAL)


class Torch(Leaves):
    """Something in torch's own code, which no model of this run uses."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self._place = place

    def leave(self) -> None:
        owner, _, name = self._place.rpartition(".")
        setattr(attrgetter(owner)(torch), name, lambda *args, **kwargs: 1)


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("utils.data.DataLoader.__len__", "torch.utils.data.dataloader.DataLoader.__len__"),
        ("utils.data.RandomSampler.__iter__", "torch.utils.data.sampler.RandomSampler.__iter__"),
        ("utils.data.random_split", "torch.utils.data.random_split"),
        ("utils.data.DataLoader", "torch.utils.data.DataLoader"),
        ("optim.AdamW.step", "torch.optim.adamw.AdamW.step"),
        ("optim.lr_scheduler.LambdaLR.get_lr", "torch.optim.lr_scheduler.LambdaLR.get_lr"),
        ("utils.checkpoint.checkpoint", "torch.utils.checkpoint.checkpoint"),
        ("nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_norm_"),
        ("distributions.Normal.mean", "torch.distributions.normal.Normal.mean"),
        ("storage.UntypedStorage.held", "torch.storage.UntypedStorage.held"),
    ],
)
def test_code_of_torch_that_is_replaced_is_told_once_and_put_back(place: str, says: str) -> None:
    owner, _, name = place.rpartition(".")
    before = vars(attrgetter(owner)(torch)).get(name)
    report = verify(Torch(place), TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.completes"])
    told = report.records[-1].summary
    assert f"torch's code: process changed: {says}" in told and told.count("process changed") == 1, told
    assert vars(attrgetter(owner)(torch)).get(name) is before


def test_code_of_torch_that_is_looked_at_by_itself_is_told_once() -> None:
    before = nn.Linear.forward
    report = verify(Torch("nn.Linear.forward"), TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.completes"])
    assert report.records[-1].summary.count("forward") == 1 and nn.Linear.forward is before


MODULES = {"torch": torch, "linalg": torch.linalg, "functional": nn.functional}


def test_modules_in_a_table_are_no_values_to_look_through() -> None:
    begin = time.perf_counter()
    assert freeze(MODULES) == freeze(dict(MODULES)) != freeze({**MODULES, "torch": nn})
    report = verify(Halves(), TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.nothing_left"])
    assert report.records[-1].outcome is Outcome.PASS, report.to_text()
    assert time.perf_counter() - begin < 60  # minutes before


def _llama() -> nn.Module:
    return tiny.llama(seed=7, vocab_size=32, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1).eval()


def _logits(model: nn.Module) -> Any:
    with torch.no_grad():
        return model(torch.arange(8).reshape(1, 8)).logits


@pytest.mark.parametrize(
    ("make", "check", "says"),
    [
        (SumsInItsFile, "repeatable", "a run after one that was aborted behind SEQUENTIAL_EPOCH_END"),
        (SumsInItsFile, "nothing_left", ".SUMS is not as it was; keep state on the object"),
        (SumsInAnObject, "repeatable", "a run after one that was aborted behind SEQUENTIAL_EPOCH_END"),
        (lambda: WatchesOn(start=0, end=2, update=1), "nothing_left", "1 hooks are on the model after on_end; call self.remove_hooks()"),
        (Compile, "completes", "torch._dynamo.config: process changed in suppress_errors"),
        (Logs, "completes", "logging of transformers: process changed"),
    ],
)
def test_what_is_left_for_others_is_told(make: Callable[[], Modifier], check: str, says: str) -> None:
    SUMS.clear()
    STORE.sums.clear()
    before = logging.getLogger("transformers").level, torch._dynamo.config.suppress_errors
    report = verify(make(), TinyModel(8), inputs=tiny_batches(1), checks=[f"lifecycle.{check}"])
    assert says in report.records[-1].summary, report.to_text()
    assert (logging.getLogger("transformers").level, torch._dynamo.config.suppress_errors) == before


class Runs:
    """How many runs are left; an object, for whose values nobody looks."""

    def __init__(self) -> None:
        self.left = 0


RUNS = Runs()


class FirstRunOnly(Halves):
    """Halves weights in the first runs of a process."""

    _is_late: bool = False

    def on_initialize(self, state: State) -> bool:
        RUNS.left -= 1
        self._is_late = RUNS.left < 0
        return super().on_initialize(state)

    def factor(self, name: str) -> float:
        return 1.0 if self._is_late else 0.5


class RefusesLater(FirstRunOnly):
    def on_initialize(self, state: State) -> bool:
        super().on_initialize(state)
        if self._is_late:
            raise TargetError("nothing to do")
        return True


@pytest.mark.parametrize("runs", [1, 2, 5])
def test_a_run_that_is_refused_after_one_that_was_not_is_no_pass(runs: int) -> None:
    """Every later run had ended in `on_initialize`, and ten checks had called that a pass."""
    RUNS.left = runs
    names = ["completes", "repeatable", "illegal_calls", "nothing_left", "hooks_watch", "surroundings", "claims", "finite", "rolls_back"]
    report = verify(RefusesLater, TinyModel(8), inputs=tiny_batches(1), checks=[f"lifecycle.{name}" for name in names])
    outcomes = {record.name: record.outcome for record in report.records[1:]}
    assert Outcome.FAIL in outcomes.values()
    assert sum(one is Outcome.PASS for one in outcomes.values()) <= runs - 1, report.to_text()
    assert "a run like one that came to its end before has failed: on_initialize of modifier 0 raised TargetError" in report.to_text()


class FlipsWhatIsSaved(Halves):
    """Says of buffers during a calibration that they are not saved, and takes it back at its end alone."""

    calibration = "sequential"

    def flip(self, state: State) -> None:
        for module in state.model.modules():
            module._non_persistent_buffers_set ^= set(module._buffers)

    def on_calibration_start(self, state: State, event: Event) -> None:
        self.flip(state)

    def on_calibration_end(self, state: State, event: Event) -> None:
        self.flip(state)


def test_what_a_checkpoint_holds_is_rolled_back() -> None:
    report = verify(FlipsWhatIsSaved, TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.rolls_back"])
    assert "in checkpoints" in report.records[-1].summary and report.records[-1].outcome is Outcome.FAIL, report.to_text()


class NeedsMore(Halves):
    calibration = "required"  # type: ignore[assignment]


def test_a_need_that_does_not_exist_is_told() -> None:
    says = "NeedsMore: its calibration is 'required', which does not exist; choose one of none, own, basic, sequential"
    assert says in verify(NeedsMore).to_text().replace("\n", " ")
    with pytest.raises(RecipeError, match="calibration is 'required', which does not exist; choose one of none, own, basic, sequential"):
        oneshot(TinyModel(8), recipe=[NeedsMore()], dataset=tiny_batches(1)[0])


def test_the_first_run_of_a_process_is_held_against_later_ones_whatever_else_is_checked() -> None:
    RUNS.left = 1
    checks = ["lifecycle.completes", "lifecycle.finite", "lifecycle.repeatable"]
    report = verify(FirstRunOnly, TinyModel(8), inputs=tiny_batches(1), checks=checks)
    assert "the second run gives other values" in report.to_text()


@pytest.mark.parametrize(
    ("modifier", "says"),
    [
        (Rotary, "modeling_llama: process changed: apply_rotary_pos_emb"),
        (Attention, "the registry ALL_ATTENTION_FUNCTIONS: process changed: sdpa"),
        (Activation, "the registry ACT2FN: process changed: silu"),
        (AddsActivation, "the registry ACT2FN: process changed: another"),
        (RegistersAttention, "the registry ALL_ATTENTION_FUNCTIONS: process changed: another"),
        (Cache, "the class DynamicCache: process changed: update"),
        (Config, "the class LlamaConfig: process changed: to_dict"),
    ],
)
def test_code_that_all_llamas_share_is_looked_at_and_put_back(modifier: type[Modifier], says: str) -> None:
    batch = {"input_ids": torch.arange(8).reshape(1, 8)}
    before = _logits(_llama())
    report = verify(modifier, _llama(), inputs=[batch], checks=["lifecycle.completes"])
    assert says in report.records[-1].summary, report.to_text()
    assert torch.equal(_logits(_llama()), before)
    assert "another" not in transformers.activations.ACT2FN
    assert "another" not in transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS


def test_a_library_may_add_to_its_own_registries() -> None:
    batch = {"input_ids": torch.arange(8).reshape(1, 8)}
    report = verify(RegistersItsOwn, _llama(), inputs=[batch], checks=["lifecycle.nothing_left"])
    del transformers.activations.ACT2FN["its own"]
    assert report.passed, report.to_text()


@pytest.mark.parametrize("modifier", [Halves, Static])
def test_right_ones_pass(modifier: type[Modifier], checks_of_right_ones: list[str] | None) -> None:
    report = verify(modifier, TinyModel(8), inputs=tiny_batches(1), checks=checks_of_right_ones)
    assert report.passed, report.to_text()


@pytest.mark.nightly
def test_a_modifier_that_was_ended_and_watches_nothing_passes() -> None:
    report = verify(Halves(start=0, end=2), TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.nothing_left"])
    assert report.records[-1].outcome is Outcome.PASS, report.to_text()


@pytest.mark.nightly
def test_right_ones_pass_on_a_llama() -> None:
    batch = {"input_ids": torch.arange(8).reshape(1, 8)}
    report = verify(Halves, _llama(), inputs=[batch], checks=["lifecycle.completes", "lifecycle.repeatable", "lifecycle.nothing_left"])
    assert report.passed, report.to_text()
