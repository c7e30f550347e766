"""A batch, as a model takes it, and what running a model on it gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Batch = Tensor | tuple[Any, ...] | dict[str, Any]


def call(model: nn.Module, batch: Batch) -> Any:
    """Run a model on a batch: keyword arguments for a dict, positional ones for a tuple, one for a tensor."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def gradients(model: nn.Module, output: object) -> list[Tensor | None]:
    """Return what a backward from the sum of all that came out leaves on the parameters that want a gradient; theirs are put back."""
    ends = [leaf.sum() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not ends or not wanted:
        return []
    kept = [parameter.grad for parameter in wanted]
    for parameter, grad in zip(wanted, kept, strict=True):  # where one lies already, a training adds to it
        parameter.grad = None if grad is None else grad.clone()
    try:
        # As a training does: `torch.autograd.grad` shows hooks no gradient of a parameter that has been reached before.
        torch.autograd.backward(ends)
        return [parameter.grad for parameter in wanted]
    finally:
        for parameter, grad in zip(wanted, kept, strict=True):
            parameter.grad = grad


def token_mask(batch: Batch) -> Tensor | None:
    """Return which tokens of a batch are no padding, bool [batch, sequence], as a calibration takes it; None where all are."""
    mask = batch.get("attention_mask") if isinstance(batch, dict) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_floating_point() or bool(mask.all()):
        return None
    return mask.bool()
