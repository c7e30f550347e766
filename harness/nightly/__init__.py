"""Regressions over nights: a history of measurements, and what tells a change from noise. Names are imported on first use."""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "History": "harness.nightly.history",
    "Judgement": "harness.nightly.judging.judgement",
    "judge": "harness.nightly.judging.judge",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'harness.nightly' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
