"""Where the two sides of an exchange come from: a step on a tape, and functions by their names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from compressor.errors import UserInputError
from compressor.object_reference import resolve
from compressor.settings.kinds import FUNCTION
from compressor.settings.options import checked
from compressor.training import Plan, TrainStep
from compressor.training.engines.select import TapeEngine
from compressor.training.replay.prove import prove
from harness.replay.kernels.compare import Swap

_WARMUP = 2


@checked(batch_at=FUNCTION)
def plan_on_tape(step: TrainStep, batch_at: Callable[[int], Any]) -> Plan:
    """Warm a step up, capture it on a tape, on whatever device it runs, and prove the tape.

    Args:
        step: the step; four steps are made.
        batch_at: gives batches of one metadata by number.

    Returns:
        The plan.

    Raises:
        ReplayError: the step cannot be captured.
        UserInputError: `batch_at` is no function.
    """
    engine = TapeEngine()
    for number in range(_WARMUP):
        step(batch_at(number))
    plan = Plan(step, batch_at(_WARMUP), engine)
    step.finish()
    prove(plan, batch_at(_WARMUP + 1), engine)
    step.finish()
    return plan


def read_swap(text: str) -> Swap:
    """Read an exchange as the command line takes it, and import its function.

    Args:
        text: `aten.silu=module:function`; the module lies in the current folder or is installed.

    Returns:
        The exchange.

    Raises:
        UserInputError: the text has another form, or there is no such function.
    """
    match, equals, path = text.partition("=")
    module, colon, name = path.partition(":")
    if not all((match, equals, module, colon, name)):
        raise UserInputError(f"--swap {text!r}: this is not of the form OP=MODULE:FUNCTION; give for example aten.silu=mine:silu")
    return Swap(match, _load_function(path, text), path)


def _load_function(reference: str, swap: str) -> Callable[..., Any]:
    where = f"--swap {swap!r}"
    with _current_folder_first():
        function = resolve(reference, "function", where=where).value
    if not callable(function):
        name = reference.rpartition(":")[2]
        raise UserInputError(f"{where}: {name} is a {type(function).__name__}, which cannot be called; name a function")
    return cast(Callable[..., Any], function)


@contextmanager
def _current_folder_first() -> Iterator[None]:
    """Let modules of the current folder be found for the time of a block."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
