"""What a load takes: other values than a module holds, of every tensor: zeros or ones, and numbers that no rounding keeps."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from harness.modules.irregular import STARTS, overwrite_irregularly
from harness.modules.subject import untouched
from harness.modules.tensors import non_persistent_names, overwrite, same_bits

_REFUSED = "loads of other values were not looked at to the end"
_CHANGES: tuple[Callable[[nn.Module], None], ...] = (
    overwrite,
    *(functools.partial(overwrite_irregularly, start=start) for start in STARTS),
)


def copied_state(module: nn.Module) -> dict[str, Any]:
    """Copy the state dict of a module, versions included, with all that it holds.

    Args:
        module: the module.

    Returns:
        What its `state_dict` gives, in memory of its own.
    """
    saved: dict[str, Any] = copy.copy(module.state_dict())
    for name, value in saved.items():
        saved[name] = value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
    return saved


def not_loaded(module: nn.Module, state: dict[str, Any]) -> list[str]:
    """Load a state dict, and find what is not there then. Changes the module.

    Args:
        module: the module.
        state: what is loaded, strictly.

    Returns:
        Names of the tensors that are others than those of the state dict.
    """
    module.load_state_dict(state, strict=True)
    now = module.state_dict()
    return [name for name, value in state.items() if isinstance(value, Tensor) and not (name in now and same_bits(value, now[name]))]


def halved(state: dict[str, Any]) -> dict[str, Any]:
    """Make a state dict of other numbers, which a module that checks what it loads takes as it takes its own.

    Args:
        state: of a module.

    Returns:
        One with half of each floating-point number, in the same dtype; versions and all else are copied.
    """
    others = copy.copy(state)
    for name, value in state.items():
        is_number = isinstance(value, Tensor) and value.is_floating_point()
        # An 8-bit float knows no arithmetic.
        others[name] = (value.detach().to(torch.float64) / 2).to(value.dtype) if is_number else copy.deepcopy(value)
    return others


def note_refusal(error: Exception, not_seen: list[str]) -> None:
    """Note that a module refuses other values than its own; it may, and once is enough.

    Args:
        error: what a load of them raised.
        not_seen: gets the line, unless it has one.
    """
    if not any(line.startswith(_REFUSED) for line in not_seen):
        not_seen.append(f"{_REFUSED}, since one raises {type(error).__name__}: {error}")


def not_taken(module: nn.Module, not_seen: list[str]) -> list[str]:
    """Load values that are others than those that a module holds. It is left as it was.

    A load of its own values is not enough: one that puts first values back is right about them, where the module holds them, and one that
    rounds is, where they are round. Nor are irregular ones alone: a load may take zeros for what is missing.

    Args:
        module: the module.
        not_seen: gets a line where the module refuses to load other values, as one that keeps a checksum of them may do.

    Returns:
        Names of the tensors that do not hold what was loaded.
    """
    lost: dict[str, None] = {}
    for change in _CHANGES:
        with untouched(module):
            try:
                with untouched(module):
                    change(module)
                    others = copied_state(module)
                lost |= dict.fromkeys(not_loaded(module, others))
            except Exception as error:  # noqa: BLE001 - a module may refuse values in any way; a load of its own values is looked at elsewhere
                note_refusal(error, not_seen)
    return [name for name in lost if name not in non_persistent_names(module)]  # that one of these is saved is told elsewhere
