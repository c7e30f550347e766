"""Memory that is used again: whoever keeps a result by the address, the shape or the identity of a tensor gives that of other values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass

from torch import Tensor

from harness.checks.catalogue.registry import CheckFailed
from harness.lifecycle.driving.snapshot import Bits


def hold_memory(call: Callable[..., object], what: str, *series: Sequence[Tensor]) -> None:
    """Call with one tensor per argument that is filled again and again, and hold the results against those for new tensors.

    Args:
        call: takes a tensor of each series; gives tensors, dataclasses or lists of them.
        what: is called with what, in words.
        *series: values that an argument takes one after the other, of one shape and dtype; not modified. One argument changes at a time.

    Raises:
        CheckFailed: a result is not, bit for bit, that for new tensors.
    """
    steps = list(_steps(series))
    new = [[value.clone() for value in step] for step in steps]  # all alive until the end, so that no two share memory
    expected = [_bits(call(*step)) for step in new]
    held = [values[0].clone() for values in series]
    for step, alone in zip(steps, expected, strict=True):
        for memory, value in zip(held, step, strict=True):
            memory.data.copy_(value)  # as an allocator gives memory out again: its address and its version stay
        if _bits(call(*held)) != alone:
            raise CheckFailed(f"{what}: in memory that has held other values it gives another result than in new memory")


def _steps(series: Sequence[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
    places = [0] * len(series)
    yield [values[0] for values in series]
    for _ in range(1, len(series[0])):
        for argument in range(len(series)):
            places[argument] += 1
            yield [values[place] for values, place in zip(series, places, strict=True)]


def _bits(value: object) -> object:
    if isinstance(value, Tensor):
        return Bits(value)
    if is_dataclass(value):
        return [_bits(getattr(value, field.name)) for field in fields(value)]
    return [_bits(item) for item in value] if isinstance(value, list | tuple) else repr(value)
