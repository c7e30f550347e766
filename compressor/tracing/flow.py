"""What crosses from stage to stage: the tensors that targets are handed, measured in one plain forward.

Both engines keep different things between stages, and only one of them names them. What a target is handed is the same for both: so it is
looked at here, with hooks, and a value is followed by the identity of its tensor. A value is live at a stage when a target from there on is
handed it and it existed before; that is the least that any engine has to keep.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressor.data.collate import Batch, call_model
from compressor.data.layouts import has_memory, num_bytes, shape_of
from compressor.nn.quantized_linear import is_conv1d
from compressor.tracing.targets.records import Stage
from compressor.tracing.targets.sample_state import TorchState

_MAX_DEPTH = 4  # of containers in the arguments of a target
BEFORE = -1  # number of the stage before the first one


@dataclass(frozen=True)
class Value:
    """One tensor that a target is handed.

    Attributes:
        name: of the argument, with the place inside it where it is a container.
        shape: of the tensor; of a nested one the shapes of what it holds.
        dtype: without the word torch.
        num_bytes: of its elements.
        source: stage that gave it out, as its output; -1 for what was made outside of all targets.
        since: first stage that was handed it; an earlier one than this means that it is shared.
    """

    name: str
    shape: tuple[Any, ...]
    dtype: str
    num_bytes: int
    source: int
    since: int

    def __str__(self) -> str:
        """Return name, shape and dtype."""
        return f"{self.name} {list(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class Stop:
    """What is to be said of one stage.

    Attributes:
        index: of the stage.
        targets: dotted names.
        classes: class names of the targets.
        num_linears: linear layers inside, those of GPT-2 (Conv1D) among them.
        num_parameters: numbers in all parameters inside.
        inputs: what the targets are handed in the first batch.
        outputs: what they give.
        live_bytes: of all values that exist when the stage begins and that it or a later one is handed.
        num_calls: how often the first batch calls the targets.
        between: names of modules with weights of their own that run after the stage before, and before this one.
    """

    index: int
    targets: tuple[str, ...]
    classes: tuple[str, ...]
    num_linears: int
    num_parameters: int
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    live_bytes: int
    num_calls: int = 1
    between: tuple[str, ...] = ()


class _Watch:
    """Sees the tensors of one forward; holds every one of them, so that no identity is used twice."""

    def __init__(self) -> None:
        self.source: dict[int, int] = {}
        self.since: dict[int, int] = {}
        self.inputs: dict[int, dict[str, int]] = {}
        self.outputs: dict[int, dict[str, int]] = {}
        self.tensors: dict[int, Tensor] = {}
        self.outside: dict[str, int] = {}  # module outside of the stages -> the stage that begins next
        self.begun = BEFORE

    def note(self, tensor: Tensor) -> int:
        key = id(tensor)
        if key not in self.tensors:
            self.tensors[key] = tensor
        return key

    def take(self, stage: int, named: Mapping[str, Tensor]) -> None:
        self.begun = max(self.begun, stage)
        for name, tensor in named.items():
            key = self.note(tensor)
            if self.source.get(key) == stage:  # from one target of the stage to the next, or back to the same
                continue
            self.since.setdefault(key, stage)
            self.inputs.setdefault(stage, {}).setdefault(name, key)

    def give(self, stage: int, named: Mapping[str, Tensor]) -> None:
        for name, tensor in named.items():
            key = self.note(tensor)
            if key not in self.since:  # a target may hand back what it was handed
                self.source.setdefault(key, stage)
            self.outputs.setdefault(stage, {}).setdefault(name, key)

    def value(self, name: str, key: int, stage: int) -> Value:
        tensor = self.tensors[key]
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Value(name, shape_of(tensor), dtype, num_bytes(tensor), self.source.get(key, BEFORE), self.since.get(key, stage))

    def live_bytes(self, stage: int, last: int) -> int:
        """Bytes of distinct memory that the stage or a later one is handed and that exists before it."""
        keys = {key for later in range(stage, last + 1) for key in self.inputs.get(later, {}).values()}
        born = [key for key in keys if self.source.get(key, stage) < stage or self.since[key] <= stage]
        storages: dict[int, int] = {}
        for tensor in (self.tensors[key] for key in born):
            if has_memory(tensor):
                memory = tensor.untyped_storage()
                storages[memory.data_ptr()] = max(min(num_bytes(tensor), memory.nbytes()), storages.get(memory.data_ptr(), 0))
            else:
                storages[id(tensor)] = num_bytes(tensor)
        return sum(storages.values())


def measure_flow(model: nn.Module, stages: Sequence[Stage], batch: Batch) -> tuple[list[Stop], tuple[str, ...]]:
    """Run one plain forward and look at what the targets are handed and give.

    Args:
        model: in eval mode; as it was afterwards, but for what its own forward changes.
        stages: of a plan.
        batch: on the device of the model; not modified.

    Returns:
        One entry per stage, in their order; and the names of modules with weights of their own that run behind the last stage.
    """
    watch, state = _Watch(), TorchState.current()
    try:
        with ExitStack() as hooks, torch.no_grad():
            for stage in stages:
                for name in stage.target_names:
                    module = model.get_submodule(name)
                    hooks.callback(module.register_forward_pre_hook(_taking(watch, stage.index, module), with_kwargs=True).remove)
                    hooks.callback(module.register_forward_hook(_giving(watch, stage.index)).remove)
            for name in _outside(model, stages):
                hooks.callback(model.get_submodule(name).register_forward_pre_hook(_noting(watch, name)).remove)
            call_model(model, batch)
    finally:
        state.restore()
    stops = [_stop(model, stage, watch, len(stages) - 1) for stage in stages]
    return stops, tuple(name for name, place in watch.outside.items() if place == len(stages))


def _outside(model: nn.Module, stages: Sequence[Stage]) -> list[str]:
    """Modules with parameters of their own in no stage."""
    inside = {name for stage in stages for name in stage.modules}
    return [name for name, module in model.named_modules() if name not in inside and any(True for _ in module.parameters(recurse=False))]


def _noting(watch: _Watch, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        del module, args
        watch.outside.setdefault(name, watch.begun + 1)

    return hook


def _taking(watch: _Watch, stage: int, module: nn.Module) -> Callable[..., None]:
    names = [name for name, one in inspect.signature(module.forward).parameters.items() if one.kind is not one.VAR_KEYWORD]

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        positional = {names[place] if place < len(names) else f"argument {place}": value for place, value in enumerate(args)}
        watch.take(stage, _named({**positional, **kwargs}))

    return hook


def _giving(watch: _Watch, stage: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        del module, args
        watch.give(stage, _named({"output": output}))

    return hook


def _named(values: Mapping[str, Any], depth: int = 0) -> dict[str, Tensor]:
    """Tensors inside arguments, by the way to them."""
    found: dict[str, Tensor] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif depth < _MAX_DEPTH and isinstance(value, Mapping):
            found |= _named({f"{name}.{key}": item for key, item in value.items()}, depth + 1)
        elif depth < _MAX_DEPTH and isinstance(value, list | tuple):
            found |= _named({f"{name}[{place}]": item for place, item in enumerate(value)}, depth + 1)
    return found


def _stop(model: nn.Module, stage: Stage, watch: _Watch, last: int) -> Stop:
    modules = [model.get_submodule(name) for name in stage.target_names]
    inside = {id(parameter): parameter.numel() for module in modules for parameter in module.parameters()}
    return Stop(
        index=stage.index,
        targets=stage.target_names,
        classes=tuple(type(module).__name__ for module in modules),
        num_linears=sum(isinstance(below, nn.Linear) or is_conv1d(below) for module in modules for below in module.modules()),
        num_parameters=sum(inside.values()),
        inputs=tuple(watch.value(name, key, stage.index) for name, key in watch.inputs.get(stage.index, {}).items()),
        outputs=tuple(watch.value(name, key, stage.index) for name, key in watch.outputs.get(stage.index, {}).items()),
        live_bytes=watch.live_bytes(stage.index, last),
        num_calls=stage.num_calls,
        between=tuple(name for name, place in watch.outside.items() if place == stage.index),
    )
