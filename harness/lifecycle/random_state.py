"""Random numbers in the harness: its own leave the caller's alone, and those that only make a module are told from all others.

`nn.Linear(...)` draws its first weights from torch's global generator, as every layer does. To make a module is a modifier's work, so the
harness does not count these draws (what comes out must not depend on them: check 43). Whoever seeds the generator, or draws from it for
anything else, moves the caller's random numbers, and is told.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Functions that draw, by their names; those of torch.nn.init draw whatever they are called.
_LIKE = ("rand", "randn", "randint")
_DRAW = frozenset({*_LIKE, *(f"{name}_like" for name in _LIKE), "randperm", "normal", "bernoulli", "multinomial", "poisson", "dropout"})
_FILL = frozenset({"uniform_", "normal_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_"})
_MAKES_A_MODULE = frozenset({"__init__", "reset_parameters", "_reset_parameters"})


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Leave the global random number generators as they were."""
    states = random.getstate(), numpy.random.get_state(), torch_states()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        _put_back(states[2])


def torch_states() -> list[Tensor]:
    """Return the states of torch's generators, the CPU's first."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *devices]


def _put_back(states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.cuda.set_rng_state_all(list(states[1:]))


class ModulesMayDraw(TorchFunctionMode):
    """Takes back, at its end, how far the making of modules has moved torch's generators, unless something else has moved them too.

    Attributes:
        draws: the other draws, in words.
    """

    def __init__(self) -> None:
        """Nothing has been drawn."""
        super().__init__()
        self.draws: list[str] = []
        self._before = self._due = torch_states()

    def __enter__(self) -> Self:
        """Remember where the generators stand."""
        self._before = self._due = torch_states()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Take back what the making of modules has drawn."""
        super().__exit__(*error)
        if self._due is not self._before and _equal(torch_states(), self._due):
            _put_back(self._before[: len(self._due)])

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, and note whether it has drawn, and for what."""
        kwargs = kwargs or {}
        if not _may_draw(func) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        before = torch_states()
        result = func(*args, **kwargs)
        after = torch_states()
        if not _equal(before, after):
            place, makes_a_module = _where()
            if not makes_a_module:
                self.draws.append(f"{getattr(func, '__name__', func)} was called at {place}")
            elif _equal(before, self._due):
                self._due = after
        return result


def _may_draw(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name in _DRAW or name in _FILL or getattr(func, "__module__", "") == "torch.nn.init"


def _equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(mine, its) for mine, its in zip(one, other, strict=True))


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
