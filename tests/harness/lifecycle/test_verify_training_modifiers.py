"""Our modifiers that work in training keep the lifecycle contract, too: pruning, and quantization with a start."""

from __future__ import annotations

import pytest

from compressor.lifecycle import Modifier
from compressor.modifiers.pruning.magnitude import ConstantPruningModifier, MagnitudePruningModifier
from compressor.modifiers.quantization import QuantizationModifier
from harness import verify
from harness.lifecycle.driving.probes import TinyModel, tiny_batches
from harness.reporting.verdict import Outcome

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


@pytest.mark.nightly
def test_static_ranges_without_a_batch_are_refused_and_rolled_back() -> None:
    modifier = QuantizationModifier(config_groups=INT8, start=0)
    assert verify(modifier, TinyModel(8), inputs=tiny_batches(1), checks=["lifecycle.rolls_back", "lifecycle.nothing_left"]).passed
