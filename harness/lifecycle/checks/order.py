"""Checks of what comes when: a whole run, illegal calls, start and end, nested contexts."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from itertools import pairwise

import torch
from torch import nn

from compressor.errors import CalibrationError, RecipeError
from compressor.lifecycle.interface import TRAINING_CALLBACKS
from compressor.lifecycle.modifier import overrides
from compressor.random_state import random_numbers_kept
from harness.lifecycle.checks.registry import register
from harness.lifecycle.driving.compare import Violation, describe, failures, failures_in
from harness.lifecycle.driving.driver import CompressorRun
from harness.lifecycle.driving.oracle_run import CheckedRun
from harness.lifecycle.driving.snapshot import freeze, num_hooks
from harness.lifecycle.forwards import call
from harness.lifecycle.machines.strategies import Setup
from harness.lifecycle.oracle import BATCH_EVENTS, MOMENTS, Settings
from harness.lifecycle.subject import NothingToCheckError, Subject

# Times for check 48: whole and fractional, from the first batch, with and without an end, with an update interval; the last two are over
# before the first batch, and between two batches.
TIMES = (
    Setup((Settings(0.0, 2.0),)),
    Setup((Settings(1.0, None),)),
    Setup((Settings(1.0, 3.0, 2.0),)),
    Setup((Settings(0.5, 1.5),), steps_per_epoch=2),
    Setup((Settings(0.1, None, 0.2),), steps_per_epoch=10),
    Setup((Settings(1 / 3, 4 / 3, 2 / 3),), steps_per_epoch=3),
    Setup((Settings(-2.0, -1.0),)),
    Setup((Settings(0.3, 0.7),)),
)


@register(
    "completes",
    "A whole run over the model comes to its end, with every callback where the contract has it",
    in_training=True,
    in_modes=True,
)
def completes(subject: Subject) -> str:
    """Go through a whole life without any fault.

    Args:
        subject: what is verified.

    Returns:
        What was seen.

    Raises:
        Violation: the run fails, or goes another way than the oracle.
    """
    run = subject.open()
    checked = subject.check(run)
    outcome = subject.live(checked, run)
    if outcome is None or outcome.kind == "failed":
        if subject.trains_beside_calibration and any(isinstance(entry.error, CalibrationError) for entry in run.recorder.entries):
            return f"a training, until {run.recorder.entries[-1].seen.callback} asks for the calibration that it does not have"
        what = failures(outcome, run.recorder.entries) if outcome else "it has no moments"
        raise Violation("refused", f"a run without any fault stopped: {what}", failures_in(run.recorder.entries))
    _hold_result(subject, run.model)
    _hold_data(subject, run)
    _hold_stages(subject)
    _hold_need(subject)
    return f"{len(subject.life())} moments, {run.model.__class__.__name__}"


def _hold_result(subject: Subject, model: nn.Module) -> None:
    """The model takes the batches that it took before."""
    with torch.no_grad(), random_numbers_kept():
        for number, batch in enumerate(subject.batches):
            try:
                call(model, copy.deepcopy(batch))
            except Exception as error:  # a model raises what it likes
                text = f"behind the run the model does not take inputs[{number}] any more ({describe(error)})"
                raise Violation("state", f"{text}; put in modules that take and give what those before did", [describe(error)]) from error


def _hold_data(subject: Subject, run: CompressorRun) -> None:
    """The batches are what they were: others are calibrated on them, too."""
    if subject.trains:
        return  # a training has none
    given, left = subject.data(), run.state.data
    if left is None or freeze((given.batches, given.token_masks)) != freeze((left.batches, left.token_masks)):
        raise Violation("state", "state.data was changed, on which others are calibrated, too; copy what you change of it")


def _hold_need(subject: Subject) -> None:
    """Some way of running it takes it: its times are refused where no training calls it, and hooks where it asks for no data."""
    if not overrides(subject.template, *TRAINING_CALLBACKS):
        try:
            subject.fresh().check_oneshot()
        except RecipeError as error:
            raise Violation("refused", f"oneshot refuses it, and so does a training: {error}") from error
    if subject.trains or subject.in_calibration or subject.template.calibration_need != "none":
        return
    run = subject.open()
    checked = subject.check(run)
    for moment in ("INITIALIZE", "CALIBRATION_START"):
        checked.go(moment)
    if run.modifiers[0].hooked_modules():
        text = "it has hooks in a calibration and asks for no data, so that oneshot refuses it"
        raise Violation("refused", f"{text}; set calibration = 'basic' in its class, or 'sequential'")


def _hold_stages(subject: Subject) -> None:
    """Go through the life again, and see that no stage is compressed by a change of what runs before it, which has fed the others."""
    if subject.trains:
        return  # a training has none
    run = subject.open()
    checked, order = subject.check(run), subject.stages.order
    for moment, names in subject.life():
        is_stage = moment == "SEQUENTIAL_EPOCH_END"
        if is_stage:
            subject.flow(checked, run, names)
        past = _before(order, names) if is_stage else set[str]()
        before = _tensors_of(run.model, past, names)
        if checked.go(moment, modules=names).kind == "failed":
            return
        after = _tensors_of(run.model, past, names)
        if changed := sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)):
            what = f"{changed[0]} was changed as {names[0] or 'the model'} was compressed, which is not in it"
            raise Violation("state", f"{what}: others have learnt from what it was; change only what event.modules names", changed)


def _before(order: Sequence[str], names: Collection[str]) -> set[str]:
    """What is called before any of these, but for what they stand in."""
    places = [place for place, one in enumerate(order) if one in names]
    past = order[: min(places)] if places else []
    return {one for one in past if one and not any(f"{name}.".startswith(f"{one}.") for name in names)}


def _tensors_of(model: nn.Module, past: Collection[str], names: Collection[str]) -> dict[str, object]:
    """What the modules of some names hold themselves, but for those that are in this stage, too, and tensors that are."""
    modules = dict(model.named_modules())
    current = {id(one) for name in names if name in modules for part in modules[name].modules() for one in (part, *part.parameters())}
    owners = {name: modules[name] for name in past if name in modules and id(modules[name]) not in current}
    own = {f"{name}.{key}": held for name, one in owners.items() for key, held in (*one._parameters.items(), *one._buffers.items())}
    return {name: freeze(tensor) for name, tensor in own.items() if id(tensor) not in current}


@register("illegal_calls", "An illegal call raises and changes nothing", number=47)
def illegal_calls(subject: Subject) -> str:
    """Try every illegal call at every point of a whole life.

    Args:
        subject: what is verified.

    Returns:
        What was seen.
    """
    run = subject.open()
    checked = subject.check(run)
    num_tried = _try_illegal(checked)
    for moment, names in subject.life():
        if subject.go(checked, run, moment, names).kind == "failed":
            break
        num_tried += _try_illegal(checked)
    return f"{num_tried} illegal calls"


def _try_illegal(checked: CheckedRun) -> int:
    forbidden = [moment for moment in MOMENTS if not checked.oracle.allows(moment)]
    for moment in forbidden:
        checked.go(moment)
    misfits = [("BATCH_START", True, ()), ("LOSS_CALCULATED", False, ()), ("CALIBRATION_START", False, ("x",))]
    for event, has_loss, modules in misfits:
        checked.send(event, has_loss=has_loss, modules=modules)
    methods = [method for method in ("initialize", "update_event", "finalize") if checked.oracle.modifiers[0].refuses(method)]
    for method in methods:
        checked.call_modifier(0, method)
    return len(forbidden) + len(misfits) + len(methods)


@register(
    "start_and_end",
    "Callbacks come exactly at start and end, for whole and fractional indices",
    number=48,
    caught=("vllm-project/llm-compressor 0.14: start and end never fire",),
)
def start_and_end(subject: Subject) -> str:
    """Train with several settings, beside the oracle.

    Args:
        subject: what is verified.

    Returns:
        What was seen.
    """
    for setup in TIMES:
        run = subject.open(setup)
        checked = subject.check(run)
        if checked.initialize().kind == "failed":
            what = failures_in(run.recorder.entries)
            text = f"it does not initialize with {setup.settings[0]}: {'; '.join(what)}"
            raise Violation("refused", text, what)
        for event in BATCH_EVENTS * 5:
            if checked.send(event).kind == "failed":
                break
        checked.close()
    return f"{len(TIMES)} settings, 5 batches each"


@register(
    "nested_contexts",
    "Contexts nest: leaving an inner disable_hooks() does not wake the hooks in the outer one",
    number=50,
    caught=("vllm-project/llm-compressor 0.14: leaving the inner context wakes all hooks",),
)
def nested_contexts(subject: Subject) -> str:
    """Enter two contexts at every point where hooks lie on the model, and leave them one by one.

    Args:
        subject: what is verified.

    Returns:
        What was seen.

    Raises:
        NothingToCheckError: it never has a hook.
        Violation: a hook runs that must sleep, or none runs afterwards.
    """
    run = subject.open()
    checked = subject.check(run)
    num_points, num_others = 0, num_hooks(run.model)
    for moment, names in subject.life():
        if subject.go(checked, run, moment, names).kind == "failed":
            break
        if num_hooks(run.model) > num_others:
            num_points += _nest(subject, run, checked, num_others)
    checked.close()
    if not num_points:
        raise NothingToCheckError("it never has a hook on the model")
    return f"hooks at {num_points} points of the run"


def _nest(subject: Subject, run: CompressorRun, checked: CheckedRun, num_others: int) -> int:
    owned = sum(len(modifier.hooked_modules()) for modifier in run.modifiers)
    if (strangers := num_hooks(run.model) - owned - num_others) > 0:
        raise Violation(
            "hooks",
            f"{strangers} hooks after {checked.oracle.last} were not made with register_hook, so they cannot be put to sleep",
            ["hooks"],
        )
    # A hook of a backward is woken by a backward; any other model is spared one.
    goes_back = any("backward" in kind for modifier in run.modifiers for _, kind in modifier.hooked_modules())

    def flow() -> None:
        (subject.backward if goes_back else subject.forward)(run)

    for outer, inner in pairwise((None, 0, None)):
        checked.enter_disabled(outer)
        checked.enter_disabled(inner)
        checked.forward(flow)
        checked.exit_disabled(1)
        checked.forward(flow)
        checked.exit_disabled(0)
    checked.enter_disabled(None)
    checked.enter_disabled(0)
    checked.exit_disabled(0)  # out of order, as two contexts of different owners may be left
    checked.forward(flow)
    checked.exit_disabled(0, ValueError("left"))
    checked.forward(flow)
    if not run.recorder.fired:
        raise Violation("hooks", f"after {checked.oracle.last} hooks lie on the model, and none runs after the outermost exit")
    return 1
