"""Checks that go beyond a list of cases: a state machine over the modifier among others, and a second run that must give the same."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from harness.lifecycle.checks.registry import register
from harness.lifecycle.driving.compare import Violation
from harness.lifecycle.driving.snapshot import freeze
from harness.lifecycle.machines.machine_subjects import GUEST_SHARE, drive_session, guest_stage
from harness.lifecycle.subject import Subject, begin_random_numbers


@register("repeatable", "A second run of a fresh modifier over the same model gives the same, bit for bit", number=43)
def repeatable(subject: Subject) -> str:
    """Run over a model, over another one, and over the first again; compare the first run with the last.

    Args:
        subject: what is verified.

    Returns:
        What was seen.

    Raises:
        Violation: the last run gives another model: something of the others is kept outside of them.
    """
    first = _result(subject, copy.deepcopy(subject.model), seed=1)
    _result(subject, _another(subject.model), seed=3)
    second = _result(subject, copy.deepcopy(subject.model), seed=1 if "random" in subject.tags else 2)
    if first.keys() != second.keys():
        raise Violation("state", f"the second run gives other tensors: {', '.join(sorted(first.keys() ^ second.keys())[:4])}")
    changed = _changed(first, second)
    if changed:
        follows = not _changed(first, _result(subject, copy.deepcopy(subject.model), seed=1))
        why = "; they follow the caller's random numbers: draw from a torch.Generator of your own, or declare 'random'" if follows else ""
        raise Violation("state", f"the second run gives other values in {', '.join(changed[:4])}{why}")
    return f"{len(first)} tensors are equal"


def _changed(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [key for key, value in one.items() if key not in other or freeze(value) != freeze(other[key])]


def _result(subject: Subject, model: nn.Module, *, seed: int) -> dict[str, Tensor]:
    """What a whole run leaves, where the caller has chosen a seed: the making of the modifier and the run find its numbers at one place."""
    begin_random_numbers(seed)
    run = subject.open(model=model)
    begin_random_numbers(seed)
    subject.live(subject.check(run), run)
    return {key: value.detach().clone() for key, value in run.model.state_dict().items()}


def _another(model: nn.Module) -> nn.Module:
    """A model whose weights and activations are larger, so that what was seen in it does not fit the first one."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1.5)
    return other


@register("state_machine", "Random calls, legal and illegal, with callbacks that fail, go as the independent model says")
def state_machine(subject: Subject) -> str:
    """Drive a session of the modifier and probes at random, as long as the profile says.

    Args:
        subject: what is verified.

    Returns:
        What was seen.
    """
    return f"{drive_session(guest_stage(subject), subject.profile, GUEST_SHARE)} steps"
