"""What a target makes of its weights once and keeps: later stages would go on with the weights as they were before compression.

Attributes and cached properties of modules belong to one forward each, so what is kept there is made anew. What is kept elsewhere (a dict,
`functools.lru_cache`, a global) shows in this: a second forward no longer reads a weight that the first one has read. What had been kept
before anybody looked does not show. The first half looks at what a user hands to a trace, before anything runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compressor.data.collate import Batch
from compressor.errors import TracingError
from compressor.tracing.graph.nested_values import call_name
from compressor.tracing.graph.nodes import Unrepeatable
from compressor.tracing.graph.planner import without_traces
from compressor.tracing.targets.call_order import plain_forward


def as_batches(batches: Iterable[Any]) -> list[Batch]:
    """Take batches as people write them.

    Args:
        batches: mappings of names to values (also those of tokenizers), tuples or lists of values, or tensors, one for each forward.

    Returns:
        A dict for keyword arguments or a tuple for positional ones, each.

    Raises:
        TracingError: a single batch in the place of several, no batch, or something that is none.
    """
    if isinstance(batches, Mapping | Tensor | str) or not isinstance(batches, Iterable):
        raise TracingError(
            f"batches: a {type(batches).__name__} was given, where several batches are expected, one for each forward; give [batch]"
        )
    made = [_as_batch(batch, index) for index, batch in enumerate(batches)]
    if not made:
        raise TracingError("trace: no batch was given, and a plan is made by running one; give at least one")
    return made


def _as_batch(raw: Any, index: int) -> Batch:
    if isinstance(raw, Mapping):
        batch: Any = {str(name): value for name, value in raw.items()}
    elif isinstance(raw, tuple | list | Tensor):
        batch = (raw,) if isinstance(raw, Tensor) else tuple(raw)
    else:
        raise TracingError(f"batches: batch {index} is a {type(raw).__name__}; give a mapping, a tuple or a tensor")
    values = batch.values() if isinstance(batch, dict) else batch
    if not any(isinstance(value, Tensor) for value in values):
        raise TracingError(f"batches: batch {index} holds no tensor; give the forward's inputs (of a tokenizer, with return_tensors='pt')")
    if any(isinstance(value, Tensor) and value.is_meta for value in values):
        raise TracingError(f"batches: batch {index} holds a tensor on the meta device, without values; give one with values")
    return batch


def check_model(model: nn.Module) -> None:
    """Refuse a model that cannot be run and followed.

    Args:
        model: not modified.

    Raises:
        TracingError: it is compiled, is TorchScript, or has weights without values.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise TracingError("the model: is TorchScript, where nothing can be followed; give the model as it was before torch.jit")
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise TracingError(
                f"{name or 'the model'}: is compiled, and what a compiled module calls cannot be followed; give the model as it was before "
                "torch.compile (of a wrapper, its ._orig_mod), and compile after compression"
            )
    bare = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if bare:
        more = f", and {len(bare) - 1} more are" if bare[1:] else ""
        raise TracingError(
            f"{bare[0]}: is on the meta device, without values{more}, and a plan is made by running the model; load its weights, or use "
            "`compressor trace`, which makes some"
        )


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
