"""Data as JSON text, one way for all that is printed and written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(data: Any) -> str:
    """Return `data` as JSON that is the same for the same data: sorted keys, `nan` and `inf` as texts, one trailing newline."""
    return json.dumps(_finite(data), sort_keys=True, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data
