"""What holds other objects, or bytes: copied one level deep, compared, and filled again with what was there.

A container is a dict, list, set, deque, bytearray or array.array, a class (it holds its attributes), or an object of a class with
`__slots__` (it holds what lies in them).
"""

from __future__ import annotations

import functools
import logging
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import is_
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch
from torch import Tensor, nn

from compressor.random_state import GENERATORS

RAW = (bytearray, array)
CONTAINERS = (dict, list, set, deque, *RAW)
_BUILTIN = frozenset({dict, OrderedDict, list, set})


def slots_of(value: object) -> dict[str, MemberDescriptorType]:
    """List what gives access to the slots of an object: no `__setattr__` of a class has a say there.

    Args:
        value: anything.

    Returns:
        By class and name; empty for an object without slots.
    """
    return {
        f"{cls.__qualname__}.{name}": member
        for cls in type(value).__mro__
        if "__slots__" in vars(cls)
        for name, member in vars(cls).items()
        if isinstance(member, MemberDescriptorType)
    }


def attributes_of(value: object) -> dict[str, Any] | None:
    """Give the attributes that an object holds beside its slots; no code of its class has a say there.

    Args:
        value: anything.

    Returns:
        The very dict; None of an object without.
    """
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return held if type(held) is dict else None


def content(container: Any) -> Any:
    """Copy what a container holds, one level deep.

    Args:
        container: see above.

    Returns:
        A dict, list, set, or bytes; of an object with slots a dict of those that hold something.
    """
    if isinstance(container, type):
        return dict(vars(container))
    if isinstance(container, dict):
        return dict.copy(container)
    if isinstance(container, RAW):
        return memoryview(container).tobytes()
    if isinstance(container, set):
        return set.copy(container)
    return [*container] if isinstance(container, list | deque) else in_slots(container)


def in_slots(value: object) -> dict[str, Any]:
    """Give what lies in the slots of an object.

    Args:
        value: anything.

    Returns:
        By class and name.
    """
    held = {}
    for name, member in slots_of(value).items():
        try:
            held[name] = member.__get__(value, type(value))
        except AttributeError:  # nothing has been put there
            continue
    return held


def holds(container: Any, kept: Any) -> bool:
    """Say whether a container holds the very same objects as before, in the same order.

    Args:
        container: see above.
        kept: its `content` from before.

    Returns:
        True if so.
    """
    if not kept and type(container) in _BUILTIN:  # as most are: the hooks of a module alone are a dozen
        return not container
    if isinstance(container, set):
        return len(container) == len(kept) and {*map(id, container)} == {*map(id, kept)}
    if isinstance(kept, bytes):
        return bool(content(container) == kept)
    if isinstance(kept, dict):
        now = vars(container) if isinstance(container, type) else container if isinstance(container, dict) else content(container)
        return len(now) == len(kept) and all(map(is_, now.values(), kept.values())) and list(now) == list(kept)
    return len(container) == len(kept) and all(map(is_, container, kept))


def fill(container: Any, kept: Any) -> None:
    """Let a container hold what it held. Changes it.

    Args:
        container: see above.
        kept: its `content` from before.
    """
    if isinstance(container, type):
        for key in [key for key in {**kept, **vars(container)} if kept.get(key, container) is not vars(container).get(key, container)]:
            setattr(container, key, kept[key]) if key in kept else delattr(container, key)
    # By the methods of the base class: those of a subclass may do more than hold.
    elif isinstance(container, OrderedDict):
        OrderedDict.clear(container)
        OrderedDict.update(container, kept)
    elif isinstance(container, dict):
        dict.clear(container)
        dict.update(container, kept)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), kept)
    elif isinstance(container, RAW):
        container[:] = array(container.typecode, kept) if isinstance(container, array) else kept
    elif isinstance(container, set | deque):
        container.clear()
        container.update(kept) if isinstance(container, set) else container.extend(kept)
    else:
        _fill_slots(container, kept)


def _fill_slots(value: object, kept: dict[str, Any]) -> None:
    now = in_slots(value)
    for name, member in slots_of(value).items():
        if name in kept:
            member.__set__(value, kept[name])
        elif name in now:
            member.__delete__(value)


# All that a model holds, found from its modules on.

