"""Put back what code has changed in the process, so that nobody who comes later is blamed for it, or computes with it."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from compressor.random_state import RandomState, random_numbers_kept
from harness.lifecycle.driving.python_settings import PYTHON_SETTINGS
from harness.lifecycle.driving.shared_code import SharedCode
from harness.lifecycle.driving.snapshot import CLASSES, GLOBAL_HOOKS, SHARED, added_names
from harness.lifecycle.driving.torch_settings import FUNCTION_MODES, TORCH_SETTINGS, EnteredModes, modes_aside

# Random numbers in the harness: its own leave the caller's alone, and those that only make a module are told from all others.
#
# `nn.Linear(...)` draws its first weights from torch's global generator, as every layer does. To make a module is a modifier's work, so the
# harness does not count these draws (what comes out must not depend on them: check 43). Whoever seeds the generator, or draws from it for
# anything else, moves the caller's random numbers, and is told.

# Functions that draw, by their names; those of torch.nn.init draw whatever they are called.
_LIKE = ("rand", "randn", "randint")
_DRAW = frozenset({*_LIKE, *(f"{name}_like" for name in _LIKE), "randperm", "normal", "bernoulli", "multinomial", "poisson", "dropout"})
_FILL = frozenset({"uniform_", "normal_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_"})
_MAKES_A_MODULE = frozenset({"__init__", "reset_parameters", "_reset_parameters"})


class ModulesMayDraw(TorchFunctionMode):
    """Takes back, at its end, how far the making of modules has moved torch's generators, unless something else has moved them too.

    Attributes:
        draws: the other draws, in words.
    """

    def __init__(self) -> None:
        """Nothing has been drawn."""
        super().__init__()
        self.draws: list[str] = []
        self._before = self._due = RandomState.current(foreign=False)

    def __enter__(self) -> Self:
        """Remember where the generators stand, and begin below all other modes: those leave by taking off whatever is on top."""
        self._before = self._due = RandomState.current(foreign=False)
        stack = FUNCTION_MODES.stack()
        place = next((number for number, mode in enumerate(stack) if not isinstance(mode, DeviceContext)), len(stack))
        FUNCTION_MODES.put([*stack[:place], self, *stack[place:]])  # that of a default device has to be the very first
        return self

    def __exit__(self, *error: Any) -> None:
        """Take back what the making of modules has drawn. Modes that somebody has entered meanwhile stay."""
        FUNCTION_MODES.put([mode for mode in FUNCTION_MODES.stack() if mode is not self])
        with modes_aside():
            if self._due is not self._before and RandomState.current(foreign=False).equals(self._due):
                self._before.restore()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, and note whether it has drawn, and for what."""
        kwargs = kwargs or {}
        if not _may_draw(func) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        before = RandomState.current(foreign=False)
        result = func(*args, **kwargs)
        after = RandomState.current(foreign=False)
        if not before.equals(after):
            place, makes_a_module = _where()
            if not makes_a_module:
                self.draws.append(f"{getattr(func, '__name__', func)} was called at {place}")
            elif before.equals(self._due):
                self._due = after
        return result


def _may_draw(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name in _DRAW or name in _FILL or getattr(func, "__module__", "") == "torch.nn.init"


def _where() -> tuple[str, bool]:
    """The line from which torch was called, and whether a module is being made there."""
    frame = sys._getframe(2)
    place = ""
    while frame is not None:
        is_torch = frame.f_globals.get("__name__", "").split(".")[0] == "torch"
        place = place or ("" if is_torch else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        if frame.f_code.co_name in _MAKES_A_MODULE and isinstance(frame.f_locals.get("self"), nn.Module):
            return place, True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return place, False


# How the hooks of all modules are called stands beside them.
_HOW_CALLED = tuple(name for name in vars(torch_module) if name.startswith("_global_forward_hooks_"))
_MISSING = object()


@contextmanager
def process_kept(modules: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Leave the process as it was: random numbers, settings of torch, numpy and Python, hooks of every module, classes and functions.

    Not put back are an inference mode that somebody has entered and not left, threads, and finders of modules: those of a library that
    was imported meanwhile stand among them.

    Args:
        modules: whose classes, and the code that these share with all others, are looked after, beside those of torch.
    """
    modules = list(modules)
    code = SharedCode(modules, library=True)
    classes = {cls for module in modules for cls in type(module).__mro__ if issubclass(cls, nn.Module)} | _layers()
    spaces = [(owner, dict(vars(owner))) for owner in {*classes, *CLASSES, *SHARED.values()}]
    places = [*GLOBAL_HOOKS, *((torch_module, name) for name in _HOW_CALLED)]
    stores: list[MutableMapping[Any, Any]] = [getattr(owner, name) for owner, name in places]
    contents = [(store, dict(store)) for store in (*stores, os.environ)]
    filters = warnings.filters[:]
    try:
        with random_numbers_kept(), settings_kept():
            yield
    finally:
        for store, items in contents:
            if store != items:
                store.clear()
                store.update(items)
        code.put_back()
        for owner, names in spaces:
            _process_state_put_back(owner, names)
        if warnings.filters != filters:
            warnings.filters[:] = filters  # type: ignore[index]
            warnings._filters_mutated()  # type: ignore[attr-defined]


@contextmanager
def settings_kept() -> Iterator[None]:
    """Leave the settings of torch, numpy and Python as they were, the grad mode among them, and modes that somebody has not left."""
    modes, settings = EnteredModes(), [(read(), read, write) for read, write in _SETTINGS]
    try:
        yield
    finally:
        modes.put_back()  # before anything is read or written, which would go through them
        for value, read, write in settings:
            if read() != value:
                write(value)


def _layers() -> set[type[nn.Module]]:
    return {nn.Module, *(cls for cls in vars(nn).values() if isinstance(cls, type) and issubclass(cls, nn.Module))}


def _process_state_put_back(owner: Any, names: dict[str, Any]) -> None:
    """Classes are put back whole; modules load further names when they are asked for, so there only what was there counts."""
    now = vars(owner)
    for name, value in names.items():
        if now.get(name, _MISSING) is not value and name != "__doc__":
            setattr(owner, name, value)
    for name in [] if isinstance(owner, type) else added_names(names, now):
        delattr(owner, name)
    if isinstance(owner, type) and issubclass(owner, nn.Module | Tensor):
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


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_deterministic, lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1])),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_device, torch.set_default_device),
    (_autocast, _set_autocast),
    (_anomaly, lambda value: torch.set_anomaly_enabled(*value)),
    (lambda: dict(vars(torch._tensor_str.PRINT_OPTS)), lambda value: vars(torch._tensor_str.PRINT_OPTS).update(value)),
    (lambda: bool(torch.tensor(1e-320, dtype=torch.float64, device="cpu") * 1 == 0), torch.set_flush_denormal),
    *TORCH_SETTINGS.values(),
    *PYTHON_SETTINGS.values(),
)
