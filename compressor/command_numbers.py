"""Numbers on the command line, with a line of their own for what is none; nothing heavy is imported."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Read a whole number above 0, or raise ArgumentTypeError."""
    return _read(text, "a whole number above 0", least=1)


def count(text: str) -> int:
    """Read a whole number of 0 or more, or raise ArgumentTypeError."""
    return _read(text, "a whole number of 0 or more", least=0)


def whole(text: str) -> int:
    """Read a whole number, or raise ArgumentTypeError."""
    return _read(text, "a whole number")


def _read(text: str, kind: str, least: int | None = None) -> int:
    value = int(text) if text.removeprefix("-").isdecimal() else None
    if value is None or (least is not None and value < least):
        raise argparse.ArgumentTypeError(f"{text!r} is not {kind}")
    return value
