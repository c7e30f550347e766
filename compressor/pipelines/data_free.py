"""The pipeline without data: modifiers that need none do their work at CALIBRATION_END."""

from __future__ import annotations

from compressor.lifecycle import EventType, Session
from compressor.pipelines.memory import memory_explained
from compressor.progress import Progress


def run(session: Session, *, progress: Progress) -> None:
    """Send the events of a calibration without data.

    Args:
        session: initialized; its model changes.
        progress: where a bar is shown.
    """
    with progress.task("compress", total=1) as task:
        session.send(EventType.CALIBRATION_START)
        model, monitor = session.state.model, session.state.monitor
        monitor.begin_stage()
        with memory_explained(model, "the model", "compressed", [name for name, _ in model.named_modules()]):
            session.send(EventType.CALIBRATION_END)
        text = monitor.end_stage(1, 1, "all layers", session.state.report.errors(session.state.report.modules), 0)
        task.advance(1, text)
