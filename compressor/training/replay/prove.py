"""The proof of a plan: from one state, plain eager, recorded eager and a replay on spoiled storages must agree bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from compressor.errors import ProofError, ReplayError, SignatureDriftError
from compressor.random_state import RandomState
from compressor.training.capture.protocol import Engine
from compressor.training.capture.signature import drift
from compressor.training.guards.containers import LooseTensors
from compressor.training.guards.optimizer_state import optimizer_facts, refuse_moved
from compressor.training.guards.python_values import PythonValues
from compressor.training.python_state import PythonState
from compressor.training.replay.plan import Plan, record
from compressor.training.step.batch import Batch, lent
from compressor.training.step.snapshot import Snapshot
from compressor.training.step.step import TrainStep

_WATCHED = (
    "a compiled region, code that asks whether it is watched, something that moves on with each call (a counter, an iterator), "
    "a batch that shares memory with what the step writes or is read past its own (as_strided), "
    "or kernels that add in no fixed order (torch.use_deterministic_algorithms(True) forbids those)"
)


def prove(plan: Plan, batch: Batch, engine: Engine) -> Tensor:
    """Perform one step, three times from the same state, and compare.

    Args:
        plan: the plan; its step has performed exactly one step afterwards.
        batch: best one that the plan has not seen.
        engine: the device's engine.

    Returns:
        The loss.

    Raises:
        SignatureDriftError: the step runs other operators than at capture.
        GuardDriftError: the step moves the optimizer before its update, or counts where no guard looks.
        ProofError: the values differ. After either the state is as before the call.
    """
    return _compared(plan, batch, partial(_legs, plan, batch, engine, is_recorded=True))


def audit(plan: Plan, batch: Batch, engine: Engine) -> Tensor:
    """Perform one step of a proven plan, eagerly and by replay, and compare; only where they differ it is recorded again, to say why.

    Args:
        plan: as for `prove`.
        batch: any that fits.
        engine: the device's engine.

    Returns:
        The loss.

    Raises:
        SignatureDriftError: the values differ, since the step runs other operators than at capture.
        GuardDriftError: as for `prove`.
        ProofError: the values differ. After either the state is as before the call.
    """
    # Ranks differ together or not at all: one that records alone would wait for the others.
    return _compared(plan, batch, partial(_legs, plan, batch, engine, is_recorded=bool(plan.step.ranks.groups)))


def _compared(plan: Plan, batch: Batch, legs: Callable[[Snapshot], Tensor]) -> Tensor:
    plan.guard()
    start, python = Snapshot.take(plan.step, plan.captured.generators), PythonState(plan.step)
    unseen = not plan.buffers.holds(batch)
    plan.buffers.bind(batch)
    try:
        loss = legs(start)
    except ReplayError:
        python.put_back()
        start.put_back(plan.step, plan.captured.generators)
        raise
    plan.proven_with_other_batch = plan.proven_with_other_batch or unseen
    return loss


def eager_end(step: TrainStep, batch: Batch, engine: Engine, generators: list[torch.Generator]) -> Snapshot:
    """Run one eager step to see where it leads, and go back: state, inputs and random generators are as before the call.

    Args:
        step: the step.
        batch: as the caller gave it.
        engine: the device's engine.
        generators: random generators of its own that the step draws from.

    Returns:
        The state after the step, its loss among it.
    """
    start, loose = Snapshot.take(step, generators), LooseTensors(step)
    random = RandomState.current(foreign=True, devices=step.device)
    with lent(batch) as given:
        try:
            end = Snapshot.take(step, generators, engine.eager(lambda: step.captured_part(given)))
        except ReplayError:
            random.restore()
            loose.put_back()
            raise  # an error of the step's own leaves what an eager step leaves
    random.restore()
    loose.put_back()
    start.put_back(step, generators)
    return end


def compare_recorded(eager: Snapshot, recorded: Snapshot) -> None:
    """Refuse a step that gives other values while it is recorded.

    Args:
        eager: the state after the eager step.
        recorded: the state after the recorded one.

    Raises:
        ProofError: they differ.
    """
    _compare(eager, recorded, "recorded", _WATCHED)


def _legs(plan: Plan, batch: Batch, engine: Engine, start: Snapshot, *, is_recorded: bool) -> Tensor:
    """Run a step from one state: eagerly on the batch as given, recorded if that is asked for, and by replay on spoiled storages."""
    step, captured, generators = plan.step, plan.captured, plan.captured.generators
    inputs = {path: tensor.clone() for path, tensor in plan.buffers.tensors.items()}

    def rewind() -> None:
        start.put_back(step, generators)
        for path, tensor in plan.buffers.tensors.items():
            tensor.copy_(inputs[path])  # a step may work on its inputs in place

    held, python = optimizer_facts(step), PythonValues()
    with lent(batch) as given, python.watching():
        eager = Snapshot.take(step, generators, engine.eager(lambda: step.captured_part(given)))
    step.ranks.together(lambda: refuse_moved(held, step))
    rewind()
    if is_recorded:
        step.ranks.together(lambda: _record_again(plan, eager, engine, rewind))
        rewind()
    step.ranks.spoil()
    try:
        captured.replay_spoiled()
    except (RuntimeError, IndexError, ValueError) as error:
        raise ProofError(
            f"the replayed step fails on spoiled storages ({error}), so an operator reads what none made; locate() names it"
        ) from error
    loss = captured.loss.clone()
    end = Snapshot.take(step, generators, loss)
    if not is_recorded and (step.skipped != plan.skipped or eager.differences(end)):
        rewind()
        _record_again(plan, eager, engine, rewind)
    step.ranks.together(lambda: _compare(eager, end, "replayed", "locate() names the first operator that differs"))
    step.ranks.together(lambda: plan.python.refuse_moved(python))
    return loss


def _record_again(plan: Plan, eager: Snapshot, engine: Engine, rewind: Callable[[], None]) -> None:
    """Record the step once more, and hold it against the capture and the eager step."""
    again = record(plan.step, plan.buffers, engine, PythonValues())
    moved = drift(plan.captured.lines, again.lines)
    if moved is not None:
        raise SignatureDriftError(f"the step is another one on another batch: {moved}")
    if not again.ran_at_capture:
        rewind()
        again.replay()
    end = Snapshot.take(plan.step, plan.captured.generators, again.loss)
    _compare(eager, end, "recorded", _WATCHED)


def _compare(eager: Snapshot, other: Snapshot, kind: str, advice: str) -> None:
    found = eager.differences(other)
    if found:
        more = f"\n  and {len(found) - 6} more" if len(found) > 6 else ""
        raise ProofError(f"the {kind} step is not the eager one: {len(found)} differences; {advice}\n  " + "\n  ".join(found[:6]) + more)
