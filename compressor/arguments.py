"""What is around a call: the dtypes that torch would compute in."""

from __future__ import annotations

from collections.abc import Callable
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
