"""A file that appears whole or not at all, and the flushing that makes files and names durable."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from compressor.errors import CheckpointError

PARTIAL_SUFFIX = ".partial"
"""What the folder is called in which a file is made: its name and this."""


_OF_SYSTEMS = r"\.DS_Store|\._.*|\.nfs\w+|Thumbs\.db|desktop\.ini"  # put into any folder by systems that show or serve it


def own_names(exact: str, made_whole: str) -> re.Pattern[str]:
    """Make a pattern of the names that a folder of ours may hold, with what a kill leaves in it.

    Args:
        exact: pattern of files that are written in place.
        made_whole: pattern of files that come from `whole_file`.

    Returns:
        The pattern. It knows what systems put into any folder, and safetensors' temporary file, which earlier releases let it make
        beside the file.
    """
    return re.compile(rf"{exact}|({made_whole})({re.escape(PARTIAL_SUFFIX)})?|\.tmp\w{{6}}|{_OF_SYSTEMS}")


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Give a path to write to, in a folder of its own beside `target`; then flush it, rename it to `target` and flush the folder around.

    A library may make temporary files beside the one that it was told to write (safetensors does): a kill leaves them in that folder.

    Args:
        target: the file; an existing one is replaced.

    Yields:
        The temporary path, of the same name.

    Raises:
        CheckpointError: the disk is full or fails; an existing file is as it was.
    """
    place = target.with_name(target.name + PARTIAL_SUFFIX)
    try:
        remove(place)
        place.mkdir()
        yield place / target.name
        flush(place / target.name)
        (place / target.name).replace(target)
        flush(target.parent)
        remove(place)
    except BaseException as error:
        with suppress(OSError):  # the error that is on its way says more
            remove(place)
        if isinstance(error, OSError | SafetensorError) and not isinstance(error, CheckpointError):
            advice = "make its folder first" if isinstance(error, FileNotFoundError) else "make room or repair the disk"
            raise CheckpointError(f"{target}: cannot be written ({reason(error)}); {advice}") from error
        raise


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; one that is not there is no error.

    Args:
        path: of the file or folder.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
