"""Tensors of a step that somebody holds when it is over: a replay neither repeats the assignment nor keeps the values."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from compressor.errors import EscapedTensorError, GuardDriftError
from compressor.training.capture.operators import Record
from compressor.training.capture.recorder import Recorder
from compressor.training.guards.frozen_value import Plain
from compressor.training.guards.python_state import one_look, variables
from compressor.training.remedies import for_kept
from compressor.training.step.batch import Batch
from compressor.training.step.step import TrainStep

_REGISTERED = ("_parameters", "_buffers", "_modules")
BatchPart = tuple[str, tuple[Any, ...], Any, dict[Any, Any]]
Taking = tuple[tuple[Any, ...], Any]
"""Where a container lies in a batch, and the key that a step takes out of it."""
Kept = Mapping[tuple[nn.Module, str], list[Tensor]]


@one_look()
def kept_tensors(step: TrainStep) -> Kept:
    """List the tensors that attributes of modules hold without having registered them.

    Args:
        step: the step; not changed.

    Returns:
        Module and attribute to tensors.
    """
    held = ((module, key, value) for module in step.model.modules() for key, value in module.__dict__.items() if key not in _REGISTERED)
    return {(module, key): list(_tensors(value)) for module, key, value in held}


def check_escapes(step: TrainStep, recorder: Recorder, before: Kept, kept: Tensor | None = None) -> None:
    """Refuse a step that leaves tensors of its own behind.

    Args:
        step: it has just been recorded, and its loss was let go.
        recorder: the record.
        before: what modules held before the step.
        kept: what the captured step keeps itself: its loss, where that lies in a storage of the step.

    Raises:
        EscapedTensorError: somebody holds a tensor that the step made.
    """
    for holder, value, remedy in _held(step, recorder, before):
        for tensor in _tensors(value):
            maker = recorder.maker(tensor)
            if maker is not None:
                raise _escaped(f"{holder}: it keeps a tensor", maker, remedy())
    own = None if kept is None else recorder.storages.number(kept.untyped_storage())
    if not set(recorder.storages.survivors()) - {own}:
        return
    gc.collect()  # a graph that refers to itself, as functions with a context make them, holds nothing for anybody
    left = [number for number in recorder.storages.survivors() if number != own]
    if left:
        raise _escaped(f"{_holder(recorder, left[0])}: it keeps a tensor", recorder.maker_of(left[0]))


def batch_contents(batch: Batch) -> list[BatchPart]:
    """List what a batch consists of, to see what a step puts into it.

    Args:
        batch: as the step is given it; not changed.

    Returns:
        Of each container, and of the attributes of each tensor: its name, its place, itself, and a copy of its content.
    """
    found: list[BatchPart] = []
    waiting: list[tuple[str, tuple[Any, ...], Any]] = [("batch", (), batch)]
    while waiting:
        name, path, value = waiting.pop()
        content = value.__dict__ if isinstance(value, Tensor) else value
        items = _items(content) if isinstance(content, dict | list | tuple | deque) else {}
        if isinstance(content, dict | list | deque):
            found.append((name, path, content, items))
        if not isinstance(value, Tensor):
            waiting += [(f"{name}[{key!r}]", (*path, key), item) for key, item in items.items()]
    return found


def check_batch(before: list[BatchPart], recorder: Recorder) -> list[Taking]:
    """Refuse a step that changes what its batch consists of: the caller may look there, or give the batch again.

    Args:
        before: what the batch held before the step.
        recorder: the record.

    Returns:
        What it only takes out of dicts, as `batch.pop("labels")` does: that can be repeated.

    Raises:
        EscapedTensorError: it puts a tensor of its own there.
        GuardDriftError: it puts something else there, or gives it another order.
    """
    taken: list[Taking] = []
    for name, path, content, held in before:
        now, there = _items(content), set(map(id, held.values()))
        for key, value in now.items():
            if id(value) in there if not isinstance(content, dict) else held.get(key, held) is value:
                continue
            maker = next((made for made in map(recorder.maker, _tensors(value)) if made is not None), None)
            if maker is not None:
                raise _escaped(f"{name}[{key!r}]: the step puts a tensor there", maker)
            raise GuardDriftError(
                f"{name}[{key!r}]: the step puts a {type(value).__name__} there, and a replay would not repeat it; keep it in a variable "
                "of the loss function, or give it with the batch"
            )
        left = held if not isinstance(content, dict) else {key: value for key, value in held.items() if key in now}
        if [*now] != [*left] or list(map(id, now.values())) != list(map(id, left.values())):
            raise GuardDriftError(
                f"{name}: the step changes its length or order, and a replay would not repeat it for who gives the batch again; let the "
                f"loss function change a copy ({type(content).__name__}(...))"
            )
        taken += [(path, key) for key in held if key not in now]
    return taken


def _items(content: Any) -> dict[Any, Any]:
    return dict(content.items() if isinstance(content, dict) else enumerate(content))


def _escaped(text: str, maker: Record, remedy: str = "") -> EscapedTensorError:
    return EscapedTensorError(
        f"{text} that {maker.place} made, and a replay neither repeats the assignment nor keeps the values; "
        f"let go of it before the step ends, or copy_ it into a buffer{remedy}"
    )


def _held(step: TrainStep, recorder: Recorder, before: Kept) -> Iterator[tuple[str, object, Callable[[], str]]]:
    """List what modules, the loss function and the variables it reaches hold, by a name for messages, and what to write instead."""
    for name, module in step.model.named_modules():
        for key, value in module.__dict__.items():
            if key not in _REGISTERED:
                is_read = any(map(recorder.has_met, before.get((module, key), ())))
                yield f"attribute '{key}' of {name or 'the model'}", value, partial(for_kept, module, name, key, is_read)
    for name, getter in variables(step):
        yield name, getter(), str


def _tensors(value: object) -> Iterator[Tensor]:
    """Give the tensors in a value and the containers within it, each container once: one may hold itself."""
    waiting, seen = [value], set()
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(thing, list | tuple | dict | deque) and id(thing) not in seen:
            seen.add(id(thing))
            waiting += reversed(list(Plain(thing).values()))


def _holder(recorder: Recorder, number: int) -> str:
    """Say who holds a storage, as well as can be seen from outside."""
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]  # isinstance asks the thing, which may warn
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError, ValueError):  # somebody's sparse, fake or lazy tensor, which has none
            continue
        if recorder.storages.number(storage) != number:
            continue
        for owner in gc.get_referrers(tensor):
            held = owner if isinstance(owner, dict) else owner.__dict__ if type(owner).__dictoffset__ else {}
            key = next((key for key, value in held.items() if value is tensor), None)
            if isinstance(key, str):
                return f"'{key}' of {'an object' if held is owner else f'an object of {type(owner).__name__}'}"
            if isinstance(owner, list | tuple | set) and owner is not tensors:
                return f"a {type(owner).__name__} of {len(owner)}"
    return "something beside the model and its loss"
