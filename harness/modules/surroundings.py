"""A check of what a forward leaves behind: the module it belongs to, and the process around it, are as they were."""

from __future__ import annotations

import torch

from harness.lifecycle.driving.oracle_run import list_differences
from harness.lifecycle.driving.snapshot import Snapshot
from harness.lifecycle.process_state import settings_kept
from harness.modules.subject import ModuleCheck, Subject, collect, untouched

CHECKS: list[ModuleCheck] = []
_check = collect(CHECKS)
_KINDS = ("torch", "process", "class", "hooks", "training", "requires_grad")
"""What no forward changes. It may write to tensors, and keep what it likes beside them."""


@_check("module.surroundings")
def _surroundings(subject: Subject) -> list[str]:
    """A forward leaves modes, requires_grad, hooks, classes, torch's settings and the process as they were, with gradients and without."""
    findings: list[str] = []
    for with_gradients in (True, False):
        with untouched(subject.module), settings_kept(), torch.set_grad_enabled(with_gradients):
            begin, process = Snapshot(subject.module), Snapshot.of_process()
            subject.call()
            found = [*begin.differences(Snapshot(subject.module)), *process.differences(Snapshot.of_process())]
        kept = [one for one in found if one.kind in _KINDS]
        findings += [f"a forward {'with' if with_gradients else 'without'} gradients changed {list_differences(kept)}"] if kept else []
    return findings
