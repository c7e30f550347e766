"""The most memory that a call holds at a time beyond what there was, as torch's allocator itself tells; temporaries of kernels included."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.profiler import ProfilerActivity, profile

from harness.errors import HarnessError


def live_peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Measure a call.

    Args:
        run: it is called once; what it returns is let go.
        device: where it works.

    Returns:
        Bytes beyond those in use at the start.

    Raises:
        HarnessError: the profiler of this build tells nothing of memory.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # Without acc_events torch warns of cycles that are forgotten: 2.11 always. There is one.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run()
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    changes = [] if results is None else [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    if not changes:
        raise HarnessError("live peak: the profiler of this torch tells no allocations; build it with Kineto")
    return peak_of(change for _, change in sorted(changes, key=lambda pair: pair[0]))


def peak_of(changes: Iterable[int]) -> int:
    """Return the highest running sum of changes, at least 0.

    Args:
        changes: bytes taken (positive) and given back (negative), in order.

    Returns:
        The peak above the start.
    """
    now = highest = 0
    for change in changes:
        now += change
        highest = max(highest, now)
    return highest
