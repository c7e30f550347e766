"""What a recorded step does on the host where no operator shows it: reads a tensor's memory, or draws from Python's generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor
from torch.overrides import TorchFunctionMode

from compressor.errors import HostReadError, ReplayError, UntrackedRandomnessError
from compressor.random_state import foreign_random, generator_state, same_state
from compressor.training.guards.containers import held_values
from compressor.training.guards.iterators import watching_iterators
from compressor.training.guards.python_state import one_look
from compressor.training.step.step import TrainStep

# They read memory without an operator; `.item()` and its like are operators, which the recorder refuses.
_READS = {getattr(Tensor, name): name for name in ("tolist", "numpy", "__array__", "__dlpack__", "__repr__", "__format__")}
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)


class _Reads(TorchFunctionMode):
    """Refuses methods that hand a tensor's values to Python.

    Args:
        put_off: let the step run to its end, since other ranks wait for it; the refusal is kept.
    """

    def __init__(self, put_off: bool) -> None:
        super().__init__()
        self.refusal: HostReadError | None = None
        self._put_off = put_off

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call a function of torch, unless it reads."""
        if func in _READS:
            self.refusal = self.refusal or HostReadError(
                f"Tensor.{_READS[func]}() in the step reads a tensor of {list(args[0].shape)} on the host, and the values would be frozen; "
                "keep it a tensor, or read it outside of the step"
            )
            if not self._put_off:
                raise self.refusal
        return func(*args, **(kwargs or {}))


@contextmanager
def watching_host(step: TrainStep) -> Iterator[None]:
    """Refuse host reads and draws while the block runs.

    Args:
        step: it runs in the block.

    Yields:
        Nothing.

    Raises:
        HostReadError: a tensor was read without an operator.
        GuardDriftError: an iterator or a stream in memory has moved on.
        UntrackedRandomnessError: a generator of Python or numpy was moved; those of the two modules are set back.
    """
    before = foreign_random()
    with one_look():
        own = {name: (generator, generator_state(generator)) for name, generator in _generators(step)}
    try:
        with watching_iterators(step):
            with _Reads(put_off=bool(step.ranks.groups)) as reads:
                yield
            if reads.refusal is not None:
                raise reads.refusal
    except ReplayError:
        before.restore()
        raise
    now = foreign_random()
    moved = "Python's module random" if now.python != before.python else None
    if moved is None and now.numpy != before.numpy:
        moved = "numpy.random"
    for name, (generator, state) in own.items():
        if moved is None and not same_state(generator_state(generator), state):
            moved = f"{name}, a {type(generator).__name__}"
    if moved is not None:
        before.restore()
        raise UntrackedRandomnessError(
            f"the step draws from {moved}, and what it drew would be frozen; draw outside, and give the result with the batch"
        )


@one_look()
def named_host_generators(step: TrainStep) -> dict[str, Any]:
    """List the generators of Python and numpy that a step reaches, beside those of the two modules.

    Args:
        step: the step; not changed.

    Returns:
        Name to generator, each once.
    """
    found = {id(generator): (name, generator) for name, generator in reversed(list(_generators(step)))}
    return dict(reversed(found.values()))


def _generators(step: TrainStep) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in held_values(step) if isinstance(value, _GENERATORS))
