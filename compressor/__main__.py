"""The command `compressor`, and `python -m compressor`, as torchrun starts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from compressor.interruption import interruptible

_ALLOCATOR = "PYTORCH_ALLOC_CONF"


def _load() -> Callable[[], int]:
    # Activations that stay on a GPU come to lie in pieces of what statistics and solvers have freed: without segments that grow, a GPU
    # that is nearly full has room enough and none in one piece. Read by torch when it is imported; what the user has set holds.
    if not {_ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ[_ALLOCATOR] = "expandable_segments:True"
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
