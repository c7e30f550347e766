"""Tell memory that ran out from every other failure: it says nothing about the model, so no other way of tracing may hide it."""

from __future__ import annotations

import re

import torch

# What the allocators say: torch's for the CPU, and CUDA's where it reports the driver's own error.
_SAYINGS = re.compile(
    r"can't allocate memory|not enough memory|out of memory|cannot allocate memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception means that memory ran out.

    Args:
        error: any exception.

    Returns:
        True for those of Python, of torch's allocators and of CUDA.
    """
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and bool(_SAYINGS.search(str(error)))
    )
