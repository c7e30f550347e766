"""The process group of a command that torchrun has started."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from compressor.errors import RankError

ENDED = "SIGTERM"  # the kind of the error of a rank that was asked to end


def num_ranks() -> int:
    """Return how many processes torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def is_first_rank() -> bool:
    """Say whether this process is the one that speaks: of those that torchrun has started the first."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def launched() -> Iterator[None]:
    """Make the process group that torchrun's environment names, with the GPU of this rank as the current one.

    Yields:
        Nothing; where there is one process, nothing is made.
    """
    if num_ranks() == 1:
        yield
        return
    import torch
    from torch import distributed as dist

    uses_gpu = torch.cuda.is_available() and dist.is_nccl_available()
    if uses_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    signal.signal(signal.SIGTERM, _ended)
    dist.init_process_group("cpu:gloo,cuda:nccl" if uses_gpu else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _ended(number: int, frame: FrameType | None) -> None:
    """What torchrun does to all ranks when one has failed: time to say which one, and to let the run folder go."""
    error = RankError("ended by SIGTERM")
    error.kind = ENDED
    raise error
