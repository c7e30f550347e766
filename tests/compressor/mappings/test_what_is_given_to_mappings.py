"""The doors of the chapters on mappings and tracing look at their arguments before anything runs or changes."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compressor.errors import CompressorError, ModelError, NumericsError, TargetError, TracingError, UserInputError
from compressor.mappings import find_pairs, scale_channels
from compressor.tracing import infer_targets, leaf, partition, trace
from tests import tiny

IDS = torch.arange(12).reshape(2, 6)
BATCH, CPU = {"input_ids": IDS}, torch.device("cpu")
UP = "model.layers.0.mlp.up_proj"
Door = Callable[[nn.Module], Any]

KINDS: dict[str, Door] = {
    "max_variants": lambda model: trace(model, [BATCH], max_variants="3"),  # type: ignore[arg-type]
    "targets_per_stage": lambda model: trace(model, [BATCH], targets_per_stage="2"),  # type: ignore[arg-type]
    "leaves": lambda model: trace(model, [BATCH], leaves="torch.nn.functional:silu"),
    "targets": lambda model: trace(model, [BATCH], targets="LlamaDecoderLayer"),
    "device": lambda model: trace(model, [BATCH], device=0),  # type: ignore[arg-type]
    "model": lambda model: trace(model.state_dict(), [BATCH]),  # type: ignore[arg-type]
    "store": lambda model: trace(model, [BATCH]).run([BATCH], {}),  # type: ignore[arg-type]
    "watched": lambda model: trace(model, [BATCH]).run([BATCH], watched=["lm_head"]),  # type: ignore[arg-type]
    "patterns": lambda model: partition(model, "LlamaDecoderLayer"),
    "model ": lambda model: infer_targets("MODEL"),  # type: ignore[arg-type]
    "function": lambda model: leaf("torch.nn.functional:silu"),  # type: ignore[type-var]
    "sources": lambda model: find_pairs(model, BATCH, CPU, sources=UP),
    "pair": lambda model: scale_channels(model, UP, torch.ones(32)),  # type: ignore[arg-type]
    "factor_C": lambda model: scale_channels(model, _pair(model), [2.0] * 32),  # type: ignore[arg-type]
}


def _pair(model: nn.Module) -> Any:
    return find_pairs(model, BATCH, CPU, sources=[UP]).by_source[UP]


def _channels(model: nn.Module) -> int:
    found: Any = model.get_submodule(UP)
    return int(found.out_features)


def _ones(model: nn.Module) -> torch.Tensor:
    return torch.ones(_channels(model))


def _factor(index: int, value: float) -> Door:
    def run(model: nn.Module) -> None:
        factor_C = torch.full((_channels(model),), 2.0)
        factor_C[index] = value
        scale_channels(model, _pair(model), factor_C)

    return run


RULES: dict[str, tuple[Door, type[CompressorError], str]] = {
    "no such source": (
        lambda model: find_pairs(model, BATCH, CPU, sources=[UP.replace("up", "upp")]),
        TargetError,
        f"sources: {UP.replace('up', 'upp')!r} is no module of LlamaForCausalLM; did you mean {UP!r}?",
    ),
    "no batch": (lambda model: find_pairs(model, "a text", CPU), TracingError, "batch: it is a str; give a mapping"),  # type: ignore[arg-type]
    "too few factors": (lambda model: scale_channels(model, _pair(model), torch.ones(3)), UserInputError, "factor_C: [3] was given"),
    "one factor": (lambda model: scale_channels(model, _pair(model), torch.ones(1)), UserInputError, "factor_C: [1] was given"),
    "zero": (_factor(1, 0.0), UserInputError, "not all of it is positive and finite"),
    "a sign": (_factor(0, -1.0), UserInputError, "not all of it is positive and finite"),
    "NaN": (_factor(2, torch.nan), UserInputError, "not all of it is positive and finite"),
    "denormal, whose inverse is infinite": (_factor(3, 1e-44), NumericsError, "its weight would hold NaN or infinity with this factor_C"),
    "complex": (lambda model: scale_channels(model, _pair(model), _ones(model) + 0j), UserInputError, "factor_C: it is complex"),
    "sparse": (
        lambda model: scale_channels(model, _pair(model), _ones(model).to_sparse()),
        UserInputError,
        "factor_C: it is complex",
    ),
    "no values": (lambda model: scale_channels(model, _pair(model), _ones(model).to("meta")), UserInputError, "or without values"),
    "a model without values": (
        lambda model: scale_channels(copy.deepcopy(model).to("meta"), _pair(model), _ones(model)),
        TargetError,
        f"pair: {UP} has no weight",
    ),
    "pairs of a model without values": (lambda model: find_pairs(copy.deepcopy(model).to("meta"), BATCH, CPU), TracingError, "meta device"),
    "a device that is none": (lambda model: find_pairs(model, BATCH, "nope"), ModelError, "device: 'nope' cannot be used"),  # type: ignore[arg-type]
    "a device without values": (lambda model: trace(model, [BATCH], device=torch.device("meta")), ModelError, "device: 'meta' cannot be"),
    "ids that the model lacks": (lambda model: find_pairs(model, IDS + 10_000, CPU), TracingError, "token id 10011 is given"),  # type: ignore[arg-type]
    "infinity": (_factor(3, torch.inf), UserInputError, "not all of it is positive and finite"),
    "a pair of another model": (
        lambda model: scale_channels(nn.Sequential(nn.Linear(2, 2)), _pair(model), torch.ones(2)),
        TargetError,
        f"pair: {UP} has no weight in this Sequential",
    ),
    "a pair that does not fit": (lambda model: _unfit(model), TargetError, "pair: model.layers.0.mlp.down_proj does not fit it here"),
}


def _unfit(model: nn.Module) -> None:
    pair = _pair(model)
    model.get_submodule("model.layers.0.mlp").down_proj = nn.Linear(3, 3)
    scale_channels(model, pair, torch.ones(_channels(model)))


@pytest.mark.parametrize("name", KINDS)
def test_an_argument_of_the_wrong_kind_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(UserInputError, match=rf"^{name.strip()}: .* was given, where .* belongs; correct it$"):
        KINDS[name](tiny.llama())


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_is_broken_is_said_and_nothing_changes(name: str) -> None:
    door, kind, said = RULES[name]
    model = tiny.llama()
    before = {key: value.clone() for key, value in model.state_dict().items() if "down_proj" not in key}
    with pytest.raises(kind, match=re.escape(said)):
        door(model)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())


def test_a_batch_is_written_as_for_a_trace() -> None:
    model = tiny.llama()
    assert find_pairs(model, IDS, CPU) == find_pairs(model, (IDS,), CPU) == find_pairs(model, BATCH, CPU)  # type: ignore[arg-type]
