"""The command `harness`, and `python -m harness`, where its script is not in the path."""

from __future__ import annotations

import sys
from collections.abc import Callable

from compressor.interruption import interruptible


def _load() -> Callable[[], int]:
    from harness.cli import main as run

    return run


def main() -> int:
    """Run the command on the arguments of the process.

    Returns:
        As `harness.cli.main`.
    """
    return interruptible("harness", _load)


if __name__ == "__main__":
    sys.exit(main())
