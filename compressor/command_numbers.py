"""Numbers on the command line, with a line of their own for what is none; nothing heavy is imported."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Read a whole number above 0.

    Args:
        text: as given.

    Returns:
        The number.

    Raises:
        ArgumentTypeError: it is none.
    """
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def count(text: str) -> int:
    """Read a whole number of 0 or more.

    Args:
        text: as given.

    Returns:
        The number.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def whole(text: str) -> int:
    """Read a whole number.

    Args:
        text: as given.

    Returns:
        The number.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)
