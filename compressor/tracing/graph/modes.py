"""The modes of torch that a call is made in: they steer what it computes, and are noted beside every node."""

from __future__ import annotations

from typing import NamedTuple

import torch

_AUTOCAST_DEVICES = ("cpu", "cuda")


class Modes(NamedTuple):
    """Modes of the thread, without the random states, which belong to a sample and not to a node."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    default_dtype: torch.dtype

    @staticmethod
    def current() -> Modes:
        """Return the modes as they are now."""
        autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST_DEVICES)
        return Modes(torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled(), torch.get_default_dtype())

    def restore(self) -> None:
        """Make these the modes."""
        torch.set_grad_enabled(self.grad)
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        torch.set_default_dtype(self.default_dtype)
