"""Where the two sides of an exchange come from: a step on a tape, and functions by their names."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compressor.errors import UserInputError
from compressor.training import Plan, TrainStep
from compressor.training.engines.select import TapeEngine
from compressor.training.replay.prove import prove
from harness.replay.kernels.compare import Swap

_WARMUP = 2
# What running somebody's module may raise beside ImportError.
_BROKEN = (
    *(SyntaxError, NameError, AttributeError, TypeError, ValueError, LookupError),
    *(ArithmeticError, AssertionError, OSError, RuntimeError),
)


def plan_on_tape(step: TrainStep, batch_at: Callable[[int], Any]) -> Plan:
    """Warm a step up, capture it on a tape, on whatever device it runs, and prove the tape.

    Args:
        step: the step; four steps are made.
        batch_at: gives batches of one metadata by number.

    Returns:
        The plan.

    Raises:
        ReplayError: the step cannot be captured.
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
    return Swap(match, load_function(module, name, text), path)


def load_function(module_name: str, name: str, where: str) -> Callable[..., Any]:
    """Import a function. This runs the module.

    Args:
        module_name: dotted; the current folder is looked into first.
        name: of the function; `Class.method` reaches further in.
        where: for messages.

    Returns:
        The function.

    Raises:
        UserInputError: there is no such module or function, or it cannot be called.
    """
    with _current_folder_first():
        try:
            value: Any = importlib.import_module(module_name)
        except ImportError as error:
            raise UserInputError(
                f"--swap {where!r}: module {module_name!r} cannot be imported ({error}); run in its folder, or install it"
            ) from error
        except _BROKEN as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserInputError(
                f"--swap {where!r}: module {module_name!r} fails while it is imported ({type(error).__name__}: {reason}); "
                "make it importable first"
            ) from error
    for part in name.split("."):
        if not hasattr(value, part):
            nearest = difflib.get_close_matches(part, [known for known in dir(value) if not known.startswith("_")], n=1)
            advice = f"did you mean {nearest[0]}?" if nearest else "name a function that it defines"
            raise UserInputError(f"--swap {where!r}: {module_name} has no {part!r}; {advice}")
        value = getattr(value, part)
    if not callable(value):
        raise UserInputError(f"--swap {where!r}: {name} is a {type(value).__name__}, which cannot be called; name a function")
    function: Callable[..., Any] = value
    return function


@contextmanager
def _current_folder_first() -> Iterator[None]:
    """Let modules of the current folder be found for the time of a block."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
