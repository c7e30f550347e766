"""Equivalence of a training step in its three modes: one step, compared bitwise, and the hazards that break others.

Public names are imported on first use, so that `import harness.replay` answers without loading torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC: dict[str, str] = {
    "Equivalence": "harness.replay.equivalence.compare",
    "KernelReport": "harness.replay.kernels.report",
    "Subject": "harness.replay.equivalence.run",
    "Swap": "harness.replay.kernels.compare",
    "assert_equivalent": "harness.replay.equivalence.compare",
    "compare_kernel": "harness.replay.kernels.compare",
    "compare_kernels": "harness.replay.kernels.compare",
    "compare_modes": "harness.replay.equivalence.compare",
    "plan_on_tape": "harness.replay.kernels.sources",
    "replay_machine": "harness.replay.equivalence.twin_machine",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'harness.replay' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
