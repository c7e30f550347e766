"""How much memory this process has: the baseline that tensors come on top of."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """Return the resident memory of this process.

    Returns:
        Bytes now; where the system does not say, the most so far.
    """
    if _STATUS.exists():
        lines = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines() if ":" in line)
        return 1024 * int(lines["VmRSS"].split()[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
