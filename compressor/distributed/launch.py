"""The process group of a command that torchrun has started."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from compressor.distributed.watch import EndedBySigterm, end_by_sigterm, ignore_sigterm, watched
from compressor.errors import RankError, UserInputError


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

    Raises:
        UserInputError: this machine has fewer GPUs than ranks.
        RankError: so it is, and the first rank tells; or this one was ended by SIGTERM.
    """
    if num_ranks() == 1:
        yield
        return
    import torch
    from torch import distributed as dist

    uses_gpu = torch.cuda.is_available() and dist.is_nccl_available()
    if uses_gpu:
        _check_gpus(int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count())
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    signal.signal(signal.SIGTERM, end_by_sigterm)
    try:
        backend = "cpu:gloo,cuda:nccl" if uses_gpu else "gloo"
        store, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
        # A clone of the store, for connecting locks its own while it waits.
        with watched(dist.PrefixStore("compressor starts", store.clone()), rank, size) as watch:  # type: ignore[attr-defined]
            watch.during(lambda: dist.init_process_group(backend, store=store, rank=rank, world_size=size))
            # Who has all its connections may fail and end while others still make theirs, and they would tell of these.
            watch.during(lambda: dist.all_reduce(torch.zeros(1, dtype=torch.float32)))
        yield
    except EndedBySigterm as ended:  # before the others are known, or behind the run
        error = RankError(f"rank {os.environ['RANK']} of {num_ranks()}: was ended by SIGTERM")
        error.is_mine_to_tell = True
        raise error from ended
    finally:
        ignore_sigterm()
        if dist.is_initialized():
            dist.destroy_process_group()


def _check_gpus(num_here: int, num_gpus: int) -> None:
    """Refuse ranks that would share a GPU, which NCCL does not let them."""
    if num_here > num_gpus:
        kind = UserInputError if is_first_rank() else RankError  # which one rank tells
        raise kind(
            f"ranks: {num_here} processes were started on a machine with {num_gpus} GPU{'s' * (num_gpus > 1)}, and each needs one of its "
            "own; start one for each GPU, or hide the GPUs (CUDA_VISIBLE_DEVICES=) and work on the processor"
        )
