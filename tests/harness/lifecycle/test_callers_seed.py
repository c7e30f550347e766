"""The seed of the caller decides nothing: whoever reads it, or the state behind it, without drawing is told."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor

import harness
from compressor import Event, Modifier, State
from compressor.numerics import QuantizationArgs
from harness.checks.adapters.ours import OurQuantizer
from harness.checks.protocols import Pruner, Quantized
from harness.reporting.verdict import Outcome

SEEDS: dict[str, Callable[[], int]] = {
    "torch's seed": torch.initial_seed,
    "torch's generator": lambda: torch.default_generator.initial_seed(),
    "torch's state": lambda: hash(torch.get_rng_state().numpy().tobytes()) % 2**31,
    "Python's state": lambda: hash(random.getstate()) % 2**31,
    "numpy's state": lambda: int(numpy.random.get_state(legacy=True)[1].sum()),  # type: ignore[union-attr]
}


def mask_of(shape: Any, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.5


class Masks(Modifier):
    """Draws its masks from a generator of its own."""

    contract_tags: ClassVar[set[str]] = {"in_place"}

    def on_initialize(self, state: State) -> bool:
        state.touch(name for name, module in state.model.named_modules() if isinstance(module, torch.nn.Linear))
        return True

    def on_calibration_end(self, state: State, event: Event) -> None:
        for module in state.model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data.mul_(mask_of(module.weight.shape, self.seed_now()))

    def seed_now(self) -> int:
        return 7


def outcome_of(modifier: object) -> Any:
    return harness.verify(modifier, checks=["lifecycle.repeatable"]).records[-1]


@pytest.mark.parametrize("what", SEEDS)
def test_a_modifier_that_reads_the_callers_seed_is_told(what: str) -> None:
    class FromTheCaller(Masks):
        def seed_now(self) -> int:
            return SEEDS[what]()

    record = outcome_of(FromTheCaller)
    assert record.outcome is Outcome.FAIL and "they follow the caller's random numbers" in record.summary


@pytest.mark.parametrize("what", SEEDS)
def test_a_modifier_that_is_made_with_the_callers_seed_is_told(what: str) -> None:
    class MadeWithIt(Masks):
        _made: int = 0

        def model_post_init(self, context: Any) -> None:
            super().model_post_init(context)
            self._made = SEEDS[what]()

        def seed_now(self) -> int:
            return self._made

    assert outcome_of(MadeWithIt).outcome is Outcome.FAIL


def test_a_generator_of_ones_own_passes_and_so_does_a_declared_draw() -> None:
    class Declared(Masks):
        contract_tags: ClassVar[set[str]] = {"in_place", "random"}

        def seed_now(self) -> int:
            return torch.initial_seed()

    assert outcome_of(Masks).outcome is Outcome.PASS
    assert outcome_of(Declared).outcome is Outcome.PASS


@pytest.mark.parametrize("what", SEEDS)
def test_a_subject_of_the_catalogue_that_reads_the_callers_seed_is_told(what: str) -> None:
    class Dithered(OurQuantizer):
        def quantize(self, weight: Tensor) -> Quantized:
            return super().quantize(weight * (1 + 0.02 * mask_of(weight.shape, SEEDS[what]())))

    def pruner(weight: Tensor, hessian: Tensor) -> Tensor:
        order = (weight.abs() * (1 + 0.3 * mask_of(weight.shape, SEEDS[what]()))).argsort(dim=1, stable=True)
        return weight.scatter(1, order[:, : weight.shape[1] // 2], 0.0)

    assert not harness.check(Pruner(pruner), checks=["sparsifier.target_met"]).passed
    assert not harness.check(Dithered(QuantizationArgs(num_bits=4, group_size=16)), draws=False).passed
