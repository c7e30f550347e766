"""Python values as JSON and tensors, and back in place: what an optimizer keeps on itself, extra state of modules, random generators.

Nothing is pickled, and no object is made of a name that stands in a file: an object of a class of one's own gets its attributes back, and
must be there. What is neither state nor can hold any, such as a function, stays what the new program makes it.
"""

from __future__ import annotations

import logging
import random
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import cache, partial
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compressor.errors import ResumeError
from compressor.random_state import generator_state, set_generator_state
from compressor.training.guards.containers import named_generators
from compressor.training.guards.frozen_value import exact_text, is_foreign
from compressor.training.guards.host_reads import named_host_generators
from compressor.training.step.step import TrainStep

Node = Any  # a plain value as it is, anything else as a dict that says what it is
_PLAIN = (bool, int, float, str, type(None))
# They keep nothing that a step moves.
_FIXED = (
    *(type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, logging.Logger, PurePath),
    *(torch.dtype, torch.device, np.dtype, random.SystemRandom, partial, Enum),
)
_LISTS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "deque": deque}
_SPACES: dict[str, type] = {"SimpleNamespace": SimpleNamespace, "Namespace": Namespace}
_HOSTS = (random.Random, np.random.Generator, np.random.RandomState)


@cache
def books() -> frozenset[str]:
    """Return what torch keeps on an optimizer and on what its schedulers wrap."""
    # Asked for at its first use: torch imports its compiler with the first optimizer, which takes as long as torch itself.
    return frozenset(vars(torch.optim.SGD([torch.zeros(1, dtype=torch.float32)], lr=0.0))) | {"_opt_called", "_step_count"}


class Writer:
    """Writes values of a step down.

    Args:
        step: the step; what of it is stored by name elsewhere is only named.

    Attributes:
        tensors: what belongs into the file beside the JSON, by the place where it was met.
    """

    def __init__(self, step: TrainStep) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._where: dict[int, str] = {}
        self._keep: list[object] = []
        self._named = _named(step)

    def write(self, value: object, where: str, *, is_new: bool = False) -> Node:
        """Write a value down.

        Args:
            value: the value; not changed.
            where: its name, also for messages.
            is_new: it is made anew when it is read, so that objects of one's own cannot be part of it.

        Returns:
            What `json` takes.

        Raises:
            ResumeError: it cannot be written down.
        """
        if type(value) in _PLAIN:
            return value
        if id(value) in self._named:
            return {"is": "named", "of": self._named[id(value)]}
        if isinstance(value, _FIXED):
            return {"is": "fixed"}
        if id(value) in self._where:
            return {"is": "same", "of": self._where[id(value)]}
        self._where[id(value)] = where
        self._keep.append(value)
        node = self._tensor(value, where) or self._container(value, where, is_new) or (None if is_new else self._object(value, where))
        if node is None:
            raise ResumeError(
                f"{where}: it holds a {type(value).__name__}, which no file of tensors and JSON keeps, and a run that is resumed would "
                "lack it; keep numbers, tensors, lists and dicts there"
            )
        return {**node, "at": where}

    def _tensor(self, value: object, where: str) -> Node:
        """Write what becomes a tensor of the file."""
        if isinstance(value, Tensor):
            if not is_writable(value):
                return None
            return self._put(where, value, "tensor") | {"device": str(value.device)}
        if isinstance(value, torch.Generator):
            return self._put(where, value.get_state(), "generator") | {"device": str(value.device)}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.isnative:
            return self._put(where, torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape).copy()), "array")
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            return {"is": "scalar", "dtype": str(value.dtype), "of": value.item()}
        return None

    def _put(self, where: str, tensor: Tensor, kind: str) -> dict[str, Any]:
        self.tensors[f"kept:{where}"] = tensor.detach().cpu().contiguous().clone()
        return {"is": kind}

    def _container(self, value: object, where: str, is_new: bool) -> Node:
        kind = type(value).__name__
        if isinstance(value, _HOSTS):
            return {"is": "host generator", "type": kind, "of": self.write(generator_state(value), f"{where}:state")}
        if _LISTS.get(kind) is type(value):
            items: Any = sorted(value, key=exact_text) if isinstance(value, set) else value
            length = {"max": value.maxlen} if isinstance(value, deque) else {}
            return {"is": kind, "of": [self.write(item, f"{where}[{n}]", is_new=is_new) for n, item in enumerate(items)], **length}
        if isinstance(value, dict):  # of a subclass, such as a defaultdict, the content
            pairs = enumerate(value.items())
            return {
                "is": "dict",
                "plain": type(value) is dict,
                "of": [
                    [self.write(key, f"{where}.key{n}", is_new=True), self.write(item, f"{where}[{_spelled(key, n)}]", is_new=is_new)]
                    for n, (key, item) in pairs
                ],
            }
        return None

    def _object(self, value: object, where: str) -> Node:
        cls = type(value)
        is_ours = not is_foreign(cls.__module__) or cls.__module__.startswith("torch.optim") or cls in _SPACES.values()
        has_slots = any(vars(base).get("__slots__") for base in cls.__mro__[:-1])
        if not is_ours or isinstance(value, nn.Module) or has_slots or not hasattr(value, "__dict__") or isinstance(value, Iterator):
            return None
        held = {key: item for key, item in _state_of(value).items() if not isinstance(item, _FIXED)}
        return {"is": "object", "type": cls.__qualname__, "of": {key: self.write(item, f"{where}.{key}") for key, item in held.items()}}


