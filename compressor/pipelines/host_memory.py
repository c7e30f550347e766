"""Keeps the memory of a calibration near what is live: large blocks that are freed go back to the system at once.

The allocator of glibc raises the size from which on it maps blocks of their own each time such a block is freed, up to 32 MB. Activations
then come from the heap, which cannot shrink beneath a block that lives on. Naming the size stops that; it was a third of a run's memory.
"""

from __future__ import annotations

import ctypes
import os

_M_MMAP_THRESHOLD = -3  # of malloc.h
_BLOCK_BYTES = 1 << 20
_CHOSEN_BY_USER = ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def return_large_blocks() -> bool:
    """Have blocks of 1 MB and more mapped by themselves, for the rest of the process.

    Returns:
        Whether that was done: not where the user has set up the allocator, nor with an allocator that has no such setting.
    """
    if any(os.environ.get(name) for name in _CHOSEN_BY_USER):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, _BLOCK_BYTES))
