"""Checks of what a run leaves behind: on the model, in the process, on disk, and after a failure at any point."""

from __future__ import annotations

import copy
import gc
import tempfile
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn

from compressor.errors import CheckpointError
from compressor.lifecycle import Session
from compressor.model.checkpoints.audit import check_unclaimed, contents
from harness.lifecycle.checks.registry import register
from harness.lifecycle.driving.callback_recorder import Act, PlannedError, Recorder, record
from harness.lifecycle.driving.class_values import frozen_class_values
from harness.lifecycle.driving.compare import CallResult, Violation, describe
from harness.lifecycle.driving.oracle_run import CheckedRun, causes, is_added, list_differences, outermost, replaced_modules
from harness.lifecycle.driving.snapshot import Bits, Snapshot, num_hooks
from harness.lifecycle.oracle import ANSWERING, BATCH_EVENTS
from harness.lifecycle.subject import NothingToCheckError, Subject
from harness.lifecycle.witness import Witness

RAISES = (Act(ending="raised"), Act(ending="interrupted", skip_own=True))
# What a run that is over must have left as it was; modules and weights are what it is there to change.
SURROUNDINGS = ("training", "requires_grad", "grad", "attribute", "class", "rng", "torch", "threads", "hooks", "settings")


def points(subject: Subject) -> list[tuple[int, str]]:
    """List every callback of a whole life.

    Args:
        subject: what is verified.

    Returns:
        The number of the moment in which it comes, and its name.
    """
    run = subject.open()
    checked = subject.check(run)
    found = []
    for number, (moment, names) in enumerate(subject.life()):
        failed = subject.go(checked, run, moment, names).kind == "failed"
        found += [(number, entry.seen.callback) for entry in run.recorder.entries]
        if failed:
            break
    return found


def _faults(subject: Subject, keep_originals: bool = False) -> Iterator[tuple[CheckedRun, str, CallResult]]:
    """Fail in every way at every callback of a whole life; each time return the run, the fault in words and its outcome."""
    for number, callback in points(subject):
        moment, names = subject.life()[number]
        answers = (Act(answer=False), Act(answer=None)) if callback in ANSWERING else ()
        for act in (*RAISES, *answers):
            run = subject.open(subject.alone(keep_originals))
            checked = subject.check(run)
            checked.compares_all = False
            subject.live(checked, run, until=number)
            checked.compares_all = True
            checked.look_again()
            outcome = subject.go(checked, run, moment, names, {(0, callback): act})
            yield checked, f"a failure in {callback} of {moment}", outcome


@register(
    "nothing_left",
    "No hook, observer or patched attribute is left outside calibration, after an exception too",
    number=49,
    caught=("quic/aimet#4115", "vllm-project/llm-compressor 0.14: 14 hooks and observers stay after an exception"),
    in_training=True,
    in_modes=True,
)
def nothing_left(subject: Subject) -> str:
    """Fail at every callback and in a forward, and look at the model; then drop everything and see it go.

    Args:
        subject: what is verified.

    Returns:
        What was seen.

    Raises:
        Violation: something is left.
    """
    num_faults = 0
    if subject.trains_beside_calibration:
        return "looked at with a calibration and behind on_end"  # most of its time goes here, and `_after_end` has sent the batches
    for _, fault, _ in _faults(subject):
        num_faults += 1
        _hold_classes(subject, fault)
    _after_forward_error(subject)
    _hold_classes(subject, "a failure in a forward")
    if "session_hooks" not in subject.tags:
        _after_end(subject)
        if not subject.trains:
            _after_calibration(subject)
    _after_all(subject)
    _activations_are_freed(subject)
    return f"{num_faults} failures, one in a forward, and a whole run"


def _after_forward_error(subject: Subject) -> None:
    """Leave the block by an exception while hooks lie on the model."""
    run = subject.open()
    checked = subject.check(run)
    middle = next((number for number, (moment, _) in enumerate(subject.life()) if moment in ("CALIBRATION_START", "LOSS_CALCULATED")), 0)
    subject.live(checked, run, until=middle + 1)
    if checked.oracle.place not in ("before", "over"):
        checked.leave(PlannedError("a forward failed"))


