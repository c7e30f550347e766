"""The pipeline of whole forwards: every batch through the uncompressed model, then one stage that holds all modules."""

from __future__ import annotations

import torch

from compressor.data import CalibrationData, batch_to, call_model
from compressor.lifecycle import EventType, Session
from compressor.pipelines.calibration_mode import calibration_mode, set_token_mask
from compressor.progress import Progress


def run(session: Session, data: CalibrationData, *, progress: Progress) -> None:
    """Calibrate in whole forwards.

    Args:
        session: initialized; its model changes.
        data: at least one batch.
        progress: where a bar is shown.
    """
    state = session.state
    session.send(EventType.CALIBRATION_START)
    with calibration_mode(state), progress.task("calibrate", total=len(data.batches)) as task:
        for index, batch in enumerate(data.batches):
            set_token_mask(state, data, index)
            with torch.no_grad():
                call_model(state.model, batch_to(batch, state.device))
            task.advance()
    names = tuple(name for name, _ in state.model.named_modules())
    session.send(EventType.SEQUENTIAL_EPOCH_END, modules=names)
    session.send(EventType.CALIBRATION_END)
