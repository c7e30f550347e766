"""Layers with many experts are calibrated piece by piece, so that the Hessians of one expert live at a time, not those of all of them.

Calibrated as one stage, a layer of DeepSeek-V3's shape would need 57 GB of Hessians. Where they would pass a fixed size, which depends on
the model alone, the stages are instead what lies around the experts (attention, shared experts) and every single expert. Samples wait at
each of them as at a layer, and an expert's statistics go as soon as it is solved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import nn

from compressor.nn.experts import Expert, UnfusedExperts
from compressor.tracing.targets.partition import infer_targets

HESSIAN_BYTES = 1 << 31  # of the experts of one layer; beyond, they are calibrated one by one


def expert_targets(
    model: nn.Module, claimed: Collection[str], pipeline: str, named: Sequence[str] | None = None, limit: int | None = None
) -> Sequence[str] | None:
    """Choose sequential targets for a model with large layers of experts.

    Args:
        model: with its experts taken apart.
        claimed: dotted names of the modules that will be compressed.
        pipeline: only `sequential` has targets.
        named: patterns of the user, which are not touched.
        limit: bytes of Hessians that one layer of experts may need in one stage; HESSIAN_BYTES by default.

    Returns:
        Dotted names in the order of the model; `named` where the usual targets will do.
    """
    sizes = [_hessian_bytes(module) for module in model.modules() if isinstance(module, UnfusedExperts)]
    if named is not None or pipeline != "sequential" or max(sizes, default=0) <= (HESSIAN_BYTES if limit is None else limit):
        return named
    names = [piece for layer, module in infer_targets(model).targets.items() for piece in _pieces(layer, module)]
    return [name for name in names if any(other == name or other.startswith(f"{name}.") for other in claimed)]


def _hessian_bytes(experts: UnfusedExperts) -> int:
    """One Hessian per expert for gate and up, which share their input, and one for down; float32."""
    projections = [expert.get_submodule(name) for expert in experts.experts() for name in (experts.layout.up, experts.layout.down)]
    return sum(4 * layer.in_features**2 for layer in projections if isinstance(layer, nn.Linear))


def _pieces(name: str, module: nn.Module) -> Iterator[str]:
    """The module itself where it holds no experts; else its parts, down to every expert."""
    if isinstance(module, Expert) or not any(isinstance(below, UnfusedExperts) for below in module.modules()):
        if any(True for _ in module.parameters()):
            yield name
        return
    for child_name, child in module.named_children():
        yield from _pieces(f"{name}.{child_name}" if name else child_name, child)
