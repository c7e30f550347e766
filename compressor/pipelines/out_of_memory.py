"""When memory runs out: in which stage, at what, what the stage holds, and what can be done about it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Literal

import torch
from torch import nn

from compressor.errors import CompressorError, OutOfMemoryError
from compressor.pipelines.offload.open_store import free_bytes
from compressor.tracing.targets.out_of_memory import is_out_of_memory

Work = Literal["traced", "calibrated", "compressed", "propagated"]

_SHOWN_MODULES = 3
_SMALLER_FORWARDS = "take smaller batches (batch_size=1) or shorter sequences (max_seq_length)"
_SMALLER_STAGES = 'take smaller stages (sequential_targets=["Linear"])'
_FEWER_ACTIVATIONS = "let activations go to disk (activation_memory and offload_dir)"
_REMEDIES: Mapping[Work, tuple[str, ...]] = MappingProxyType(
    {
        "traced": (_SMALLER_FORWARDS, 'leave the proof out (verify="off")'),
        "calibrated": (_SMALLER_FORWARDS, _SMALLER_STAGES, _FEWER_ACTIVATIONS),
        "compressed": (_SMALLER_STAGES, _FEWER_ACTIVATIONS, "leave the search for scales out (scale_search: false)"),
        "propagated": (_SMALLER_FORWARDS, _FEWER_ACTIVATIONS),
    }
)


@contextmanager
def memory_explained(model: nn.Module, stage: str, work: Work, names: Collection[str]) -> Iterator[None]:
    """Say more than an allocator can when memory runs out inside.

    Args:
        model: whose stage it is.
        stage: name of the stage, for the error.
        work: what is being done to it.
        names: dotted names of the modules in it.

    Yields:
        Nothing.

    Raises:
        OutOfMemoryError: memory ran out.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, CompressorError) or not is_out_of_memory(error):
            raise
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        raise OutOfMemoryError(
            f"{stage}: memory ran out while it was {work} ({_said(error)}; {free_bytes(device) / 1e6:,.0f} MB are free on {device}); "
            f"{_contents(model, names)}; {', or '.join(_REMEDIES[work])}; compressor plan shows what each stage needs"
        ) from error


def _said(error: BaseException) -> str:
    """The allocator's own words about the size that it was asked for."""
    text = " ".join(str(error).split())
    asked = re.search(r"Tried to allocate [\d.]+ \w+|you tried to allocate \d+ bytes|allocate \d+ bytes", text, re.IGNORECASE)
    return asked[0] if asked else text[:120] or type(error).__name__


def _contents(model: nn.Module, names: Collection[str]) -> str:
    """The largest modules of a stage."""
    wanted = set(names)
    sizes = {
        name: sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
        for name, module in model.named_modules()
        if name in wanted
    }
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_SHOWN_MODULES]
    shown = ", ".join(f"{name} ({_shape(model.get_submodule(name))}{sizes[name] / 1e6:,.1f} MB)" for name in largest if sizes[name])
    return f"its modules hold {sum(sizes.values()) / 1e6:,.1f} MB, the largest are {shown}" if shown else "its modules hold no tensors"


def _shape(module: nn.Module) -> str:
    weight = getattr(module, "weight", None)
    return "x".join(str(side) for side in weight.shape) + " " if isinstance(weight, torch.Tensor) else ""
