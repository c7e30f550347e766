"""A golden's name as a path that a person reads and that every file system holds.

    layers/W4A16_ASYM 5x128   ->   layers/w4a16-asym.5x128.safetensors
    layers/W4A16[sym=True]    ->   layers/w4a16-sym-true~fd024f5a.safetensors

Letters become lower case, because some file systems do not tell case apart; a space becomes a dot, an underscore a hyphen. A part that
no file system would hold like that ends in `~` and a hash of the whole part: one with other characters, with a dot or a hyphen at its
front or a dot at its end, with the name of a device of Windows or of a file of the store, or one that is too long.

So different names can have one file, as `W4A16` and `w4a16` do. Whoever writes a file refuses the second name.
"""

from __future__ import annotations

import hashlib
import re
import shlex

from harness.errors import GoldenError

SUFFIX = ".safetensors"
MANIFEST = "manifest.json"
CACHE_DIR = ".harness_cache"
"""Where runs of the tests leave what `harness golden` reads, unless a project names another folder."""
USAGE_FILE = "golden-usage.json"
"""In there: which goldens the tests used."""
MAX_PART = 120
"""Characters of a part; file systems take 255, encrypting ones 143, and the platform of a variant may follow."""

_PLAIN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._ -]*[A-Za-z0-9_-])?")
_REPLACED = str.maketrans(" _", ".-")
_DEVICES = frozenset(["con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(10))])
_HASH_DIGITS = 8


def folder_of(name: str) -> str:
    """Return the folder of a golden, relative to the store and with `/` between its parts; empty at the top.

    Args:
        name: of the golden.

    Returns:
        The path.

    Raises:
        GoldenError: the name is empty or has an empty part.
    """
    *folders, _ = _parts(name)
    return "/".join(_readable(part) for part in folders)


def stem_of(name: str) -> str:
    """Return the file name of a golden, without its suffix.

    Args:
        name: of the golden.

    Returns:
        A name free of `@`, and of `~` but for a hash at its end.

    Raises:
        GoldenError: the name is empty or has an empty part.
    """
    return _readable(_parts(name)[-1])


def relative_path(name: str, variant: str = "") -> str:
    """Return the path of a golden's file, relative to the store.

    Args:
        name: of the golden.
        variant: the platform of a further variant; empty for the first.

    Returns:
        The path, with `/` between its parts.

    Raises:
        GoldenError: the name is empty or has an empty part.
    """
    folder = folder_of(name)
    return f"{folder}/{file_name(name, variant)}" if folder else file_name(name, variant)


def file_name(name: str, variant: str = "") -> str:
    """Return the file name of a golden; a variant follows `@`, which no name's own part holds."""
    return f"{stem_of(name)}{'@' + _readable(variant) if variant else ''}{SUFFIX}"


def same_file(name: str, other: str, *, is_stored: bool = False) -> GoldenError:
    """Return the error of a golden whose file is another golden's.

    Args:
        name: of the golden that is refused.
        other: of the golden that has the file.
        is_stored: the other one is in the store.

    Returns:
        The error.
    """
    way_out = f", or, if no test uses {other!r} any more, {deletion(other)}" if is_stored else ""
    return GoldenError(
        f"golden {name!r}: its file {relative_path(name)} is that of golden {other!r} too, and is not written for both; give one of them "
        f"another name{way_out}: case makes no difference, nor do space and dot, hyphen and underscore"
    )


def _parts(name: str) -> list[str]:
    parts = name.split("/")
    if not all(parts):
        raise GoldenError(f"golden {name!r}: an empty part in the name makes no file; give every part between slashes a name")
    return parts


def _readable(part: str) -> str:
    plain = part.lower().translate(_REPLACED)
    if _PLAIN.fullmatch(part) and len(plain) <= MAX_PART and not _is_taken(plain):
        return plain
    digest = hashlib.sha256(part.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_DIGITS]
    ascii_only = part.encode("ascii", "replace").decode().lower()
    kept = re.sub("[^a-z0-9]+", "-", ascii_only).strip("-")[: MAX_PART - _HASH_DIGITS - 1]
    return f"{kept}~{digest}"


def _is_taken(plain: str) -> bool:
    """Whether Windows takes it for a device, or a folder of this name could be taken for a file of the store."""
    return plain.partition(".")[0] in _DEVICES or plain == MANIFEST or plain.endswith(SUFFIX)


def deletion(name: str) -> str:
    """Return the command line that deletes a golden.

    Args:
        name: of the golden.

    Returns:
        The line, for a POSIX shell.
    """
    return shlex.join(["harness", "golden", "prune", "--delete", *(["--"] if name.startswith("-") else []), name])
