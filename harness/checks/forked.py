"""A copy of this process (`os.fork`), in which something is tried that this process is not to remember.

What a function keeps between its calls, at a module, in a closure or in a cache of its own, cannot be taken back; a copy that ends can.
As in the workers of torch's DataLoader, torch computes with one thread there, for those of this process do not live on in a copy.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from compressor.json_text import from_json
from harness.checks.catalogue.registry import NothingToCheckError, described

_SECONDS = 120


def in_a_fork(make: Callable[[], Mapping[str, str]]) -> dict[str, str]:
    """Make something in a copy of this process, which ends with it.

    Args:
        make: what is returned comes back as JSON.

    Returns:
        The same.

    Raises:
        NothingToCheckError: not on Linux, or it raises something there, or takes more than two minutes.
    """
    if sys.platform != "linux":
        raise NothingToCheckError("only on Linux a process that computes can be copied")
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the threads that the copy does not have
        pid = os.fork()
    if not pid:
        _answer(make, write)
    os.close(write)
    with os.fdopen(read, "rb") as answers:
        if not select.select([read], [], [], _SECONDS)[0]:
            os.kill(pid, signal.SIGKILL)
        text = answers.read()
    os.waitpid(pid, 0)
    found: Mapping[str, Any] = from_json(text) if text else {"error": "the copy ended without an answer"}
    if "error" in found:
        raise NothingToCheckError(f"in a copy of the process: {found['error']}")
    made: dict[str, str] = found["made"]
    return made


def _answer(make: Callable[[], Mapping[str, str]], write: int) -> None:
    """Write what was made, or why it was not, and end, with none of what this process does at its end."""
    torch.set_num_threads(1)
    try:
        found: dict[str, object] = {"made": dict(make())}
    except BaseException as error:  # noqa: BLE001 - a subject may raise anything; other checks say what is wrong with it
        found = {"error": described(error)}
    with os.fdopen(write, "w") as answer:
        answer.write(json.dumps(found))
    os._exit(0)
