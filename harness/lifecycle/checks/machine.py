"""Checks that go beyond a list of cases: a state machine over the modifier among others, and a second run that must give the same."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from harness.lifecycle.checks.registry import register
from harness.lifecycle.driving.callback_recorder import PlannedError
from harness.lifecycle.driving.compare import Violation
from harness.lifecycle.driving.snapshot import freeze
from harness.lifecycle.machines.machine_subjects import GUEST_SHARE, drive_session, guest_stage
from harness.lifecycle.subject import Subject, begin_random_numbers


@register("repeatable", "A second run of a fresh modifier over the same model gives the same, bit for bit", number=43)
def repeatable(subject: Subject) -> str:
    """Run over a model, over another one, and over the first again, then after runs that were given up; compare with the first run.

    Args:
        subject: what is verified.

    Returns:
        What was seen.

    Raises:
        Violation: the last run gives another model: something of the others is kept outside of them.
    """
    first = _result(subject, copy.deepcopy(subject.model), seed=1)
    _result(subject, _another(subject.model), seed=3)
    _hold_again(subject, first, "the second run")
    for error in (None, PlannedError("a forward failed")):
        _give_up(subject, error)
        _hold_again(subject, first, f"a run after one that was {'aborted' if error is None else 'left by an exception'}")
    return f"{len(first)} tensors are equal"


def _hold_again(subject: Subject, first: dict[str, Tensor], which: str) -> None:
    second = _result(subject, copy.deepcopy(subject.model), seed=1 if "random" in subject.tags else 2)
    if first.keys() != second.keys():
        raise Violation("state", f"{which} gives other tensors: {', '.join(sorted(first.keys() ^ second.keys())[:4])}")
    changed = _changed(first, second)
    if changed:
        follows = not _changed(first, _result(subject, copy.deepcopy(subject.model), seed=1))
        why = "; they follow the caller's random numbers: draw from a torch.Generator of your own, or declare 'random'" if follows else ""
        raise Violation("state", f"{which} gives other values in {', '.join(changed[:4])}{why}")


def _give_up(subject: Subject, error: BaseException | None) -> None:
    """Begin a run over another model, let it see what flows there, and abort it, or leave it by an exception."""
    run = subject.open(model=_another(subject.model))
    checked = subject.check(run)
    moments = [moment for moment, _ in subject.life()]
    last = max((number for number, moment in enumerate(moments) if moment in ("SEQUENTIAL_EPOCH_END", "LOSS_CALCULATED")), default=0)
    outcome = subject.live(checked, run, until=last + 1)
    if (outcome is not None and outcome.kind == "failed") or checked.is_over:
        return
    if error is None:
        checked.abort()
    else:
        checked.leave(error)


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
