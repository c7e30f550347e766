"""`python -m compressor`: the command `compressor`, as torchrun starts it."""

from __future__ import annotations

import sys

from compressor.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
