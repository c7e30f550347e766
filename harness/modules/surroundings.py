"""A check of what a forward leaves behind: the module it belongs to, and the process around it, are as they were."""

from __future__ import annotations

import torch

from compressor.random_state import random_numbers_kept
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
    """A forward leaves parameters, requires_grad, modes, hooks, classes, torch's settings and the process as they were."""
    findings: list[str] = []
    for with_gradients in (True, False):
        with untouched(subject.module), settings_kept(), torch.set_grad_enabled(with_gradients):
            begin, process = Snapshot(subject.module), Snapshot.of_process()
            parameters = dict(subject.module.named_parameters(remove_duplicate=False))
            subject.call()
            now = dict(subject.module.named_parameters(remove_duplicate=False))
            found = [*begin.differences(Snapshot(subject.module)), *process.differences(Snapshot.of_process())]
        kept = [one for one in found if one.kind in _KINDS]
        others = [name for name, parameter in parameters.items() if now.get(name) is not parameter]
        how = f"a forward {'with' if with_gradients else 'without'} gradients"
        findings += [f"{how} changed {list_differences(kept)}"] if kept else []
        findings += [f"{how} put others in the place of parameters that optimizers hold: {', '.join(others[:5])}"] if others else []
    if _reseeds(subject):
        findings.append("a forward seeds torch's generator, so that whatever draws after it draws the same numbers every time")
    return findings


def _reseeds(subject: Subject) -> bool:
    """Whether the generator ends at the same place from two beginnings; a forward that only draws keeps them apart."""
    ends = []
    with untouched(subject.module), random_numbers_kept():
        for seed in (1, 2):
            torch.manual_seed(seed)
            args, kwargs = subject.inputs()
            subject.module(*args, **kwargs)
            ends.append(torch.get_rng_state())
    return torch.equal(*ends)
