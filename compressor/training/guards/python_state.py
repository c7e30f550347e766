"""The Python variables that a step's functions reach: what they close over, their defaults, and the globals they name.

A replay runs no Python. So a counter in a closure would stand still, and a flag that changes between steps would not be seen: the guards
compare these variables like any other fact. Functions are followed into the functions they reach, methods into the methods they name,
modules and classes into those of their attributes that the code names; the code of libraries is not followed.
"""

from __future__ import annotations

import dis
import inspect
import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial, wraps
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from compressor.training.guards.frozen_value import PLAIN, is_foreign
from compressor.training.step.step import HasPlanKey, TrainStep

_MAX_ITEMS = 64
_NEAR = 4  # calls from one function to the next
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
# Hooks that torch runs for every module, and for every optimizer.
_MODULE_HOOKS: tuple[dict[Any, Any], ...] = (
    *(torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks),
    *(torch_module._global_backward_pre_hooks, torch_module._global_backward_hooks),
)
_OPTIMIZER_HOOKS: tuple[dict[Any, Any], ...] = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
GLOBAL_HOOKS = (*_MODULE_HOOKS, *_OPTIMIZER_HOOKS)
_WATCHED = frozenset({"state", "param_groups", "defaults"})  # what an optimizer holds is watched by name already
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
_OF_AUTOGRAD = frozenset({"forward", "setup_context", "backward", "vjp", "jvp", "vmap"})
# Where code says one of these, the texts that it holds may be names.
_LOOKUPS = frozenset({"globals", "vars", "getattr", "__dict__", "attrgetter", "itemgetter", "import_module", "__import__", "modules"})
Getter = Callable[[], object]
T = TypeVar("T")
# What has been found of which step since a look began.
_seen_in_look: ContextVar[dict[tuple[object, TrainStep], Any] | None] = ContextVar("seen_in_look", default=None)


@contextmanager
def one_look() -> Iterator[None]:
    """Nothing of a step runs in here, so that what its functions reach is found once, whoever asks for it.

    Yields:
        None: within a look that has begun already, that one goes on.
    """
    if _seen_in_look.get() is not None:
        yield
        return
    token = _seen_in_look.set({})
    try:
        yield
    finally:
        _seen_in_look.reset(token)


def once_a_look(find: Callable[[TrainStep], T]) -> Callable[[TrainStep], T]:
    """Let a function that finds something of a step run once in a look.

    Args:
        find: what it returns is not changed by its callers.

    Returns:
        A function that does the same.
    """

    @wraps(find)
    def found(step: TrainStep) -> T:
        seen = _seen_in_look.get()
        if seen is None:
            return find(step)
        if (find, step) not in seen:
            seen[find, step] = find(step)
        return seen[find, step]

    return found


@dataclass
class _Walk:
    """What was met on the way, and the functions that are still to be looked into: one after the other, since they lead deep."""

    seen: set[int] = field(default_factory=set)
    functions: deque[tuple[object, str]] = field(default_factory=deque)


def variables(step: TrainStep, *, with_modules: bool = False) -> list[tuple[str, Getter]]:
    """List the variables that the functions of a step reach: its loss function, forward methods, hooks, and functions that modules keep.

    Args:
        step: the step; not changed.
        with_modules: variables that hold a module count too.

    Returns:
        Name for messages, and a function that gives the value of the moment.
    """
    found = _reached(step)
    return found if with_modules else [(name, getter) for name, getter in found if not isinstance(getter(), nn.Module)]


@once_a_look
def _reached(step: TrainStep) -> list[tuple[str, Getter]]:
    found: list[tuple[str, Getter]] = []
    for name, tensor in (*step.parameters().items(), *step.model.named_buffers()):
        found += [(f"attribute '{key}' of {name}", partial(vars(tensor).get, key)) for key in vars(tensor)]
    walk = _Walk()
    for name, root in _roots(step):
        if isinstance(root, MethodType):
            found += _attributes(root.__self__, root.__func__, name)
        elif not isinstance(root, FunctionType | partial):
            values = getattr(root, "__dict__", {})
            found += [(f"attribute '{key}' of {name}", partial(values.get, key)) for key in values]
            found.append((f"class of {name}", partial(getattr, root, "__class__")))
            root = type(root).__call__ if callable(root) else None
        walk.functions.append((root, name))
    while walk.functions:
        found += _reach(*walk.functions.popleft(), walk)
    return found


