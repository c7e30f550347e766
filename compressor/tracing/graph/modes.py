"""The modes of torch that a call is made in: they steer what it computes, and are noted beside every node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_AUTOCAST_DEVICES = ("cpu", "cuda")
_cuda, _mha = torch.backends.cuda, torch.backends.mha

# What context managers of torch exchange for the whole process: how to ask, and how to set it.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (_mha.get_fastpath_enabled, _mha.set_fastpath_enabled),
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
)


class Modes(NamedTuple):
    """Modes of the thread and settings of the process, without the random states, which belong to a sample and not to a node."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    settings: tuple[Any, ...]

    @staticmethod
    def current() -> Modes:
        """Return the modes as they are now."""
        autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST_DEVICES)
        settings = tuple(ask() for ask, _ in _SETTINGS)
        return Modes(torch.is_grad_enabled(), autocast, torch.is_autocast_cache_enabled(), settings)

    def restore(self) -> None:
        """Make these the modes."""
        torch.set_grad_enabled(self.grad)
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        for (ask, put), value in zip(_SETTINGS, self.settings, strict=True):
            if ask() != value:
                put(value)
