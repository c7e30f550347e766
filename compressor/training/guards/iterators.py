"""Iterators and streams that a step takes from: each time they give something else, and a replay would not move them.

One that a step names is refused before it runs. Of others (in a list, in an attribute of an object or a module) nobody knows whether the
step asks them at all, so how far they are is taken down before the recorded step and compared after it.
"""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO, IOBase, StringIO
from itertools import count, repeat
from mmap import mmap
from queue import SimpleQueue
from types import GeneratorType
from typing import Any

from compressor.errors import GuardDriftError
from compressor.training.guards.containers import held_values
from compressor.training.guards.frozen_value import Same, frozen
from compressor.training.guards.python_state import one_look, variables
from compressor.training.step.step import TrainStep

# They give something else each time, and do not show what comes next.
_GIVING = Iterator | SimpleQueue | type(re.compile("").scanner(""))  # type: ignore[attr-defined]
_STREAMS = StringIO | BytesIO | mmap
_REMEDY = "give what it gave with the batch"
_DEPTH = 8
_WRITES_NOTHING: Any = object.__reduce__


@one_look()
def refuse_iterators(step: TrainStep) -> None:
    """Refuse iterators and their like that a step names: they move on when it runs.

    Args:
        step: the step.

    Raises:
        GuardDriftError: the step names an iterator, a SimpleQueue or a scanner of re.
    """
    for name, getter in variables(step):
        value = getter()
        if _gives(value):
            raise GuardDriftError(
                f"{name}: it is {_spelled(value)}, which a replay would not advance; take from it outside of the step, and {_REMEDY}"
            )


@contextmanager
def watching_iterators(step: TrainStep) -> Iterator[None]:
    """Refuse a step that takes from what modules and containers hold. What it took is not put back.

    Args:
        step: it runs in the block.

    Yields:
        Nothing.

    Raises:
        GuardDriftError: an iterator has moved on, or does not show where it stands; or a stream in memory has, and has more to give.
    """
    with one_look():
        held = {id(value): (name, value) for name, value in held_values(step)}
    giving = [(name, value, _place(value)) for name, value in held.values() if _gives(value)]
    streams = [(name, value, value.tell()) for name, value in held.values() if isinstance(value, _STREAMS) and not value.closed]
    yield
    for name, value, before in giving:
        if before is None or _place(value) != before:
            word = "does not show where it stands" if before is None else "moves on in the step"
            raise GuardDriftError(
                f"{name}: it is {_spelled(value)} and {word}, and a replay would not advance it; take from it outside of the step, and "
                f"{_REMEDY}"
            )
    for name, stream, before in streams:
        _refuse_if_read(name, stream, before)


def _gives(value: object) -> bool:
    return isinstance(value, _GIVING) and not isinstance(value, IOBase)


def _place(value: Any, depth: int = _DEPTH) -> object:
    """Say how far an iterator is, to be compared later; None where Python does not show it."""
    if isinstance(value, count | repeat):
        return repr(value)
    if isinstance(value, SimpleQueue):
        return [Same(one) for held in gc.get_referents(value) if isinstance(held, list) for one in held]
    if depth < 0:
        return None
    if isinstance(value, GeneratorType):  # its variables, and the iterators of its loops
        return (value.gi_frame and value.gi_frame.f_lasti, _inside(gc.get_referents(value), depth))
    if attributes := getattr(value, "__dict__", None):
        return _inside(attributes.values(), depth)
    left = value.__length_hint__() if hasattr(value, "__length_hint__") else None
    if isinstance(left, int):
        return left
    parts = _reduced(value) or [one for one in gc.get_referents(value) if isinstance(one, _GIVING)]
    return _inside(parts, depth) if parts else None


def _inside(values: Iterable[object], depth: int) -> object:
    """Take down iterators by their places, and the rest by value; None where one of them does not show it."""
    places = []
    for value in values:
        if isinstance(value, _GIVING):
            places.append(_place(value, depth - 1))
        else:
            places.append(_inside(value, depth - 1) if isinstance(value, tuple) and value and depth > 0 else (frozen(value),))
    return None if None in places else places


def _reduced(value: Any) -> tuple[object, ...]:
    """What Python would write down of an iterator; of those of itertools before 3.14 only."""
    if type(value).__reduce__ is _WRITES_NOTHING or isinstance(value, type(iter(int, 1))):
        return ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return tuple(value.__reduce__())


def _refuse_if_read(name: str, stream: StringIO | BytesIO | mmap, before: int) -> None:
    """One that was written to stands at its end: what is printed there once is no number of the step."""
    if stream.closed or (place := stream.tell()) == before:
        return
    is_read = bool(stream.read(1))
    stream.seek(place)
    if is_read:
        raise GuardDriftError(
            f"{name}: the step moves on in it ({type(stream).__name__}), and a replay would not; read it outside of the step, and "
            "give what was read with the batch"
        )


def _spelled(value: object) -> str:
    return f"{'an iterator' if isinstance(value, Iterator) else 'like an iterator'} ({type(value).__name__})"
