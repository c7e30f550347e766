"""What a plan says of stages, passes and memory is what the run then does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import compressor
from compressor import (
    AutoRoundModifier,
    AWQModifier,
    GPTQModifier,
    MagnitudePruningModifier,
    QuantizationModifier,
    QuIPModifier,
    REAPPruningModifier,
    ScaleTuningModifier,
    SmoothQuantModifier,
    SparseGPTModifier,
    SpinQuantModifier,
    WandaPruningModifier,
)
from compressor.planning import Plan, planner
from compressor.planning.footprint import measure_footprints
from tests import tiny
from tests.bench.memory import TOLERANCE, run_cases

INT4: dict[str, Any] = {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 16}}}
RANGE = {"num_bits": 8, "strategy": "tensor", "dynamic": False}
STATIC: dict[str, Any] = {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": RANGE}}
KEYS = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
INT = {"config_groups": INT4, "ignore": ["lm_head"]}
BY_LAYERS = {"pipeline": "sequential"}
NAMED = {"sequential_targets": ["LlamaDecoderLayer"]}
OUTSIDE = ("trace", "rest", "save", "compress")  # of a plan, no stages of a run
IDS = torch.randint(64, (16, 12), generator=torch.Generator().manual_seed(0))


def gptq(**more: Any) -> GPTQModifier:
    return GPTQModifier(**INT, **more)


def rounding(**more: Any) -> QuantizationModifier:
    return QuantizationModifier(**INT, **more)


def auto(**more: Any) -> AutoRoundModifier:
    return AutoRoundModifier(**INT, **{"iters": 1, **more})


CASES: dict[str, tuple[Callable[[], list[Any]], dict[str, Any]]] = {
    "gptq": (lambda: [gptq()], {}),
    "gptq fast": (lambda: [gptq(mode="fast")], {}),
    "gptq two": (lambda: [gptq()], {"passes": "two"}),
    "gptq keys": (lambda: [gptq(kv_cache_scheme=KEYS)], {}),
    "gptq keys two": (lambda: [gptq(kv_cache_scheme=KEYS)], {"passes": "two"}),
    "gptq suspend": (lambda: [gptq()], {"engine": "suspend"}),
    "best": (lambda: [gptq(), ScaleTuningModifier(steps=1)], {}),
    "autoround": (lambda: [auto()], {}),
    "autoround one": (lambda: [auto()], {"passes": "one"}),
    "autoround two": (lambda: [auto()], {"passes": "two"}),
    "autoround base": (lambda: [auto(target="base")], {"passes": "two"}),
    "autoround, nothing to learn": (lambda: [auto(iters=0)], BY_LAYERS),
    "rounding": (lambda: [rounding()], {}),
    "rounding by layers": (lambda: [rounding()], BY_LAYERS),
    "rounding by layers, one": (lambda: [rounding()], {**BY_LAYERS, "passes": "one"}),
    "importance by layers": (lambda: [rounding(weight_observer="imatrix_mse")], BY_LAYERS),
    "static": (lambda: [QuantizationModifier(config_groups=STATIC, ignore=["lm_head"])], {}),
    "static by layers": (lambda: [QuantizationModifier(config_groups=STATIC, ignore=["lm_head"])], BY_LAYERS),
    "keys by layers": (lambda: [rounding(kv_cache_scheme=KEYS)], BY_LAYERS),
    "awq": (lambda: [AWQModifier(n_grid=2), rounding()], {}),
    "awq by layers": (lambda: [AWQModifier(n_grid=2), rounding()], BY_LAYERS),
    "smoothquant": (lambda: [SmoothQuantModifier(), gptq()], {}),
    "spinquant": (lambda: [SpinQuantModifier(), gptq()], {}),
    "spinquant, learned": (lambda: [SpinQuantModifier(learnable=True, steps=1), rounding()], BY_LAYERS),
    "quip": (lambda: [QuIPModifier(ignore=["lm_head"]), gptq()], {}),
    "sparsegpt": (lambda: [SparseGPTModifier(sparsity=0.5, ignore=["lm_head"])], {}),
    "sparsegpt and gptq": (lambda: [SparseGPTModifier(sparsity=0.5, ignore=["lm_head"]), gptq()], {}),
    "wanda": (lambda: [WandaPruningModifier(sparsity=0.5, ignore=["lm_head"])], {}),
    "wanda by layers": (lambda: [WandaPruningModifier(sparsity=0.5, ignore=["lm_head"])], NAMED),
    "wanda and gptq": (lambda: [WandaPruningModifier(sparsity=0.5, ignore=["lm_head"]), gptq()], {}),
    "magnitude by layers": (lambda: [MagnitudePruningModifier(targets=["re:.*proj$"], final_sparsity=0.5)], BY_LAYERS),
    "reap": (lambda: [REAPPruningModifier(sparsity=0.25)], {}),
    "reap and gptq": (lambda: [REAPPruningModifier(sparsity=0.25), gptq()], {}),
    "experts": (lambda: [gptq()], {}),
}


def model_of(case: str) -> Any:
    return tiny.qwen3_moe(hidden_size=32, moe_intermediate_size=32) if "reap" in case or case == "experts" else tiny.llama()


def planned(case: str) -> Plan:
    recipe, settings = CASES[case]
    return compressor.plan(model_of(case), recipe=recipe(), num_calibration_samples=16, max_seq_length=12, **settings)


@pytest.mark.parametrize("case", CASES)
def test_the_stages_of_a_plan_are_those_of_the_run(case: str) -> None:
    recipe, settings = CASES[case]
    made, run = planned(case), compressor.oneshot(model_of(case), recipe=recipe(), dataset=IDS, **settings)
    beside = [one.label for one in (recipe() if len(recipe()) == 1 else ())] + [
        f"{type(one).__name__}[{n}]" for n, one in enumerate(recipe())
    ]
    stages = [stage.name for stage in made.estimate.stages if stage.name not in (*OUTSIDE, *beside)]
    assert made.pipeline == "data_free" or stages == [stage.name for stage in run.stages]


class _Counting(TorchDispatchMode):
    """Counts numbers that go through the activation of an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket is torch.ops.aten.silu:
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


