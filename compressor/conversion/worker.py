"""A process that does units: `python -m compressor.conversion.worker BASE MADE DEVICE`.

It reads a unit from each line of standard input, and writes what came of it as a line of standard output. Who started it ends it; where
that one is gone without a word, the end of standard input says so.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

import torch
from pydantic import BaseModel

from compressor.conversion.files import Files
from compressor.conversion.rounding import run_unit
from compressor.conversion.units import Unit
from compressor.errors import CompressorError


class Failure(BaseModel):
    """Why a worker gave up.

    Attributes:
        kind: class of the error.
        text: what it says.
        code: of the system, for errors of files.
    """

    kind: str
    text: str
    code: int | None = None


EXPECTED = (CompressorError, OSError, MemoryError, RuntimeError)


def main(argv: Sequence[str]) -> int:
    """Do units until one fails, or the process is ended.

    Args:
        argv: folders to read and to write, and the device.

    Returns:
        1, after a failure.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C goes to all of the terminal's processes; who started this one ends it
    base, made, device = Path(argv[0]), Path(argv[1]), torch.device(argv[2])
    with Files(base) as read, Files(made, writable=True) as written:
        lines: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=_read, args=(lines,), daemon=True).start()
        while True:
            unit = Unit.model_validate_json(lines.get())
            try:
                done = run_unit(unit, read, written, device)
            except EXPECTED as error:
                print(Failure(kind=type(error).__name__, text=str(error), code=getattr(error, "errno", None)).model_dump_json(), flush=True)
                return 1
            print(done.model_dump_json(), flush=True)


def _read(lines: SimpleQueue[bytes]) -> None:
    """Hand lines on; at their end end the process, whatever it is doing: nobody waits for it any more, and a unit may take minutes."""
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
