"""Where in the arena of its device each storage of a step lies: storages that are never needed at the same time share bytes.

A storage lives from the first operator that touches it to the last one, through any view. What only makes a view or reserves memory is not
repeated, and touches nothing. Storages are placed from large to small, each into the smallest gap between those it shares time with; this
is the greedy-by-size rule with best fit of Pisarchyk and Lee 2020, arXiv:2001.03288.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from compressor.training.capture.operators import IDLE, Extent, Record, operands

# Memory that the tapes of one engine take turns in: of several plans one replays at a time, and nothing in it outlasts a step.


class Arena:
    """One storage per device, as large as the largest tape so far needs it.

    A tape that was made before a larger one keeps the storage that it was given.
    """

    def __init__(self) -> None:
        self._storages: dict[torch.device, torch.UntypedStorage] = {}

    def at_least(self, device: torch.device, num_bytes: int) -> torch.UntypedStorage:
        """Give the storage of a device.

        Args:
            device: where it lies.
            num_bytes: what is needed.

        Returns:
            A storage of that many bytes or more; its content is undefined, and other tapes write to it too.
        """
        found = self._storages.get(device)
        if found is None or found.nbytes() < num_bytes:
            found = torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()
            self._storages[device] = found
        return found


# Bytes; as torch's own allocators, so that kernels take the same way.
_ALIGNMENT = {"cpu": 64}
_DEFAULT_ALIGNMENT = 512
_SINGLE = 16  # bytes of the largest element


@dataclass(frozen=True)
class Layout:
    """Places in arenas.

    Attributes:
        offsets: the first byte of each storage in the arena of its device.
        sizes: its number of bytes.
        devices: its device.
        first: index of the operator that touches it first.
        last: index of the operator that touches it last; the number of operators where it must outlast the step.
        arena_bytes: size of each device's arena.
    """

    offsets: list[int]
    sizes: list[int]
    devices: list[torch.device]
    first: list[int]
    last: list[int]
    arena_bytes: dict[torch.device, int]


def lay_out(records: Sequence[Record], sizes: Sequence[int], devices: Sequence[torch.device], kept: Iterable[int] = ()) -> Layout:
    """Place the storages of a step.

    Args:
        records: its operators.
        sizes: bytes of each storage, by number.
        devices: device of each.
        kept: numbers of the storages that are read after the step.

    Returns:
        Their places.
    """
    first, last = lifetimes(records, len(sizes))
    for number in kept:
        last[number] = len(records)
    offsets, arena_bytes = [0] * len(sizes), {}
    for device in dict.fromkeys(devices):
        chosen = [number for number, its_device in enumerate(devices) if its_device == device]
        alignment = _ALIGNMENT.get(device.type, _DEFAULT_ALIGNMENT)
        lives = ([life[number] for number in chosen] for life in (first, last))
        found, arena_bytes[device] = place([sizes[number] for number in chosen], *lives, alignment=alignment)
        for number, offset in zip(chosen, found, strict=True):
            offsets[number] = offset
    return Layout(offsets, list(sizes), list(devices), first, last, arena_bytes)


def lifetimes(records: Sequence[Record], num_storages: int) -> tuple[list[int], list[int]]:
    """Find the first and the last operator that touches each storage.

    Args:
        records: the operators.
        num_storages: how many storages there are.

    Returns:
        Two lists of indices. A storage that no operator touches has the index of the one that named it.
    """
    first, last = [-1] * num_storages, [-1] * num_storages
    named = [-1] * num_storages
    for record in records:
        for number in {leaf.storage for leaf in _operands(record) if isinstance(leaf, Extent)}:
            if record.kind in IDLE:
                named[number] = record.index if named[number] < 0 else named[number]
                continue
            if first[number] < 0:
                first[number] = record.index
            last[number] = record.index
    for number in range(num_storages):
        if first[number] < 0:
            first[number] = last[number] = named[number]
    return first, last


def place(sizes: Sequence[int], first: Sequence[int], last: Sequence[int], *, alignment: int) -> tuple[list[int], int]:
    """Give each storage an offset, so that those that live at the same time are disjoint.

    Args:
        sizes: bytes of each.
        first: begin of each life.
        last: end of each life, inclusive.
        alignment: the offsets are multiples of it, those of single numbers of `_SINGLE`.

    Returns:
        The offsets, and the size of the arena.
    """
    starts, ends, widths = (np.asarray(values, dtype=np.int64) for values in (first, last, sizes))
    offsets = np.zeros(len(sizes), dtype=np.int64)
    done = np.zeros(len(sizes), dtype=bool)
    for number in sorted(range(len(sizes)), key=lambda k: (-sizes[k], first[k])):
        if sizes[number]:
            rivals = np.flatnonzero(done & (starts <= ends[number]) & (ends >= starts[number]))
            unit = _SINGLE if sizes[number] <= _SINGLE else alignment
            offsets[number] = _best_gap(offsets[rivals], widths[rivals], sizes[number], unit)
            done[number] = True
    return offsets.tolist(), int((offsets + widths).max(initial=0))


def _best_gap(offsets: Any, widths: Any, size: int, unit: int) -> int:
    """Find the smallest gap that fits between taken ranges, or the end of the last."""
    order = np.argsort(offsets, kind="stable")
    ends = np.concatenate(([0], np.maximum.accumulate((offsets + widths)[order])))
    begins = -(-ends // unit) * unit
    rooms = offsets[order] - begins[:-1]
    fitting = np.flatnonzero(rooms >= size)
    return int(begins[fitting[np.argmin(rooms[fitting])]] if len(fitting) else begins[-1])


def _operands(record: Record) -> list[Any]:
    return [*operands((record.args, record.kwargs)), *record.outs]