def times_a_layer_runs(case: str) -> float:
    """For each sample more; the last layer of two is left as soon as nobody looks behind it."""
    recipe, settings = CASES[case]
    counts = []
    for num_samples in (8, 16):
        with _Counting() as counting:
            compressor.oneshot(model_of(case), recipe=recipe(), dataset=IDS[:num_samples], batch_size=1, **settings)
        counts.append(counting.count)
    return (counts[1] - counts[0]) / (8 * 12 * 64 * 2)


@pytest.mark.parametrize(
    ("case", "words", "times"),
    [
        ("gptq", "one, and one beside in the uncompressed model", 2.0),
        ("gptq fast", "one", 1.0),
        ("gptq two", "two", 1.5),
        ("static by layers", "one", 1.0),
        ("rounding by layers", "none, for nothing learns from what flows", 0.0),
        ("rounding by layers, one", "none, for nothing learns from what flows", 0.0),
        ("wanda", "one", 1.0),
        ("magnitude by layers", "none", 0.0),
    ],
)
def test_a_layer_runs_as_often_as_planned(case: str, words: str, times: float) -> None:
    assert planned(case).forwards == words
    assert times_a_layer_runs(case) == times


def test_blocks_that_learn_run_twice_whatever_the_passes() -> None:
    """They are calibrated and propagated; the last of two layers is not propagated, and what is learned from runs besides."""
    assert [planned(f"autoround{more}").forwards for more in (" one", " two")] == ["two, and one beside in the uncompressed model", "two"]
    assert times_a_layer_runs("autoround two") >= 1.5


_SIZES = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 4}
_GROUPS = {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}}
_INT4 = {"config_groups": _GROUPS, "ignore": ["lm_head"]}
LEARNING: dict[str, dict[str, Any]] = {
    "spinquant": {"SpinQuantModifier": {"learnable": True, "steps": 2}, "GPTQModifier": _INT4},
    "best": {"GPTQModifier": _INT4, "ScaleTuningModifier": {"steps": 2}},
    "autoround": {"AutoRoundModifier": {**_INT4, "iters": 2}},
    "awq": {"AWQModifier": {}, "QuantizationModifier": _INT4},
    "wanda": {"WandaPruningModifier": {"sparsity": 0.5, "ignore": ["lm_head"]}},
    "smoothquant": {"SmoothQuantModifier": {}, "GPTQModifier": {"scheme": "W8A8", "ignore": ["lm_head"]}},
    "quip": {"QuIPModifier": {"ignore": ["lm_head"]}, "GPTQModifier": _INT4},
}


