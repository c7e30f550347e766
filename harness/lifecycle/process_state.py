"""Put back what code has changed in the process, so that nobody who comes later is blamed for it, or computes with it."""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from harness.lifecycle.random_state import random_numbers_kept
from harness.lifecycle.snapshot import SHARED

_GLOBAL_HOOKS = tuple(name for name, value in vars(torch_module).items() if name.startswith("_global_") and isinstance(value, dict))
_MISSING = object()


@contextmanager
def process_kept(modules: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Leave the process as it was: random numbers, settings of torch, numpy and Python, hooks of every module, classes and functions.

    Not put back are modes that somebody has entered and not left, and threads.

    Args:
        modules: whose classes are looked after, beside those of torch.
    """
    classes = {cls for module in modules for cls in type(module).__mro__ if issubclass(cls, nn.Module)} | _layers()
    spaces = [(owner, dict(vars(owner))) for owner in (*classes, *SHARED.values())]
    stores: list[MutableMapping[Any, Any]] = [getattr(torch_module, name) for name in _GLOBAL_HOOKS]
    contents = [(store, dict(store)) for store in (*stores, os.environ)]
    settings = [(read(), read, write) for read, write in _SETTINGS]
    filters = warnings.filters[:]
    try:
        with random_numbers_kept():
            yield
    finally:
        for value, read, write in settings:
            if read() != value:
                write(value)
        for store, items in contents:
            if store != items:
                store.clear()
                store.update(items)
        for owner, names in spaces:
            _put_back(owner, names)
        if warnings.filters != filters:
            warnings.filters[:] = filters  # type: ignore[index]
            warnings._filters_mutated()  # type: ignore[attr-defined]


def _layers() -> set[type[nn.Module]]:
    return {nn.Module, *(cls for cls in vars(nn).values() if isinstance(cls, type) and issubclass(cls, nn.Module))}


def _put_back(owner: Any, names: dict[str, Any]) -> None:
    """Classes are put back whole; modules load further names when they are asked for, so there only what was there counts."""
    now = vars(owner)
    for name, value in names.items():
        if now.get(name, _MISSING) is not value and name != "__doc__":
            setattr(owner, name, value)
    if isinstance(owner, type) and issubclass(owner, nn.Module):
        for name in [name for name in now if name not in names and not name.startswith("__")]:
            delattr(owner, name)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _autocast() -> tuple[bool, bool]:
    return torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def _set_autocast(value: tuple[bool, bool]) -> None:
    for kind, enabled in zip(("cpu", "cuda"), value, strict=True):
        torch.set_autocast_enabled(kind, enabled)


def _collect(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_deterministic, lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1])),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_device, torch.set_default_device),
    (_autocast, _set_autocast),
    (_anomaly, lambda value: torch.set_anomaly_enabled(*value)),
    (Path.cwd, os.chdir),
    (lambda: list(sys.path), lambda value: sys.path.__setitem__(slice(None), value)),
    (gc.isenabled, _collect),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (lambda: dict(numpy.geterr()), lambda value: numpy.seterr(**value)),
    (lambda: dict(vars(torch._tensor_str.PRINT_OPTS)), lambda value: vars(torch._tensor_str.PRINT_OPTS).update(value)),
    (lambda: bool(torch.tensor(1e-320, dtype=torch.float64) * 1 == 0), torch.set_flush_denormal),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    _attribute(sys, "excepthook"),
    _attribute(logging.root, "level"),
    _attribute(logging.root.manager, "disable"),
    _attribute(torch.backends.cudnn, "enabled"),
    _attribute(torch.backends.cudnn, "benchmark"),
    _attribute(torch.backends.cudnn, "deterministic"),
    _attribute(torch.backends.mkldnn, "enabled"),
)
