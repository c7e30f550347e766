"""Where the sequential pipeline stops: at layers, at the inputs of their modules, or at every single expert.

Two passes: all samples through a layer as it is, all of its modules compressed, all samples through the compressed layer. One pass: the
layer is cut at the inputs of its own modules. Those that read one input (q/k/v, gate/up) are shown it, compressed, and then called for
the first time, so that nothing runs twice, and each module sees the error of those before it in the same layer, too. What waits between
two cuts is more than between two layers: the input of the modules beside the residual stream.

Layers with many experts are calibrated piece by piece, so that the Hessians of one expert live at a time, not those of all of them. As one
stage, a layer of DeepSeek-V3's shape would need 57 GB of Hessians. Where they would pass a fixed size, which depends on the model alone,
the stages are instead what lies around the experts (attention, shared experts) and every single expert. Samples wait at each of them as at
a layer, and an expert's statistics go as soon as it is solved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import nn

from compressor.model.targets import outward
from compressor.nn.experts import Expert, UnfusedExperts
from compressor.tracing import Partition
from compressor.tracing.targets.partition import infer_targets

HESSIAN_BYTES = 1 << 31  # of the experts of one layer; beyond, they are calibrated one by one


def cut_at_inputs(model: nn.Module, watched: Collection[str], layers: Partition) -> Partition:
    """Name the places at which a forward stops when layers run once.

    Args:
        model: of the run.
        watched: dotted names of the modules that carry calibration hooks.
        layers: the sequential targets of a run in two passes.

    Returns:
        The watched modules themselves; where those lie in experts, which are called for other tokens in every batch, the layer of experts,
        and where one lies inside another the outer one. Both run twice.
    """
    experts = [name for name, module in model.named_modules() if isinstance(module, UnfusedExperts)]
    stops = {*experts, *watched}
    chosen = {[outer for outer in outward(name) if outer in stops][-1] for name in watched}
    targets = {name: module for name, module in model.named_modules() if name in chosen}
    return Partition(targets, f"the inputs of what is compressed, in one pass ({layers.reason})", layers.inferred)


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
    holding = {outer for name in claimed for outer in outward(name)}
    return [name for name in names if name in holding]


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
