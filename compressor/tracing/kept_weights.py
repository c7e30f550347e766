"""What a target makes of its weights once and keeps: later stages would go on with the weights as they were before compression.

Attributes and cached properties of modules belong to one forward each, so what is kept there is made anew. What is kept elsewhere (a dict,
`functools.lru_cache`, a global) shows in this: a second forward no longer reads a weight that the first one has read. What had been kept
before anybody looked does not show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from compressor.data.collate import Batch
from compressor.tracing.graph.calls import call_name
from compressor.tracing.graph.planner import without_traces
from compressor.tracing.graph.refusal import Unrepeatable
from compressor.tracing.observe import plain_forward


class KeptWeights(Unrepeatable):
    """What was made of a weight would outlive it."""


class _Reading(TorchFunctionMode):
    """Counts the torch calls that are given a weight."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not call_name(func).endswith("_"):  # who writes to a weight keeps the weight, and others look for that
            self.counts.update(self._names[id(item)] for item in (*args, *kwargs.values()) if id(item) in self._names)
        return func(*args, **kwargs)


@torch.no_grad()
def check_kept_weights(model: nn.Module, targets: Mapping[str, nn.Module], batch: Batch) -> None:
    """Run two plain forwards of a batch and compare which weights they read.

    Args:
        model: as it was afterwards, but for what its forward changes elsewhere than on modules.
        targets: dotted name to module.
        batch: on the device of the model; not modified.

    Raises:
        KeptWeights: the second forward reads a weight of a target less often than the first one.
    """
    owners = {f"{target}.{name}".lstrip("."): target for target, module in targets.items() for name, _ in module.named_parameters()}
    names = {id(tensor): name for name, tensor in model.named_parameters() if name in owners and tensor.dim() > 1}
    counts = []
    for _ in range(2):
        with without_traces(), _Reading(names) as reading:
            plain_forward(model, batch)
        counts.append(reading.counts)
    fewer = next((name for name in counts[0] if counts[1][name] < counts[0][name]), None)
    if fewer is not None:
        raise KeptWeights(
            f"{fewer}: forward makes something of it once and keeps it for later forwards (a dict, functools.lru_cache, a global), where "
            f"it would stay as it was before {owners[fewer]} is compressed; make it in each forward, keep it in an attribute "
            '(self.name = ...), or use pipeline="basic"'
        )