_MAX_OBJECTS = 100_000  # besides
_OBJECTS_A_MODULE = 100  # a Linear has about fifteen: experts by the ten thousand are looked at in whole
_LEAVES = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size)
_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {  # what holds other objects, and neither changes nor has attributes for them
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    property: lambda value: (value.fget, value.fset, value.fdel),
    functools.cached_property: lambda value: (value.func,),
    functools.partial: lambda value: (value.func, value.args, value.keywords),
    FunctionType: lambda value: (value.__defaults__, value.__kwdefaults__),
    MappingProxyType: lambda value: value.values(),
}
_SCRIPTED = (torch.jit.ScriptModule, torch.jit.ScriptFunction)
_OPAQUE = (*_SCRIPTED, logging.Logger, MethodType, BuiltinFunctionType, ModuleType, ReferenceType)
_WITHOUT_ATTRIBUTES = ("builtins", "collections")  # modules of containers that are nothing else
_OF_NO_MODEL = frozenset(("torch", "numpy", *sys.stdlib_module_names))
_OF_ALL_MODULES = vars(torch.nn.modules.module)
GLOBAL_HOOKS = tuple(_OF_ALL_MODULES[name] for name in _OF_ALL_MODULES if name.startswith("_global_") and name.endswith("_hooks"))


class Walk:
    """Finds all that a model holds.

    Attributes:
        containers: by identity, classes among them.
        tensors: by identity; the memory of numpy arrays as bytes.
        generators: by identity.
        instruments: objects of this package that are no modules, such as hooks that turn what a layer is handed.
    """

    def __init__(self, model: nn.Module, but: Collection[nn.Module] = (), of: Sequence[Any] | None = None) -> None:
        """Look at a model.

        Args:
            model: is only looked at.
            but: modules whose own attributes do not count.
            of: look at these alone, and into no module; None: at the model and at the hooks of all modules.
        """
        self.instruments: list[Any] = []
        self.containers: dict[int, Any] = {}
        self.tensors: dict[int, Tensor] = {}
        self.generators: dict[int, Any] = {}
        self._seen: set[int] = {id(vars(module)) for module in but} | (set() if of is None else set(map(id, model.modules())))
        self._queue: list[Any] = [*GLOBAL_HOOKS, model] if of is None else [*of]
        self._held: list[Any] = []  # so that no identity is used twice
        limit = _MAX_OBJECTS + _OBJECTS_A_MODULE * sum(1 for _ in model.modules())
        while self._queue and len(self._seen) < limit:
            self._visit(self._queue.pop())

    def _visit(self, value: Any) -> None:
        if isinstance(value, type):
            self._visit_classes(value)
            return
        if isinstance(value, _LEAVES) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self.tensors[id(value)] = value
            self._queue += [vars(value), value._backward_hooks]
        elif isinstance(value, CONTAINERS):
            self.containers[id(value)] = value
            self._queue.extend(value.values() if isinstance(value, dict) else () if isinstance(value, RAW) else value)
            self._visit_attributes(value)
        elif isinstance(value, tuple | frozenset):
            self._queue.extend(value)
            self._visit_attributes(value)
        elif isinstance(value, GENERATORS):
            self.generators[id(value)] = value
            self._visit_attributes(value)
        elif isinstance(value, nn.Module) or not (isinstance(value, _OPAQUE) or type(value).__module__.startswith("torch")):
            self._visit_object(value)

    def _visit_object(self, value: Any) -> None:
        self._held.append(value)
        if type(value).__module__.startswith("compressor.") and not isinstance(value, nn.Module):
            self.instruments.append(value)
        self._queue.extend(_PARTS[type(value)](value) if type(value) in _PARTS else ())
        if isinstance(value, np.ndarray):
            if value.dtype.kind in "biufc" and value.size and value.flags.writeable and value.flags.c_contiguous:
                shared = torch.from_numpy(value.reshape(-1).view(np.uint8))
                self.tensors[id(shared)] = shared
        else:
            self._visit_attributes(value)
            if slots_of(value):
                self.containers[id(value)] = value
                self._queue.extend(content(value).values())

    def _visit_attributes(self, value: Any) -> None:
        is_bare = isinstance(value, (*CONTAINERS, tuple, frozenset)) and type(value).__module__ in _WITHOUT_ATTRIBUTES
        if not is_bare:
            self._queue.append(attributes_of(value))
            self._visit_classes(type(value))

    def _visit_classes(self, kind: type) -> None:
        for cls in kind.__mro__:
            if id(cls) not in self._seen:
                self._seen.add(id(cls))
                if is_of_model(cls):
                    self._visit_classes(type(cls))
                    self.containers[id(cls)] = cls
                    self._queue.extend(vars(cls).values())


def is_of_model(cls: type) -> bool:
    """Say whether a class belongs to a model, and not to torch, numpy or Python.

    Args:
        cls: of a module or of what it holds, or above that.

    Returns:
        True if so.
    """
    return str(cls.__module__).partition(".")[0] not in _OF_NO_MODEL
