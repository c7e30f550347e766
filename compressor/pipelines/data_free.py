"""The pipeline without data: modifiers that need none do their work at CALIBRATION_END."""

from __future__ import annotations

from compressor.errors import CalibrationError
from compressor.lifecycle import EventType, Session
from compressor.pipelines.memory import memory_explained
from compressor.progress import Progress


def run(session: Session, *, progress: Progress) -> None:
    """Send the events of a calibration without data.

    Args:
        session: initialized; its model changes.
        progress: where a bar is shown.

    Raises:
        CalibrationError: a modifier has hooks, which would see nothing.
    """
    with progress.task("compress", total=1) as task:
        session.send(EventType.CALIBRATION_START)
        _refuse_hooks(session)
        model, monitor = session.state.model, session.state.monitor
        monitor.begin_stage()
        with memory_explained(model, "the model", "compressed", [name for name, _ in model.named_modules()]):
            session.send(EventType.CALIBRATION_END)
        text = monitor.end_stage(1, 1, "all layers", session.state.report.errors(session.state.report.modules), 0)
        task.advance(1, text)


def _refuse_hooks(session: Session) -> None:
    watching = next((modifier for modifier in session.modifiers if modifier.hooked_modules()), None)
    if watching is not None:
        raise CalibrationError(
            f"{watching.label}: it has hooks on the model and asks for no data, so that they would see nothing; set calibration = 'basic' "
            "in its class, or 'sequential' where it compresses layer by layer"
        )