def _roots(step: TrainStep) -> Iterator[tuple[str, Any]]:
    yield "loss_fn", step.loss_fn
    for name, module in step.model.named_modules():
        where = name or "the model"
        yield from ((f"attribute '{key}' of {where}", value) for key, value in module.__dict__.items() if _is_function(value))
        for table in HOOKS:
            yield from ((f"a hook of {where}", hook) for hook in module.__dict__[table].values() if _runs(hook))
    for name, parameter in step.parameters().items():
        after = getattr(parameter, "_post_accumulate_grad_hooks", None)
        hooks = (*(parameter._backward_hooks or {}).values(), *(after or {}).values())
        yield from ((f"a hook of {name}", hook) for hook in hooks if _runs(hook))
    yield from (("a hook of all modules", hook) for table in _MODULE_HOOKS for hook in table.values() if _runs(hook))
    yield from _zero_roots(step.optimizer)
    yield from _update_roots(step.optimizer) if step.update_is_captured else ()
    for number, modifier in enumerate(step.modifiers):  # one with a plan key speaks for itself, and so do those of this package
        if not isinstance(modifier, HasPlanKey) and not is_foreign(type(modifier).__module__):
            yield f"on_event() of modifier {number}", modifier.on_event
    for cls in dict.fromkeys(map(type, step.model.modules())):
        yield from ((f"{function.__qualname__}", function) for function in _methods(cls, "forward"))


