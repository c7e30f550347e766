"""Our modifiers that work in training keep the lifecycle contract, too: pruning, and quantization with a start."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from pydantic import PrivateAttr

from compressor.lifecycle import Event, EventType, Modifier, State
from compressor.modifiers.pruning.magnitude import ConstantPruningModifier, MagnitudePruningModifier
from compressor.modifiers.quantization import QuantizationModifier
from harness import verify
from harness.lifecycle.driving.probes import TinyModel, tiny_batches
from harness.reporting.verdict import Outcome, Verdict

INT4 = {"group": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 8}}}
INT8 = {"group": {"targets": ["Linear"], "weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}}}
MODIFIERS = {
    "2:4": MagnitudePruningModifier(final_sparsity=0.5, mask_structure="2:4", start=1, end=5, update=2, leave_enabled=True),
    "pruning at once": MagnitudePruningModifier(final_sparsity=0.5, apply_globally=True),
    "zeros kept": ConstantPruningModifier(start=1, end=3),
    "int4, scales fixed": QuantizationModifier(
        config_groups=INT4, ignore=["lm_head"], start=0, end=4, disable_quantization_observer_epoch=2
    ),
    "int4, scales in intervals": QuantizationModifier(config_groups=INT4, ignore=["lm_head"], start=1, update=2),
}


@pytest.mark.parametrize("modifier", MODIFIERS.values(), ids=MODIFIERS.keys())
def test_modifiers_of_a_training_keep_the_contract(modifier: Modifier, checks_of_right_ones: list[str] | None) -> None:
    report = verify(modifier, TinyModel(8), inputs=tiny_batches(1), profile="change", checks=checks_of_right_ones)
    assert report.passed, report.to_text()
    skipped = {record.name for record in report.records if record.outcome is Outcome.SKIP}
    # It has no hooks, no recipe names its class there, and pruning what is pruned changes nothing.
    assert skipped <= {"lifecycle.nested_contexts", "lifecycle.already_quantized", "lifecycle.new_process"}


class ActsLate(Modifier):
    """Writes to a weight that nobody has claimed, in one batch of a training."""

    contract_tags: ClassVar = {"in_place"}
    batch: int = 12
    _batches: int = PrivateAttr(0)

    def on_initialize(self, state: State) -> bool:
        return True

    def on_event(self, state: State, event: Event) -> None:
        self._batches += event.type is EventType.OPTIM_POST_STEP
        if self._batches == self.batch and event.type is EventType.OPTIM_POST_STEP:
            next(iter(state.model.parameters())).data.mul_(0.5)


@pytest.mark.parametrize("batch", [3, 12])
def test_a_training_without_an_end_has_twelve_batches(batch: int) -> None:
    report = verify(ActsLate(batch=batch), checks=["lifecycle.claims"])
    assert report.verdict is Verdict.REGRESSION, report.to_text()


class FreezesInTraining(Modifier):
    """Has no hook; a weight of its own does not train from its start to its end."""

    _weight: Any = PrivateAttr(None)

    def on_initialize(self, state: State) -> bool:
        self._weight = state.model.get_submodule("layers.0.up_proj").weight
        state.touch(["layers.0.up_proj"])
        return True

    def on_start(self, state: State, event: Event) -> None:
        self._weight.requires_grad_(False)

    def on_end(self, state: State, event: Event) -> None:
        self._weight.requires_grad_(True)

    def on_finalize(self, state: State) -> bool:
        self._weight.requires_grad_(True)
        return True


def test_a_weight_that_does_not_train_for_a_while_is_no_doing_of_hooks() -> None:
    report = verify(FreezesInTraining(), checks=["lifecycle.hooks_watch"])
    assert report.passed, report.to_text()


@pytest.mark.nightly
def test_static_ranges_without_a_batch_are_refused_and_rolled_back() -> None:
    modifier = QuantizationModifier(config_groups=INT8, start=0)
    assert verify(modifier, TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.rolls_back", "lifecycle.nothing_left"]).passed
