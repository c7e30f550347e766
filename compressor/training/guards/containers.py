"""What plain Python objects hold: the lists, dicts and attributes that modules and functions reach.

A tensor or a number in an object in a dict can be exchanged between steps, and a replay would not know. So every container on the way is
watched: by identity of its values where nothing changed, which costs no Python, and by name and value where something did.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compressor.training.guards.frozen_value import CONTAINERS, PLAIN, Plain, fact, is_foreign, is_small_array, spelled
from compressor.training.guards.python_state import once_a_look, one_look, other_modules, said_by_loss, variables
from compressor.training.guards.reach import BOOKS, TORCH_S_OWN
from compressor.training.step.step import TrainStep

_OPAQUE = (
    *(nn.Module, Tensor, torch.optim.Optimizer, torch.Generator, TrainStep, logging.Logger),
    *(type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, torch.dtype, torch.device),
)
# What a module keeps in tables of its own; those are watched as such.
TABLES = (
    "_parameters", "_buffers", "_modules",
    "_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_DEPTH, _MAX_CONTAINERS, _MAX_ITEMS = 4, 512, 4096


@dataclass(frozen=True, slots=True)
class Container:
    """A list or dict that is alive, or the attributes of an object.

    Attributes:
        name: how it is reached, for messages.
        content: the very list, dict, set or deque.
        keep: held, so that its identity is not given to another.
    """

    name: str
    content: Any
    keep: object = None

    def members(self) -> list[object]:
        """Return what it holds; of a mapping the values, and then the keys."""
        held = Plain(self.content)
        return [*held.values(), *held] if isinstance(self.content, Mapping) else list(held)

    def facts(self) -> tuple[object, ...]:
        """Return keys and values in their order, to be compared later."""
        held = Plain(self.content)
        return tuple((fact(key), fact(value)) for key, value in held.items()) if len(held) <= _MAX_ITEMS else (len(held),)


@once_a_look
def containers(step: TrainStep) -> list[Container]:
    """List the containers that modules hold, and those that the functions of a step reach.

    Args:
        step: the step; not changed.

    Returns:
        Each once, with the way to it.
    """
    search = _Search(said_by_loss(step))
    for name, value in _roots(step):
        search.visit(value, name)
    return list(search.found.values())


def containers_of(values: Mapping[str, object]) -> list[Container]:
    """List the containers that some values hold.

    Args:
        values: name to value.

    Returns:
        Each once, with the way to it.
    """
    search = _Search(None)
    for name, value in values.items():
        search.visit(value, name)
    return list(search.found.values())


def watches_update(step: TrainStep) -> bool:
    """Say whether the optimizer's settings and state are guarded: a capture holds its update, or the step's functions reach or name them.

    Args:
        step: the step; not changed.

    Returns:
        False where the update runs in Python after every replay.
    """
    is_named = "param_groups" in said_by_loss(step) or any(getter() is step.optimizer for _, getter in variables(step))
    return step.update_is_captured or is_named


def guarded_tensors(step: TrainStep) -> dict[str, Tensor]:
    """List the tensors whose addresses are guarded.

    Args:
        step: the step; not changed.

    Returns:
        All that the step may read or write, without those of an optimizer that updates in Python.
    """
    hidden = () if watches_update(step) else ("opt.", "group")
    return {name: tensor for name, tensor in step.tensors().items() if not name.startswith(hidden)}


def all_modules(step: TrainStep) -> list[tuple[str, nn.Module]]:
    """List the modules that a step runs: those of its model, and those beside it.

    Args:
        step: the step; not changed.

    Returns:
        Name for messages, and module; each once.
    """
    return [*((name or "the model", module) for name, module in step.model.named_modules()), *other_modules(step).items()]


def classes(step: TrainStep) -> dict[type, Mapping[str, Any]]:
    """List the classes of the modules, of those beside the model too, with their attributes: a patched class is another step.

    Args:
        step: the step; not changed.

    Returns:
        Class to a live view of its attributes; those of libraries are left out.
    """
    found: dict[type, Mapping[str, Any]] = {}
    for kind in dict.fromkeys(type(module) for _, module in all_modules(step)):
        found |= {cls: vars(cls) for cls in kind.__mro__ if not is_foreign(cls.__module__)}
    return found


@one_look()
def arrays(step: TrainStep) -> list[np.ndarray[Any, Any] | array[Any] | bytearray]:
    """List the small arrays, of numpy and of Python, that functions of a step reach: they can be written in place.

    Args:
        step: the step; not changed.

    Returns:
        Each once.
    """
    values = (one for _, one in held_values(step) if isinstance(one, np.ndarray | array | bytearray) and is_small_array(one))
    return list({id(one): one for one in values}.values())


def own_generators(step: TrainStep) -> list[torch.Generator]:
    """List the random generators of torch that modules and functions hold.

    Args:
        step: the step; not changed.

    Returns:
        Each once.
    """
    return list(named_generators(step).values())


@one_look()
def named_generators(step: TrainStep) -> dict[str, torch.Generator]:
    """List the random generators of torch that modules and functions hold, by name.

    Args:
        step: the step; not changed.

    Returns:
        A name, the same in every program that makes the same step, to the generator; each once.
    """
    values = [(f"attribute '{key}' of {name}", value) for name, module in all_modules(step) for key, value in module.__dict__.items()]
    values += [(f"{held.name}: {number}", value) for held in containers(step) for number, value in enumerate(held.members())]
    values += [(name, getter()) for name, getter in variables(step)]
    found = {id(value): (name, value) for name, value in reversed(values) if isinstance(value, torch.Generator)}
    return dict(reversed(found.values()))


@one_look()
def loose_tensors(step: TrainStep) -> list[Tensor]:
    """List the tensors that nobody has registered, as far as the guards see them.

    Args:
        step: its own tensors are not among them.

    Returns:
        Each once.
    """
    values: list[Any] = [value for _, value in held_values(step)]
    values += [value for module in other_modules(step).values() for value in module.state_dict(keep_vars=True).values()]
    own = {tensor.untyped_storage()._cdata for tensor in step.tensors().values()}
    found = {id(value): value for value in values if isinstance(value, Tensor) and value.layout is torch.strided}
    return [value for value in found.values() if value.untyped_storage()._cdata not in own]


def loose_gradients(step: TrainStep) -> list[tuple[Tensor, Tensor | None]]:
    """List what a backward pass may add to beside the step's own gradients.

    Args:
        step: its own tensors are not among them.

    Returns:
        Each loose tensor that asks for a gradient, and the one that it holds.
    """
    return [(value, value.grad) for value in loose_tensors(step) if value.is_leaf and value.requires_grad]


class LooseTensors:
    """Copies of the tensors that nobody has registered, as far as the guards see them.

    Args:
        step: its own tensors are not looked at.
    """

    @one_look()
    def __init__(self, step: TrainStep) -> None:
        self._gradients = loose_gradients(step)
        held = (*loose_tensors(step), *(gradient for _, gradient in self._gradients if gradient is not None))
        self._kept = [(value, value.detach().clone()) for value in {id(value): value for value in held}.values()]

    @torch.no_grad()
    def put_back(self) -> None:
        """Write the copies back, in place but for what has been resized; gradients, too."""
        for value, gradient in self._gradients:
            value.grad = gradient
        for value, old in self._kept:
            if value.shape == old.shape:
                value.detach().copy_(old)
            else:
                value.data = old.clone()


def held_values(step: TrainStep) -> Iterator[tuple[str, Any]]:
    """Give what modules, variables and containers hold, and what lies in tuples there.

    Args:
        step: the step; not changed.

    Yields:
        The way to it, for messages, and the value; one that is held twice comes twice.
    """
    for name, value in _held(step):
        waiting = [(name, value)]
        while waiting:
            name, value = waiting.pop()
            yield name, value
            items = islice(Plain(value), _MAX_ITEMS) if isinstance(value, tuple) else ()
            waiting += [(f"{name}[{number}]", item) for number, item in enumerate(items)]


def _held(step: TrainStep) -> Iterator[tuple[str, object]]:
    for held in containers(step):
        yield held.name, held.keep
        yield from ((f"{held.name}: {spelled(key)}", value) for key, value in Plain(held.content).items())
        keys = enumerate(Plain(held.content)) if isinstance(held.content, Mapping) else ()
        yield from ((f"{held.name}: key {number}", key) for number, key in keys)
    yield from ((name, getter()) for name, getter in variables(step))
    for name, module in all_modules(step):
        yield from ((f"attribute '{key}' of {name}", value) for key, value in module.__dict__.items())
    for cls, content in classes(step).items():
        yield from ((f"attribute '{key}' of class {cls.__qualname__}", value) for key, value in content.items())


def _roots(step: TrainStep) -> Iterator[tuple[str, object]]:
    for name, module in all_modules(step):
        for key, value in module.__dict__.items():
            if key not in BOOKS and type(value) not in PLAIN:
                yield f"attribute '{key}' of {name}", value
    for cls, content in classes(step).items():
        for key, value in content.items():
            if type(value) not in PLAIN and not key.startswith("__"):
                yield f"attribute '{key}' of class {cls.__qualname__}", value
    for name, getter in variables(step):
        yield name, getter()


class _Search:
    """Finds containers below some values.

    Args:
        said: names that the step's code says: a trainer, which counts its steps, is looked at where one is an attribute of it only. None:
            all are looked at.
    """

    def __init__(self, said: Set[str] | None) -> None:
        self._said = said
        self.found: dict[int, Container] = {}

    def visit(self, value: object, name: str, depth: int = _DEPTH) -> None:
        """Look at a value, and at what it holds.

        Args:
            value: anything.
            name: the way to it.
            depth: how many levels below it are looked at.
        """
        is_loose = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)  # those are looked at by their names
        if is_loose and vars(value) and depth >= 0 and len(self.found) < _MAX_CONTAINERS:
            self._hold(Container(name, vars(value), value), _attribute, depth)
        if type(value) in PLAIN or isinstance(value, _OPAQUE) or depth < 0 or len(self.found) >= _MAX_CONTAINERS:
            return
        if isinstance(value, tuple | frozenset):
            for number, item in enumerate(islice(Plain(value), _MAX_ITEMS)):
                self.visit(item, f"{name}[{number}]", depth - 1)
        if type(value).__module__.startswith(TORCH_S_OWN):
            return
        is_container = isinstance(value, CONTAINERS)
        if is_container:
            self._hold(Container(name, value), _item, depth)
        attributes = getattr(value, "__dict__", None)  # a class of one's own derived from list or dict has some, too
        if isinstance(attributes, dict) and not self._is_aside(type(value), attributes):
            self._hold(Container(f"{name}.__dict__" if is_container else name, attributes, value), _attribute, depth)

    def _hold(self, held: Container, place: Callable[[object], str], depth: int) -> None:
        if id(held.content) in self.found:
            return
        self.found[id(held.content)] = held
        content = Plain(held.content)
        for number, (key, item) in enumerate(list(content.items()) if len(content) <= _MAX_ITEMS else ()):
            if type(item) not in PLAIN:
                self.visit(item, f"{held.name}{place(key)}", depth - 1)
            if type(key) not in PLAIN:  # held as a member of a set is
                self.visit(key, f"{held.name}.keys()[{number}]", depth - 1)

    def _is_aside(self, kind: type, attributes: Mapping[str, object]) -> bool:
        is_ours = kind.__module__.startswith("compressor.training.")
        return is_ours and self._said is not None and not attributes.keys() & self._said


def _attribute(key: object) -> str:
    return f".{key if isinstance(key, str) else type(key).__name__}"


def _item(key: object) -> str:
    return f"[{spelled(key) if type(key) in PLAIN else type(key).__name__}]"
