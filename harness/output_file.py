"""A place to write to is looked at before the work begins: a file of another kind is never replaced."""

from __future__ import annotations

import tempfile
from pathlib import Path

from compressor.errors import OutputError


def check_output_file(path: Path, *suffixes: str) -> None:
    """Refuse a name that does not say what the file will hold: whatever lies under it then is of another kind.

    Args:
        path: to be written; a file with a right name is replaced.
        *suffixes: endings that the name may have, such as `.json`.

    Raises:
        OutputError: another ending, a folder of that name, or no folder to put it into, or one that takes no file.
    """
    if path.suffix not in suffixes:
        kinds = " or ".join(suffixes)
        raise OutputError(f"{path}: a file of the kind {kinds} goes there, and this names another; end the name in {kinds}")
    if path.is_dir():
        raise OutputError(f"{path}: it is a folder; name a file")
    if not path.parent.is_dir():
        raise OutputError(f"{path}: there is no folder {path.parent}; make it first")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:  # rights alone do not say it: of mounts that are read only, and for those who may do anything
        raise OutputError(f"{path}: {path.parent} takes no file ({error.strerror or error}); choose another folder") from error
