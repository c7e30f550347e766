"""How often a layer runs for its calibration: twice, or once.

Two passes: all samples through a layer as it is, all of its modules compressed, all samples through the compressed layer. One pass: the
layer is cut at the inputs of its own modules. Those that read one input (q/k/v, gate/up) are shown it, compressed, and then called for
the first time, so that nothing runs twice, and each module sees the error of those before it in the same layer, too. What waits between
two cuts is more than between two layers: the input of the modules beside the residual stream.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from compressor.nn.experts import UnfusedExperts
from compressor.tracing import Partition


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
    chosen = {_outermost(name, (*experts, *watched)) for name in watched}
    targets = {name: module for name, module in model.named_modules() if name in chosen}
    return Partition(targets, f"the inputs of what is compressed, in one pass ({layers.reason})", layers.inferred)


def _outermost(name: str, others: Iterable[str]) -> str:
    return min((other for other in others if name == other or name.startswith(f"{other}.") or not other), key=len)
