"""What a recipe would do to a model, and what it would cost, without loading a weight or running a batch.

Shapes come from the config alone (weights on the meta device), so a plan for a model of any size answers in seconds. Bytes on disk are
exact. Memory and time are estimates, and say so: memory from the shapes of the largest layer, time from the arithmetic and a matrix
product timed on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compressor.lifecycle import PlannedModule, State
from compressor.model.experts import unfused_experts
from compressor.model.experts_stages import expert_targets
from compressor.model.skeleton import load_skeleton
from compressor.pipelines import choose_pipeline
from compressor.recipe import Recipe, load_recipe
from compressor.tracing import partition

DEFAULT_SEQ_LENGTH = 2048


@dataclass(frozen=True)
class Estimate:
    """What a run would cost.

    Attributes:
        checkpoint_bytes: size of the weights on disk; exact.
        model_bytes: size of the weights in memory before compression; exact.
        peak_extra_bytes: memory beyond the model at the worst moment: statistics, solver and activations of one layer.
        seconds: wall time of calibration and compression on this machine's CPU or GPU.
    """

    checkpoint_bytes: int
    model_bytes: int
    peak_extra_bytes: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """The resolved recipe: modules that change, linear layers that stay and why, and the cost.

    Attributes:
        modules: what each targeted module gets.
        skipped: linear layers that stay as they are, with the reason.
        pipeline: `data_free`, `basic` or `sequential`.
        sequential_targets: names of the layers that would be calibrated one after another.
        estimate: what the run would cost.
    """

    modules: list[PlannedModule]
    skipped: list[PlannedModule]
    pipeline: str
    sequential_targets: list[str]
    estimate: Estimate

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""

        def plain(module: PlannedModule) -> dict[str, Any]:
            return {**asdict(module), "details": dict(module.details)}

        return {
            "modules": [plain(module) for module in self.modules],
            "skipped": [plain(module) for module in self.skipped],
            "pipeline": self.pipeline,
            "sequential_targets": self.sequential_targets,
            "estimate": asdict(self.estimate),
        }

    def estimate_lines(self) -> list[tuple[str, str]]:
        """Return the estimate as label and text, for people."""
        cost = self.estimate
        return [
            ("weights in memory", f"{cost.model_bytes / 1e6:,.1f} MB"),
            ("weights on disk", f"{cost.checkpoint_bytes / 1e6:,.1f} MB ({cost.checkpoint_bytes / max(1, cost.model_bytes):.0%})"),
            ("layers in sequence", str(len(self.sequential_targets) or "-")),
            ("memory beyond the model (estimate)", f"{cost.peak_extra_bytes / 1e6:,.1f} MB"),
            ("time (estimate)", f"{cost.seconds:,.1f} s"),
        ]


def plan(
    model: str | Path | nn.Module,
    *,
    recipe: Any,
    recipe_args: dict[str, Any] | None = None,
    num_calibration_samples: int = 512,
    max_seq_length: int | None = None,
    pipeline: str | None = None,
    sequential_targets: list[str] | None = None,
    model_class: str | None = None,
    trust_remote_code_model: bool = False,
) -> Plan:
    """Resolve a recipe against a model and estimate the run; nothing is run and nothing is changed.

    Args:
        model: folder with a config.json (weights are not needed), or a model in memory.
        recipe: as for `oneshot`.
        recipe_args: values for `${name}` in the recipe.
        num_calibration_samples: sequences that would be taken.
        max_seq_length: tokens of each; by default what the model takes, at most 2048.
        pipeline: `data_free`, `basic` or `sequential`; by default what the modifiers need.
        sequential_targets: layers that would be calibrated one after another; by default inferred.
        model_class: transformers class; by default AutoModelForCausalLM.
        trust_remote_code_model: run Python code that lies in the model's folder.

    Returns:
        The plan.

    Raises:
        UserInputError: whatever `oneshot` would refuse of recipe and model.
    """
    parsed = load_recipe(recipe, args=recipe_args)
    chosen = choose_pipeline(parsed.modifiers, pipeline)
    skeleton = load_skeleton(model, trust_remote_code=trust_remote_code_model, model_class=model_class)
    tokens = num_calibration_samples * (max_seq_length or _default_length(skeleton))
    with unfused_experts(skeleton, hold=True) as experts:
        try:
            return _plan(skeleton, parsed, chosen, sequential_targets, tokens)
        finally:
            experts.restore()


def _plan(skeleton: nn.Module, parsed: Recipe, chosen: str, sequential_targets: list[str] | None, tokens: int) -> Plan:
    planned: dict[str, PlannedModule] = {}
    state = State(model=skeleton)
    for modifier in parsed.modifiers:
        modules = modifier.plan(skeleton)
        state.claim([module.name for module in modules if module.reason is None], modifier.label)
        for module in modules:
            # A module that one modifier changes is not "skipped" because another leaves it.
            if module.reason is None or module.name not in planned:
                planned[module.name] = module
    targets = expert_targets(skeleton, state.claims, chosen, sequential_targets)
    layers = list(partition(skeleton, targets).targets) if chosen == "sequential" else []
    modules = [module for module in planned.values() if module.reason is None]
    return Plan(
        modules=modules,
        skipped=[module for module in planned.values() if module.reason is not None],
        pipeline=chosen,
        sequential_targets=layers,
        estimate=_estimate(skeleton, modules, layers, 0 if chosen == "data_free" else tokens),
    )


def _default_length(model: nn.Module) -> int:
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return min(DEFAULT_SEQ_LENGTH, positions or DEFAULT_SEQ_LENGTH)


def _estimate(model: nn.Module, modules: list[PlannedModule], layers: list[str], tokens: int) -> Estimate:
    model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in _unique([*model.parameters(), *model.buffers()]))
    saved = sum(_number(module, "bytes_before") - _number(module, "bytes_after") for module in modules)
    groups = [[module for module in modules if module.name.startswith(f"{layer}.") or module.name == layer] for layer in layers] or [
        modules
    ]
    peak = max((_layer_bytes(group, tokens) for group in groups), default=0)
    flops = sum(_module_flops(module, tokens) for module in modules)
    return Estimate(model_bytes - saved, model_bytes, peak, flops / _flops_per_second())


def _unique(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _number(module: PlannedModule, key: str) -> int:
    return int(module.details[key])


def _layer_bytes(modules: list[PlannedModule], tokens: int) -> int:
    """Hessians of the distinct inputs of one layer, working set of its largest solve, and the hidden states of all samples."""
    if not modules or tokens == 0:
        return max((8 * _number(module, "rows") * _number(module, "columns") for module in modules), default=0)
    inputs = {(module.name.rpartition(".")[0], _number(module, "columns")) for module in modules}
    hessians = sum(4 * columns * columns for _, columns in inputs)
    solve = max(8 * _number(module, "columns") * (_number(module, "rows") + _number(module, "columns")) for module in modules)
    hidden = min(_number(module, "columns") for module in modules)
    return hessians + solve + 2 * tokens * hidden


def _module_flops(module: PlannedModule, tokens: int) -> float:
    """Two forwards over all tokens, the upper half of the Hessian, one Cholesky and the solve."""
    rows, columns = _number(module, "rows"), _number(module, "columns")
    if tokens == 0:
        return 10.0 * rows * columns
    return 4.0 * tokens * rows * columns + tokens * columns**2 + columns**3 / 3 + 2.0 * rows * columns**2


def _flops_per_second(size: int = 768) -> float:
    """Time one float32 matrix product; the best of three, since the first one warms up."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = torch.ones(size, size, device=device)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # reading one value waits for the device
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best
