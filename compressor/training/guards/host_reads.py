"""What a recorded step does on the host where no operator shows it: reads a tensor's memory, or draws from Python's generators."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO, IOBase, StringIO
from mmap import mmap
from queue import SimpleQueue
from typing import Any

import numpy as np
from torch import Tensor
from torch.overrides import TorchFunctionMode

from compressor.errors import GuardDriftError, HostReadError, ReplayError, UntrackedRandomnessError
from compressor.random_state import foreign_random, generator_state, same_state
from compressor.training.guards.containers import all_modules, containers
from compressor.training.guards.frozen_value import Plain, spelled
from compressor.training.guards.python_state import one_look, variables
from compressor.training.step.step import TrainStep

# They read memory without an operator; `.item()` and its like are operators, which the recorder refuses.
_READS = {getattr(Tensor, name): name for name in ("tolist", "numpy", "__array__", "__dlpack__", "__repr__", "__format__")}
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
# They give something else each time, and do not show what comes next.
_GIVING = Iterator | SimpleQueue | type(re.compile("").scanner(""))  # type: ignore[attr-defined]
_STREAMS = StringIO | BytesIO | mmap


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
        GuardDriftError: a stream in memory has moved on, and has more to give.
        UntrackedRandomnessError: a generator of Python or numpy was moved; those of the two modules are set back.
    """
    before = foreign_random()
    with one_look():
        own = {name: (generator, generator_state(generator)) for name, generator in _generators(step)}
        streams = [(name, stream, stream.tell()) for name, stream in _open_streams(step)]
    try:
        with _Reads(put_off=bool(step.ranks.groups)) as reads:
            yield
        if reads.refusal is not None:
            raise reads.refusal
        _refuse_read_streams(streams)
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
def refuse_iterators(step: TrainStep) -> None:
    """Refuse iterators and their like: one that the step names moves on when it runs, and where it stands cannot be seen.

    Args:
        step: the step.

    Raises:
        GuardDriftError: the step reaches an iterator, a SimpleQueue or a scanner of re.
    """
    for name, getter in variables(step):
        value = getter()
        if isinstance(value, _GIVING) and not isinstance(value, IOBase):
            what = "an iterator" if isinstance(value, Iterator) else "like an iterator"
            raise GuardDriftError(
                f"{name}: it is {what} ({type(value).__name__}), which a replay would not advance; take from it outside of the step, "
                "and give what it gave with the batch"
            )


def _open_streams(step: TrainStep) -> Iterator[tuple[str, StringIO | BytesIO | mmap]]:
    for name, getter in variables(step):
        value = getter()
        if isinstance(value, _STREAMS) and not value.closed:
            yield name, value


def _refuse_read_streams(streams: Sequence[tuple[str, StringIO | BytesIO | mmap, int]]) -> None:
    """One that was written to stands at its end: what is printed there once is no number of the step."""
    for name, stream, before in streams:
        if stream.closed or (place := stream.tell()) == before:
            continue
        is_read = bool(stream.read(1))
        stream.seek(place)
        if is_read:
            raise GuardDriftError(
                f"{name}: the step moves on in it ({type(stream).__name__}), and a replay would not; read it outside of the step, and "
                "give what was read with the batch"
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
    for held in containers(step):
        if isinstance(held.keep, _GENERATORS):
            yield held.name, held.keep
        items = Plain(held.content).items()
        yield from ((f"{held.name}: {spelled(key)}", value) for key, value in items if isinstance(value, _GENERATORS))
        keys = enumerate(Plain(held.content)) if isinstance(held.content, dict) else ()
        yield from ((f"{held.name}: key {number}", key) for number, key in keys if isinstance(key, _GENERATORS))
    yield from ((name, getter()) for name, getter in variables(step) if isinstance(getter(), _GENERATORS))
    for name, module in all_modules(step):
        for key, value in module.__dict__.items():
            if isinstance(value, _GENERATORS):
                yield f"attribute '{key}' of {name}", value
