"""Hooks go when what they watch for is done: with their stage, be it compressed or skipped, or when calibration ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compressor import AutoRoundModifier, GPTQModifier, QuantizationModifier, SparseGPTModifier
from compressor.lifecycle import EventType, FinishedStage, Modifier, Session, State
from tests import tiny

IDS = torch.randint(64, (4, 12), generator=torch.Generator().manual_seed(0))
GROUPS = {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 16}}}
REST = {"ignore": ["lm_head"]}
MODIFIERS: dict[str, Any] = {
    "GPTQ": lambda: GPTQModifier(config_groups=GROUPS, **REST),
    "static inputs, keys and values": lambda: QuantizationModifier(scheme="FP8", kv_cache_scheme={"num_bits": 8, "type": "float"}, **REST),
    "learned rounding": lambda: AutoRoundModifier(config_groups=GROUPS, iters=1, **REST),
    "SparseGPT": lambda: SparseGPTModifier(sparsity=0.5, **REST),
}
OF_CALIBRATION = {"static inputs, keys and values": {"model.layers.0.self_attn"}}  # ranges of keys and values are used at its end


class Started:
    """A calibration that has seen the data, and of which no stage has ended."""

    def __init__(self, modifier: Modifier) -> None:
        self.model, self.modifier = tiny.llama(intermediate_size=32), modifier
        self.names = {module: name for name, module in self.model.named_modules()}
        self.state = State(model=self.model)
        self.session = Session(self.state, [modifier])
        self.session.initialize()
        self.session.send(EventType.CALIBRATION_START)
        with torch.no_grad():
            self.model(IDS, use_cache=False)

    @property
    def stage(self) -> tuple[str, ...]:
        return tuple(name for name in self.names.values() if name.startswith("model.layers.0."))

    def hooked(self) -> set[str]:
        return {self.names[module] for module, _ in self.modifier.hooked_modules()}


@pytest.mark.parametrize("name", MODIFIERS)
def test_the_hooks_of_a_stage_go_with_it(name: str) -> None:
    run, resumed = Started(MODIFIERS[name]()), Started(MODIFIERS[name]())
    watched = run.hooked()
    later = {one for one in watched if not one.startswith("model.layers.0")} | OF_CALIBRATION.get(name, set())
    assert later < watched
    run.session.send(EventType.SEQUENTIAL_EPOCH_END, modules=run.stage)
    assert run.hooked() == later

    tensors = {one: run.model.get_submodule(one).state_dict() for one in run.stage}
    resumed.modifier.skip_stage(resumed.state, FinishedStage(run.stage, run.modifier.stage_memory(run.stage), tensors))
    assert resumed.hooked() == later

    for one in (run, resumed):
        one.session.send(EventType.CALIBRATION_END)
        assert one.hooked() == set()
