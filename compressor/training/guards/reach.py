"""Where the functions of a step lead: a walk over functions, objects, classes and modules, from one to what it names or holds.

Functions are followed into what they close over, their defaults, and the globals they name; objects and classes into those of their
attributes that any function on the way names; modules into all that they hold. The code of libraries is not followed.
"""

from __future__ import annotations

import builtins
import inspect
import logging
import os
import sys
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import (
    BuiltinFunctionType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.optim import Optimizer

from compressor.training.guards.frozen_value import MISSING, PLAIN, Plain, is_foreign, spelled
from compressor.training.guards.said_names import ATTRIBUTES, GLOBALS, content_of, home, methods, said_by, said_within, within

Getter = Callable[[], object]
Found = Iterator[tuple[str, Getter]]
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
# The attributes in which torch keeps its books, these tables among them.
BOOKS = frozenset(vars(nn.Module()))
_DEPTH, _MAX_OBJECTS, _MAX_ITEMS = 4, 512, 4096
_WATCHED = frozenset({"state", "param_groups", "defaults"})  # what an optimizer holds is watched by name already
_OF_AUTOGRAD = frozenset({"forward", "setup_context", "backward", "vjp", "jvp", "vmap"})
# What runs when an object is made, spelled or stored, and not because a step has it.
_OF_MAKING = frozenset({"__init__", "__new__", "__post_init__"})
_ASIDE = _OF_MAKING | {"__init_subclass__", "__repr__", "__str__", "__del__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"}
# What a function or a class says of itself.
_TEXTS = frozenset({"__annotations__", "__doc__", "__module__", "__name__", "__qualname__"})
_CONTAINERS = (list, tuple, set, frozenset, deque, dict, MappingProxyType)
# Books that torch keeps for itself, as the context of a compiled module or an operator: they change without a change of the step.
TORCH_S_OWN = "torch._"
_OPAQUE = (Tensor, torch.Generator, Optimizer, logging.Logger, torch.dtype, torch.device)
# What a class shows as it holds it; anything else may give another object whenever it is asked.
_STEADY = (FunctionType, property, MemberDescriptorType, type(vars(namedtuple("_Named", "field"))["field"]))


@dataclass
class _Held:
    """An object whose attributes count as soon as code names them."""

    value: object
    name: str
    depth: int
    done: set[str] = field(default_factory=set)


class Walk:
    """What was met on the way, and what is still to be looked into: one after the other, since they lead deep.

    Args:
        own: the modules of the model.

    Attributes:
        others: modules beside the model, and the way to each.
        classes: what was met of them, by name; those of objects, of modules, and those that code names.
        said: attributes that code on the way names.
    """

    def __init__(self, own: frozenset[nn.Module]) -> None:
        self.others: dict[nn.Module, str] = {}
        self.classes: dict[type, set[str]] = {}
        self._own, self.said = own, set[str]()
        self._waiting: deque[tuple[object, str]] = deque()
        self._seen: set[int] = set()
        self._held: list[_Held] = []
        self._named, self._of_modules = set[type](), set[type]()
        self._speaking: dict[type | FunctionType, tuple[str, set[str]]] = {}

    def follow(self, roots: Iterable[tuple[str, object]]) -> list[tuple[str, Getter]]:
        """Walk to the end.

        Args:
            roots: what to start from, by name.

        Returns:
            Name for messages, and a function that gives the value of the moment.
        """
        found: list[tuple[str, Getter]] = []
        self._waiting += ((root, name) for name, root in roots)
        met = -1
        while self._waiting or met != len(self._held) + len(self.classes):
            met = len(self._held) + len(self.classes)
            while self._waiting:
                found += self._reach(*self._waiting.popleft())
            found += self._of_objects()
            found += self._of_classes()
            found += self._of_texts()
        return found

    def _reach(self, thing: object, name: str) -> Found:
        if isinstance(thing, nn.Module):
            yield from self._of_module(thing, name)
        elif isinstance(thing, MethodType):
            yield from self._of_method(thing, name)
        elif isinstance(thing, partial):
            yield from self._bound(thing, name)
        elif isinstance(thing, FunctionType):
            yield from self._of_function(thing, name)
        elif isinstance(thing, type) or runs(thing):
            values = getattr(thing, "__dict__", None)
            if isinstance(values, dict):
                yield from ((f"attribute '{key}' of {name}", partial(values.get, key, MISSING)) for key in values)
            yield from self._found(name, partial(_itself, thing), frozenset())

    def _of_module(self, module: nn.Module, name: str) -> Found:
        """What a module holds and runs; of one beside the model, its submodules too."""
        for inner, part in [("", module)] if module in self._own else module.named_modules():
            if id(part) in self._seen:
                continue
            self._seen.add(id(part))
            where = f"{name}{'.' if inner else ''}{inner}"
            if part not in self._own:
                self.others[part] = where
            self.classes.setdefault(type(part), set())
            self._of_modules |= {*type(part).__mro__}
            for key, value in part.__dict__.items():
                if key not in BOOKS or key == "forward":
                    yield from self._within(value, f"attribute '{key}' of {where}", _DEPTH)
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                self._of_tensor_class(type(tensor))
            self._waiting += ((hook, f"a hook of {where}") for table in HOOKS for hook in part.__dict__[table].values() if runs(hook))

    def _of_method(self, method: MethodType, name: str) -> Found:
        """What a bound method may read of its object: the attributes that it, or a method it calls, names, there or not."""
        holder, function = method.__self__, method.__func__
        self._waiting.append((function, name))
        mark = hash((id(holder), id(function)))
        if mark in self._seen:
            return
        self._seen.add(mark)
        if isinstance(holder, nn.Module):
            self._waiting.append((holder, f"the object of {name}"))
        elif isinstance(holder, type):
            self.classes.setdefault(holder, set())
        elif not is_foreign(type(holder).__module__):
            self.classes.setdefault(type(holder), set())
            yield f"class of the object of {name}", partial(getattr, holder, "__class__")
            own = (function, *methods(type(holder), function.__name__))
            said = frozenset().union(*(said_within(one) for one in own if isinstance(one, FunctionType))) - _WATCHED
            where = f"of the object of {name}"
            spaces = (getattr(holder, "__dict__", {}), getattr(holder, "__pydantic_private__", None) or {})
            for key in sorted(said):
                for space in (*spaces[:1], *(space for space in spaces[1:] if key in space)):
                    yield from self._found(f"attribute '{key}' {where}", partial(space.get, key, MISSING), said)
            for slot in said.intersection(_slots(type(holder))):
                yield from self._found(f"attribute '{slot}' {where}", partial(getattr, holder, slot, None), said)

    def _bound(self, function: partial[object], name: str) -> Found:
        """What a `functools.partial` holds."""
        for number, value in enumerate(function.args):
            yield from self._found(f"argument {number} of {name}", partial(_itself, value), frozenset())
        for key in function.keywords:
            yield from self._found(f"argument '{key}' of {name}", partial(function.keywords.get, key, MISSING), frozenset())
        yield f"keywords of {name}", partial(getattr, function, "keywords")  # others may come
        self._waiting.append((function.func, name))

    def _of_function(self, function: FunctionType, name: str) -> Found:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        if hasattr(function, "__wrapped__"):
            self._waiting.append((function.__wrapped__, name))
        if is_foreign(home(function)):
            return
        self._speaking[function] = (name, set())
        self.said |= said_by(function.__code__, ATTRIBUTES)
        for part in ("__code__", "__defaults__", "__kwdefaults__", "__dict__"):
            if getattr(function, part):
                yield f"{part} of {name}", partial(getattr, function, part)
        said = said_within(function)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            yield from self._found(f"variable '{variable}' that {name} closes over", partial(content_of, cell), said)
        for number, default in enumerate((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())):
            yield from self._found(f"default {number} of {name}", partial(_itself, default), said)
        yield from self._of_globals(function, name, said)

    def _of_globals(self, function: FunctionType, name: str, said: Set[str]) -> Found:
        """What a function reads of the module that it stands in, and of those that it imports."""
        space = function.__globals__
        for variable in sorted(said_by(function.__code__, GLOBALS) & space.keys()):
            yield from self._found(f"global '{variable}' that {name} reads", partial(space.get, variable, MISSING), said)
        built_in = (said_by(function.__code__, GLOBALS) & vars(builtins).keys()) - space.keys()
        for variable in sorted(built_in):  # a global of that name would stand before it
            mark = hash((id(space), variable))
            if mark not in self._seen:
                self._seen.add(mark)
                yield f"global '{variable}' that {name} reads", partial(space.get, variable, MISSING)
        yield from self._of_library(builtins, built_in)
        for imported in sorted(said_by(function.__code__, ("IMPORT_NAME",))):
            for module in _imported(imported, space):
                yield from self._found(f"module {module.__name__} that {name} imports", partial(_itself, module), said)

    def _found(self, name: str, getter: Getter, said: Set[str]) -> Found:
        """Give a variable, and what lies behind it, given the attributes that the code around it names."""
        value = getter()
        if isinstance(value, ModuleType):
            yield from self._of_library(value, said) if is_foreign(value.__name__) else self._of_space(value, said)
            return
        yield name, getter
        if isinstance(value, Optimizer):
            keys = sorted((said & vars(value).keys()) - _WATCHED)
            yield from ((f"attribute '{key}' of {name}", partial(vars(value).get, key)) for key in keys)
        elif isinstance(value, ContextVar):
            yield f"value of {name}", partial(_current, value)
        elif value is os.getenv:
            yield "environ of module os", partial(_itself, os.environ)
        elif isinstance(value, BuiltinFunctionType | MethodWrapperType):
            if not isinstance(value.__self__, ModuleType | type | None):
                yield from self._found(f"the object of {name}", partial(_itself, value.__self__), said)
        else:
            yield from self._within(value, name, _DEPTH)

    def _within(self, value: object, name: str, depth: int) -> Found:
        """Note what a value is or holds: functions, modules, classes and objects, those in containers too."""
        kind = type(value)
        self._waiting += ((function, function.__qualname__) for function in _of_operator(value))
        self._of_tensor_class(kind)
        # A class of tensors is made by one of torch's own, and is none of its books.
        is_torchs = kind.__module__.startswith(TORCH_S_OWN) and not isinstance(value, type)
        if kind in PLAIN or isinstance(value, _OPAQUE) or is_torchs or depth < 0:
            return
        self._of_class(kind)  # of a class that is its metaclass
        if isinstance(value, FunctionType | MethodType | partial):
            own = str(getattr(value, "__qualname__", name))
            self._waiting.append((value, own if depth == _DEPTH else f"{own} (in {name})"))  # whether it is called nobody knows
        elif isinstance(value, nn.Module):
            self._waiting.append((value, name))
        elif isinstance(value, type):
            self.classes.setdefault(value, set())
            self._named.add(value)
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            is_container = isinstance(value, _CONTAINERS)
            if is_container:
                yield from self._of_items(Plain(value), name, depth)
            if len(self._held) < _MAX_OBJECTS and not (is_container and is_foreign(kind.__module__)):
                self._held.append(_Held(value, name, depth))
                yield from self._of_own(value, name, depth)

    def _of_items(self, held: Plain, name: str, depth: int) -> Found:
        """What a container holds: items, and keys, which are held as members of a set are."""
        for number, (key, item) in enumerate(held.items() if len(held) <= _MAX_ITEMS else ()):
            yield from () if type(key) in PLAIN else self._within(key, f"key {number} of {name}", depth - 1)
            yield from self._within(item, f"{_spelled(key)} of {name}", depth - 1)

    def _of_class(self, kind: type) -> None:
        if not is_foreign(kind.__module__):
            self.classes.setdefault(kind, set())

    def _of_tensor_class(self, kind: type) -> None:
        """The class of a tensor that is no plain one computes for every operator what it likes."""
        if issubclass(kind, Tensor):
            self._of_class(kind)

    def _of_own(self, value: object, name: str, depth: int) -> Found:
        """The class and the slots of an object that is no library's."""
        if not isinstance(value, ModuleType) and not is_foreign(type(value).__module__):
            yield f"class of {name}", partial(getattr, value, "__class__")
            for slot in _slots(type(value)):
                getter = partial(getattr, value, slot, None)
                yield f"{name}.{slot}", getter
                yield from self._within(getter(), f"{name}.{slot}", depth - 1)

    def _of_objects(self) -> Found:
        """What code names of the objects that were met."""
        for held in self._held:  # more may come meanwhile
            space = getattr(held.value, "__dict__", {})
            for key in sorted((self.said & space.keys()) - held.done):
                held.done.add(key)
                if isinstance(held.value, ModuleType) and not is_foreign(held.value.__name__):
                    yield f"'{key}' of {held.name}", partial(space.get, key, MISSING)
                yield from self._within(space[key], f"{held.name}.{key}", held.depth - 1)

    def _of_texts(self) -> Found:
        """What code names of what functions and classes say of themselves, such as their names."""
        for thing, (name, done) in self._speaking.items():
            for key in sorted((self.said & _TEXTS) - done):
                done.add(key)
                yield f"{key} of {name}", partial(getattr, thing, key, MISSING)

    def _of_classes(self) -> Found:
        """What code names of the classes that were met, and what runs without being named."""
        classes = [cls for cls in self.classes if not is_foreign(cls.__module__)]
        for cls in classes:
            done = self.classes[cls]
            self._speaking.setdefault(cls, (f"class {cls.__qualname__}", set()))
            if issubclass(cls, Enum) and "_member_map_" not in done:  # whoever has the class can have any member by its value
                done.add("_member_map_")
                yield from self._found(f"members of class {cls.__qualname__}", partial(getattr, cls, "_member_map_"), frozenset())
            said = self.said | (_OF_AUTOGRAD if issubclass(cls, torch.autograd.Function) else frozenset({"forward"}))
            plain = {key for key in said if not (key.startswith("__") and key.endswith("__")) and hasattr(cls, key)}
            for key in sorted((plain | self._implicit(cls)) - done):
                done.add(key)
                yield from self._of_member(cls, key)

    def _implicit(self, cls: type) -> set[str]:
        """Methods that Python calls by itself, as operators do."""
        own = [vars(base) for base in cls.__mro__ if not is_foreign(base.__module__)]
        aside = _ASIDE - _OF_MAKING if cls in self._named else _ASIDE
        found = {key: value for space in own for key, value in space.items() if key.startswith("__")}
        return {key for key, value in found.items() if callable(value) or isinstance(value, classmethod | property)} - aside

    def _of_member(self, cls: type, key: str) -> Found:
        member = inspect.getattr_static(cls, key, MISSING)
        name = f"'{key}' of class {cls.__qualname__}"
        if cls not in self._of_modules:  # those are watched as a whole
            is_steady = isinstance(member, _STEADY) or not hasattr(type(member), "__get__")
            yield name, partial(getattr if is_steady else inspect.getattr_static, cls, key, MISSING)
        function = within(member)
        yield from self._within(function, name, _DEPTH)

    def _of_space(self, module: ModuleType, said: Set[str]) -> Found:
        """What code names of a module of one's own."""
        space = vars(module)
        self._of_class(type(module))
        plain = {key for key in said if not (key.startswith("__") and key.endswith("__"))}
        for key in sorted((plain | {"__getattr__"}) & space.keys()):
            mark = hash((id(space[key]), id(module), key))
            if mark not in self._seen:
                self._seen.add(mark)
                yield from self._found(f"'{key}' of module {module.__name__}", partial(space.get, key, MISSING), said)

    def _of_library(self, module: ModuleType, said: Set[str]) -> Found:
        """Functions of a library that code may call: somebody may put others in their place. What else it holds is its own affair."""
        space = vars(module)
        if module is os and said & {"environ", "getenv"}:
            yield "environ of module os", partial(_itself, os.environ)
        for key in sorted(said & space.keys()):
            value, mark = space[key], hash((id(space[key]), id(module), key))
            if mark in self._seen:
                continue
            self._seen.add(mark)
            if isinstance(value, ModuleType):
                yield from self._of_library(value, said)
            elif callable(value) and not isinstance(value, type):
                yield f"'{key}' of module {module.__name__}", partial(space.get, key)
                self._waiting += ((function, function.__qualname__) for function in _of_operator(value))


def _of_operator(value: object) -> list[FunctionType]:
    """Functions of one's own in an operator of `torch.library.custom_op`, however it is named."""
    if isinstance(value, OpOverload | OpOverloadPacket):
        value = OPDEFS.get(str(value._qualified_op_name if isinstance(value, OpOverloadPacket) else value._schema.name))
    if not isinstance(value, CustomOpDef):
        return []
    found = (value._init_fn, value._setup_context_fn, value._backward_fn, *value._backend_fns.values())
    return [one for one in found if isinstance(one, FunctionType)]


def runs(value: object) -> bool:
    """Say whether a hook is code of one's own.

    Args:
        value: the hook.

    Returns:
        True for a function, or an object that is called like one.
    """
    return isinstance(value, FunctionType | MethodType | partial) or not (
        isinstance(value, nn.Module) or is_foreign(type(value).__module__)
    )


def _imported(name: str, space: Mapping[str, Any]) -> list[ModuleType]:
    """Modules that code imports when it runs: by their whole name, or within the package that the code lies in."""
    package = str(space.get("__package__") or "")
    parents = [package.rsplit(".", level)[0] for level in range(package.count(".") + 1)] if package else []
    names = [name, name.split(".", 1)[0], *(f"{parent}.{name}" for parent in parents), *parents]
    return [module for one in dict.fromkeys(names) if isinstance(module := sys.modules.get(one), ModuleType)]


_PYDANTIC = ("__pydantic_private__", "__pydantic_extra__")  # where its models keep what is no field


def _slots(cls: type) -> list[str]:
    """The names under which an object keeps what is not in its `__dict__`."""
    spaces = [vars(base).get("__slots__", ()) for base in cls.__mro__]
    found = [slot for slots in spaces for slot in ((slots,) if isinstance(slots, str) else slots)]
    found += ["args"] if issubclass(cls, BaseException) else []
    return [slot for slot in found if not slot.startswith("__") or slot in _PYDANTIC]


def _spelled(key: object) -> str:
    return f"[{spelled(key)}]" if type(key) in PLAIN else f"[{type(key).__name__}]"


def _current(variable: ContextVar[object]) -> object:
    try:
        return variable.get()
    except LookupError:  # never set in this context
        return None


def _itself(value: object) -> object:
    return value
