"""`python -m harness`: the command `harness`, where its script is not in the path."""

from __future__ import annotations

import sys

from harness.cli import main

if __name__ == "__main__":
    sys.exit(main())
