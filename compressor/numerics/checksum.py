"""A checksum of a tensor's bytes at nearly the speed of memory, on the device where it lies.

It tells accidents: a weight that somebody halved, swapped, zeroed or negated. It is no defence against somebody who wants a collision.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from compressor.pages import let_go

_CHUNK = 1 << 17  # words of eight bytes: a megabyte, which stays in the cache of a core
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def checksum(tensor: Tensor) -> int:
    """Sum up the bytes of a tensor's elements, each word multiplied by an odd number of its own and mixed.

    Args:
        tensor: any dense tensor with values.

    Returns:
        64 bits; equal for equal bytes, on every device.
    """
    with torch._C.DisableTorchFunction(), torch.no_grad():
        data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        if data.storage_offset() % 8:
            data = data.clone()
        num_words = data.numel() // 8
        words, rest = data[: num_words * 8].view(torch.int64), bytes(data[num_words * 8 :].tolist())
        factors = _factors(data.device)
        sums = [_mixed(chunk * factors[: chunk.numel()]).sum() for chunk in words.split(_CHUNK)] if num_words else []
        total = data.numel() ^ int.from_bytes(rest, "little")
        for one in torch.stack(sums).tolist() if sums else ():
            total = ((total ^ (total >> 31)) * _MIX + one) & _MASK
        let_go([data])  # who compares all weights of a large model needs them one by one
    return total


def _mixed(words: Tensor) -> Tensor:
    """Bring the upper bits down: else two flipped signs would cancel out."""
    return words.bitwise_xor_(words >> 29)


@cache
def _factors(device: torch.device) -> Tensor:
    numbers = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device) * -7046029254386353131
    numbers.bitwise_xor_(numbers >> 32).mul_(-4417276706812531889)
    return _mixed(numbers) | 1
