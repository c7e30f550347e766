"""The record that a test run leaves of the goldens it used; the plugin writes it, `harness golden` reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compressor.json_text import from_json

USAGE_FILE = "golden-usage.json"


def read_usage(path: Path) -> dict[str, Any] | None:
    """Return the record of which goldens were used, or None where there is none that can be read."""
    try:
        record = from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and {"complete", "gaps", "used", "unknown_tests"} <= set(record) else None