def _hold_classes(subject: Subject, fault: str) -> None:
    """What a run has learned before it failed, the next one must not find in the class or its file."""
    before, now = subject.class_values, frozen_class_values(subject.template)
    changed = [key for key in {**before, **now} if before.get(key, ()) != now.get(key, ())]
    if changed:
        text = f"after {fault}, {changed[0]} is not as it was; keep state on the object, under a private name, as self._seen"
        raise Violation("left behind", text, [f"class {changed[0]}"])


def _after_end(subject: Subject) -> None:
    """A modifier that a training has ended watches nothing any more."""
    if subject.template.start is None or subject.template.end is None:
        return
    run = subject.open()
    checked = subject.check(run)
    before = num_hooks(run.model)
    if checked.initialize().kind == "failed":
        return
    for event in BATCH_EVENTS * subject.num_batches:
        if checked.send(event).kind == "failed":
            return
    if (left := num_hooks(run.model) - before) and run.modifiers[0].ended:
        text = f"{left} hooks are on the model after on_end; call self.remove_hooks() there, or declare 'session_hooks'"
        raise Violation("left behind", text, ["hooks"])


def _after_calibration(subject: Subject) -> None:
    run = subject.open()
    checked = subject.check(run)
    before = num_hooks(run.model)
    subject.live(checked, run, until=len(subject.life()) - 1)
    left = num_hooks(run.model) - before
    if left and not checked.is_over:
        text = f"{left} hooks are on the model after CALIBRATION_END; call self.remove_hooks() there, or declare 'session_hooks'"
        raise Violation("left behind", text, ["hooks"])


def _after_all(subject: Subject) -> None:
    """The model can be freed once a run is over: nothing outside of the run holds it."""
    run = subject.open()
    subject.live(subject.check(run), run)
    model = weakref.ref(run.model)
    del run
    subject.latest = None
    gc.collect()
    if model() is not None:
        raise Violation(
            "left behind", "the model is still held after the run and its modifier are gone; keep no reference in a class or module"
        )


def _activations_are_freed(subject: Subject) -> None:
    """A run that is over, and its modifiers, hold nothing of what flowed through the model."""
    run = subject.open()
    checked = subject.check(run)
    witness = Witness(run.model)
    for moment, names in subject.life():
        if moment == "SEQUENTIAL_EPOCH_END" or (subject.trains and moment == "LOSS_CALCULATED"):
            checked.forward(partial(witness.run, partial(subject.forward, run)))
        if checked.go(moment, modules=names).kind == "failed":
            break
    modules = dict(run.model.named_modules())
    for kind, where in subject.written:  # what the model's own forward keeps is no modifier's
        name, _, key = where.rpartition(".")
        if kind == "attribute" and name in modules:
            modules[name].__dict__.pop(key, None)
    gc.collect()
    if held := witness.held():
        what = f"{len(held)} activations are still held after the run, such as {held[0]}; drop them in on_calibration_end or on_finalize"
        raise Violation("left behind", what)


@register(
    "surroundings", "RNG state, training flags, requires_grad, use_cache, dtype and config are as before", number=51, in_training=True
)
def surroundings(subject: Subject) -> str:
    """Compare the surroundings before and after whole lives, over a model in training mode and one in evaluation mode.

    Args:
        subject: what is verified.

    Returns:
        What was seen.

    Raises:
        Violation: something is not as it was.
    """
    for training in (True, False):
        model = copy.deepcopy(subject.model).train(training)
        for parameter in list(model.parameters())[::2]:
            parameter.requires_grad_(not training)
        untouched = copy.deepcopy(model)
        for module in model.modules():  # of the caller: they must still be there afterwards, in this order
            module.register_forward_hook(_look)
            module.register_forward_hook(_look_again)
        run = subject.open(model=model)
        start = Snapshot(model, {**run.shared(), "class": subject.class_values})
        subject.live(subject.check(run), run)
        end = Snapshot(model, {**run.shared(), "class": frozen_class_values(subject.template)})
        _compare(subject, start, end)
        _compare_replaced(untouched, model)
    return "a model in training mode and one in evaluation mode"


