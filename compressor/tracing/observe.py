"""Watching one plain forward: which targets it calls, in which order and how often. All that the suspend engine can plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn

from compressor.data.collate import Batch, call_model
from compressor.tracing.partition import Partition, module_names
from compressor.tracing.records import Stage


def observe_stages(model: nn.Module, cut: Partition, batch: Batch) -> tuple[Stage, ...]:
    """Run one plain forward and note the targets that it calls.

    Args:
        model: as it was afterwards, but for what its own forward changes.
        cut: its targets.
        batch: on the device of the model.

    Returns:
        A stage for each target that was called, in the order of the first calls.
    """
    calls: Counter[str] = Counter()

    def note(name: str) -> Callable[..., None]:
        def hook(*args: object) -> None:
            del args
            calls[name] += 1

        return hook

    with ExitStack() as hooks, torch.random.fork_rng(), torch.no_grad():
        for name, module in cut.targets.items():
            hooks.callback(module.register_forward_pre_hook(note(name)).remove)
        call_model(model, batch)
    return tuple(Stage(index, (name,), module_names(model, name), num_calls=calls[name]) for index, name in enumerate(calls))
