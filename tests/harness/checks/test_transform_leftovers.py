"""A transform changes the weights of its model: whatever else it changes is told, and so is a checkpoint that computes something else."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import harness
from harness.checks.protocols import InPlaceTransform
from harness.reporting.verdict import Outcome, Verdict

TARGETS = ["*.mlp.up_proj.weight", "*.mlp.down_proj.weight"]
CHECKS = ["transform.float_output", "transform.checkpoint"]


def fold(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.mul_(2)
        layer.mlp.down_proj.weight.div_(2)


def config(model: Any) -> None:
    model.config.hidden_act = "relu"


def nested_config(model: Any) -> None:
    model.config.rope_parameters["rope_theta"] = 77.0


def generation_config(model: Any) -> None:
    model.generation_config.temperature = 0.3


def tied_config(model: Any) -> None:
    model.config.tie_word_embeddings = not model.config.tie_word_embeddings


def a_buffer(model: Any) -> None:
    model.register_buffer("smooth_scale", torch.ones(3))


def a_buffer_below(model: Any) -> None:
    model.model.rotary_emb.register_buffer("table", torch.ones(2), persistent=False)


def a_buffers_values(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(1 + 1e-9)
    model.model.rotary_emb.inv_freq[-1] *= 0.999


def an_attribute(model: Any) -> None:
    model.smoothed = True


def an_attribute_of_a_weight(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight.smoothed = torch.ones(2)


def an_attribute_of_a_layer(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.scale = 2.0


def a_class(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.__class__ = type("Mine", (type(layer.mlp),), {})


def a_forward(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.mul_(3)
        plain = layer.mlp.down_proj.forward
        layer.mlp.down_proj.forward = lambda x, plain=plain: plain(x) / 3


def a_method(model: Any) -> None:
    norm = model.model.norm
    norm.forward = types.MethodType(type(norm).forward, norm)


def a_scaling(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling /= 4
        layer.self_attn.q_proj.weight.mul_(4)


def an_epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon *= 1.0000001


class Half(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) / 2


def a_module(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.mul_(2)
        layer.mlp.act_fn = Half(layer.mlp.act_fn)


def another_function(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.SiLU()


def a_hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda *args: None)


def frozen(model: Any) -> None:
    model.requires_grad_(False)


BESIDE = [
    config, nested_config, generation_config, tied_config, a_buffer, a_buffer_below, a_buffers_values, an_attribute,
    an_attribute_of_a_weight, an_attribute_of_a_layer, a_class, a_forward, a_method, a_scaling, an_epsilon, a_module,
    another_function, a_hook, frozen,
]  # fmt: skip


def transform(*parts: Callable[[Any], None]) -> InPlaceTransform:
    def function(model: nn.Module, batches: Any) -> None:
        for part in (fold, *parts):
            part(model)

    return InPlaceTransform(function, TARGETS)


@pytest.mark.parametrize("part", BESIDE, ids=lambda part: part.__name__)
def test_what_is_changed_beside_weights_is_told(part: Callable[[Any], None]) -> None:
    report = harness.check(transform(part), checks=["transform.not_vacuous"])
    assert report.verdict is Verdict.REGRESSION
    assert "apply() has changed the model that it was given" in report.records[0].summary


def a_new_weight(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj.weight = nn.Parameter(layer.mlp.up_proj.weight.clone())


def new_memory(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data.clone().t().contiguous().t()


def untied(model: Any) -> None:
    if model.config.tie_word_embeddings:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False


@pytest.mark.parametrize("part", [a_new_weight, new_memory, untied], ids=lambda part: part.__name__)
def test_what_comes_of_weights_passes(part: Callable[[Any], None]) -> None:
    report = harness.check(transform(part))
    assert not [record for record in report.records if record.outcome is Outcome.FAIL], report.to_text()


def turned_online(model: Any) -> None:
    """What a layer is handed is doubled, and its weight is half of what it was."""
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.div_(2)
        layer.mlp.down_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


class Online(InPlaceTransform):
    def reload(self, model: nn.Module) -> nn.Module:
        return model


class Forgets(Online):
    def reload(self, model: nn.Module) -> nn.Module:
        for layer in model.model.layers:
            layer.mlp.down_proj._forward_pre_hooks.clear()
        return model


def test_hooks_of_changed_layers_are_for_those_who_say_so_and_must_come_back() -> None:
    def function(model: nn.Module, batches: Any) -> None:
        turned_online(model)

    def with_another_hook(model: nn.Module, batches: Any) -> None:
        turned_online(model)
        a_hook(model)

    targets, tags = ["*.mlp.down_proj.weight"], frozenset({"invariant_fp", "online"})
    assert harness.check(Online(function, targets, tags=tags)).passed
    assert "hooks" in harness.check(InPlaceTransform(function, targets), checks=[35]).records[0].summary
    beside = harness.check(Online(with_another_hook, targets, tags=tags), checks=[35])
    assert "model.layers.0._forward_hooks: hooks changed" in beside.records[0].summary
    assert "saved and loaded" in harness.check(Forgets(function, targets, tags=tags), checks=["transform.checkpoint"]).records[0].summary


def a_bias(model: Any) -> None:
    """No checkpoint of this config has it."""
    for layer in model.model.layers:
        layer.mlp.down_proj.bias = nn.Parameter(torch.ones(layer.mlp.down_proj.out_features))


def another_bias(model: Any) -> None:
    """Small, and of the attention."""
    model.model.layers[0].self_attn.o_proj.bias = nn.Parameter(torch.full((model.config.hidden_size,), 0.05))


@pytest.mark.parametrize("part", [a_bias, another_bias], ids=lambda part: part.__name__)
def test_a_checkpoint_that_computes_something_else_is_told(part: Callable[[Any], None]) -> None:
    record = harness.check(transform(part), checks=["transform.checkpoint"]).records[0]
    assert record.outcome is Outcome.FAIL and "saved and loaded again" in record.summary
