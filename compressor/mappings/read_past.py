"""Weights that a model reads past the forward of their layer, as Mamba does that of its time step, or a hook that takes a norm of it.

What is turned on one side there, or scaled, counts elsewhere, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn


def read_past(model: nn.Module, names: Sequence[str], run: Callable[[], Tensor]) -> list[str]:
    """Find layers whose weight or bias counts elsewhere, too: they are NaN while the layer itself does not run.

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
    forward, held = module.forward, vars(module)
    hidden = [(one, one.data, _nowhere(one.data)) for one in module.parameters(recurse=False) if one.is_floating_point()]

    def show(*given: Any, **keywords: Any) -> Any:
        places = [parameter.device for parameter, *_ in hidden]
        put_back()
        try:
            return forward(*given, **keywords)
        finally:
            for (parameter, _, nowhere), place in zip(hidden, places, strict=True):
                parameter.data = nowhere.to(place)

    def put_back() -> None:
        for parameter, own, _ in hidden:
            parameter.data = own.to(parameter.device)

    stack.callback(put_back)
    stack.callback(held.update, {"forward": held["forward"]} if "forward" in held else {})
    stack.callback(held.pop, "forward", None)
    held["forward"] = show
    for parameter, _, nowhere in hidden:
        parameter.data = nowhere


def _nowhere(own: Tensor) -> Tensor:
    return torch.full((1,) * own.dim(), torch.nan, dtype=own.dtype, device=own.device).expand(own.shape)
