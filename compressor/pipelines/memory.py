"""Memory of a calibration: sizes as people write them, what is free, what goes back at once, and what to say when it runs out."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import nn

from compressor.errors import CompressorError, OutOfMemoryError
from compressor.pages import address_space_left
from compressor.tracing.targets.out_of_memory import is_out_of_memory


def free_bytes(device: torch.device) -> int:
    """Return the memory that could be used now.

    Args:
        device: a GPU, or the CPU for main memory.

    Returns:
        Bytes: on a GPU what the driver and torch's allocator have left; in main memory what is available to this process, within the limits
        of its control groups and of its address space.
    """
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + reserved
    return min(_available_bytes(), _control_group_bytes(), address_space_left())


def _available_bytes() -> int:
    """Memory that the system would give without swapping; where it does not say, all there is."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
        return 1024 * int(lines["MemAvailable"].split()[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class _GroupFiles(NamedTuple):
    """How a version of control groups names its limit, what is used, and, in memory.stat, pages of files."""

    limit: str
    used: str
    files: tuple[str, ...]


_VERSION_1 = _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_VERSION_2 = _GroupFiles("memory.max", "memory.current", ("inactive_file", "active_file"))


def _control_group_bytes(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """What the control groups of this process, and those above them, leave; a very large number where there is no limit.

    Pages of files count as used there, mapped weights among them, but go as soon as something else needs the room.
    """
    left = [1 << 62]
    for line in membership.read_text(encoding="utf-8").splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files, top = (_VERSION_1, root / "memory") if controllers else (_VERSION_2, root)
        groups = [top / path.lstrip("/"), *(top / path.lstrip("/")).parents]
        left += [_group_bytes(group, files) for group in groups if group.is_relative_to(top) and (group / files.limit).exists()]
    return min(left)


def _group_bytes(folder: Path, files: _GroupFiles) -> int:
    limit = (folder / files.limit).read_text(encoding="ascii").strip()
    if limit == "max":
        return 1 << 62
    counts = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    used = int((folder / files.used).read_text(encoding="ascii")) - sum(int(counts[name]) for name in files.files)
    return max(0, int(limit) - used)


# The allocator of glibc raises the size from which on it maps blocks of their own each time such a block is freed, up to 32 MB, and what
# it keeps at the end of the heap with it; or, where the first is named, gives back all beyond 128 KB. The one keeps a third of a run's
# memory, the other costs a third of its time in page faults, where activations are as large as a forward of 1024 tokens makes them.
# Named are both. What lives on from stage to stage is not in the heap (see `compressor.pipelines.offload.block_pool`), but a few bytes of a
# small object are enough to keep a freed activation from being used again or given back, so what is free there is bounded as well.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_MAPPED_BYTES, _FREED_BYTES = 8 << 20, 16 << 20
_SETTINGS = {_M_MMAP_THRESHOLD: _MAPPED_BYTES, _M_TRIM_THRESHOLD: _FREED_BYTES}
_CHOSEN_BY_USER = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def bound_heap() -> bool:
    """Have blocks of 8 MB and more mapped by themselves, and smaller ones used again, for the rest of the process.

    Returns:
        Whether that was done: not where the user has set up the allocator, nor with an allocator that has no such setting.
    """
    if any(os.environ.get(name) for name in _CHOSEN_BY_USER):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    return mallopt is not None and all(mallopt(which, size) for which, size in _SETTINGS.items())


def return_freed_pages() -> None:
    """Give the system what was freed within the heap: between blocks that live on, whole pages of it stay otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


_STATUS = Path("/proc/self/statm")  # in pages: the second number what is resident, the third what of it are files


class FreedMemory:
    """Gives back what was freed within the heap each time that it may have become more than 16 MB. Linux; elsewhere it does nothing."""

    def __init__(self) -> None:
        """Start from what the process has now."""
        self._least = self._own_bytes(0)

    def bound(self, kept_bytes: int) -> None:
        """Look at the memory of the process, which takes some 20 us.

        Args:
            kept_bytes: what of it is known to be in use.
        """
        now = self._own_bytes(kept_bytes)
        if now - self._least > _FREED_BYTES:
            return_freed_pages()
            now = self._least = self._own_bytes(kept_bytes)
        self._least = min(self._least, now)

    def _own_bytes(self, kept_bytes: int) -> int:
        if not _STATUS.exists():
            return 0
        _, resident, files, *_ = (int(pages) for pages in _STATUS.read_text(encoding="ascii").split())
        return (resident - files) * mmap.PAGESIZE - kept_bytes


# When memory runs out: in which stage, at what, what the stage holds, and what can be done about it.

Work = Literal["traced", "brought to the device", "calibrated", "compressed", "propagated"]

_SHOWN_MODULES = 3
_SMALLER_FORWARDS = "take smaller batches (batch_size=1) or shorter sequences (max_seq_length)"
_SMALLER_STAGES = 'take smaller stages (sequential_targets=["Linear"])'
_FEWER_ACTIVATIONS = "let activations go to disk (activation_memory and offload_dir)"
_REMEDIES: Mapping[Work, tuple[str, ...]] = MappingProxyType(
    {
        "traced": (_SMALLER_FORWARDS, 'leave the proof out (verify="off")'),
        "brought to the device": (_SMALLER_STAGES, _FEWER_ACTIVATIONS),
        "calibrated": (_SMALLER_FORWARDS, _SMALLER_STAGES, _FEWER_ACTIVATIONS),
        "compressed": (_SMALLER_STAGES, _FEWER_ACTIVATIONS, "leave the search for scales out (scale_search: false)"),
        "propagated": (_SMALLER_FORWARDS, _FEWER_ACTIVATIONS),
    }
)


@contextmanager
def memory_explained(model: nn.Module, stage: str, work: Work, names: Collection[str]) -> Iterator[None]:
    """Say more than an allocator can when memory runs out inside.

    Args:
        model: whose stage it is.
        stage: name of the stage, for the error.
        work: what is being done to it.
        names: dotted names of the modules in it.

    Yields:
        Nothing.

    Raises:
        OutOfMemoryError: memory ran out.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # An error of ours says what is wrong already; everything else that is no lack of memory is none of this.
        if isinstance(error, CompressorError) or not is_out_of_memory(error):
            raise
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        raise OutOfMemoryError(
            f"{stage}: memory ran out while it was {work} ({_said(error)}; {free_bytes(device) / 1e6:,.0f} MB are free on {device}); "
            f"{_contents(model, names)}; {', or '.join(_REMEDIES[work])}; compressor plan shows what each stage needs"
        ) from error


def _said(error: BaseException) -> str:
    """The allocator's own words about the size that it was asked for."""
    text = " ".join(str(error).split())
    asked = re.search(r"Tried to allocate [\d.]+ \w+|you tried to allocate \d+ bytes|allocate \d+ bytes", text, re.IGNORECASE)
    return asked[0] if asked else text[:120] or type(error).__name__


def _contents(model: nn.Module, names: Collection[str]) -> str:
    """The largest modules of a stage."""
    wanted = set(names)
    sizes = {
        name: sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
        for name, module in model.named_modules()
        if name in wanted
    }
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_SHOWN_MODULES]
    shown = ", ".join(f"{name} ({_shape(model.get_submodule(name))}{sizes[name] / 1e6:,.1f} MB)" for name in largest if sizes[name])
    return f"its modules hold {sum(sizes.values()) / 1e6:,.1f} MB, the largest are {shown}" if shown else "its modules hold no tensors"


def _shape(module: nn.Module) -> str:
    weight = getattr(module, "weight", None)
    return "x".join(str(side) for side in weight.shape) + " " if isinstance(weight, torch.Tensor) else ""
