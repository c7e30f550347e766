"""Copies of live values for a calibration pass, so that the propagation pass finds them as they were."""

from __future__ import annotations

import hashlib
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


def state_of(values: dict[str, Any], by_content: bool) -> dict[str, Any]:
    """Note what tells whether the live tensors have been written to.

    Args:
        values: live values by name.
        by_content: hash their contents, too: a write through `.data` leaves no other trace.

    Returns:
        Name to version and digest.
    """

    def state(tensor: Tensor) -> Any:
        return (None if tensor.is_inference() else tensor._version, digest(tensor) if by_content else None)

    return {name: state(value) for name, value in values.items() if isinstance(value, Tensor)}


def check_untouched(values: dict[str, Any], before: dict[str, Any], by_content: bool, copied: Collection[str], where: str) -> None:
    """Make sure that a calibration pass wrote to its copies only.

    Args:
        values: live values by name.
        before: their state before the pass.
        by_content: whether that holds digests.
        copied: names of those that were copied.
        where: stage and sample, for the error.

    Raises:
        TracingError: it wrote to another one.
    """
    after = state_of(values, by_content)
    touched = [name for name in after if name not in copied and after[name] != before[name]]
    if touched:
        raise TracingError(
            f"{where} writes in place to {touched[0]}, past what was recorded; what is written must not depend on the data nor go through "
            '`.data`, or use engine="suspend"'
        )


def digest(tensor: Tensor) -> str:
    """Hash the contents of a tensor.

    Args:
        tensor: on any device.

    Returns:
        A digest of its bytes.
    """
    with torch._C.DisableTorchFunction():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=12).hexdigest()
