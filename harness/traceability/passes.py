"""The naive reference for sequential calibration: all plain forwards run again from the start for every stage."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from harness.traceability.batches import Batch, copies
from harness.traceability.recording import Record, flatten, recording


@torch.no_grad()
def plain_forward(model: nn.Module, batch: Batch) -> Any:
    """Run one plain forward on a copy of a batch, from a fixed state of the random generator.

    Args:
        model: not modified, but by its own forward.
        batch: not modified.

    Returns:
        What the model returns.
    """
    torch.manual_seed(0)
    return model(**copies([batch])[0])


def compress_stage(model: nn.Module, names: Collection[str]) -> None:
    """Stand in for a compression: every weight of a stage is moved, by an amount that its name decides, and rounded. Changes the model.

    Matrices, and what is tied to a module elsewhere, become new parameters, as when a modifier replaces a module: so a head is untied
    from the embedding, and who kept the old tensor is found out. Other vectors are changed in place.

    Args:
        model: the model.
        names: modules of the stage.
    """
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name in sorted(names):
        module = model.get_submodule(name)
        for own, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_floating_point():
                generator = torch.Generator().manual_seed(zlib.crc32(f"{name}.{own}".encode()))
                moved = parameter.detach() * (1 + 0.2 * torch.rand(parameter.shape, generator=generator)).to(parameter)
                if parameter.dim() > 1 or owners[id(parameter)] > 1:
                    setattr(module, own, nn.Parameter((moved * 64).round() / 64))
                else:
                    parameter.detach().copy_((moved * 64).round() / 64)


def watchable(model: nn.Module, names: Collection[str]) -> list[str]:
    """Choose what a modifier would hook: modules with weights of their own.

    Args:
        model: the model.
        names: to choose from.

    Returns:
        Dotted names.
    """
    return [name for name in names if any(True for _ in model.get_submodule(name).parameters(recurse=False))]


def naive_passes(model: nn.Module, batches: Sequence[Batch], stages: Sequence[str]) -> Record:
    """The reference for sequential calibration: for every stage, run all plain forwards again from the start.

    Args:
        model: changed: each stage is compressed before the next is calibrated.
        batches: all of them.
        stages: targets in the order in which they are compressed.

    Returns:
        The inputs of the modules of each stage as its calibration must see them, and the results of the compressed model.
    """
    record = Record()
    for stage in stages:
        names = [name for name, _ in model.get_submodule(stage).named_modules(prefix=stage)]
        with recording(model, record, set(watchable(model, names)), only_inputs=True):
            for batch in batches:
                plain_forward(model, batch)
        compress_stage(model, names)
    record.results = [flatten(plain_forward(model, batch)) for batch in batches]
    return record
