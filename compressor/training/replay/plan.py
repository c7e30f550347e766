"""A plan: one captured step with its input buffers, and the guards that say whether it still stands for the eager one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from compressor.errors import (
    BindError,
    EscapedTensorError,
    GuardDriftError,
    HostReadError,
    PointerDriftError,
    ReplayError,
    SignatureDriftError,
)
from compressor.settings.kinds import Kind, object_of
from compressor.settings.options import checked
from compressor.training.capture.module_scope import Whereabouts
from compressor.training.capture.protocol import Captured, Engine
from compressor.training.capture.recorder import Recorder
from compressor.training.capture.signature import drift, neutral
from compressor.training.guards.containers import guarded_tensors, own_generators
from compressor.training.guards.escaping_tensors import BatchPart, batch_contents, check_batch, check_escapes, kept_tensors
from compressor.training.guards.host_facts import Identities, difference, host_facts, looks_for_nan
from compressor.training.guards.host_reads import watching_host
from compressor.training.guards.iterators import refuse_iterators
from compressor.training.guards.optimizer_state import optimizer_facts, refuse_moved
from compressor.training.guards.python_state import one_look
from compressor.training.guards.python_values import PythonValues
from compressor.training.step.batch import Batch, InputBuffers, named_leaves
from compressor.training.step.snapshot import Snapshot
from compressor.training.step.step import TrainStep

T = TypeVar("T")


class Plan:
    """A captured step on fixed storages.

    Args:
        step: the step that it stands for.
        batch: the batch to capture with; on the CPU this performs the step on it.
        engine: the device's engine.

    Raises:
        ReplayError: the step cannot be captured; it may have run in part.
    """

    @checked(step=object_of(TrainStep, words="a TrainStep"), engine=Kind(lambda value: hasattr(value, "eager"), "an Engine"))
    def __init__(self, step: TrainStep, batch: Batch, engine: Engine) -> None:
        self.step = step
        _refuse_shared(step, batch)
        self.buffers = InputBuffers(batch)
        self.python = PythonValues()
        self.captured = record(step, self.buffers, engine, self.python)
        self.skipped = step.skipped
        with one_look():
            self._facts = host_facts(step)
            self._tensors = guarded_tensors(step)  # held, so that no other tensor can take over an address
            self._addresses = self._guarded(self._tensors)
            self._identities = Identities(step)
        self.proven_with_other_batch = False

    def guard(self) -> None:
        """Check that the plan still stands for the eager step.

        Raises:
            PointerDriftError: a tensor lies elsewhere than at capture.
            GuardDriftError: a fact of the host has changed.
        """
        if self._identities.unchanged():
            return
        now = self._guarded(guarded_tensors(self.step))
        if now != self._addresses:
            name = next(name for name in {**self._addresses, **now} if now.get(name) != self._addresses.get(name))
            what = _drift(self._addresses.get(name), now.get(name))
            is_gradient = name.startswith("grad:")
            own = "end a backward pass of your own, or what else has set it, with optimizer.zero_grad()"
            advice = own if is_gradient else "update in place with copy_"
            raise PointerDriftError(
                f"{name}: it {what} since the capture of {len(self.captured.ops)} ops, and a replay writes to the old storage; "
                f"{advice}, or call Trainer.forget_plans()"
            )
        changed = difference(self._facts, host_facts(self.step))
        if changed is not None:
            raise GuardDriftError(
                f"{changed}, since the capture of {len(self.captured.ops)} ops; put it back, {_remedy(changed)}, "
                "or call Trainer.forget_plans()"
            )
        self._identities = Identities(self.step)  # other objects of equal value

    def __call__(self, batch: Batch) -> Tensor:
        """Perform one step by replay.

        Args:
            batch: has the metadata of the captured one.

        Returns:
            A copy of the loss.
        """
        self.buffers.bind(batch)
        self.captured.replay()
        self.step.skipped = self.skipped
        return self.captured.loss.clone()

    def _guarded(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
        """Return addresses, without those of optimizer state that this plan leaves alone: another plan may make it."""
        skipped = set(self.skipped)
        others = {name for name, parameter in self.step.parameters().items() if parameter in skipped}
        return _addresses({n: t for n, t in tensors.items() if not (n.startswith("opt.") and n.partition(":")[2] in others)})


def _remedy(changed: str) -> str:
    """Say how a fact that varies may do so; of a captured update only the rate may be a tensor."""
    is_setting = changed.startswith("optimizer group") and ": lr " not in changed and ": parameters " not in changed
    return "leave fused=True and capturable=True out of the optimizer" if is_setting else "make a number that varies a tensor"


def _refuse_shared(step: TrainStep, batch: Batch) -> None:
    """Refuse a batch that lies in what the step writes while it reads it: a buffer of the replay keeps the values of before."""
    written = {t.untyped_storage()._cdata: name for name, t in step.tensors().items() if not name.startswith("param:")}
    for path, leaf in named_leaves(batch).items():
        name = written.get(leaf.untyped_storage()._cdata) if isinstance(leaf, Tensor) else None
        if name is not None:
            raise BindError(f"batch{path}: it shares its memory with {name}, which the step writes; give a clone()")


def record(step: TrainStep, buffers: InputBuffers, engine: Engine, python: PythonValues) -> Captured:
    """Capture a step on fixed inputs, and check that it left nothing behind that a replay would not.

    Args:
        step: the step.
        buffers: its inputs.
        engine: the device's engine.
        python: gets the numbers of the run.

    Returns:
        The captured step.

    Raises:
        ReplayError: by its named subclasses, what cannot be captured.
    """
    refuse_early(step)
    before = None if engine.runs_while_capturing else _rehearse(step, buffers, engine, python)
    generators = own_generators(step)

    def capture(recorder: Recorder, batch: Callable[[], Batch]) -> tuple[Captured, Tensor]:
        captured = engine.capture(lambda: step.captured_part(batch()), recorder, generators)
        return captured, captured.loss

    captured, _ = _watch(step, buffers, capture, python if before is None else PythonValues())
    moved = None if before is None else drift(neutral(before), neutral(captured.lines), ("eager", "captured"))
    if moved is not None:
        raise SignatureDriftError(
            f"the step takes another way while a graph is captured, as code does that asks whether it is: {moved}\n"
            "decide before the step; to models of transformers give the whole attention mask with the batch"
        )
    return captured


def _rehearse(step: TrainStep, buffers: InputBuffers, engine: Engine, python: PythonValues) -> list[str]:
    """Run the step eagerly under the recorder, and go back: what cannot be captured is said before anything is."""
    generators = own_generators(step)
    start = Snapshot.take(step, generators)
    inputs = {path: tensor.clone() for path, tensor in buffers.tensors.items()}

    def run(recorder: Recorder, batch: Callable[[], Batch]) -> tuple[list[str], None]:
        def recorded() -> Tensor:
            with recorder:
                return step.captured_part(batch())

        engine.eager(recorded)
        return [op.line for op in recorder.ops], None

    try:
        return _watch(step, buffers, run, python)[0]
    finally:
        start.put_back(step, generators)
        for path, tensor in buffers.tensors.items():
            tensor.copy_(inputs[path])


def _watch(
    step: TrainStep,
    buffers: InputBuffers,
    run: Callable[[Recorder, Callable[[], Batch]], tuple[T, Tensor | None]],
    python: PythonValues,
) -> tuple[T, Tensor | None]:
    """Run the step under a recorder, and check that it left nothing behind that a replay would not."""
    tensors, facts, kept, held = step.tensors(), host_facts(step), kept_tensors(step), optimizer_facts(step)
    whereabouts = Whereabouts(step.model)
    roles = {**{f"in:{path}": tensor for path, tensor in buffers.tensors.items()}, **tensors, **step.ranks.buckets}
    recorder = Recorder(roles, step.device, whereabouts, groups=step.ranks.groups, lasting=step.lasting)

    given: list[BatchPart] = []

    def batch() -> Batch:
        made = buffers.batch
        given.extend(batch_contents(made))
        return made

    def mark(phase: str) -> None:
        recorder.phase = phase

    with whereabouts.watching(), step.marking(mark), watching_host(step), python.watching():
        result = run(recorder, batch)
    recorder.finish()
    buffers.taken = check_batch(given, recorder)
    if buffers.taken and buffers.repeats_container:
        raise GuardDriftError(
            "batch: the step takes something out of it, and it holds one dict or list in two places, which are two in a replay; "
            "let the loss function change a copy (dict(...))"
        )
    _check_moved(tensors, step.tensors(), recorder)
    with one_look():
        check_escapes(step, recorder, kept, result[1])
        refuse_moved(held, step)
        changed = difference(facts, host_facts(step))
    if changed is not None:
        raise GuardDriftError(f"the step changes the host: {changed}, and a replay would not repeat it; keep it in a buffer, in place")
    return result


def _addresses(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: (t.data_ptr(), t.shape, t.stride(), t.dtype, t.is_neg(), t.is_conj()) for name, t in tensors.items()}


def _drift(before: tuple[Any, ...] | None, now: tuple[Any, ...] | None) -> str:
    if before is None or now is None:
        return "is new" if before is None else "is gone"
    return "lies elsewhere" if before[0] != now[0] else "is read in another shape, order, dtype or sign"


def refuse_early(step: TrainStep) -> None:
    """Refuse a step that cannot be captured, as far as this can be told without running it.

    Args:
        step: the step.

    Raises:
        ReplayError: by its named subclasses, what cannot be captured.
    """
    _refuse_compiled(step.model)
    if looks_for_nan():
        raise HostReadError(
            "torch.autograd.set_detect_anomaly is on: it looks for NaN on the host at every operator of the backward pass, which a replay "
            "would not; switch it off, or use mode='eager'"
        )
    step.ranks.refuse(step.device)
    refuse_iterators(step)


def _refuse_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ReplayError(
                f"{name or 'the model'}: it is compiled by torch.compile, whose graphs run other operators while they are watched; "
                "train the module that was compiled, or use mode='eager'"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ReplayError(
                f"{name or 'the model'}: it is a module of torch.jit, whose attributes cannot be guarded; train what it was made from, "
                "or use mode='eager'"
            )


def _check_moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor], recorder: Recorder) -> None:
    old, new = _addresses(before), _addresses(after)
    for name in {**old, **new}:
        if old.get(name) == new.get(name):
            continue
        if name not in before and name.startswith("opt."):
            raise SignatureDriftError(
                f"{name}: the update makes it in this step, for a parameter that no step of the warm-up reached: Python control flow; "
                "let each step reach the same parameters, or tell the ways apart by a constant in the batch"
            )
        if name in after and recorder.maker(after[name]) is not None:
            raise EscapedTensorError(
                f"{name}: the step puts a tensor of its own in this place, which a replay overwrites; write in place with copy_, "
                "or call forget_plans() where it was you who put another parameter or tensor there"
            )
        raise PointerDriftError(f"{name}: the step gives it another storage, which a replay would not; allocate before, write in place")
