"""Layers that runtimes fuse into one product share their global scale: q/k/v, gate/up.

A fused product has room for one global scale only, so vLLM takes the largest of those it is given, and every other layer is dequantized
with a scale that is not its own. Here siblings get one and the same: that of all their weights together.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compressor.numerics import QuantizationScheme, calculate_global_scale

# Last parts of names of layers that read one input and are fused; each tuple one product.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"))


def siblings(name: str) -> tuple[str, ...]:
    """Name the layers that a runtime fuses with this one.

    Args:
        name: dotted name of a layer.

    Returns:
        Dotted names, its own among them; its own alone where nothing is fused.
    """
    parent, dot, own = name.rpartition(".")
    parts = next((parts for parts in FUSED if own in parts), (own,))
    return tuple(f"{parent}{dot}{part}" for part in parts)


def shared_global_scales(weights: Mapping[str, Tensor], schemes: Mapping[str, QuantizationScheme]) -> dict[str, Tensor]:
    """Choose the global scales of weights whose formats have one.

    Args:
        weights: dotted name of every layer to its weight [R, C]; all siblings that are quantized must be among them.
        schemes: dotted name to scheme, at least for these layers.

    Returns:
        Name to float32 [1], for layers whose format has a global scale; siblings hold equal values.
    """
    wanted = [name for name in weights if (args := schemes[name].weights) is not None and args.has_global_scale]
    largest = {name: weights[name].detach().abs().amax() for name in wanted}
    found = {}
    for name in wanted:
        together = torch.stack([largest[sibling] for sibling in siblings(name) if sibling in largest])
        found[name] = calculate_global_scale(together, together)
    return found
