"""What is seen once before a model leaves: every check, held against a policy, on one page, with a statement that can be checked later.

The way of one sign-off: command -> sign_off (the order of everything) -> candidate (both models) -> files, tokenizer, generation,
invariance, outside (the checks) -> policy (what is required and waived) -> page and statement. Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "ReleasePolicy": "harness.release.policy",
    "load_release_policy": "harness.release.policy",
    "ReleaseReport": "harness.release.report",
    "sign_off": "harness.release.sign_off",
    "verify_statement": "harness.release.statement",
    "write_release": "harness.release.page",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'harness.release' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
