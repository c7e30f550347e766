"""The bytes that tensors span in their storages: kept, compared and put back, whatever strides, dtypes and aliases there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def _length(tensor: Tensor) -> int:
    """Count the bytes from the first of a tensor to its last."""
    if tensor.numel() == 0:
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _bytes_of(tensor: Tensor) -> Tensor:
    begin = tensor.storage_offset() * tensor.element_size() if tensor.numel() else 0
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), begin, (_length(tensor),), (1,))


def first_byte(tensor: Tensor) -> Tensor:
    """Return the first byte of a tensor's first element, as a view; on a little-endian machine its lowest."""
    return _bytes_of(tensor)[:1]


def overlap(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors span a byte in common. Their addresses tell: storages of a tape are cut from one memory.

    Args:
        one: a dense tensor.
        other: another.

    Returns:
        True also where strides keep them apart within a common span.
    """
    if one.device != other.device:
        return False
    begin, other_begin = one.data_ptr(), other.data_ptr()
    return max(begin, other_begin) < min(begin + _length(one), other_begin + _length(other))


def overlaps_any(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    """Say whether a tensor overlaps one of many.

    Args:
        tensor: a dense tensor.
        others: those to look at.

    Returns:
        True where one does.
    """
    return any(overlap(tensor, other) for other in others)


@dataclass(frozen=True)
class Kept:
    """Copies of the bytes of some tensors.

    Attributes:
        tensors: the tensors.
        copies: their bytes, uint8.
    """

    tensors: Sequence[Tensor]
    copies: Sequence[Tensor]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Kept:
        """Copy the bytes.

        Args:
            tensors: dense tensors.

        Returns:
            The copies.
        """
        return cls(tensors, [_bytes_of(tensor).clone() for tensor in tensors])

    def put_back(self) -> None:
        """Write the bytes back. Changes the tensors."""
        for tensor, copy in zip(self.tensors, self.copies, strict=True):
            _bytes_of(tensor).copy_(copy)

    def changed(self) -> list[int]:
        """List the positions of the tensors whose bytes are others now."""
        pairs = zip(self.tensors, self.copies, strict=True)
        return [number for number, (tensor, copy) in enumerate(pairs) if not torch.equal(_bytes_of(tensor), copy)]
