"""The pipeline of whole forwards: every batch through the uncompressed model, then one stage that holds all modules."""

from __future__ import annotations

import torch

from compressor.data import CalibrationData, batch_to
from compressor.lifecycle import EventType, Session, State
from compressor.pipelines.calibration_mode import calibration_mode, set_token_mask
from compressor.pipelines.journal import NoJournal
from compressor.pipelines.out_of_memory import memory_explained
from compressor.progress import Progress
from compressor.tracing.observe import plain_forward


def run(session: Session, data: CalibrationData, *, progress: Progress, journal: NoJournal | None = None) -> None:
    """Calibrate in whole forwards.

    Args:
        session: initialized; its model changes.
        data: at least one batch.
        progress: where a bar is shown.
        journal: keeps the one stage, or knows it from an earlier run, which then needs no forward; None keeps nothing.
    """
    state, journal = session.state, journal or NoJournal()
    session.send(EventType.CALIBRATION_START)
    names = tuple(name for name, _ in state.model.named_modules())
    if not journal.open_stage(session, 0, "", names, 1):
        with memory_explained(state.model, "the model", "calibrated", names):
            _forward_all(state, data, progress)
    with memory_explained(state.model, "the model", "compressed", names):
        journal.compress(session, names)
    session.send(EventType.CALIBRATION_END)


def _forward_all(state: State, data: CalibrationData, progress: Progress) -> None:
    with calibration_mode(state), progress.task("calibrate", total=len(data.batches)) as task:
        for index, batch in enumerate(data.batches):
            set_token_mask(state, data, index)
            with torch.no_grad():
                plain_forward(state.model, batch_to(batch, state.device))
            task.advance()
