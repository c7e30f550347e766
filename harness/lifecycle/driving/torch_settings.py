"""Settings of torch that hold for the whole process, by the names that a finding has for them: how to read each, and how to set it;
and the modes of a thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import overrides
from torch.distributions import Distribution
from torch.sparse import check_sparse_tensor_invariants
from torch.utils import _python_dispatch, deterministic
from torch.utils._device import DeviceContext

from compressor.numerics.precision import KERNEL_SETTINGS, float32_precisions, set_float32_precisions


def attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return how to read an attribute, and how to set it."""
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _set_sparse_checks(enabled: bool) -> None:
    (check_sparse_tensor_invariants.enable if enabled else check_sparse_tensor_invariants.disable)()


def _safe_globals() -> list[Any]:
    return sorted((one for one in torch.serialization.get_safe_globals() if not _is_of_torch(one)), key=str)


def _set_safe_globals(allowed: list[Any]) -> None:
    of_torch = [one for one in torch.serialization.get_safe_globals() if _is_of_torch(one)]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*of_torch, *allowed])


def _is_of_torch(allowed: Any) -> bool:
    """Parts of torch allow their own classes when they are first imported."""
    return getattr(allowed, "__module__", "").split(".")[0] == "torch"


def _checks_of_distributions() -> bool:
    """Whether they are on; once something was compiled they are off, which is torch's doing and nobody's setting."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return Distribution._validate_args or (dynamo is not None and dynamo.TorchPatcher.patch.cache_info().currsize > 0)


def _told_when_set(write: Callable[[Any], Any], other: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return how to read, and how to set, what torch tells only to whoever sets it."""

    def read() -> Any:
        held = write(other)
        write(held)
        return held

    return read, write


_future, _processes, _files = torch.__future__, torch.multiprocessing, torch.serialization
_ranks: Any = torch.distributed
TORCH_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = MappingProxyType(
    {
        "float32 precision": (float32_precisions, set_float32_precisions),
        **KERNEL_SETTINGS,
        "torch.backends.opt_einsum.enabled": attribute(torch.backends.opt_einsum, "enabled"),
        "torch.backends.opt_einsum.strategy": attribute(torch.backends.opt_einsum, "strategy"),
        "torch.backends.quantized.engine": attribute(torch.backends.quantized, "engine"),
        "dtype of autocast on the CPU": (lambda: torch.get_autocast_dtype("cpu"), lambda dtype: torch.set_autocast_dtype("cpu", dtype)),
        "dtype of autocast on CUDA": (lambda: torch.get_autocast_dtype("cuda"), lambda dtype: torch.set_autocast_dtype("cuda", dtype)),
        "cache of autocast": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        "filling of new memory": attribute(deterministic, "fill_uninitialized_memory"),
        "threads of autograd": (torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled),
        "gradients in forward mode": (torch._C._is_fwd_grad_enabled, torch._C._set_fwd_grad_enabled),
        "views made again in a backward": (torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled),
        "operators without a gradient": (torch._C._get_autograd_fallback_mode, torch._C._set_autograd_fallback_mode),
        "warning each time": (torch.is_warn_always_enabled, torch.set_warn_always),
        "checks of distributions": (_checks_of_distributions, Distribution.set_default_validate_args),
        "checks of sparse tensors": (check_sparse_tensor_invariants.is_enabled, _set_sparse_checks),
        "overwriting of converted parameters": (
            _future.get_overwrite_module_params_on_conversion,
            _future.set_overwrite_module_params_on_conversion,
        ),
        "swapping of converted parameters": (_future.get_swap_module_params_on_conversion, _future.set_swap_module_params_on_conversion),
        "sharing between processes": (_processes.get_sharing_strategy, _processes.set_sharing_strategy),
        "what torch.load takes for safe": (_safe_globals, _set_safe_globals),
        "mapping of torch.load": (_files.get_default_mmap_options, _files.set_default_mmap_options),
        "byte order of torch.load": (_files.get_default_load_endianness, _files.set_default_load_endianness),
        "folder of torch.hub": attribute(torch.hub, "_hub_dir"),
        "checksums of torch.save": (_files.get_crc32_options, _files.set_crc32_options),
        "profiling executor of torch.jit": _told_when_set(torch._C._jit_set_profiling_executor, True),
        "profiling mode of torch.jit": _told_when_set(torch._C._jit_set_profiling_mode, True),
        "fusion strategy of torch.jit": _told_when_set(torch._C._jit_set_fusion_strategy, []),
        "fusion in torch.jit": (torch._C._jit_texpr_fuser_enabled, torch._C._jit_set_texpr_fuser_enabled),
        **({"debugging of torch.distributed": (_ranks.get_debug_level, _ranks.set_debug_level)} if _ranks.is_available() else {}),
    }
)


# Modes of torch: objects through which every call of a function or an operator of this thread goes, the last one first.


@dataclass(frozen=True)
class _Modes:
    """One of torch's stacks of modes: what is on it, how one is taken off and how one is put on."""

    stack: Callable[[], Sequence[Any]]
    pop: Callable[[], Any]
    push: Callable[[Any], None]

    def put(self, modes: Sequence[Any]) -> None:
        """Have these modes, and no others."""
        for _ in self.stack():
            self.pop()
        for mode in modes:
            self.push(mode)


FUNCTION_MODES = _Modes(overrides._get_current_function_mode_stack, overrides._pop_mode, overrides._push_mode)
_DISPATCH_MODES = _Modes(_python_dispatch._get_current_dispatch_mode_stack, _python_dispatch._pop_mode, _python_dispatch._push_mode)


def _saved_tensors() -> list[Any]:
    """The hooks that pack what is saved for a backward; torch shows the last pair of them only."""
    found: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return [] if found is None else [found]


class EnteredModes:
    """The modes of this thread as they are now, to be had again."""

    def __init__(self) -> None:
        """Take note of them."""
        self._stacks = [(modes, list(modes.stack())) for modes in (FUNCTION_MODES, _DISPATCH_MODES)]
        self._saved = _saved_tensors()

    def put_back(self) -> None:
        """Take off what somebody has entered since then and not left; that of torch.set_default_device is a setting, and stays."""
        for modes, stack in self._stacks:
            now = modes.stack()
            if [*map(id, now)] != [*map(id, stack)]:
                device = [mode for mode in now if isinstance(mode, DeviceContext)]
                modes.put([*device, *(mode for mode in stack if not isinstance(mode, DeviceContext))])
        while _saved_tensors() and _saved_tensors() != self._saved:
            torch._C._autograd._pop_saved_tensors_default_hooks()


def num_modes() -> tuple[int, int, bool]:
    """Return how many modes of functions and of operators this thread is in, and whether hooks pack what is saved for a backward."""
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(), bool(_saved_tensors())


def while_in_modes() -> str:
    """Name the modes that this thread is in, for the message of an error that may be theirs; empty where there is none."""
    modes = [mode for stack in (FUNCTION_MODES, _DISPATCH_MODES) for mode in stack.stack() if not isinstance(mode, DeviceContext)]
    names = ", ".join(type(mode).__qualname__ for mode in modes)
    return f", while torch's modes were entered and not left: {names}" if names else ""


@contextmanager
def modes_aside() -> Iterator[None]:
    """Look at what is there while no mode looks on: what its handler raises or returns then is nobody's doing."""
    stacks = [(modes, list(modes.stack())) for modes in (FUNCTION_MODES, _DISPATCH_MODES)]
    for modes, stack in stacks:
        modes.put([mode for mode in stack if isinstance(mode, DeviceContext)])
    try:
        yield
    finally:
        for modes, stack in stacks:
            modes.put(stack)
