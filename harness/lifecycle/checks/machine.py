"""Checks that go beyond a list of cases: a state machine, further runs that must give the same, and what a run leaves being finite."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from compressor.errors import CompressorError
from compressor.lifecycle import Session
from compressor.recipe import load_recipe
from harness.lifecycle.checks.leftovers import points
from harness.lifecycle.checks.registry import register
from harness.lifecycle.driving.callback_recorder import PlannedError
from harness.lifecycle.driving.compare import Violation
from harness.lifecycle.driving.snapshot import freeze
from harness.lifecycle.machines.machine_subjects import GUEST_SHARE, drive_session, guest_stage
from harness.lifecycle.other_process import NoAnswerError, digests, run_elsewhere
from harness.lifecycle.subject import NothingToCheckError, Subject


@register(
    "repeatable",
    "A second run of a fresh modifier over the same model gives the same, bit for bit",
    number=43,
    in_training=True,
    in_modes=True,
)
def repeatable(subject: Subject) -> str:
    """Run twice over a model, over another one, and over the first again, then after runs that were given up; compare with the first run.

    Args:
        subject: what is verified.

    Returns:
        What was seen.

    Raises:
        Violation: another run gives another model: something of those before is kept outside of them.
    """
    first = subject.result(seed=1)
    _hold_again(subject, first, "the second run")
    subject.result(_another(subject.model), seed=3)
    _hold_again(subject, first, "a run after one over another model")
    for place, error in _ways_out(subject):
        _give_up(subject, place, error)
        way, (moment, _) = "aborted" if error is None else "left by an exception", subject.life()[place]
        _hold_again(subject, first, f"a run after one that was {way} behind {moment} ({place + 1})")
    return f"{len(first)} tensors are equal"


def _hold_again(subject: Subject, first: dict[str, Tensor], which: str) -> None:
    second = subject.result(seed=_seed(subject))
    if first.keys() != second.keys():
        raise Violation("state", f"{which} gives other tensors: {', '.join(sorted(first.keys() ^ second.keys())[:4])}")
    changed = _changed(first, second)
    if changed:
        follows = not _changed(first, subject.result(seed=1)) and not _changed(second, subject.result(seed=_seed(subject)))
        why = "; they follow the caller's random numbers: draw from a torch.Generator of your own, or declare 'random'" if follows else ""
        raise Violation("state", f"{which} gives other values in {', '.join(changed[:4])}{why}")


def _seed(subject: Subject) -> int:
    """Of a second run: the caller may have chosen another one, unless the modifier says that it matters."""
    return 1 if "random" in subject.tags else 2


@register(
    "new_process", "A run in another process, where texts have other hashes, gives the same, bit for bit", number=43, in_training=True
)
def new_process(subject: Subject) -> str:
    """Run here, and in three processes with other PYTHONHASHSEEDs, most of which order sets of names in another way.

    Args:
        subject: what is verified.

    Returns:
        What was seen.

    Raises:
        NothingToCheckError: the other process cannot make the modifier, or the model.
        Violation: two runs give other models.
    """
    cls = type(subject.template)
    if not subject.is_tiny or subject.session_class is not Session:
        raise NothingToCheckError("another process has neither the model nor the session that were given")
    if not subject.can_be_named:
        raise NothingToCheckError(f"{cls.__qualname__} is defined where another process cannot find it; move it into a module")
    try:
        own = subject.fresh()
        if own.parts() != [own]:
            raise NothingToCheckError(f"a recipe holds the parts of {cls.__name__} in its place; verify each of them")
        elsewhere = run_elsewhere(load_recipe([subject.fresh()]).dump(), subject, _seed(subject))
    except (CompressorError, NoAnswerError) as error:
        raise NothingToCheckError(f"another process cannot tell: {error}") from error
    here = digests(subject.result(seed=1))
    changed = sorted({name for there in elsewhere for name in here.keys() | there.keys() if here.get(name) != there.get(name)})
    if changed:
        what = f"in another process it gives other values in {', '.join(changed[:4])}"
        advice = "sort what comes out of a set, use no hash() of a text, and keep nothing of earlier runs outside of the modifier"
        raise Violation("state", f"{what}; {advice}")
    return f"{len(here)} tensors are equal"


def _ways_out(subject: Subject) -> list[tuple[int, PlannedError | None]]:
    """Where a run is given up, and by what: behind the first call of each callback, and behind what flows last in both ways."""
    moments, error = [moment for moment, _ in subject.life()], PlannedError("a forward failed")
    last = max((number for number, moment in enumerate(moments) if moment in ("SEQUENTIAL_EPOCH_END", "LOSS_CALCULATED")), default=0)
    first = {callback: number for number, callback in reversed(points(subject))}
    places = sorted({*first.values()} - {last, len(moments) - 1})
    return [*((place, error if at % 2 else None) for at, place in enumerate(places)), (last, None), (last, error)]


def _give_up(subject: Subject, place: int, error: BaseException | None) -> None:
    """Begin a run over another model, let it see what flows there, and abort it, or leave it by an exception."""
    run = subject.open(model=_another(subject.model))
    checked = subject.check(run)
    outcome = subject.live(checked, run, until=place + 1)
    if (outcome is not None and outcome.kind == "failed") or checked.is_over:
        return
    if error is None:
        checked.abort()
    else:
        checked.leave(error)


def _changed(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [key for key, value in one.items() if key not in other or freeze(value) != freeze(other[key])]


def _another(model: nn.Module) -> nn.Module:
    """A model whose weights and activations are larger, so that what was seen in it does not fit the first one."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1.5)
    return other


@register("finite", "What a run leaves in the model is finite, wherever it was before", in_training=True, in_modes=True)
def finite(subject: Subject) -> str:
    """Look for NaN and infinity in the state dict; whether the values are right is for the checks of algorithms.

    Args:
        subject: what is verified.

    Returns:
        What was seen.

    Raises:
        Violation: a tensor that was finite, or was not there, is not finite.
    """
    odd = {name for name, tensor in subject.model.state_dict().items() if not _is_finite(tensor)}
    left = subject.result(seed=1)
    wrong = [name for name, tensor in left.items() if name not in odd and not _is_finite(tensor)]
    if wrong:
        text = f"it leaves NaN or infinity in {', '.join(wrong[:4])}; check what it divides by, and what no token has reached"
        raise Violation("state", text, [f"finite {name}" for name in wrong])
    return f"{len(left)} tensors"


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.float().isfinite().all())


@register("state_machine", "Random calls, legal and illegal, with callbacks that fail, go as the independent model says")
def state_machine(subject: Subject) -> str:
    """Drive a session of the modifier and probes at random, as long as the profile says.

    Args:
        subject: what is verified.

    Returns:
        What was seen.
    """
    return f"{drive_session(guest_stage(subject), subject.profile, GUEST_SHARE)} steps"
