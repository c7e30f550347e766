"""Sizes in bytes as users write them."""

from __future__ import annotations

import re

from compressor.errors import UserInputError

_MAX_BYTES = 2**63
_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(size: int | str, name: str) -> int:
    """Read a size in bytes.

    Args:
        size: a number of bytes, or text such as `4GB`, `512 MiB`, `1.5e9`.
        name: of the setting, for errors only.

    Returns:
        Bytes.

    Raises:
        UserInputError: it is no size.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:E[0-9]+)?)\s*([KMGT]I?)?B?\s*", str(size).upper())
    if match is None:
        raise UserInputError(f"{name}: {size!r} is no size in bytes; write a number, or one with a unit, such as 4GB or 512MiB")
    found = float(match[1]) * _UNITS[match[2] or ""]
    if found >= _MAX_BYTES:
        raise UserInputError(f"{name}: {size!r} is more than any machine has; write a size such as 4GB or 512MiB")
    return int(found)
