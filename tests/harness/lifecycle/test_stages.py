"""The stages of a calibration that verify shows a modifier, against those that `oneshot` has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
from pydantic import PrivateAttr
from torch import nn

from compressor import oneshot
from compressor.lifecycle import Event, Modifier, State
from compressor.lifecycle.interface import CalibrationNeed
from harness.lifecycle.stages import calls_of, stages_of
from tests import tiny

IDS = torch.randint(0, 60, (4, 6), generator=torch.Generator().manual_seed(0))


class Notes(Modifier):
    """Watches some modules, notes the stages, and changes a weight, for a recipe must change something."""

    calibration: ClassVar[CalibrationNeed] = "sequential"
    pattern: str
    _seen: list[tuple[str, ...]] = PrivateAttr(default_factory=list)

    def on_initialize(self, state: State) -> bool:
        state.claim([next(name for name, module in state.model.named_modules() if isinstance(module, nn.Linear))], self.label)
        return True

    def on_calibration_start(self, state: State, event: Event) -> None:
        for name in watched(state.model, self.pattern):
            self.register_hook(state.model.get_submodule(name), lambda module, args, output: None, "forward")

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        self._seen.append(event.modules)

    def on_calibration_end(self, state: State, event: Event) -> None:
        self.remove_hooks()
        name = next(iter(state.claims))
        state.model.get_submodule(name).weight.data.mul_(2)


def of_oneshot(model: nn.Module, names: Sequence[str]) -> list[tuple[str, ...]]:
    return stages_of(model, names, calls_of(model, IDS)).parts


def watched(model: nn.Module, pattern: str) -> list[str]:
    return [name for name, _ in model.named_modules() if name and re.fullmatch(pattern, name)]


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "bert"])
@pytest.mark.parametrize("pattern", [r".*(proj|fc\d|c_attn|c_fc|dense|query|key)", r".*layers?\.\d|.*h\.\d", r".*(norm|ln_1|LayerNorm)"])
def test_what_is_watched_makes_the_stages_of_oneshot(family: str, pattern: str) -> None:
    model = getattr(tiny, family)()
    expected = of_oneshot(model, watched(model, pattern))
    notes = Notes(pattern=pattern)
    oneshot(model, recipe=[notes], dataset=IDS)
    assert expected == notes._seen and len(expected) > 1


def test_without_what_is_watched_it_stops_at_layers() -> None:
    """As two passes do."""
    model = tiny.llama()
    notes = Notes(pattern="lm_head")
    oneshot(model, recipe=[notes], dataset=IDS, passes="two")
    assert of_oneshot(model, ()) == notes._seen and [stage[0] for stage in notes._seen] == ["model.layers.0", "model.layers.1", ""]


def test_what_holds_something_else_that_is_watched_is_one_stage() -> None:
    model = tiny.llama()
    names = tuple(name for name, _ in model.named_modules())
    assert of_oneshot(model, names) == [names]
