"""A golden's name as a path, so that no two names share a file on any file system.

    layers/W4A16 5x128   ->   layers/+w4+a16%205x128.safetensors

Lower-case letters, digits, `-`, `_` and dots inside a name stay; a capital becomes `+` and its lower case, because some file systems do
not tell them apart; all else becomes `%` and the hexadecimal bytes of its UTF-8 form. Names that Windows keeps for devices, and leading
dots, have their first character written as bytes. A part that would be too long is cut, and ends in `~` and the hash of the whole name.
"""

from __future__ import annotations

import hashlib
import string

from compressor.errors import GoldenError

SUFFIX = ".safetensors"
MANIFEST = "manifest.json"
MAX_PART = 120
"""Characters of an escaped part; file systems take 255, encrypting ones 143, and the platform of a variant may follow."""

_PLAIN = frozenset(string.ascii_lowercase + string.digits + "-_")
_DEVICES = frozenset(
    ["con", "prn", "aux", "nul", "conin$", "conout$", *(f"{port}{number}" for port in ("com", "lpt") for number in range(10))]
)
_HASH_DIGITS = 32


def folder_of(name: str) -> str:
    """Return the escaped folder of a golden, relative to the store and with `/` between its parts; empty at the top.

    Args:
        name: of the golden.

    Returns:
        A path that no other folder name leads to.

    Raises:
        GoldenError: the name is empty or has an empty part.
    """
    *folders, _ = _parts(name)
    return "/".join(_escaped(part, keep_dots=False) for part in folders)


def stem_of(name: str) -> str:
    """Return the escaped file name of a golden, without its suffix.

    Args:
        name: of the golden.

    Returns:
        A name that no other golden of its folder has; free of `@` and `~` but for a hash at its end.

    Raises:
        GoldenError: the name is empty or has an empty part.
    """
    return _escaped(_parts(name)[-1], keep_dots=True)


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
    """Return the file name of a golden; a variant follows `@`, which no escaped name holds."""
    return f"{stem_of(name)}{'@' + _escaped(variant, keep_dots=True) if variant else ''}{SUFFIX}"


def _parts(name: str) -> list[str]:
    parts = name.split("/")
    if not all(parts):
        raise GoldenError(f"golden {name!r}: an empty part in the name makes no file; give every part between slashes a name")
    return parts


def _escaped(part: str, *, keep_dots: bool) -> str:
    pieces = [_escaped_char(char, keep_dots) for char in part]
    if part[0] == "." or part.partition(".")[0].lower() in _DEVICES:
        pieces[0] = _as_bytes(part[0])
    whole = "".join(pieces)
    if len(whole) <= MAX_PART:
        return whole
    digest = hashlib.sha256(part.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_DIGITS]
    kept = 0
    for count, piece in enumerate(pieces):
        if kept + len(piece) > MAX_PART - _HASH_DIGITS - 1:
            return "".join(pieces[:count]) + "~" + digest
        kept += len(piece)
    raise AssertionError("a text that is too long has a place to cut")


def _escaped_char(char: str, keep_dots: bool) -> str:
    if char in _PLAIN or (keep_dots and char == "."):
        return char
    if char in string.ascii_uppercase:
        return "+" + char.lower()
    return _as_bytes(char)


def _as_bytes(char: str) -> str:
    return "".join(f"%{byte:02x}" for byte in char.encode("utf-8", "surrogatepass"))
