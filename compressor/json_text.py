"""Data as JSON text, one way for all that is printed and written, and one for all that others wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

MAX_DEPTH = 100
"""Lists and objects within each other; what looks into data later goes down with it, and no file of this field has twenty."""


def to_json(data: Any) -> str:
    """Return `data` as JSON that is the same for the same data: sorted keys, `nan` and `inf` as texts, one trailing newline."""
    text = json.dumps(_finite(data), sort_keys=True, indent=1, allow_nan=False, ensure_ascii=False)
    return encodable(text) + "\n"


def encodable(text: str) -> str:
    """Write out what UTF-8 has no bytes for, as half a surrogate pair in the name of a file that is no UTF-8: `\\udce9`, as JSON does."""
    return text.encode("utf-8", "backslashreplace").decode()


def from_json(text: str | bytes, *, once: bool = False) -> Any:
    """Read JSON that somebody else wrote.

    Args:
        text: of a file, a line or an option.
        once: a key that stands twice in one object is an error, for other readers take the other value.

    Returns:
        The data.

    Raises:
        ValueError: whatever is wrong with it, in a few words: no JSON (with the place), a number without end, nested too deeply.
    """
    try:
        data = json.loads(text, object_pairs_hook=_once if once else None)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    level, depth = [data], 0
    while level := [child for one in level for child in _children(one)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
    return data


_TOO_DEEP = f"its entries are nested too deeply to be read, more than {MAX_DEPTH} levels"


def _children(value: Any) -> Collection[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands twice in one object")
    return found


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data