def _zero_roots(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Give a `zero_grad()` of one's own, which is captured with the step even where the update is not."""
    function = _behind(optimizer.zero_grad)
    if not isinstance(function, FunctionType) or not is_foreign(_home(function)):
        yield "zero_grad() of the optimizer", optimizer.zero_grad


def _update_roots(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    yield from (("a hook of the optimizer", hook) for hook in hooks if _runs(hook))
    yield from (("a hook of all optimizers", hook) for table in _OPTIMIZER_HOOKS for hook in table.values() if _runs(hook))
    if not is_foreign(type(optimizer).__module__):
        yield "step() of the optimizer", optimizer.step


def _methods(cls: type, name: str) -> list[FunctionType]:
    """Follow a method into the methods of the same class whose names it says."""
    found: dict[str, FunctionType] = {}
    names, seen = [name], {name}
    while names:
        function = _behind(getattr(cls, names.pop(), None))
        if isinstance(function, FunctionType) and not is_foreign(_home(function)):
            found[function.__qualname__] = function
            new = _said(function.__code__, _ATTRIBUTES) - seen
            names += sorted(new, reverse=True)
            seen |= new
    return list(found.values())


def _behind(value: object) -> Any:
    """The function behind a method, a property or a decorator; anything else is given back."""
    for way in ("__func__", "fget", "func"):
        value = (
            getattr(value, way, value) if isinstance(value, MethodType | classmethod | staticmethod | property | cached_property) else value
        )
    return inspect.unwrap(value) if callable(value) else value


def _attributes(holder: object, function: Any, name: str) -> Iterator[tuple[str, Getter]]:
    """What a bound method may read of its object: the attributes that it, or a method it calls, names."""
    if isinstance(holder, nn.Module | type) or is_foreign(type(holder).__module__):
        return
    said: set[str] = set()
    for method in (_behind(function), *_methods(type(holder), function.__name__)):
        said |= _said(method.__code__, _ATTRIBUTES)
    values = {**getattr(holder, "__dict__", {}), **(getattr(holder, "__pydantic_private__", None) or {})}
    keys = sorted((said & values.keys()) - _WATCHED)
    yield from ((f"attribute '{key}' of the object of {name}", partial(getattr, holder, key, None)) for key in keys)


def _home(function: FunctionType) -> str:
    """The module whose code a function runs; a decorator of torch takes over the name of what it wraps, but not its globals."""
    return str(function.__globals__.get("__name__"))


def _is_function(value: object) -> bool:
    return isinstance(value, FunctionType | MethodType | partial)


def _runs(value: object) -> bool:
    """Say whether a hook is code of one's own: a function, or an object that is called like one."""
    return _is_function(value) or not (isinstance(value, nn.Module) or is_foreign(type(value).__module__))


def _reach(function: object, name: str, walk: _Walk) -> Iterator[tuple[str, Getter]]:
    if isinstance(function, MethodType):
        function = function.__func__
    if isinstance(function, partial):
        yield from _bound(function, name, walk)
        return
    if not isinstance(function, FunctionType) or id(function) in walk.seen:
        return
    walk.seen.add(id(function))
    if hasattr(function, "__wrapped__"):
        walk.functions.append((function.__wrapped__, name))
    if is_foreign(_home(function)):
        return
    for part in ("__code__", "__defaults__", "__kwdefaults__", "__dict__"):
        if getattr(function, part):
            yield f"{part} of {name}", partial(getattr, function, part)
    said = _said_within(function)
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield from _found(f"variable '{variable}' that {name} closes over", partial(_content, cell), walk, said)
    for number, default in enumerate((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())):
        yield from _found(f"default {number} of {name}", partial(_itself, default), walk, said)
    yield from _of_space(function, name, walk, said)


def _of_space(function: FunctionType, name: str, walk: _Walk, said: frozenset[str]) -> Iterator[tuple[str, Getter]]:
    """What a function reads of the module that it stands in, and of those that it imports."""
    space = function.__globals__
    for variable in sorted(_said(function.__code__, _GLOBALS) & space.keys()):
        yield from _found(f"global '{variable}' that {name} reads", partial(space.get, variable), walk, said)
    for imported in sorted(_said(function.__code__, ("IMPORT_NAME",))):
        for module in _imported(imported, space):
            yield from _found(f"module {module.__name__} that {name} imports", partial(_itself, module), walk, said)


def _imported(name: str, space: Mapping[str, Any]) -> list[ModuleType]:
    """Modules that code imports when it runs: by their whole name, or within the package that the code lies in."""
    package = str(space.get("__package__") or "")
    parents = [package.rsplit(".", level)[0] for level in range(package.count(".") + 1)] if package else []
    names = [name, name.split(".", 1)[0], *(f"{parent}.{name}" for parent in parents), *parents]
    return [module for one in dict.fromkeys(names) if isinstance(module := sys.modules.get(one), ModuleType)]


def _bound(function: partial[object], name: str, walk: _Walk) -> Iterator[tuple[str, Getter]]:
    """What a `functools.partial` holds."""
    for number, value in enumerate(function.args):
        yield from _found(f"argument {number} of {name}", partial(_itself, value), walk, frozenset())
    for key, value in function.keywords.items():
        yield from _found(f"argument '{key}' of {name}", partial(_itself, value), walk, frozenset())
    walk.functions.append((function.func, name))


def _found(name: str, getter: Getter, walk: _Walk, said: frozenset[str]) -> Iterator[tuple[str, Getter]]:
    """Give a variable, and what lies behind it, given the attributes that the code around it names."""
    value = getter()
    if isinstance(value, ModuleType):
        of_module = (
            _of_library(value, walk, said) if is_foreign(value.__name__) else _named(value, f"of module {value.__name__}", walk, said)
        )
        yield from of_module
        return
    if isinstance(value, type):
        yield from _of_class(value, walk, said)
        return
    yield name, getter
    if isinstance(value, Optimizer):
        keys = sorted((said & vars(value).keys()) - _WATCHED)
        yield from ((f"attribute '{key}' of {name}", partial(vars(value).get, key)) for key in keys)
    if isinstance(value, ContextVar):
        yield f"value of {name}", partial(_current, value)
    elif value is os.getenv:
        yield "environ of module os", partial(_itself, os.environ)
    elif _is_function(value):
        walk.functions.append((value, str(getattr(value, "__qualname__", name))))
    elif type(value) not in PLAIN and not isinstance(value, nn.Module):
        walk.functions += [(function, str(getattr(function, "__qualname__", name))) for function in filter(_is_function, _items(value))]
        if not is_foreign(type(value).__module__):
            yield from _of_object(value, name, walk, said)


def _items(value: object) -> list[object]:
    """What a small container or an object holds."""
    if isinstance(value, list | tuple):
        held: Collection[object] = value
    else:
        held = (value if isinstance(value, dict) else getattr(value, "__dict__", {})).values()
    return list(held) if len(held) <= _MAX_ITEMS else []


def _named(holder: ModuleType | type, where: str, walk: _Walk, said: frozenset[str]) -> Iterator[tuple[str, Getter]]:
    """What code names of a module or a class."""
    space = vars(holder)
    for key in sorted(said & space.keys()):
        mark = hash((id(space[key]), where, key))
        if mark not in walk.seen and not (key.startswith("__") and key.endswith("__")):
            walk.seen.add(mark)
            getter = partial(_of_type, holder, key) if isinstance(holder, type) else partial(space.get, key)
            yield from _found(f"'{key}' {where}", getter, walk, said)


def _of_library(module: ModuleType, walk: _Walk, said: frozenset[str]) -> Iterator[tuple[str, Getter]]:
    """Functions of a library that code may call: somebody may put others in their place. What else a library holds is its own affair."""
    space = vars(module)
    if module is os and said & {"environ", "getenv"}:
        yield "environ of module os", partial(_itself, os.environ)
    for key in sorted(said & space.keys()):
        value, mark = space[key], hash((id(space[key]), id(module), key))
        if mark in walk.seen:
            continue
        walk.seen.add(mark)
        if isinstance(value, ModuleType):
            yield from _of_library(value, walk, said)
        elif callable(value) and not isinstance(value, type):
            yield f"'{key}' of module {module.__name__}", partial(space.get, key)


def _of_class(cls: type, walk: _Walk, said: frozenset[str]) -> Iterator[tuple[str, Getter]]:
    if issubclass(cls, torch.autograd.Function):
        said |= _OF_AUTOGRAD
    for key in sorted(said & set(dir(cls))):  # what its methods name of it, such as the one instance that there is
        said = said.union(*(_said(method.__code__, _ATTRIBUTES) for method in _methods(cls, key)))
    for base in cls.__mro__:
        if is_foreign(base.__module__) or issubclass(base, nn.Module):
            continue
        where = f"of class {base.__qualname__}"
        yield from _named(base, where, walk, said)
        for key in sorted(said & vars(base).keys()):
            function = getattr(vars(base)[key], "fget", None) or getattr(vars(base)[key], "__func__", None)
            walk.functions.append((function, f"{base.__qualname__}.{key}"))


def _of_object(value: object, name: str, walk: _Walk, said: frozenset[str]) -> Iterator[tuple[str, Getter]]:
    """What code reads of a plain object: slots, the methods that it names, and the attributes of its class that these name."""
    cls = type(value)
    yield f"class of {name}", partial(getattr, value, "__class__")
    for slot in (slot for base in cls.__mro__ for slot in _slots(base)):
        yield from _found(f"{name}.{slot}", partial(getattr, value, slot, None), walk, said)
    methods = [function for key in sorted({*said, "__call__"}) for function in _methods(cls, key)]
    for function in methods:
        said |= _said(function.__code__, _ATTRIBUTES)
        walk.functions.append((function, function.__qualname__))
    properties = [key for key in sorted(said) if isinstance(getattr(cls, key, None), property)]
    for key in properties:
        getter = getattr(cls, key).fget
        said |= _said(getter.__code__, _ATTRIBUTES) if isinstance(getter, FunctionType) else frozenset()
    yield from _of_class(cls, walk, said)


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return tuple(slot for slot in ((slots,) if isinstance(slots, str) else slots) if not slot.startswith("__"))


def _current(variable: ContextVar[object]) -> object:
    try:
        return variable.get()
    except LookupError:  # never set in this context
        return None


def _said_within(function: FunctionType) -> frozenset[str]:
    """Attributes that a function names, and those named by functions near it: it may hand them what it holds."""
    passed: dict[int, FunctionType] = {}
    level = [function]
    for _ in range(_NEAR):
        level = [one for one in level if id(one) not in passed and not is_foreign(_home(one))]
        passed |= {id(one): one for one in level}
        named = [(one.__globals__, _said(one.__code__, _GLOBALS)) for one in level]
        held = [content for one in level for content in map(_content, one.__closure__ or ())]
        held += [space.get(name) for space, names in named for name in names]
        level = [value for value in held if isinstance(value, FunctionType)]
    return frozenset().union(*(_said(one.__code__, _ATTRIBUTES) for one in passed.values()))


@lru_cache(maxsize=4096)
def _said(code: CodeType, operations: tuple[str, ...]) -> frozenset[str]:
    """Names that code, and the code within it, says in some operations."""
    names = frozenset(str(step.argval) for step in dis.get_instructions(code) if step.opname in operations)
    if not _LOOKUPS.isdisjoint(code.co_names):
        names |= {constant for constant in code.co_consts if isinstance(constant, str)}
    return names.union(*(_said(inner, operations) for inner in code.co_consts if isinstance(inner, CodeType)))


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that was never set
        return None


def _itself(value: object) -> object:
    return value


def _of_type(cls: type, key: str) -> object:
    return vars(cls).get(key)


def put(getter: Getter, value: object) -> None:
    """Set a variable that was found. Changes what holds it; what nobody can set stays.

    Args:
        getter: gives its value.
        value: the value that it is to have.
    """
    assert isinstance(getter, partial)
    holder = getattr(getter.func, "__self__", None)  # of a dict's own `get`
    target, *rest = (holder, *getter.args) if isinstance(holder, dict) else getter.args
    if isinstance(target, CellType):
        target.cell_contents = value
    elif isinstance(target, ContextVar):
        target.set(value)
    elif isinstance(target, dict):
        target[rest[0]] = value
    elif rest:
        setattr(target, rest[0], value)
