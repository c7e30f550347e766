"""Copies of live values for a calibration pass, so that the propagation pass finds them as they were."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import TracingError
from compressor.tracing.isolation import copy_arguments

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def copy_live(values: dict[str, Any], mutated: Collection[str], model: nn.Module) -> dict[str, Any]:
    """Copy what a calibration pass writes to.

    Args:
        values: live values by name; not modified.
        mutated: names of the tensors that are written to.
        model: its modules are not copied.

    Returns:
        The values; tensors that share memory share it in the copy, too. Objects other than tensors are always copied.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Tensor) and name in mutated and value.layout is torch.strided:
            copies[name] = _copy_in_storage(value, storages)
        elif not isinstance(value, (Tensor, *_PLAIN)) or name in mutated:
            others[name] = value
    return {**values, **copies, **copy_arguments(others, model)}


def _copy_in_storage(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    storage = tensor.untyped_storage()
    copied = storages.setdefault(storage._cdata, storage.clone())
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(copied, tensor.storage_offset(), tensor.size(), tensor.stride())


def versions_of(values: dict[str, Any]) -> dict[str, int]:
    """Note how often each live tensor has been written to.

    Args:
        values: live values by name.

    Returns:
        Name to version.
    """
    return {name: value._version for name, value in values.items() if isinstance(value, Tensor) and not value.is_inference()}


def check_untouched(values: dict[str, Any], before: dict[str, int], copied: Collection[str], target: str, sample: int) -> None:
    """Make sure that a calibration pass wrote to its copies only.

    Args:
        values: live values by name.
        before: their versions before the pass.
        copied: names of those that were copied.
        target: dotted name, for the error.
        sample: number of the batch, for the error.

    Raises:
        TracingError: it wrote to another one.
    """
    touched = [name for name, version in versions_of(values).items() if name not in copied and version != before[name]]
    if touched:
        raise TracingError(
            f'{target}: batch {sample} writes in place to {touched[0]}, which the recorded forward did not; use engine="suspend" for data '
            "that decides what is written"
        )
