"""What a forward pass outside of a step moves, put back: buffers of the model, and random generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import UninitializedBuffer

from compressor.random_state import RandomState, generator_state, set_generator_state
from compressor.training.guards.containers import all_modules, own_generators
from compressor.training.guards.host_reads import named_host_generators
from compressor.training.step.digests import same_bits
from compressor.training.step.step import TrainStep


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
