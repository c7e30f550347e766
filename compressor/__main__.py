"""The command `compressor`, and `python -m compressor`, as torchrun starts it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from compressor.interruption import interruptible


def _load() -> Callable[[], int]:
    from compressor.cli.main import main as run

    return run


def main() -> int:
    """Run the command on the arguments of the process.

    Returns:
        As `compressor.cli.main.main`.
    """
    return interruptible("compressor", _load)


if __name__ == "__main__":
    sys.exit(main())
