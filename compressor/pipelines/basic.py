"""The pipeline of whole forwards: every batch through the uncompressed model, then one stage that holds all modules."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

import torch

from compressor.data import Batch, CalibrationData, batch_to
from compressor.lifecycle import EventType, Modifier, Session
from compressor.lifecycle.padding import check_padding, note_unread_masks
from compressor.pipelines.forward_checks import (
    calibration_mode,
    calls_of,
    check_alike,
    check_still_called,
    compressed_names,
    note_kept,
    refuse_exchanged,
    set_token_mask,
    watched_modules,
    weights_held_to,
)
from compressor.pipelines.journal import NullJournal, StageJournal
from compressor.pipelines.memory import memory_explained
from compressor.progress import Progress
from compressor.tracing.footprint import all_that_may_change
from compressor.tracing.graph.nodes import Unrepeatable
from compressor.tracing.picking import check_model
from compressor.tracing.targets.call_order import changed_by_forwards, plain_forward
from compressor.tracing.traces import Traces


def run(session: Session, data: CalibrationData, *, progress: Progress, journal: StageJournal | None = None) -> None:
    """Calibrate in whole forwards.

    Args:
        session: initialized; its model changes.
        data: at least one batch.
        progress: where a bar is shown.
        journal: keeps the one stage, or knows it from an earlier run, which then needs no forward; None keeps nothing.

    Raises:
        TracingError: the model is compiled, so that its calls are not seen, or has weights without values.
    """
    state, journal = session.state, journal or NullJournal()
    check_model(state.model)
    session.send(EventType.CALIBRATION_START)
    state.monitor.begin_stage()
    names = tuple(name for name, _ in state.model.named_modules())
    # To the journal the whole model is one stage, so a run whose checkpoint could not be saved is resumed like any other.
    is_finished = journal.open_stage(session, 0, "", names, 1)
    if not is_finished:
        with memory_explained(state.model, "the model", "calibrated", names):
            called, rewritten = _forward_all(session, data, progress)
    with memory_explained(state.model, "the model", "compressed", names):
        if is_finished:
            journal.restore_stage(session)
        else:
            session.send(EventType.SEQUENTIAL_EPOCH_END, modules=names)
            check_alike(state, names)
            journal.finish_stage(session)
            state.monitor.end_stage(1, 1, "all layers", state.report.errors(names), data.num_tokens)
    session.send(EventType.CALIBRATION_END)
    if not is_finished:
        with calibration_mode(state):
            check_still_called(session, data, called, rewritten)


def _forward_all(session: Session, data: CalibrationData, progress: Progress) -> tuple[set[str], Collection[str]]:
    """Run every batch on the model as it was loaded: what a forward leaves there is taken back after each.

    Returns the modules that were called, and the parameters that were written to.
    """
    state = session.state
    with calibration_mode(state), progress.task("calibrate", total=len(data.batches)) as task:
        watched = watched_modules(session)
        names = compressed_names(state)
        with session.hooks_disabled(), calls_of(state.model, names) as called, weights_held_to(state.model, names) as exchanged:
            stirred, kept = changed_by_forwards(state.model, watched, [batch_to(batch, state.device) for batch in data.batches[:2]])
            refuse_exchanged(exchanged, stirred.rewritten)
            note_unread_masks(state, data)
            check_padding(state, data, watched)
        note_kept(state, kept)
        # Nobody would look: modifiers of need `own` run forwards themselves, and may have hooks for those.
        if not any(_looks(modifier) for modifier in session.modifiers):
            return called, stirred.rewritten
        stirred.add(all_that_may_change(state.model, watched))  # later batches may change what the first one leaves alone
        with Traces(state.model, stirred) as traces:
            for index in state.own_batches(data):
                batch = data.batches[index]
                state.ranks.check()
                set_token_mask(state, data, index)
                with torch.no_grad(), traces.forwards():
                    _forward(session, batch_to(batch, state.device))
                traces.undo()
                task.advance()
    return called, stirred.rewritten


def _looks(modifier: Modifier) -> bool:
    need = modifier.calibration_need
    return need not in ("none", "own") or (need == "none" and bool(modifier.hooked_modules()))


def _forward(session: Session, batch: Batch) -> None:
    """Run a forward under hooks; what a hook raises is not called the model's."""
    try:
        plain_forward(session.state.model, batch)
    except Unrepeatable as error:
        with session.hooks_disabled():
            plain_forward(session.state.model, batch)
        raise cast("Exception", error.__cause__) from None
