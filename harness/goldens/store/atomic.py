"""Files that appear whole or not at all: written beside their place, flushed to the disk, renamed."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def stage(path: Path, data: bytes) -> Path:
    """Write the content of a file beside its place.

    Args:
        path: where it will stand; its folder is made.
        data: its content.

    Returns:
        The partial file; renaming it to `path` makes it visible.

    Raises:
        OSError: the disk is full, or the folder cannot be written; nothing is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{secrets.token_hex(6)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    return partial


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, or replace it.

    Args:
        path: of the file.
        data: its content.

    Raises:
        OSError: the disk is full, or the folder cannot be written; the file is as before.
    """
    partial = stage(path, data)
    try:
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
