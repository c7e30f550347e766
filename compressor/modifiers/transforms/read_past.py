"""Weights that a model reads past the forward of their layer, as Mamba does that of its time step: a rotation there is of one side only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn


def read_past(model: nn.Module, names: Sequence[str], run: Callable[[], Tensor]) -> list[str]:
    """Find layers whose weight counts elsewhere, too: it is NaN while the layer itself does not run.

    Args:
        model: as it was when it is left.
        names: dotted names of layers with a weight.
        run: gives outputs of the model.

    Returns:
        Those of the names, in their order; none where the model gives NaN as it is.
    """
    if not names or not _counts_elsewhere(model, names, run) or bool(run().isnan().any()):
        return []
    if len(names) == 1:
        return [*names]
    half = len(names) // 2
    return read_past(model, names[:half], run) + read_past(model, names[half:], run)


def _counts_elsewhere(model: nn.Module, names: Sequence[str], run: Callable[[], Tensor]) -> bool:
    with ExitStack() as stack:
        for name in names:
            _hide(model.get_submodule(name), stack)
        try:
            return bool(run().isnan().any())
        except (RuntimeError, ValueError, IndexError):  # as a NaN that was to become a place does
            return True


def _hide(module: nn.Module, stack: ExitStack) -> None:
    """By its forward and not by hooks: who looks whether somebody watches a layer may run it otherwise."""
    weight, forward = module.get_parameter("weight"), module.forward
    own, held = weight.data, vars(module)
    nowhere = torch.full((1,) * own.dim(), torch.nan, dtype=own.dtype, device=own.device).expand(own.shape)

    def show(*given: Any, **keywords: Any) -> Any:
        weight.data = own.to(weight.device)
        try:
            return forward(*given, **keywords)
        finally:
            weight.data = nowhere.to(weight.device)

    def put_back() -> None:
        weight.data = own.to(weight.device)

    stack.callback(put_back)
    stack.callback(held.update, {"forward": held["forward"]} if "forward" in held else {})
    stack.callback(held.pop, "forward", None)
    held["forward"] = show
    weight.data = nowhere.to(weight.device)
