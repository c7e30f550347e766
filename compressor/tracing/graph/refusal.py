"""Refusing to record, and where in the model's source something happened."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from compressor.errors import TracingError
from compressor.tracing.records import short_file

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])
_MOST_SAID = 300  # characters of a foreign message
_OUTERMOST = (str(Path(__file__).with_name("record.py")), "_run")  # the frame that calls the model


class Place(NamedTuple):
    """A line of the model's source."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Return `file.py:line`."""
        return f"{short_file(self.file)}:{self.line}"


class Frame(NamedTuple):
    """A running function of the model: its code, its globals and what it is a method of."""

    code: CodeType
    module_globals: dict[str, Any]
    owner: Any


class Refusal(TracingError):
    """The recorder cannot follow the model here."""

    def __init__(self, message: str, frames: tuple[Frame, ...] = ()) -> None:
        """Keep the running functions, outermost first, beside the message."""
        super().__init__(message)
        self.frames = frames


class Unrepeatable(TracingError):
    """No engine can run it in stages: a forward changes what all share, uses weights outside of their targets, or orders contradict."""


class Unreached(Unrepeatable):
    """No batch calls any of the targets."""


class SwallowedTarget(Refusal):
    """A function that is recorded as one node calls a sequential target."""

    def __init__(self, message: str, leaf: str) -> None:
        """Keep the name of the function beside the message."""
        super().__init__(message)
        self.leaf = leaf


def one_line(error: BaseException) -> str:
    """Say what somebody else's exception says, which may be a page.

    Args:
        error: any exception.

    Returns:
        Its class and the beginning of its message, in one line.
    """
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= _MOST_SAID else text[:_MOST_SAID] + ' ...'}"


def _model_frames() -> Iterator[FrameType]:
    """Give the running frames of the forward that belong neither to torch nor to the recorder, innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if (file, frame.f_code.co_name) == _OUTERMOST:
            return
        if not file.startswith((_TORCH, _OURS)):
            yield frame
        frame = frame.f_back


def current_place() -> Place:
    """Find the line of the model's code that runs.

    Returns:
        The innermost line outside of torch and the recorder.
    """
    frame = next(_model_frames(), None)
    return Place("?", 0, "?") if frame is None else Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)


def current_frames() -> tuple[Frame, ...]:
    """List the running functions of the model.

    Returns:
        Outermost first.
    """
    found = [Frame(frame.f_code, frame.f_globals, frame.f_locals.get("self", frame.f_locals.get("cls"))) for frame in _model_frames()]
    return tuple(reversed(found))
