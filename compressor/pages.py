"""Memory that is a look at a file: pages that nobody has written to can be read again, so they need not stay.

Weights of a folder are mapped from their safetensors files. What has been read of them counts as memory of the process until the system
takes it back; who has read through a tensor, and will not soon again, gives it back at once. The system still holds the file in its cache,
while it has room: to read there again costs about a tenth of reading memory.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import resource
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_PAGEMAP = Path("/proc/self/pagemap")  # a word of 64 bits for each page; Linux
_ENTRY_BYTES = 8
_PRESENT, _SWAPPED, _OF_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))
SMALL_BYTES = 1 << 20  # of a tensor that is not worth a look
_PIECE_BYTES = 1 << 24
HASHERS = 4  # threads; a core hashes more slowly than a disk reads, and each may hold a piece
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def address_space_left(sizes: Path = Path("/proc/self/statm")) -> int:
    """Say how much more this process may map, whether it is ever read or not.

    Args:
        sizes: what the process has, in pages: all of it first, its data sixth.

    Returns:
        Bytes that `ulimit -v` and `ulimit -d` leave, a very large number without limits; weights that are mapped count in both.
    """
    limits = {place: resource.getrlimit(kind)[0] for place, kind in ((0, resource.RLIMIT_AS), (5, resource.RLIMIT_DATA))}
    limited = {place: limit for place, limit in limits.items() if limit != resource.RLIM_INFINITY}
    if not limited or not sizes.exists():
        return 1 << 62
    pages = sizes.read_text(encoding="ascii").split()
    return max(0, min(limit - int(pages[place]) * mmap.PAGESIZE for place, limit in limited.items()))


def let_go(tensors: Iterable[Tensor]) -> None:
    """Give back the pages of tensors that are as their file has them; their values stay, and are read anew where they are asked for.

    Pages that were written to, memory of other kinds, and everything where the system does not tell pages apart, stay.

    Args:
        tensors: any.
    """
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.nbytes >= SMALL_BYTES and tensor.is_contiguous():
            for first, count in _unwritten(tensor.data_ptr(), tensor.nbytes):
                _give_back(first * mmap.PAGESIZE, count * mmap.PAGESIZE)


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's elements, so that NaN equals NaN and -0 differs from 0.

    Args:
        tensor: any dense tensor.

    Returns:
        uint8, one dimension, on the same device; the tensor's own memory where it is contiguous.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    # One value alone is contiguous whatever its stride, and of another stride than 1 torch shows no bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def equal_bytes(a_B: Tensor, b_B: Tensor) -> bool:
    """Compare bytes, in words as wide as both allow: torch compares one element after the other, of whatever width.

    Args:
        a_B: uint8, one dimension, as `raw_bytes` gives it.
        b_B: likewise, on the same device.

    Returns:
        True for the same number of the same bytes.
    """
    word = _WORDS[math.gcd(8, a_B.numel(), b_B.numel(), a_B.storage_offset(), b_B.storage_offset())]
    return torch.equal(a_B.view(word), b_B.view(word))


def in_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Read through a tensor that may be larger than what is to be resident of it: what was read is given back before the next piece.

    Args:
        tensor: dense.

    Yields:
        Its bytes in order, [up to 16 MB] uint8, in main memory; those of a GPU are there until the next ones come.
    """
    data = raw_bytes(tensor)
    if data.device.type != "cpu":
        # Into pinned memory a GPU copies several times as fast.
        host = torch.empty(min(_PIECE_BYTES, len(data)), dtype=torch.uint8, pin_memory=data.is_cuda)
        yield from (host[: len(piece)].copy_(piece) for piece in data.split(_PIECE_BYTES))
        return
    for piece in data.split(_PIECE_BYTES):
        yield piece
        let_go([piece])


def _unwritten(address: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Runs of whole pages in a stretch of memory that hold nothing but what a file holds: number of the first, and how many."""
    first, last = -(-address // mmap.PAGESIZE), (address + num_bytes) // mmap.PAGESIZE
    if last <= first or not _PAGEMAP.exists():
        return
    with _PAGEMAP.open("rb", buffering=0) as stream:
        read = os.pread(stream.fileno(), (last - first) * _ENTRY_BYTES, first * _ENTRY_BYTES)
    entries = np.frombuffer(read, dtype=np.uint64)
    if not (entries & _OF_FILE).any():
        return
    free = ((entries & _SWAPPED) == 0) & (((entries & _PRESENT) == 0) | ((entries & _OF_FILE) != 0))
    edges = np.flatnonzero(np.diff(np.concatenate([[False], free, [False]]).astype(np.int8)))
    for start, end in edges.reshape(-1, 2).tolist():
        yield first + start, end - start


def _give_back(address: int, num_bytes: int) -> None:
    """Pages that the user has locked stay: then the system says no, which costs memory and nothing else."""
    _system().madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(mmap.MADV_DONTNEED))


@cache
def _system() -> ctypes.CDLL:
    return ctypes.CDLL(None)