def _look(*args: object) -> None:
    """A hook that changes nothing."""


def _look_again(*args: object) -> None:
    """Another one."""


def _compare(subject: Subject, start: Snapshot, end: Snapshot) -> None:
    differences = start.differences(end, subject.allowed)
    replaced = tuple(f"{name}." for name in replaced_modules(differences))
    found = []
    for one in outermost(differences):
        is_inside = bool(replaced) and one.where.startswith(replaced)
        if one.kind == "training":
            counts = "->" in one.text
        elif one.kind in ("module", "tensor"):
            is_new = is_added(one) and "attribute" not in subject.allowed
            counts = not is_inside and (is_new or (one.kind == "tensor" and "->" in one.text))
        else:
            counts = one.kind in SURROUNDINGS and not is_inside
        if counts:
            found.append(one)
    if found:
        raise Violation("left behind", f"a run changed {list_differences(found)}", causes(found))


def _compare_replaced(before: nn.Module, after: nn.Module) -> None:
    """Parameters of modules that were put in, under the names of those before: none trains that did not, and numbers keep their dtype."""
    now = dict(after.named_parameters(remove_duplicate=False))
    for name, old in before.named_parameters(remove_duplicate=False):
        new = now.get(name, old)
        if new.requires_grad and not old.requires_grad:
            raise Violation("left behind", f"a run changed {name}: requires_grad False -> True; make what you put in as what was there")
        if new.is_floating_point() and old.is_floating_point() and new.dtype.itemsize > old.dtype.itemsize > 1:
            text = f"a run changed {name}: {old.dtype} -> {new.dtype}; make what you put in as what was there"
            raise Violation("left behind", text)


@register(
    "claims",
    "What a run changes of the model it has claimed or touched, so that the result can be saved",
    number=51,
    in_training=True,
    in_modes=True,
)
def claims(subject: Subject) -> str:
    """Go through a whole life, and hold the model's tensors against those before it, as every way of saving does.

    Args:
        subject: what is verified.

    Returns:
        What was seen.

    Raises:
        Violation: something has changed that the modifier has not named.
    """
    run = subject.open()
    before, unsaved, held = contents(run.model), _unsaved(run.model), dict(run.model.named_parameters(remove_duplicate=False))
    subject.live(subject.check(run), run)
    claimed = run.state.claims.keys() | run.state.touched
    advice = "call state.claim(names, self.label) for modules that are this modifier's alone, or state.touch(names)"
    # Running statistics, tables that grow: nobody's modifier is to blame.
    written = {name for kind, name in subject.written if kind == "tensor" and name not in held}
    try:
        check_unclaimed(run.model, {name: one for name, one in before.items() if name not in written}, claimed, exempt=written)
    except CheckpointError as error:
        raise Violation("left behind", f"the result could not be saved: {error}; {advice}") from error
    others = dict(run.model.named_parameters(remove_duplicate=False))
    may_go = run.state.claims.keys() if subject.trains else claimed  # what is touched changes in place, where an optimizer holds it
    free = {id(tensor) for name, tensor in held.items() if any(name.startswith(f"{one}.") for one in may_go)}  # under any of its names
    if exchanged := [name for name, tensor in held.items() if others.get(name) is not tensor and id(tensor) not in free]:
        text = f"{exchanged[0]}: another parameter stands here, or none, while ties and an optimizer keep the old one"
        raise Violation("left behind", f"{text}; write into it with copy_, or claim the module with state.claim(names, self.label)")
    now = _unsaved(run.model)
    changed = [name for name in unsaved if now.get(name, unsaved[name]) != unsaved[name] and name.rpartition(".")[0] not in claimed]
    if changed := sorted(set(changed) - written):
        text = f"{changed[0]}: {len(changed)} buffers that no checkpoint holds are no longer what was loaded"
        raise Violation("left behind", f"{text}, so that a loaded result is another one; {advice}")
    return f"{len(before) + len(unsaved)} tensors, {len(claimed)} modules claimed or touched"