def test_what_a_backward_keeps_is_planned_as_autograd_keeps_it() -> None:
    model = tiny.llama(**_SIZES, num_hidden_layers=5)
    batch = {"input_ids": torch.zeros(2, 64, dtype=torch.long), "attention_mask": torch.ones(2, 64, dtype=torch.long)}
    layers = [f"model.layers.{place}" for place in range(5)]
    planned = [measure_footprints(planner.without_values(model), batch, targets, [], trains=True) for targets in ([], layers)]
    weights, kept = {one.untyped_storage().data_ptr() for one in model.parameters()}, dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(**batch, use_cache=False)
    found = sum(size for place, size in kept.items() if place not in weights)
    assert output.logits.requires_grad
    assert [sum(one.saved_bytes for one in each) for each in planned] == pytest.approx([found, found], rel=0.1)


@pytest.mark.parametrize("name", LEARNING)
def test_what_modifiers_keep_beside_forwards_is_in_the_plan(name: str) -> None:
    """Cheap: a stage of each that learns or searches holds more than a forward of its own takes."""
    model = tiny.llama(**_SIZES, max_position_embeddings=128)
    saved = sum(
        one.saved_bytes
        for one in measure_footprints(planner.without_values(model), {"input_ids": torch.zeros(8, 128).long()}, [], [], trains=True)
    )
    made = compressor.plan(model, recipe={"a_modifiers": LEARNING[name]}, num_calibration_samples=32, max_seq_length=128)
    largest = made.estimate.worst
    assert largest.phase == ("train" if name in ("spinquant", "best", "autoround") else largest.phase)
    if name in ("spinquant", "best"):
        assert largest.temporaries_bytes > saved + made.estimate.model_bytes / 2
    elif name == "autoround":
        assert largest.temporaries_bytes > saved / 3
    else:  # beside the copy that forwards are held against lie weights of its own
        assert largest.peak_bytes > 2.5 * made.estimate.model_bytes


@pytest.mark.parametrize("name", LEARNING)
def test_memory_of_what_learns_or_searches_is_planned(name: str) -> None:
    """As the allocator has given it out, in a fresh process: it was a fourth of that for what trains through all layers."""
    config = {**_SIZES, "num_hidden_layers": 2, "max_position_embeddings": 128}
    case = {"name": name, "config": config, "class": "LlamaForCausalLM", "recipe": {"a_modifiers": LEARNING[name]}, "dtype": "float32"}
    (result,) = run_cases([{**case, "num_samples": 32, "seq_len": 128}])
    assert result["estimate"]["peak_bytes"] == pytest.approx(result["peak_bytes"], rel=TOLERANCE)


_MOE = {**_SIZES, "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 64}
_HALF = {"sparsity": 0.5, "ignore": ["lm_head"]}
BESIDE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sparsegpt and gptq": ("LlamaForCausalLM", _SIZES, {"SparseGPTModifier": _HALF, "GPTQModifier": _INT4}),
    "wanda and gptq": ("LlamaForCausalLM", _SIZES, {"WandaPruningModifier": _HALF, "GPTQModifier": _INT4}),
    "reap": ("Qwen3MoeForCausalLM", _MOE, {"REAPPruningModifier": {"sparsity": 0.25}}),
}


@pytest.mark.parametrize("name", BESIDE)
def test_memory_of_what_prunes_is_planned(name: str) -> None:
    """Two modifiers with statistics of the same inputs, and layers that are kept to refit experts: it was two thirds of that."""
    kind, sizes, modifiers = BESIDE[name]
    config = {**sizes, "num_hidden_layers": 2, "max_position_embeddings": 128}
    case = {"name": name, "config": config, "class": kind, "recipe": {"a_modifiers": modifiers}, "dtype": "float32"}
    (result,) = run_cases([{**case, "num_samples": 32, "seq_len": 128}])
    assert result["estimate"]["peak_bytes"] == pytest.approx(result["peak_bytes"], rel=TOLERANCE)


def test_modifiers_of_one_weight_have_statistics_each() -> None:
    model = tiny.llama()

    def statistics(*recipe: Any) -> int:
        made = compressor.plan(model, recipe=list(recipe), num_calibration_samples=16, max_seq_length=12)
        return max(stage.statistics_bytes for stage in made.estimate.stages)

    pruning = SparseGPTModifier(sparsity=0.5, ignore=["lm_head"])
    assert statistics(pruning.model_copy(), gptq()) == statistics(pruning) + statistics(gptq())