class Reader:
    """Reads what a `Writer` wrote, into a step.

    Args:
        step: the step; the values that it has are changed in place.
        tensors: those of the file.
        dry: change nothing, to see whether everything fits.

    Attributes:
        is_dry: the same.
    """

    def __init__(self, step: TrainStep, tensors: Mapping[str, Tensor], *, dry: bool) -> None:
        self._tensors, self.is_dry = tensors, dry
        self._named: dict[str, object] = {name: value for name, value in _values_by_name(step)}
        self._read: dict[str, object] = {}

    def read(self, node: Node, present: Any) -> Any:
        """Read a value.

        Args:
            node: what was written.
            present: the value that stands there now; changed in place where it can be.

        Returns:
            The value that is to stand there.

        Raises:
            ResumeError: it does not fit what is there.
        """
        if not isinstance(node, dict):
            return node
        kind = node["is"]
        if kind == "fixed":
            return present
        if kind == "named":
            return self._named.get(node["of"], present)
        if kind == "same":
            return self._read.get(node["of"], present)
        read = _READERS.get(kind, Reader._list)
        value = self._read[node["at"]] = read(self, node, present)
        return value

    def _tensor(self, node: Node, present: Any) -> Any:
        stored = self._tensors[f"kept:{node['at']}"]
        if not isinstance(present, Tensor) or present.shape != stored.shape or present.dtype != stored.dtype:
            return stored.clone() if self.is_dry else stored.clone().to(node["device"])
        if not self.is_dry:
            with torch.no_grad():
                present.copy_(stored)
        return present

    def _array(self, node: Node, present: Any) -> Any:
        stored = self._tensors[f"kept:{node['at']}"].numpy().copy()
        if not isinstance(present, np.ndarray) or present.shape != stored.shape or present.dtype != stored.dtype:
            return stored
        if not self.is_dry:
            present[...] = stored
        return present

    def _scalar(self, node: Node, present: Any) -> Any:
        return np.dtype(node["dtype"]).type(node["of"])

    def _generator(self, node: Node, present: Any) -> Any:
        generator = present if isinstance(present, torch.Generator) and str(present.device) == node["device"] else None
        generator = torch.Generator(node["device"]) if generator is None else generator
        (torch.Generator(node["device"]) if self.is_dry else generator).set_state(self._tensors[f"kept:{node['at']}"].clone())
        return generator

    def _host(self, node: Node, present: Any) -> Any:
        state = self.read(node["of"], None)
        generator = present if type(present).__name__ == node["type"] else _new_host(node, state)
        if not self.is_dry:
            set_generator_state(generator, state)
        return generator

    def _list(self, node: Node, present: Any) -> Any:
        cls = _LISTS[node["is"]]
        there: list[Any] = [*present] if type(present) is cls and cls is not set else []
        items = [self.read(item, there[place] if place < len(there) else None) for place, item in enumerate(node["of"])]
        if cls is tuple:
            return tuple(items)
        target: Any = present if type(present) is cls and not self.is_dry else deque(maxlen=node["max"]) if cls is deque else cls()
        target.clear()
        (target.update if isinstance(target, set) else target.extend)(items)
        return present if type(present) is cls else target

    def _dict(self, node: Node, present: Any) -> Any:
        if not (isinstance(present, dict) or node["plain"]):
            raise ResumeError(f"{node['at']}: it was stored as a mapping of another class than dict; make it before the first step")
        there = present if isinstance(present, dict) else {}
        keys = [self.read(key, None) for key, _ in node["of"]]
        items = {key: self.read(item, there.get(key)) for key, (_, item) in zip(keys, node["of"], strict=True)}
        if isinstance(present, dict) and not self.is_dry:
            present.clear()
            present.update(items)
        return present if isinstance(present, dict) else items

    def _object(self, node: Node, present: Any) -> Any:
        if type(present).__qualname__ != node["type"]:
            if node["type"] not in _SPACES:
                raise ResumeError(
                    f"{node['at']}: it was stored with an object of {node['type']}, and now there is {type(present).__name__}; "
                    "make the object before the state is loaded"
                )
            present = _SPACES[node["type"]]()
        self._read[node["at"]] = present  # it may hold itself
        values = {key: self.read(item, vars(present).get(key)) for key, item in node["of"].items()}
        if not self.is_dry:
            vars(present).update(values)
        return present


