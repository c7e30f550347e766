"""What a load takes: other values than a module holds, of every tensor, those that are all 0 or all 1 included."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from harness.modules.subject import untouched
from harness.modules.tensors import overwrite, same_bits


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


def not_taken(module: nn.Module, not_seen: list[str]) -> list[str]:
    """Load values that are others than those that a module holds. It is left as it was.

    A load of its own values is not enough: one that puts first values back is right about them, where the module holds them.

    Args:
        module: the module.
        not_seen: gets a line where the module refuses to load other values, as one that keeps a checksum of them may do.

    Returns:
        Names of the tensors that do not hold what was loaded.
    """
    with untouched(module):
        try:
            with untouched(module):
                overwrite(module)
                others = copied_state(module)
            return not_loaded(module, others)
        except Exception as error:  # noqa: BLE001 - a module may refuse values in any way; a load of its own values is looked at elsewhere
            line = f"loads of other values were not looked at to the end, since one raises {type(error).__name__}: {error}"
            not_seen += [] if line in not_seen else [line]
            return []
