"""Proof that a compressed checkpoint is what it claims to be: files, format, weights, behaviour.

The way of one validation: command -> compare.validate -> subject (both folders, which weights are quantized) -> files, record,
acceptance (what the folder holds and who accepts it) -> inspection and weights (decoded by `decoder`) -> scoring, metrics, intervals,
quality (behaviour) -> report, page, plots. Names are imported on first use, so that the command line answers without loading torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "validate": "harness.validation.compare",
    "ValidationReport": "harness.validation.compare",
    "Policy": "harness.validation.policy",
    "load_policy": "harness.validation.policy",
    "write_report": "harness.validation.report.page",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'harness.validation' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
