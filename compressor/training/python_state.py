"""What a step and the forwards between two steps move beside the weights, to be put back.

Of a step whose capture is refused that is what Python holds: a counter, a list that grew, a module's attribute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import UninitializedBuffer

from compressor.random_state import RandomState, generator_state, set_generator_state
from compressor.training.guards.containers import TABLES, all_modules, classes, containers, loose_gradients, own_generators
from compressor.training.guards.frozen_value import Plain
from compressor.training.guards.host_reads import named_host_generators
from compressor.training.guards.optimizer_state import optimizer_classes, optimizer_containers
from compressor.training.guards.python_state import one_look, put, reached_classes, variables
from compressor.training.step.digests import same_bits
from compressor.training.step.step import TrainStep

_MISSING = object()


class PythonState:
    """Copies of the containers and variables that the guards see, and the gradients there; what these do not see is not put back.

    Args:
        step: the step; not changed.
    """

    @one_look()
    def __init__(self, step: TrainStep) -> None:
        self._contents = [(content, _copy(content)) for content in _contents(step)]
        self._classes = [
            (cls, dict(content)) for cls, content in {**classes(step), **reached_classes(step), **optimizer_classes(step)}.items()
        ]
        self._variables = [(getter, getter()) for _, getter in variables(step, with_modules=True)]
        self._gradients = loose_gradients(step)

    def put_back(self) -> None:
        """Write back whatever is another object now. Changes containers, attributes and variables in place."""
        for content, kept in self._contents:
            if not _holds(content, kept):
                content.clear()
                (content.update if isinstance(content, dict | set) else content.extend)(kept)
        for cls, kept in self._classes:
            for key in [key for key in {**kept, **vars(cls)} if kept.get(key, _MISSING) is not vars(cls).get(key, _MISSING)]:
                setattr(cls, key, kept[key]) if key in kept else delattr(cls, key)
        for getter, value in self._variables:
            if getter() is not value:
                put(getter, value)
        for tensor, gradient in self._gradients:
            tensor.grad = gradient


def _contents(step: TrainStep) -> Iterator[Any]:
    for _, module in all_modules(step):
        yield module.__dict__
        yield from (module.__dict__[name] for name in TABLES)
    held = [*optimizer_containers(step), *containers(step)]
    yield from {id(one.content): one.content for one in held if isinstance(one.content, list | dict | set | deque)}.values()


def _copy(content: Any) -> Any:
    held = Plain(content)
    return dict(held.items()) if isinstance(content, dict) else set(held) if isinstance(content, set) else list(held)


def _holds(content: Any, kept: Any) -> bool:
    """Say whether a container holds the very same objects in the same order."""
    if isinstance(content, set):
        return set(map(id, Plain(content))) == set(map(id, kept))  # what is asked whether it is equal may raise
    items = [part for item in Plain(content).items() for part in item] if isinstance(content, dict) else list(Plain(content))
    others = [part for item in kept.items() for part in item] if isinstance(content, dict) else kept
    return len(items) == len(others) and all(one is other for one, other in zip(items, others, strict=True))


# What a forward pass outside of a step moves: buffers of the model, and random generators.


@contextmanager
def kept_generators(step: TrainStep) -> Iterator[None]:
    """Put back, after the block, all random generators that a step knows of.

    Args:
        step: the step; its loss runs in the block.

    Yields:
        Nothing.
    """
    own = own_generators(step)
    states = RandomState.current(foreign=True, devices=step.device, generators=own)
    hosts = [(generator, generator_state(generator)) for generator in named_host_generators(step).values()]
    try:
        yield
    finally:
        states.restore(own)
        for generator, state in hosts:
            if state is not None:
                set_generator_state(generator, state)


@contextmanager
def kept_buffers(step: TrainStep) -> Iterator[None]:
    """Put back, after the block, the buffers of a model, and of modules that its loss reaches: the tensors, and what they held.

    Args:
        step: the step; its loss runs in the block.

    Yields:
        Nothing.
    """
    modules = dict.fromkeys(module for _, module in all_modules(step))
    places = [(module, name, buffer) for module in modules for name, buffer in module._buffers.items()]
    made = (buffer for _, _, buffer in places if buffer is not None and not isinstance(buffer, UninitializedBuffer))
    buffers = list({id(buffer): buffer for buffer in made}.values())
    copies = [buffer.detach().clone() for buffer in buffers]
    try:
        yield
    finally:
        for module, name, buffer in places:
            module._buffers[name] = buffer
        with torch.no_grad():
            for buffer, copy in zip(buffers, copies, strict=True):
                is_dense = buffer.layout is torch.strided and not (buffer.is_quantized or buffer.is_nested)
                if not (is_dense and same_bits(buffer, copy)):
                    buffer.copy_(copy)