def _unsaved(model: nn.Module) -> dict[str, Bits]:
    """Buffers that are computed and not stored, such as rotary tables: whoever loads the result has them as they were."""
    stored = model.state_dict().keys()
    return {name: Bits(buffer) for name, buffer in model.named_buffers(remove_duplicate=False) if name not in stored}


@register("already_quantized", "Applying to an already quantized model raises", number=52, tags=("idempotent",))
def already_quantized(subject: Subject) -> str:
    """Run a second, fresh modifier over the result of the first.

    Args:
        subject: what is verified.

    Returns:
        What was seen.

    Raises:
        NothingToCheckError: it replaces no module.
        Violation: the second one is accepted, or leaves a change behind.
    """
    run = subject.open()
    start = Snapshot(run.model)
    subject.live(subject.check(run), run)
    if not [one for one in start.differences(Snapshot(run.model)) if one.kind == "module"]:
        raise NothingToCheckError("it replaces no module")
    second = subject.open(model=run.model)
    before = Snapshot(run.model)
    refusals: tuple[type[BaseException], ...] = (*subject.refusals, ValueError, RuntimeError)
    try:
        second.initialize()
    except refusals:
        left = before.differences(Snapshot(run.model))
        if left:
            raise Violation("unchanged", f"a quantized model is refused, and changed: {left[0]}", causes(left)) from None
        return "refused at initialize"
    raise Violation(
        "accepted", "a model whose modules it has replaced before is accepted again; refuse it in on_initialize, or declare 'idempotent'"
    )


@register(
    "rolls_back",
    "A failure in the middle rolls back, or leaves a directory that no loader takes for a finished checkpoint",
    number=54,
    in_training=True,
    in_modes=True,
)
def rolls_back(subject: Subject) -> str:
    """Fail at every callback with originals kept, and compare the model; then fail in the main path with a folder to write to.

    Args:
        subject: what is verified.

    Returns:
        What was seen.

    Raises:
        Violation: the model is not as it was, or something like a checkpoint is in the folder.
    """
    kinds = {"state", "session", *subject.allowed, *(("tensor",) if "in_place" in subject.tags else ())}
    num_faults = 0
    for checked, fault, outcome in _faults(subject, keep_originals=True):
        left = outermost(checked.start.differences(checked.now, kinds)) if outcome.kind == "failed" else []
        if left := [one for one in left if not (is_added(one) and "attribute" in subject.allowed)]:
            raise Violation("left behind", f"{fault}: {list_differences(left[:1])}", causes(left))
        num_faults += 1
    if subject.is_tiny and not subject.trains and subject.session_class is Session:
        _fail_on_the_main_path(subject)
    return f"{num_faults} failures"


def _fail_on_the_main_path(subject: Subject) -> None:
    subject.stopwatch.pause()
    from compressor.entrypoints.oneshot import oneshot  # heavy: transformers, and all that it imports

    subject.stopwatch.restart()
    recorder = Recorder()
    first, *others = subject.fresh().parts()  # a recipe puts them in its place, and its own callbacks do not run
    record(first, recorder, 0)
    recorder.begin({(0, "on_finalize"): Act(ending="raised")})
    model: nn.Module = copy.deepcopy(subject.model)
    data = torch.cat([batch for batch in subject.batches if isinstance(batch, torch.Tensor)])
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "checkpoint"
        try:
            oneshot(model, recipe=[first, *others], dataset=data, output_dir=target)
        except Exception as error:  # noqa: BLE001 - which error comes out is judged elsewhere
            text = describe(error)
        else:
            raise Violation("errors", "oneshot went on after on_finalize had raised")
        found = [path.name for path in target.rglob("*") if path.suffix in (".safetensors", ".json")] if target.exists() else []
        if found:
            raise Violation("left behind", f"oneshot failed ({text}), and left {', '.join(sorted(found))} in the output folder")
