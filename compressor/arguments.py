"""What is around a call: the dtypes that torch would compute in, and the nearest of the words that could have been meant."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from compressor.errors import UserInputError


def check_dtypes_around(function: Callable[..., Any]) -> None:
    """Refuse to run under torch.autocast or another default dtype: forwards would compute otherwise than where the result is loaded.

    Args:
        function: that was called, for the error.

    Raises:
        UserInputError: autocast is on, for any kind of device, or torch.set_default_dtype() was called.
    """
    import torch

    kind = next((kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)), None)
    if kind is not None:
        raise UserInputError(
            f"{function.__name__}: torch.autocast({kind!r}, {torch.get_autocast_dtype(kind)}) is on around the call, and would compute "
            "forwards and statistics in another dtype than the model's; call it outside, and cast the model if that is meant"
        )
    if torch.get_default_dtype() != torch.float32:
        raise UserInputError(
            f"{function.__name__}: torch.set_default_dtype({torch.get_default_dtype()}) is in force, and what a forward makes would "
            "have another dtype than where the result is loaded; call torch.set_default_dtype(torch.float32) first, and cast the model if "
            "that is meant"
        )


def suggest(given: str, choices: Iterable[str]) -> str:
    """Return advice for a word that is not among the choices.

    Args:
        given: the word.
        choices: what would be valid.

    Returns:
        `did you mean 'x'?`, the list of choices where none is near, or to leave it out where there is no choice.
    """
    choices = list(choices)
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(given.lower(), by_lower, n=1)
    return f"did you mean '{by_lower[near[0]]}'?" if near else f"choose from {', '.join(choices)}" if choices else "leave it out"
