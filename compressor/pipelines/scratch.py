"""Scratch space on disk for bytes that do not fit into memory: one file without a name, with a checksum for every block.

The file is deleted the moment it is opened, so nothing is left behind however the process ends; its space returns to the disk with it.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from compressor.errors import CalibrationError, OutputError

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