_READERS: dict[str, Callable[[Reader, Node, Any], Any]] = {
    "tensor": Reader._tensor,
    "array": Reader._array,
    "scalar": Reader._scalar,
    "generator": Reader._generator,
    "host generator": Reader._host,
    "dict": Reader._dict,
    "object": Reader._object,
}


def is_writable(tensor: Tensor) -> bool:
    """Say whether a file of tensors holds a tensor as it is."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def generators(step: TrainStep) -> dict[str, Any]:
    """List the random generators that modules and functions of a step hold: those of torch, of Python and of numpy.

    Args:
        step: the step; not changed.

    Returns:
        Name to generator, each once; those that have no state are left out.
    """
    return {
        **named_generators(step),
        **{name: one for name, one in named_host_generators(step).items() if generator_state(one) is not None},
    }


def _new_host(node: Node, state: Any) -> Any:
    """Make a generator of Python or numpy that a step makes when it first needs it."""
    if node["type"] == "Random":
        return random.Random()
    bits = getattr(np.random, state["bit_generator"], None)
    if node["type"] not in ("Generator", "RandomState") or bits is None:
        raise ResumeError(f"{node['at']}: it was stored with a {node['type']}, which is not there; make it before the state is loaded")
    return getattr(np.random, node["type"])(bits())


def _state_of(value: object) -> dict[str, Any]:
    """The attributes of an object; of an optimizer within another one also what torch keeps there, but not its hooks."""
    torchs = books() - {"state", "param_groups"} if isinstance(value, torch.optim.Optimizer) else frozenset()
    return {key: item for key, item in vars(value).items() if key not in torchs}


def _spelled(key: object, number: int) -> str:
    return exact_text(key) if type(key) in _PLAIN else str(number)


def _named(step: TrainStep) -> dict[int, str]:
    return {id(value): name for name, value in _values_by_name(step)}


def _values_by_name(step: TrainStep) -> Iterator[tuple[str, object]]:
    """Give what is stored elsewhere, or made by the program, by a name that it has in every program."""
    optimizer = step.optimizer
    for name, module in step.model.named_modules():
        yield f"module:{name}", module
    yield from (("model", step.model), ("step", step), ("optimizer", optimizer), ("optimizer.state", optimizer.state))
    yield from (("optimizer.groups", optimizer.param_groups), ("optimizer.defaults", optimizer.defaults))
    for number, group in enumerate(optimizer.param_groups):
        yield from ((f"group{number}", group), (f"group{number}.params", group["params"]))
        yield from ((f"group{number}.{key}", value) for key, value in group.items() if isinstance(value, Tensor))
    for name, parameter in step.parameters().items():
        yield f"parameter:{name}", parameter
        if parameter in optimizer.state:
            yield f"state:{name}", optimizer.state[parameter]
    yield from ((name, tensor) for name, tensor in step.tensors().items() if not name.startswith("param:"))
