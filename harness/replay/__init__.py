"""Equivalence of a training step in its three modes: one step, compared bitwise, and the hazards that break others.

Public names are imported on first use, so that `import harness.replay` answers without loading torch.
"""

from __future__ import annotations

from compressor.object_reference import lazy_names

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


__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
