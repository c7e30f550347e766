"""Which recorder, if any, listens to the code that runs: a context variable, so that paused forwards and other threads have their own."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol


class LeafRecorder(Protocol):
    """What a leaf needs of a recorder."""

    inside: int

    def call_leaf(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        """Record a call as one node."""


_RECORDER: ContextVar[LeafRecorder | None] = ContextVar("recorder", default=None)


def set_recorder(recorder: LeafRecorder | None) -> None:
    """Say who listens from now on.

    Args:
        recorder: None for nobody.
    """
    _RECORDER.set(recorder)


def listening_recorder() -> LeafRecorder | None:
    """Return the recorder that listens to this very code.

    Returns:
        None outside of recordings and inside of what is recorded as one node.
    """
    recorder = _RECORDER.get()
    return None if recorder is None or recorder.inside else recorder
