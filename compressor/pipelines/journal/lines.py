"""An append-only file of JSON lines. Each line carries a checksum over itself and all lines before it.

A kill in the middle of an append leaves a last line without its end: that is found and dropped. Anything else that does not fit its
checksum was changed after it was written, and is an error that names the line.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor.atomic import whole_file
from compressor.errors import ResumeError


class Lines:
    """The file, open for appending.

    Attributes:
        path: of the file.
        entries: what its lines hold, in order.
        was_torn: whether a last line without its end was found, and dropped.
    """

    def __init__(self, path: Path, entries: list[dict[str, Any]], checksum: str, num_bytes: int, was_torn: bool = False) -> None:
        """Made by `create` and `read`."""
        self.path = path
        self.entries = entries
        self.was_torn = was_torn
        self._checksum, self._num_bytes = checksum, num_bytes

    @staticmethod
    def create(path: Path, first: Mapping[str, Any]) -> Lines:
        """Write a new file of one line: all of it, or nothing.

        Args:
            path: of the file; an existing one is replaced.
            first: the first entry; JSON types.

        Returns:
            The file.

        Raises:
            CheckpointError: it cannot be written.
        """
        checksum, line = _line("", first)
        with whole_file(path) as partial:
            partial.write_bytes(line)
        return Lines(path, [dict(first)], checksum, len(line))

    @staticmethod
    def read(path: Path) -> Lines:
        """Read a file; nothing on the disk is changed.

        Args:
            path: of the file.

        Returns:
            The file; a last line without its end is left out.

        Raises:
            ResumeError: a line does not fit its checksum, or the file cannot be read.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ResumeError(f"{path}: cannot be read ({error.strerror}); {_remedy(path, 0)}") from error
        *whole, tail = data.split(b"\n")
        checksum, entries = "", []
        for number, text in enumerate(whole):
            expected, _ = text[:64].decode("ascii", "replace"), text[64:65]
            checksum = _checksum(checksum, text[65:])
            if checksum != expected or text[64:65] != b" ":
                raise ResumeError(f"{path}: line {number + 1} is not what was written (its checksum does not fit); {_remedy(path, number)}")
            entries.append(json.loads(text[65:]))
        if not entries:
            raise ResumeError(f"{path}: its first line is cut off; {_remedy(path, 0)}")
        return Lines(path, entries, checksum, len(data) - len(tail), was_torn=bool(tail))

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a line and flush it to the disk; after an error the file is as it was.

        Args:
            entry: JSON types.

        Raises:
            OSError: the disk is full or fails.
        """
        checksum, line = _line(self._checksum, entry)
        descriptor = os.open(self.path, os.O_WRONLY)
        try:
            os.ftruncate(descriptor, self._num_bytes)  # a line without its end, of this run or an earlier one
            os.lseek(descriptor, 0, os.SEEK_END)
            try:
                _write_all(descriptor, line)
                os.fsync(descriptor)
            except BaseException:
                os.ftruncate(descriptor, self._num_bytes)
                raise
        finally:
            os.close(descriptor)
        self.entries.append(dict(entry))
        self._checksum, self._num_bytes, self.was_torn = checksum, self._num_bytes + len(line), False


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _line(previous: str, entry: Mapping[str, Any]) -> tuple[str, bytes]:
    text = json.dumps(entry, allow_nan=False, separators=(",", ":")).encode()
    checksum = _checksum(previous, text)
    return checksum, checksum.encode() + b" " + text + b"\n"


def _checksum(previous: str, text: bytes) -> str:
    return hashlib.sha256(previous.encode() + b" " + text).hexdigest()


def _remedy(path: Path, num_good: int) -> str:
    remedy = f"restore the file, or remove {path.parent} to start over"
    if num_good < 2:
        return remedy
    return f"{remedy}; or keep its first {num_good} lines and the first {num_good - 1} stage files, and resume from there"
