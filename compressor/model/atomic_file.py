"""A file that appears whole or not at all, and the flushing that makes files and names durable."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from compressor.errors import CheckpointError

PARTIAL_SUFFIX = ".partial"


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Give a path beside `target` to write to; then flush it, rename it to `target` and flush the folder, or remove it.

    Args:
        target: the file; an existing one is replaced.

    Yields:
        The temporary path.

    Raises:
        CheckpointError: the disk is full or fails; an existing file is as it was.
    """
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    try:
        yield partial
        flush(partial)
        partial.replace(target)
        flush(target.parent)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError | SafetensorError) and not isinstance(error, CheckpointError):
            raise CheckpointError(f"{target}: cannot be written ({reason(error)}); make room or repair the disk") from error
        raise


def flush(path: Path) -> None:
    """Make a file, or the names in a folder, durable: after it a loss of power takes nothing away.

    Args:
        path: a file or folder.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno == errno.EINVAL):  # some file systems cannot flush a folder
            raise
    finally:
        os.close(descriptor)


def reason(error: BaseException) -> str:
    """Say in few words why a disk refused.

    Args:
        error: of the file system or of safetensors.

    Returns:
        The system's text where there is one.
    """
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
