"""Mixture-of-experts layers: finding those with fused weights, and taking them apart into one linear layer per expert and projection.

Any module with the interface of transformers' `use_experts_implementation` (65 classes in 5.23) is taken apart by what it says of itself;
`_UNTOLD` adds classes that have the interface and do not say so. The projections are called what the files of the architecture call them,
as transformers' own conversion table has it; where its files keep experts fused, by the names that vLLM and llm-compressor use. Each module
is proven on the spot: fused and unfused forward run on the same random tokens through every expert, and anything but rounding is an error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compressor.errors import ModelError
from compressor.model.targets import matches, other_names, put_module
from compressor.nn.experts import ExpertLayout, SortedExperts, UnfusedExperts

# What the files of an architecture call the projections of its experts, read off the table by which transformers converts files.

_MERGES = (["MergeModulelist", "Concatenate"], ["MergeModulelist"])


class DiskNames(NamedTuple):
    """What the files of an architecture call the projections of one expert.

    Attributes:
        gate: name of the gate projection.
        up: name of the up projection.
        down: name of the down projection.
        is_converted: transformers merges per-expert tensors of these names while it loads.
    """

    gate: str
    up: str
    down: str
    is_converted: bool


VLLM_NAMES = DiskNames("gate_proj", "up_proj", "down_proj", False)


def disk_names(converters: list[Any], name: str) -> DiskNames:
    """Find what the files of a model call the projections of its experts.

    Args:
        converters: those of the model.
        name: dotted name of the module with the experts.

    Returns:
        The names, those of vLLM where files keep experts fused.
    """
    found = {fused: _merged_names(converters, f"{name}.{fused}") for fused in ("gate_up_proj", "up_proj", "down_proj")}
    gate_up, up, down = found["gate_up_proj"], found["up_proj"], found["down_proj"]
    first = gate_up if len(gate_up) == 2 else [VLLM_NAMES.gate, *up] if len(up) == 1 else []
    if len(first) != 2 or len(down) != 1:
        return VLLM_NAMES
    return DiskNames(gate=first[0], up=first[1], down=down[0], is_converted=True)


def weight_converters(model: nn.Module) -> list[Any]:
    """List how transformers converts the tensors of a model's files.

    Args:
        model: any model.

    Returns:
        Its WeightConverter objects; empty for what is no model of transformers.
    """
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    if not isinstance(model, PreTrainedModel):
        return []
    return [entry for entry in get_model_conversion_mapping(model, add_legacy=False) if isinstance(entry, WeightConverter)]


def _merged_names(converters: list[Any], fused_name: str) -> list[str]:
    """Names of the per-expert projections that transformers merges into a fused tensor; empty where it merges none."""
    for converter in converters:
        operations = [type(operation).__name__ for operation in converter.operations]
        if operations in _MERGES and any(re.search(f"{target}$", fused_name) for target in converter.target_patterns):
            return [source.replace("\\", "").removesuffix(".weight").rpartition(".")[2] for source in converter.source_patterns]
    return []


_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_USUAL = MappingProxyType({"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True})
# Classes that have the interface but not the flags, and what the flags would say.
_SORTED = "Llama4TextExperts"  # is handed weighted tokens, one copy for each expert, and says nothing of itself
_UNTOLD: Mapping[str, Mapping[str, bool]] = MappingProxyType({"Step3p7Experts": _USUAL, _SORTED: {**_USUAL, "is_transposed": True}})
_EXPERT_CLASS = re.compile(r"Experts?(?![a-z])|M[oO]E(?![a-z])|Moe(?![a-z])")
_ROUNDINGS = 64  # how many units of the last place fused and unfused forward may differ by, relative to the largest output


@dataclass(frozen=True)
class UnfusedModule:
    """One module that was taken apart.

    Attributes:
        class_name: of the fused module.
        num_experts: how many experts it holds.
        difference: largest difference to the fused forward on the probe, relative to the largest output: 0.0 means bitwise equal.
            None where there are no weights to run.
    """

    class_name: str
    num_experts: int
    difference: float | None


@dataclass
class UnfusedModel:
    """The modules of a model that were taken apart, and those that they replace.

    Attributes:
        model: the model.
        modules: what was taken apart, by dotted name.
        fused: the modules as they were, by dotted name.
    """

    model: nn.Module
    modules: dict[str, UnfusedModule] = field(default_factory=dict)
    fused: dict[str, nn.Module] = field(default_factory=dict)

    def keep(self, changed: Collection[str]) -> None:
        """Put back the modules of which nothing is going to change. Changes the model.

        Args:
            changed: dotted names of the modules that will be changed.

        Raises:
            ModelError: what will be changed is a module whose forward was exchanged, and would go on reading the fused weights.
        """
        for name in [name for name in self.fused if not any(other.startswith(f"{name}.") for other in changed)]:
            put_module(self.model, name, self.fused.pop(name), other_names(self.model))
            del self.modules[name]
        if patched := next((name for name, module in self.fused.items() if "forward" in vars(module)), None):
            raise ModelError(
                f"{patched}: its forward was exchanged on the object, as hooks of accelerate do, and would not read experts that are taken "
                "apart; take it off (accelerate.hooks.remove_hook_from_module), or ignore the experts"
            )

    def restore(self) -> None:
        """Put every fused module back that is still known. Changes the model."""
        self.keep(())

    def forget(self) -> None:
        """Let the fused modules go, and with them the memory of their weights once all experts have been replaced."""
        self.fused.clear()

    def calibrate_all(self) -> None:
        """Show every token to the hooks of every expert. Changes the model.

        Raises:
            ModelError: experts are never handed the tokens of others.
        """
        for name in self.modules:
            module = self.model.get_submodule(name)
            assert isinstance(module, UnfusedExperts)
            if isinstance(module, SortedExperts):
                raise ModelError(
                    f"calibrate_all_experts: {name} is handed tokens that are weighted for each expert, and zeros for all others; leave "
                    "the option out"
                )
            module.calibrate_all = True

    def describe(self) -> list[str]:
        """Say what was taken apart and how equal it is, a line per class."""
        lines = []
        for kind in dict.fromkeys(module.class_name for module in self.modules.values()):
            group = [module for module in self.modules.values() if module.class_name == kind]
            counts = "/".join(sorted({str(module.num_experts) for module in group}))
            differences = [module.difference for module in group if module.difference is not None]
            equal = "bitwise" if not any(differences) else f"up to rounding ({max(differences):.1e})"
            # One product for gate and up sums as the two do on most kernels of a CPU, not on all.
            proof = f"; outputs equal to the fused forward {equal}, as this machine multiplies" if differences else ""
            lines.append(f"{len(group)} x {kind} taken apart into linear layers of {counts} experts{proof}")
        return lines


@contextmanager
def unfused_experts(model: nn.Module, *, hold: bool) -> Iterator[UnfusedModel]:
    """Take the experts of a model apart; on an exception the fused modules come back. Changes the model.

    Args:
        model: with weights, or on the meta device.
        hold: keep the fused modules until the end, for a model that belongs to the caller; else `keep` is the last moment to go back.

    Yields:
        What was taken apart.

    Raises:
        ModelError: the unfused forward computes something else than the fused one.
    """
    unfused = UnfusedModel(model)
    try:
        unfuse_into(unfused)
        yield unfused
    except BaseException:
        unfused.restore()
        raise
    finally:
        for name in unfused.modules:
            module = model.get_submodule(name)
            if isinstance(module, UnfusedExperts):
                module.calibrate_all = False
        if not hold:
            unfused.forget()


def unfuse_into(unfused: UnfusedModel, *, prove: bool = True) -> None:
    """Take apart every module with fused experts whose layout is known. Changes the model.

    Args:
        unfused: of the model; notes what was taken apart.
        prove: run fused and unfused forward on a probe; False where the weights are still to come.

    Raises:
        ModelError: the unfused forward computes something else than the fused one.
    """
    model = unfused.model
    known = [(name, module) for name, module in model.named_modules() if layout_of(module) is not None]
    converters, others = (weight_converters(model), other_names(model)) if known else ([], {})
    for name, module in known:
        layout = layout_of(module, disk_names(converters, name))
        assert layout is not None
        apart = (SortedExperts if type(module).__name__ == _SORTED else UnfusedExperts)(module, layout)
        difference = _difference(name, module, apart) if prove else None
        put_module(model, name, apart, others)
        unfused.fused[name] = module
        unfused.modules[name] = UnfusedModule(type(module).__name__, len(list(apart.experts())), difference)


def layout_of(module: nn.Module, names: DiskNames = VLLM_NAMES) -> ExpertLayout | None:
    """Find out how a module keeps its experts.

    Args:
        module: any module.
        names: what the projections shall be called.

    Returns:
        The layout; None for what is no fused module, or one whose layout is not known.
    """
    told = all(hasattr(module, flag) for flag in _FLAGS)
    flags = {flag: bool(getattr(module, flag)) for flag in _FLAGS} if told else _UNTOLD.get(type(module).__name__)
    if flags is None:
        return None
    layout = ExpertLayout(
        names.gate if flags["has_gate"] else None, names.up, names.down, flags["is_transposed"], flags["is_concatenated"], flags["has_bias"]
    )
    return layout if all(_has_fused(module, name) for name in layout.sources) else None


def unknown_experts(model: nn.Module) -> dict[str, str]:
    """Find modules that hold the weights of many experts in a way that is not known here.

    Args:
        model: not modified.

    Returns:
        Dotted name to class name.
    """
    found = {}
    for name, module in model.named_modules():
        batched = [p for p in module.parameters(recurse=False) if p.dim() >= 3 and min(p.shape) > 1 and p.is_floating_point()]
        if batched and _EXPERT_CLASS.search(type(module).__name__) and layout_of(module) is None:
            found[name] = type(module).__name__
    return found


def check_no_unknown_experts(model: nn.Module, targets: list[str], ignore: list[str]) -> None:
    """Refuse a recipe for all linear layers on a model whose experts would silently stay as they are.

    Args:
        model: not modified.
        targets: patterns of the recipe.
        ignore: patterns of the recipe; ignoring the class, or the modules, says that they shall stay as they are.

    Raises:
        ModelError: experts of an unknown layout, or of a known one that have not been taken apart.
    """
    if "Linear" not in targets:
        return
    fused = {name: type(module).__name__ for name, module in model.named_modules() if layout_of(module) is not None}
    left = {
        name: kind
        for name, kind in (fused | unknown_experts(model)).items()
        if not any(matches(name, model.get_submodule(name), pattern) for pattern in ignore)
    }
    if not fused.keys().isdisjoint(left):
        raise ModelError(
            f"{next(iter(left))}: {len(left)} modules still hold the weights of many experts in one tensor, so no target reaches them, and "
            "only oneshot and a conversion take them apart; ignore them here"
        )
    if left:
        kinds = sorted(set(left.values()))
        raise ModelError(
            f"{next(iter(left))}: {len(left)} modules of class {', '.join(kinds)} hold the weights of many experts in one tensor, in a "
            f"layout that is not known here, so no target reaches them; add {', '.join(kinds)} to ignore to leave them as they are"
        )


def _has_fused(module: nn.Module, name: str) -> bool:
    weight = module._parameters.get(name)
    return weight is not None and weight.dim() == 3


@torch.no_grad()
def _difference(name: str, fused: nn.Module, apart: UnfusedExperts) -> float | None:
    """Run both on random tokens that reach every expert; None without weights."""
    weight = fused.get_parameter("down_proj")
    if weight.is_meta:
        return None
    arguments = _probe(fused, apart)
    expected, got = fused(*arguments), apart(*arguments)
    if torch.equal(expected, got):
        return 0.0
    if not bool(torch.isfinite(expected).all()):
        raise ModelError(f"{name}: its experts give NaN or infinity on ordinary inputs; repair the weights")
    scale = max(float(expected.abs().max()), torch.finfo(torch.float32).tiny)
    difference = float((expected.float() - got.float()).abs().max()) / scale
    if not difference <= _ROUNDINGS * torch.finfo(weight.dtype).eps:
        raise ModelError(
            f"{name}: {type(fused).__name__} taken apart gives other outputs than before (relative difference {difference:.1e}), so its "
            "layout is not what it says; add the class to ignore"
        )
    return difference


def _probe(fused: nn.Module, apart: UnfusedExperts) -> tuple[Tensor, ...]:
    weight = fused.get_parameter("down_proj")
    num_experts = weight.shape[0]
    layer = next(apart.experts()).get_submodule(apart.layout.up)
    assert isinstance(layer, nn.Linear)
    slots = min(2, num_experts)
    num_tokens = max(4, 2 * num_experts // slots)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, layer.in_features, generator=generator, dtype=torch.float32)
    if isinstance(apart, SortedExperts):
        sent = torch.arange(num_tokens * num_experts) % 3 > 0  # of every expert some tokens, of none all
        return ((hidden.repeat(num_experts, 1) * sent[:, None]).to(weight.device, weight.dtype),)
    index = torch.arange(num_tokens * slots).reshape(num_tokens, slots) % num_experts
    shares = torch.rand(num_tokens, slots, generator=generator, dtype=torch.float32)
    return hidden.to(weight.device, weight.dtype), index.to(weight.device), shares.to(weight.device, weight.dtype)
