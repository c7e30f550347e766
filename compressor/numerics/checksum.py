"""A checksum of a tensor's bytes at nearly the speed of memory, on the device where it lies.

It tells accidents: a weight that somebody halved, swapped, zeroed or negated. It is no defence against somebody who wants a collision.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from compressor.pages import let_go, raw_bytes

_CHUNK = 1 << 17  # words of eight bytes: a megabyte, which stays in the cache of a core
_AT_ONCE = {"cuda": 64}  # chunks: a launch takes as long as a GPU needs for several of them
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
        data = raw_bytes(tensor)
        if data.storage_offset() % 8:
            data = data.clone()
        num_words = data.numel() // 8
        words, rest = data[: num_words * 8].view(torch.int64), bytes(data[num_words * 8 :].tolist())
        total = data.numel() ^ int.from_bytes(rest, "little")
        for one in _sums(words):
            total = ((total ^ (total >> 31)) * _MIX + one) & _MASK
        let_go([data])  # who compares all weights of a large model needs them one by one
    return total


def _sums(words: Tensor) -> list[int]:
    """One for each chunk, all through two buffers: of freed ones the heap would keep as many as chunks, small results between them."""
    whole = len(words) // _CHUNK * _CHUNK
    blocks = [*words[:whole].view(-1, _CHUNK).split(_AT_ONCE.get(words.device.type, 1)), words[whole:].view(1, -1)]
    blocks = [block for block in blocks if block.numel()]
    if not blocks:
        return []
    factors, products, upper = _factors(words.device), torch.empty_like(blocks[0]), torch.empty_like(blocks[0])
    sums = words.new_empty(sum(map(len, blocks)))
    for block, own in zip(blocks, sums.split([len(block) for block in blocks]), strict=True):
        rows, columns = block.shape
        product = torch.mul(block, factors[:columns], out=products[:rows, :columns])
        torch.sum(_mixed(product, upper[:rows, :columns]), 1, out=own)
    return sums.tolist()


def _mixed(words: Tensor, upper: Tensor) -> Tensor:
    """Bring the upper bits down, by way of a buffer: else two flipped signs would cancel out."""
    return words.bitwise_xor_(torch.bitwise_right_shift(words, 29, out=upper))


@cache
def _factors(device: torch.device) -> Tensor:
    numbers = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device) * -7046029254386353131
    numbers.bitwise_xor_(numbers >> 32).mul_(-4417276706812531889)
    return _mixed(numbers, torch.empty_like(numbers)) | 1
