"""What happens when a capture fails: in which order it is ended, put right and named. It knows no device, so every machine can test it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from compressor.errors import ReplayError

T = TypeVar("T")


def run_captured(
    begin: Callable[[], object],
    run: Callable[[], T],
    end: Callable[[], object],
    recover: Callable[[], object],
    name: Callable[[RuntimeError], ReplayError],
) -> T:
    """Run something between the begin and the end of a capture, and leave no capture open.

    Args:
        begin: opens the capture.
        run: what is captured.
        end: closes it; it fails where the device has given the capture up.
        recover: puts right what a failed end leaves behind.
        name: says in our words what the device refused.

    Returns:
        What it returned.

    Raises:
        ReplayError: refused by the recorder, or by the device.
    """
    begin()
    try:
        result = run()
    except BaseException as error:
        _close(end, recover)
        if isinstance(error, RuntimeError) and not isinstance(error, ReplayError):
            raise name(error) from error
        raise
    try:
        end()
    except RuntimeError as error:
        recover()
        raise name(error) from error
    return result


def _close(end: Callable[[], object], recover: Callable[[], object]) -> None:
    """End a capture whose content has failed; where the end fails too, it says the same once more."""
    try:
        end()
    except RuntimeError:
        recover()
