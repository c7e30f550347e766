"""Ctrl-C and SIGTERM end a command in one line, from before its first import on: what stands here needs none but the standard library's."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_INTERRUPTED = 130
"""What a shell reports of a program that ctrl-C has ended: 128 + SIGINT."""


def interruptible(name: str, load: Callable[[], Callable[[], int]]) -> int:
    """Import a command, which takes a second or ten, and run it.

    Args:
        name: of the command, for the line of an interruption that it does not tell itself.
        load: imports it.

    Returns:
        The command's exit code, or EXIT_INTERRUPTED.
    """
    with ended_by_sigterm():
        try:
            return load()()
        except (KeyboardInterrupt, ImportError) as stop:
            if not _is_interruption(stop):
                raise
            print(f"{name}: interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        finally:
            exec("")  # CPython ends as one that was killed where ctrl-C came in an exec of text, as in dataclasses, until the next one


def _is_interruption(error: BaseException) -> bool:
    """Whether it is one, or comes of one: an extension in C whose import is interrupted says that it could not be imported."""
    while not isinstance(error, KeyboardInterrupt):
        came_of = error.__cause__ or error.__context__
        if came_of is None:
            return False
        error = came_of
    return True


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Take SIGTERM, which schedulers send, for ctrl-C; where nobody listens to it yet."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _as_ctrl_c)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _as_ctrl_c(number: int, frame: FrameType | None) -> None:
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    if not callable(on_ctrl_c):  # shells let what they start in the background ignore it
        on_ctrl_c = signal.default_int_handler
    on_ctrl_c(number, frame)
