"""A check of what a forward leaves behind: the module it belongs to, and the process around it, are as they were."""

from __future__ import annotations

import random

import numpy
import torch

from compressor.random_state import foreign_random, random_numbers_kept
from harness.lifecycle.driving.oracle_run import list_differences
from harness.lifecycle.driving.snapshot import Difference, Snapshot
from harness.lifecycle.driving.torch_settings import EnteredModes, modes_aside
from harness.lifecycle.process_state import settings_kept
from harness.modules.subject import ModuleCheck, Subject, collect, untouched
from harness.modules.tensors import cut_names, same_bits

CHECKS: list[ModuleCheck] = []
_check = collect(CHECKS)
_GRADIENT = -0.6171875  # that no forward writes by chance, as zeros and ones are
_KINDS = ("torch", "process", "class", "hooks", "training", "requires_grad", "grad")
"""What no forward changes. It may write to buffers, as statistics and caches are, and keep what it likes beside them."""
# Gradients are on, and the mode: None for that in which the module was given.
_CALLS = 2  # one that sets something up, and one that finds it there
_WAYS = tuple((gradients, mode) for mode in (None, True, False) for gradients in (True, False))


@_check("module.surroundings")
def _surroundings(subject: Subject) -> list[str]:
    """A forward leaves parameters, gradients, requires_grad, modes, hooks, classes, torch's settings and the process as they were."""
    findings: list[str] = []
    told: set[str] = set()
    refused: dict[str, None] = {}
    for with_gradients, mode in _WAYS:
        how = f"a forward {'with' if with_gradients else 'without'} gradients" + ("" if mode is None else f" in training={mode}")
        with torch.set_grad_enabled(with_gradients), untouched(subject.module), settings_kept():
            if mode is not None:
                subject.module.train(mode)
            changes, refusal = _changes(subject)
        if refusal is not None and mode is None:
            raise refusal
        if refusal is not None:  # one for inference alone may refuse to train, with any class
            refused[f"training={mode} was not looked at to the end, since the forward raises {type(refusal).__name__}: {refusal}"] = None
        if refusal is None:
            with torch.set_grad_enabled(with_gradients), untouched(subject.module), settings_kept():
                if mode is not None:
                    subject.module.train(mode)
                changes += [f"seeds {whose} generator, so that what draws next draws the same numbers" for whose in _reseeded(subject)]
        findings += [f"{how} {what}" for what in changes if mode is None or what not in told]
        told.update(changes)
    subject.not_seen += refused
    return findings


def _changes(subject: Subject) -> tuple[list[str], Exception | None]:
    """What a forward changes, in words, and what it raises; an embedding may cut the norms of its weight, if it has a max_norm."""
    parameters = dict(subject.module.named_parameters(remove_duplicate=False))
    for parameter in parameters.values():
        if parameter.requires_grad and parameter.is_leaf:
            parameter.grad = torch.full_like(parameter, _GRADIENT)
    values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    classes = {name: type(part) for name, part in subject.module.named_modules()}
    with settings_kept():
        kept, refusal = _kept_changes(subject)
    now, parts = dict(subject.module.named_parameters(remove_duplicate=False)), dict(subject.module.named_modules())
    others = [name for name, parameter in parameters.items() if now.get(name) is not parameter]
    with modes_aside():  # those that the forward has left on are told
        written = [
            name
            for name, value in values.items()
            if name not in {*others, *cut_names(subject.module)} and not same_bits(parameters[name].detach(), value)
        ]
    changes = [
        *([f"changed {list_differences(kept)}"] if kept else []),
        *([f"put others in the place of parameters that optimizers hold: {', '.join(others[:5])}"] if others else []),
        *([f"changed the values of parameters: {', '.join(written[:5])}"] if written else []),
        *(f"changed the class of {name or 'the module'}" for name, its_class in classes.items() if type(parts.get(name)) is not its_class),
    ]
    return changes, refusal


def _kept_changes(subject: Subject) -> tuple[list[Difference], Exception | None]:
    """What is not as it was after the first forwards in a mode, of what is to stay, and what a forward has raised."""
    begin, process = Snapshot(subject.module), Snapshot.of_process()
    buffers, found, refusal = _buffers(subject), list[Difference](), None
    for _ in range(_CALLS):
        try:
            subject.call()
        except Exception as error:  # noqa: BLE001 - a module may refuse to run in a mode, in any way; it is told
            refusal = error
        found = [*begin.differences(Snapshot(subject.module)), *process.differences(Snapshot.of_process())]
        now = _buffers(subject)
        came_or_went = {name for name in buffers.keys() ^ now.keys() if not {**buffers, **now}[name]}
        found = [one for one in found if one.kind in _KINDS and not (one.kind in ("requires_grad", "grad") and one.where in came_or_went)]
        if found or refusal:
            break
    return found, refusal


def _buffers(subject: Subject) -> dict[str, bool]:
    """Names of the buffers that hold a tensor, and whether it keeps a graph."""
    return {name: buffer.requires_grad for name, buffer in subject.module.named_buffers(remove_duplicate=False)}


def _reseeded(subject: Subject) -> list[str]:
    """Whose generators end at the same place from two beginnings, in a first or a second call; one that only draws keeps them apart."""
    ends: list[list[dict[str, object]]] = []
    for seed in (1, 2):
        with untouched(subject.module), random_numbers_kept():
            ends.append([_random_numbers_behind(subject, _CALLS * seed + call) for call in range(_CALLS)])
    calls = list(zip(*ends, strict=True))
    return [whose for whose in calls[0][0] if any(one[whose] == other[whose] for one, other in calls)]


def _random_numbers_behind(subject: Subject, seed: int) -> dict[str, object]:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    args, kwargs = subject.inputs()
    modes = EnteredModes()
    subject.module(*args, **kwargs)
    modes.put_back()
    foreign = foreign_random()
    return {"torch's": torch.get_rng_state().tolist(), "Python's": foreign.python, "numpy's": foreign.numpy}
