"""Blocks of bytes in three places: where they were made, in pinned host memory, on disk; each place has a budget.

A block stays where it was put until it is released. Samples are visited in turns, always in the same order, so whatever fits is best left
alone: moving the oldest away, as caches do, would move every block in every round. On a GPU copies run on a stream of their own.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from compressor.errors import CalibrationError, OutputError

# Scratch space on disk for bytes that do not fit into memory: one file without a name, with a checksum for every block.
#
# The file is deleted the moment it is opened, so nothing is left behind however the process ends; its space returns to the disk with it.

_REMEDY = "free space, name another offload_dir, raise activation_memory, or take fewer or shorter samples"


@dataclass(frozen=True)
class Extent:
    """Where a block lies in the file, and the CRC-32 of its bytes."""

    offset: int
    num_bytes: int
    checksum: int


class ScratchFile:
    """Blocks of bytes in one nameless file; freed places are used again. Reading is safe from several threads."""

    def __init__(self, folder: str | Path) -> None:
        """Open the file.

        Args:
            folder: an existing folder, best on a fast local disk.

        Raises:
            OutputError: the folder is missing or not writable.
        """
        self._folder = Path(folder)
        try:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise OutputError(f"offload_dir: no file can be made in {folder} ({error.strerror}); name a folder that is writable") from error
        self._end = 0
        self._free: list[tuple[int, int]] = []  # offset and length, by offset, never adjacent

    def write(self, data: Tensor, label: str) -> Extent:
        """Write a block.

        Args:
            data: uint8 [num_bytes] on the CPU, contiguous.
            label: whose bytes these are, for errors only.

        Returns:
            Where it lies.

        Raises:
            CalibrationError: the disk is full, or fails.
        """
        view = data.numpy().data
        offset = self._take_place(len(view))
        at = 0
        try:
            # The system may take less than it is given.
            while at < len(view):
                at += os.pwrite(self._file.fileno(), view[at:], offset + at)
        except OSError as error:
            self._give_place(offset, len(view))
            raise CalibrationError(
                f"offload_dir {self._folder}: {label} needs {len(view):,} bytes, the disk took {at:,} of them ({error.strerror}); {_REMEDY}"
            ) from error
        return Extent(offset, len(view), zlib.crc32(view))

    def read(self, extent: Extent, into: Tensor, label: str) -> None:
        """Read a block back. Changes `into`.

        Args:
            extent: where it lies.
            into: uint8 [num_bytes] on the CPU, contiguous.
            label: whose bytes these are, for errors only.

        Raises:
            CalibrationError: the file cannot be read, or holds other bytes than were written.
        """
        view = into.numpy().data
        at = 0
        try:
            while at < len(view) and (count := os.preadv(self._file.fileno(), [view[at:]], extent.offset + at)):
                at += count
        except OSError as error:
            raise CalibrationError(f"offload_dir {self._folder}: {label} cannot be read back ({error.strerror}); check the disk") from error
        if at < len(view) or zlib.crc32(view) != extent.checksum:
            raise CalibrationError(
                f"offload_dir {self._folder}: {label} does not read back as it was written ({at:,} of {len(view):,} bytes); check the disk"
            )

    def free(self, extent: Extent) -> None:
        """Let the place of a block be used again.

        Args:
            extent: a block that nobody reads any more.
        """
        self._give_place(extent.offset, extent.num_bytes)

    def close(self) -> None:
        """Give the space back; may be called again."""
        self._file.close()

    def _take_place(self, num_bytes: int) -> int:
        """First fit."""
        for at, (offset, length) in enumerate(self._free):
            if length >= num_bytes:
                self._free[at : at + 1] = [(offset + num_bytes, length - num_bytes)] if length > num_bytes else []
                return offset
        self._end += num_bytes
        return self._end - num_bytes

    def _give_place(self, offset: int, length: int) -> None:
        """Free a place and join it with its neighbours."""
        merged: list[tuple[int, int]] = []
        for start, size in sorted([*self._free, (offset, length)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        if merged and sum(merged[-1]) == self._end:
            self._end = merged.pop()[0]
        self._free = merged


Place = Literal["device", "host", "disk"]
SMALL_BYTES = 4096  # what is smaller stays where it is, whatever the budgets say: a file access costs more than it frees
_OWN_PAGES_BYTES = 1 << 17  # from here on blocks in main memory leave the heap, which could not shrink beneath them


class Block:
    """The bytes of one storage.

    Attributes:
        home: the device that the bytes belong to and come back to.
        num_bytes: how many they are.
        place: where they are now.
        refs: how many samples hold them; the owner of the block counts.
    """

    __slots__ = ("copied", "data", "extent", "home", "label", "num_bytes", "place", "refs")

    def __init__(self, home: torch.device, num_bytes: int, place: Place, label: str) -> None:
        """Made by `BlockPool.keep`."""
        self.home, self.num_bytes, self.place, self.label = home, num_bytes, place, label
        self.data: Tensor | None = None
        self.extent: Extent | None = None
        self.copied: torch.cuda.Event | None = None  # when the copy to pinned memory is complete
        self.refs = 1


class Coming(NamedTuple):
    """Bytes on their way home: usable on a stream that waits for `copied`."""

    data: Tensor
    copied: torch.cuda.Event | None


class BlockPool:
    """Chooses a place for each block, and brings blocks back.

    Attributes:
        used: bytes in each place.
        peak: the most bytes that each place has held.
    """

    def __init__(self, device: torch.device, device_bytes: int, host_bytes: int, disk_dir: str | Path | None) -> None:
        """Open the places.

        Args:
            device: that computes. On a CPU its memory and host memory are one, and both budgets count together.
            device_bytes: budget on the device.
            host_bytes: budget of host memory.
            disk_dir: folder for what fits in neither; None where there is none.

        Raises:
            OutputError: the folder cannot be written.
        """
        self.used: Counter[Place] = Counter()
        self.peak: Counter[Place] = Counter()
        is_cuda = device.type == "cuda"
        self._budget = {"device": device_bytes, "host": host_bytes} if is_cuda else {"device": device_bytes + host_bytes, "host": 0}
        self._is_cuda = is_cuda
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._scratch = None if disk_dir is None else ScratchFile(disk_dir)
        self._pages: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()  # by address

    def keep(self, data: Tensor, label: str) -> Block:
        """Find a place for bytes.

        Args:
            data: uint8 [num_bytes], contiguous; kept as it is where a GPU has room, so nobody may write to it any more. In main memory
                a large one is copied out of the heap.
            label: whose bytes these are, for errors only.

        Returns:
            The block.

        Raises:
            CalibrationError: no place has room.
        """
        block = Block(data.device, data.numel(), self._choose(data, label), label)
        if block.place == "disk":
            assert self._scratch is not None
            block.extent = self._scratch.write(data if data.device.type == "cpu" else data.cpu(), label)
        elif block.place == self._own_place(data.device):
            block.data = self._on_own_pages(data) if data.device.type == "cpu" and data.numel() >= _OWN_PAGES_BYTES else data
        else:
            block.data, block.copied = self._to_host(data)
        self.used[block.place] += block.num_bytes
        self.peak[block.place] = max(self.peak[block.place], self.used[block.place])
        return block

    def fits(self, storages: Iterable[Tensor]) -> bool:
        """Say whether all of these bytes can be kept where they lie.

        Args:
            storages: uint8 [num_bytes] each.

        Returns:
            False where some would have to move.
        """
        needed: Counter[Place] = Counter()
        for data in storages:
            needed[self._own_place(data.device)] += data.numel()
        return all(self.used[place] + num_bytes <= self._budget[place] for place, num_bytes in needed.items())

    def fetch(self, block: Block) -> Coming:
        """Bring a block home; may run in another thread than the rest.

        Args:
            block: not released; it keeps its place.

        Returns:
            Its bytes; for a block that is at home those of the block itself, else a copy.
        """
        if block.place == self._own_place(block.home):
            assert block.data is not None
            return Coming(block.data, None)
        data, pinned = block.data, self._is_cuda and block.home.type == "cuda"
        if block.extent is not None:
            assert self._scratch is not None
            data = torch.empty(block.num_bytes, dtype=torch.uint8, pin_memory=pinned)
            self._scratch.read(block.extent, data, block.label)
        assert data is not None
        return self._to_home(data, block) if pinned else Coming(data, None)

    def arrive(self, coming: Coming) -> Tensor:
        """Make the bytes usable on the current stream.

        Args:
            coming: of `fetch`.

        Returns:
            uint8 [num_bytes].
        """
        if coming.copied is not None:
            stream = torch.cuda.current_stream(coming.data.device)
            stream.wait_event(coming.copied)
            coming.data.record_stream(stream)
        return coming.data

    def release(self, block: Block) -> None:
        """Free the place of a block.

        Args:
            block: that nobody needs any more.
        """
        self.used[block.place] -= block.num_bytes
        block.data = None
        if block.extent is not None and self._scratch is not None:
            self._scratch.free(block.extent)

    def close(self) -> None:
        """Give the disk space back; may be called again."""
        if self._scratch is not None:
            self._scratch.close()

    def _own_place(self, home: torch.device) -> Place:
        """Where bytes lie that have not been moved; on a GPU run, what was made on the CPU lies in host memory."""
        return "device" if home.type != "cpu" or not self._is_cuda else "host"

    def _choose(self, data: Tensor, label: str) -> Place:
        own, num_bytes = self._own_place(data.device), data.numel()
        if num_bytes <= SMALL_BYTES:
            return own
        places: tuple[Place, ...] = (own, "host")
        for place in places:
            if self.used[place] + num_bytes <= self._budget[place]:
                return place
        if self._scratch is not None:
            return "disk"
        words = {"device": "GPU memory" if self._is_cuda else "main memory", "host": "main memory"}
        budgets = " and ".join(f"{self._budget[place]:,} bytes of {words[place]}" for place in dict.fromkeys(places) if self._budget[place])
        raise CalibrationError(
            f"activation_memory: {label} needs {num_bytes:,} bytes more than its budget ({budgets or 'none'}) holds; raise "
            "activation_memory, name an offload_dir for the rest, or take fewer or shorter samples"
        )

    def _on_own_pages(self, data: Tensor) -> Tensor:
        """Copy bytes to pages that go back to the system with them, unless they lie on such pages already.

        Forwards then make and free their tensors in a heap where nothing stays, without new pages for each.
        """
        if data.data_ptr() in self._pages:
            return data
        pages = mmap.mmap(-1, data.numel(), access=mmap.ACCESS_COPY)
        copied = torch.frombuffer(pages, dtype=torch.uint8).copy_(data)
        self._pages[copied.data_ptr()] = pages
        return copied

    def _to_host(self, data: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        assert self._stream is not None
        host = torch.empty(data.numel(), dtype=torch.uint8, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(data.device))
        with torch.cuda.stream(self._stream):
            host.copy_(data, non_blocking=True)
        data.record_stream(self._stream)  # the allocator must not give its memory away before the copy is done
        return host, self._stream.record_event()

    def _to_home(self, data: Tensor, block: Block) -> Coming:
        assert self._stream is not None
        with torch.cuda.stream(self._stream):  # in order behind the copy that filled `data`
            home = torch.empty(block.num_bytes, dtype=torch.uint8, device=block.home)
            home.copy_(data, non_blocking=True)
        return Coming(home, self._stream.record_event())
