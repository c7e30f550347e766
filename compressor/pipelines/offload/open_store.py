"""From the memory that a user grants to activations to the store that keeps within it."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import torch
from torch import nn

from compressor.errors import OutputError, UserInputError
from compressor.pipelines.offload.activation_store import ActivationStore

# Shares of what is free when calibration starts: the rest is for statistics, solvers and the forwards themselves.
HOST_SHARE, DEVICE_SHARE = 0.75, 0.4
_MAX_BYTES = 2**63
_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(size: int | str, name: str) -> int:
    """Read a size in bytes.

    Args:
        size: a number of bytes, or text such as `4GB`, `512 MiB`, `1.5e9`.
        name: of the setting, for errors only.

    Returns:
        Bytes.

    Raises:
        UserInputError: it is no size.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:E[0-9]+)?)\s*([KMGT]I?)?B?\s*", str(size).upper())
    if match is None:
        raise UserInputError(f"{name}: {size!r} is no size in bytes; write a number, or one with a unit, such as 4GB or 512MiB")
    found = float(match[1]) * _UNITS[match[2] or ""]
    if found >= _MAX_BYTES:
        raise UserInputError(f"{name}: {size!r} is more than any machine has; write a size such as 4GB or 512MiB")
    return int(found)


def check_offload_dir(folder: str | Path) -> None:
    """Refuse a folder before anything runs that could not be written later.

    Args:
        folder: for activations.

    Raises:
        OutputError: it is missing or not writable.
    """
    if not Path(folder).is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"offload_dir: {folder} is no folder that can be written; make it, or name another")


def free_bytes(device: torch.device) -> int:
    """Return the memory that could be used now.

    Args:
        device: a GPU, or the CPU for main memory.

    Returns:
        Bytes: on a GPU what the driver and torch's allocator have left; in main memory what is available to this process, within the limits
        of its control group and of its address space.
    """
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + reserved
    return min(_available_bytes(), _control_group_bytes(), _address_space_bytes())


def open_store(
    model: nn.Module,
    device: torch.device,
    *,
    activation_memory: int | str | None = None,
    activation_device_memory: int | str | None = None,
    offload_dir: str | Path | None = None,
) -> ActivationStore:
    """Make the store for one run.

    Args:
        model: its configurations are kept by reference wherever activations hold one.
        device: that computes.
        activation_memory: bytes of main memory; None takes three quarters of what is free.
        activation_device_memory: bytes of GPU memory; None takes two fifths of what is free. There is none to grant on a CPU.
        offload_dir: folder for what fits in neither; None makes that an error.

    Returns:
        An empty store; close it.

    Raises:
        UserInputError: a size that is none, GPU memory without a GPU, or a folder that cannot be written.
    """
    cpu = torch.device("cpu")
    host = int(HOST_SHARE * free_bytes(cpu)) if activation_memory is None else parse_bytes(activation_memory, "activation_memory")
    if device.type != "cuda" and activation_device_memory is not None:
        raise UserInputError(
            f"activation_device_memory: {activation_device_memory!r} was given, but the run is on {device}; use activation_memory"
        )
    on_device = 0
    if device.type == "cuda":
        granted = activation_device_memory
        on_device = int(DEVICE_SHARE * free_bytes(device)) if granted is None else parse_bytes(granted, "activation_device_memory")
    configs = {id(module.__dict__["config"]) for module in model.modules() if "config" in module.__dict__}
    return ActivationStore(device, on_device, host, offload_dir, by_reference=lambda value: id(value) in configs)


def _available_bytes() -> int:
    """Memory that the system would give without swapping; where it does not say, all there is."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
        return 1024 * int(lines["MemAvailable"].split()[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _control_group_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """What a container may still take (cgroup version 2); a very large number where there is no limit."""
    limit, used = root / "memory.max", root / "memory.current"
    if not limit.exists() or not used.exists():
        return 1 << 62
    text = limit.read_text(encoding="ascii").strip()
    return 1 << 62 if text == "max" else max(0, int(text) - int(used.read_text(encoding="ascii")))


def _address_space_bytes(status: Path = Path("/proc/self/statm")) -> int:
    """What `ulimit -v` leaves; a very large number where there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or not status.exists():
        return 1 << 62
    return max(0, limit - int(status.read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE"))
