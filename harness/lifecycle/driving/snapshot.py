"""Everything about a model and its surroundings that a call might change, taken at one moment and compared with another.

A difference carries the kind of thing that changed, so that a caller may allow some kinds (modules, where a modifier is to replace
them) and forbid all others. Tensors are compared bit for bit, functions and modules by identity, plain data by value.
"""

from __future__ import annotations

import builtins
import math
import operator
import os
import random
import threading
from array import array
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from compressor.pages import equal_bytes
from harness.lifecycle.driving.python_settings import PYTHON_SETTINGS, WarningFilters
from harness.lifecycle.driving.torch_settings import TORCH_SETTINGS, modes_aside, num_modes

MAX_DEPTH = 8
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# Hooks of all modules, those of registration among them, and of all optimizers.
GLOBAL_HOOKS = [(torch_module, name) for name in vars(torch_module) if name.startswith("_global_") and name.endswith("_hooks")]
GLOBAL_HOOKS += [(torch_optimizer, name) for name in vars(torch_optimizer) if name.startswith("_global_") and name.endswith("_hooks")]
_OWN = {*HOOKS, "training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"}
_OWN |= {"_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_backward_pre_hooks"}
# Where torch keeps its functions: what is put there in the place of one changes every model of the process.
SHARED = {
    "torch": torch,
    "torch.nn": nn,
    "torch.nn.functional": nn.functional,
    "torch.nn.init": nn.init,
    "torch.linalg": torch.linalg,
    "torch.Tensor": torch.Tensor,
    **{module.__name__: module for module in (numpy, numpy.linalg, random, math, builtins)},
}
# Where an attribute of one object is one of every tensor or layer of the process.
CLASSES: tuple[type, ...] = (torch.Tensor, nn.Parameter, nn.Module, nn.Linear)
# Where torch's own code lies, and what the first torch.compile writes into the environment.
_TORCH = str(Path(torch.__file__).parent)
_LOADS_MORE = ("torch", "numpy")
_OF_THE_COMPILER = ("TORCHINDUCTOR_", "TRITON_")
_WEAK = WeakSet | WeakKeyDictionary | WeakValueDictionary  # what they hold goes when garbage is collected, by nobody's doing
_NOTES = ("__slotnames__", "_implementation_cached_value")  # whether a class can have another attention is looked up once
_MISSING = object()
_PLAIN = (type(None), bool, int, str, bytes, Enum, torch.dtype, torch.device, torch.Size)
# What most attributes are, seen at one look; a snapshot is taken at every call of a lifecycle, and holds hundreds of them.
_MOST = frozenset({type(None), bool, int, str, torch.dtype, torch.device})
_NO_HOOKS: list[object] = []


class Same:
    """An object that is compared by identity; it stays alive as long as the snapshot does."""

    def __init__(self, thing: object) -> None:
        """Hold the object."""
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        """Equal only with a holder of the very same object."""
        return isinstance(other, Same) and self.thing is other.thing

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Name the type."""
        return f"<{getattr(self.thing, '__qualname__', type(self.thing).__name__)}>"


class Namespace:
    """The attributes of a class or module at one moment, each compared by identity."""

    def __init__(self, owner: object) -> None:
        """Copy the references, at one stroke: this happens at every call that is watched."""
        self.values = vars(owner).copy()

    def __eq__(self, other: object) -> bool:
        """Equal with a namespace of the same names and the very same objects."""
        if not isinstance(other, Namespace):
            return NotImplemented
        return not self.changed(other)

    __hash__ = None  # type: ignore[assignment]

    def is_same(self, other: Namespace) -> bool:
        """Whether all stands as it stood, in the same order, which is quickly seen."""
        mine, its = self.values, other.values
        return len(mine) == len(its) and all(map(operator.is_, mine.values(), its.values())) and list(mine) == list(its)

    def changed(self, other: Namespace) -> list[str]:
        """Return the names that do not stand for the same object in both."""
        if self.is_same(other):
            return []
        mine, its = self.values, other.values
        names = [name for name in {**mine, **its} if mine.get(name, _MISSING) is not its.get(name, _MISSING)]
        return [name for name in names if name != "__doc__" and not is_of_torch(name, its.get(name))]


class Functions(Namespace):
    """The functions of a class or module of torch, which loads further names when they are asked for."""

    def changed(self, other: Namespace) -> list[str]:
        """Return the names that stand for another function."""
        if self.is_same(other):
            return []
        its = other.values
        names = [name for name, value in self.values.items() if its.get(name, value) is not value and callable(value)]
        return [name for name in names if not is_of_torch(name, its[name])]


class Shared(Functions):
    """What a module holds that all code of the process shares: also plain values under public names, and what somebody has put there."""

    def changed(self, other: Namespace) -> list[str]:
        """Return the names that stand for something else, or are new."""
        if self.is_same(other):
            return []
        mine, its = self.values, other.values
        public = [name for name, value in mine.items() if not name.startswith("_") and its.get(name, _MISSING) is not value]
        replaced = [name for name in public if not is_of_torch(name, its.get(name))]
        return list(dict.fromkeys([*super().changed(other), *replaced, *added_names(mine, its)]))


def added_names(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Find what somebody has put into a module of a library.

    Args:
        before: its names.
        now: likewise.

    Returns:
        New public names, without the modules, classes and functions that a library loads when they are asked for.
    """
    added = [name for name in now if name not in before and not name.startswith("_") and not isinstance(now[name], ModuleType)]
    return [name for name in added if str(getattr(now[name], "__module__", "")).partition(".")[0] not in _LOADS_MORE]


def is_of_torch(name: str, value: object) -> bool:
    """Say whether a library itself has put something there.

    The first torch.compile wraps functions and marks the class of modules; pickling and transformers note something of a class they meet.

    Args:
        name: of the attribute.
        value: what stands there now.

    Returns:
        True for such marks, and for functions of torch's files.
    """
    code = getattr(value, "__code__", None)
    return name.startswith("___") or name.endswith(_NOTES) or (code is not None and code.co_filename.startswith(_TORCH))


class Bits:
    """A copy of a tensor, compared bit for bit."""

    def __init__(self, tensor: Tensor) -> None:
        """Copy the tensor."""
        plain = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()  # as the gradient of an embedding
        copy = plain.clone(memory_format=torch.contiguous_format)
        self.kind = (copy.dtype, copy.shape, copy.device, tensor.layout)
        self.bits = copy.reshape(-1).view(torch.uint8)

    def __eq__(self, other: object) -> bool:
        """Equal with a tensor of the same dtype, shape, device and bytes."""
        if not isinstance(other, Bits):
            return NotImplemented
        return self.kind == other.kind and (self.bits.device.type == "meta" or equal_bytes(self.bits, other.bits))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Name dtype and shape."""
        dtype, shape, *_ = self.kind
        return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


class Held(Bits):
    """A tensor of somebody else's: its bits, and whatever may be said of it beside them."""

    def __init__(self, tensor: Tensor) -> None:
        """Copy the tensor, and what hangs on it."""
        super().__init__(tensor)
        place = None if tensor.is_sparse or tensor.device.type == "meta" else (tensor.stride(), tensor.data_ptr())
        self.beside: dict[str, object] = {"requires_grad": tensor.requires_grad, "memory": place}
        self.beside["grad"] = None if not tensor.is_leaf or tensor.grad is None else Bits(tensor.grad)
        self.beside |= {f"hooks {kind}": [Same(hook) for hook in (getattr(tensor, kind, None) or {}).values()] for kind in TENSOR_HOOKS}
        self.beside |= {f"attribute {name}": freeze(thing) for name, thing in getattr(tensor, "__dict__", {}).items()}

    def __eq__(self, other: object) -> bool:
        """Equal with the same bits, of which the same is said."""
        same = super().__eq__(other)
        return same if same is not True or not isinstance(other, Held) else self.beside == other.beside

    __hash__ = None


Allowed = str | tuple[str, str]
"""What may differ: everything of a kind, or one thing by its kind and name."""


@dataclass(frozen=True)
class Difference:
    """One thing that is not as it was.

    Attributes:
        kind: module, hooks, tensor, grad, requires_grad, training, attribute, class, rng, torch, threads, process, or the caller's own.
        where: dotted name of what changed.
        text: how it changed.
    """

    kind: str
    where: str
    text: str

    def __str__(self) -> str:
        """Return one line."""
        return f"{self.where or 'the model'}: {self.kind} {self.text}"


class Snapshot:
    """What is true at one moment.

    Args:
        model: looked at whole; not modified.
        extra: further things to look at, by kind.
    """

    @modes_aside()
    def __init__(self, model: nn.Module, extra: Mapping[str, object] | None = None) -> None:
        self.items: dict[tuple[str, str], object] = dict(surroundings())
        for name, module in model.named_modules(remove_duplicate=False):
            self.items.update(module_items(name, module))
        for cls in {cls for module in model.modules() for cls in type(module).__mro__ if issubclass(cls, nn.Module)}:
            self.items["class", cls.__qualname__] = Namespace(cls)
        for kind, thing in (extra or {}).items():
            parts = thing if isinstance(thing, Mapping) else {kind: thing}
            self.items.update({(kind, str(name)): freeze(part) for name, part in parts.items()})

    @classmethod
    def of_surroundings(cls) -> Snapshot:
        """Return what is true around any model: all that a call of code without a model may leave as it was."""
        taken = cls.of_process()
        with modes_aside():
            taken.items.update(surroundings())
        return taken

    @classmethod
    def of_process(cls) -> Snapshot:
        """Return what is true of the process apart from any model; looked at before and after a run, not at every call."""
        taken = cls.__new__(cls)
        taken.items = {("process", name): (Functions if isinstance(owner, type) else Shared)(owner) for name, owner in SHARED.items()}
        taken.items.update({("process", f"the class {owner.__name__}"): Namespace(owner) for owner in CLASSES})
        environment = {key: value for key, value in os.environ.items() if not key.startswith(_OF_THE_COMPILER)}
        taken.items["process", "environment"] = environment
        taken.items.update({("process", name): value for name, value in _settings_of_process()})
        return taken

    @modes_aside()
    def differences(self, later: Snapshot, allowed: Collection[Allowed] = ()) -> list[Difference]:
        """Compare with a later snapshot.

        Args:
            later: of the same model.
            allowed: what may differ: kinds, and single things by kind and name.

        Returns:
            The differences, in a fixed order.
        """
        found = []
        mine, its = self.items, later.items
        pairs = [(key, before, its.get(key, _MISSING)) for key, before in mine.items()]
        for key, before, after in pairs + [(key, _MISSING, after) for key, after in its.items() if key not in mine]:
            if before is after or key[0] in allowed or key in allowed or before == after:  # as nearly all are, of tens of thousands
                continue
            # A module of another class came or went, no class has changed.
            is_news = (before is _MISSING and isinstance(after, Namespace)) or (after is _MISSING and isinstance(before, Namespace))
            # Somebody else's thread has ended.
            is_less = isinstance(before, frozenset) and isinstance(after, frozenset) and after <= before
            if not is_news and not is_less:
                found.append(Difference(*key, "was seeded or drawn from" if key[0] == "rng" else describe_change(before, after)))
        return sorted(found, key=str)


def freeze(value: object, depth: int = MAX_DEPTH, above: tuple[int, ...] = (), tensors: type[Bits] = Bits) -> object:
    """Return something that stays as it is and equals another freeze of an unchanged value.

    Args:
        value: anything; not modified.
        depth: how far containers and objects are followed.
        above: objects around the value, so that a cycle ends.
        tensors: what a tensor becomes: Bits for its values, Held for all that may be said of it.

    Returns:
        Plain data, copies of tensors and identities.
    """
    if type(value) in _MOST or isinstance(value, (*_PLAIN, Bits, Same)):  # plain, or frozen already
        return value
    if isinstance(value, float):
        return repr(value)  # NaN equals itself here
    if isinstance(value, Tensor):
        return tensors(value)
    if depth == 0 or id(value) in above or isinstance(value, type | nn.Module | ModuleType | _WEAK) or callable(value):
        return Same(value)
    below = (*above, id(value))
    if isinstance(value, Mapping):
        return {repr(key): freeze(item, depth - 1, below, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [type(value).__name__, *(freeze(item, depth - 1, below, tensors) for item in value)]
    if isinstance(value, set | frozenset):
        return {repr(item) for item in value}
    if isinstance(value, numpy.ndarray | array | bytearray):
        numbers = numpy.asarray(value)
        return [type(value).__name__, str(numbers.dtype), numbers.shape, numbers.tobytes()]
    if hasattr(value, "__dict__"):
        return [Same(value), {key: freeze(item, depth - 1, below, tensors) for key, item in vars(value).items()}]
    return Same(value)


@modes_aside()
def num_hooks(model: nn.Module) -> int:
    """Return how many hooks of any kind lie on a model's modules and tensors, and on all modules of the process."""
    own = sum(len(module.__dict__.get(kind) or ()) for module in model.modules() for kind in HOOKS)
    tensors = (*model.parameters(), *model.buffers())
    own += sum(len(getattr(tensor, kind, None) or ()) for tensor in tensors for kind in TENSOR_HOOKS)
    return own + sum(len(getattr(owner, kind)) for owner, kind in GLOBAL_HOOKS)


def module_items(name: str, module: nn.Module) -> Iterator[tuple[tuple[str, str], object]]:
    """Find all that a module holds itself: flags, hooks, attributes and tensors.

    Args:
        name: of the module in its model.
        module: its children are not looked into.

    Yields:
        Kind and place, and what stands there.
    """
    held, prefix = module.__dict__, f"{name}." if name else ""
    yield ("module", name), Same(module)
    yield ("attribute", f"{prefix}__class__"), Same(type(module))
    yield ("attribute", f"{prefix}order of modules"), _Order(module._modules)
    yield ("training", name), module.training
    for kind in HOOKS:
        hooks = held.get(kind)
        yield ("hooks", prefix + kind), [Same(hook) for hook in hooks.values()] if hooks else _NO_HOOKS
    for key, value in held.items():
        if key not in _OWN:
            yield ("attribute", prefix + key), freeze(value)
    own: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
    for key, tensor in own.items():
        where = prefix + key
        yield ("tensor", where), None if tensor is None else [Same(tensor), Bits(tensor)]
        if tensor is not None:
            yield ("requires_grad", where), tensor.requires_grad
            yield ("grad", where), None if tensor.grad is None else Bits(tensor.grad)
            if key in module._buffers:
                yield ("attribute", f"{where} in checkpoints"), key not in module._non_persistent_buffers_set
            for attribute, thing in getattr(tensor, "__dict__", {}).items():
                yield ("attribute", f"{where}.{attribute}"), freeze(thing)
            for kind in TENSOR_HOOKS:
                if hooks := getattr(tensor, kind, None):
                    yield ("hooks", f"{where}.{kind}"), [Same(hook) for hook in hooks.values()]


class _Order(tuple[str, ...]):
    """The names in a table; what comes or goes does not change the order of the others."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Order) and [one for one in self if one in other] == [one for one in other if one in self]

    __hash__ = None  # type: ignore[assignment]


def surroundings() -> Iterator[tuple[tuple[str, str], object]]:
    """Find what any code of the process shares: random numbers, settings of torch, hooks of every module, threads.

    Yields:
        Kind and place, and what stands there.
    """
    yield ("rng", "torch"), Bits(torch.get_rng_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield ("rng", "cuda"), [Bits(state) for state in torch.cuda.get_rng_state_all()]
    yield ("rng", "random"), random.getstate()
    state = numpy.random.get_state(legacy=False)
    yield ("rng", "numpy"), [state["state"]["key"].tobytes(), state["state"]["pos"]]
    yield ("torch", "grad mode"), torch.is_grad_enabled()
    yield ("torch", "inference mode"), torch.is_inference_mode_enabled()
    yield ("torch", "default dtype"), torch.get_default_dtype()
    yield ("torch", "deterministic algorithms"), torch.are_deterministic_algorithms_enabled()
    yield ("torch", "threads"), torch.get_num_threads()
    yield ("torch", "default device"), str(torch.get_default_device())
    yield ("torch", "autocast"), (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
    yield ("torch", "anomaly mode"), torch.is_anomaly_enabled()
    for owner, kind in GLOBAL_HOOKS:
        what = "module" if owner is torch_module else "optimizer"
        yield ("hooks", f"of every {what}.{kind}"), [Same(hook) for hook in getattr(owner, kind).values()]
    yield ("threads", "the process"), frozenset(thread.name for thread in threading.enumerate() if not _is_housekeeping(thread))


def _settings_of_process() -> Iterator[tuple[str, object]]:
    yield "torch's modes", num_modes()
    yield "warnings", WarningFilters()
    yield "torch's print options", freeze(vars(torch._tensor_str.PRINT_OPTS))
    with modes_aside():
        yield "denormal numbers", bool(torch.tensor(1e-320, dtype=torch.float64, device="cpu") * 1 == 0)
    yield from ((name, read()) for name, (read, _) in TORCH_SETTINGS.items())
    yield from ((name, _setting(read())) for name, (read, _) in PYTHON_SETTINGS.items())


def _setting(value: object) -> object:
    """Plain data by value, and all else, as streams are, by identity: what somebody writes there is no setting."""
    if isinstance(value, dict):
        return {repr(key): _setting(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_setting(item) for item in value]
    return value if isinstance(value, (*_PLAIN, float, tuple, set, Path)) else Same(value)


def _is_housekeeping(thread: threading.Thread) -> bool:
    """A thread of the harness itself, or the monitor that the first progress bar of a process starts for good."""
    return thread.name.startswith("harness") or type(thread).__module__.startswith("tqdm")


def describe_change(before: Any, after: Any) -> str:
    """Say how something has changed.

    Args:
        before: frozen.
        after: frozen, and not equal.

    Returns:
        Words that follow a name.
    """
    if isinstance(before, frozenset) and isinstance(after, frozenset):
        return f"appeared: {', '.join(sorted(after - before))}"
    if before is _MISSING or after is _MISSING:
        return f"appeared: {_short(after)}" if before is _MISSING else f"vanished: {_short(before)}"
    if isinstance(before, list) and isinstance(after, list) and all(isinstance(item, Same) for item in before + after):
        return f"changed: {len(before)} before, {len(after)} after"
    if isinstance(before, Namespace) and isinstance(after, Namespace):
        return f"changed: {', '.join(before.changed(after)[:5])}"
    path, old, new = _narrowed(before, after)
    what = f" in {path}" if path else ""
    if old is _MISSING or new is _MISSING:
        return f"changed{what}, which {describe_change(old, new)}"
    if isinstance(old, Same) and isinstance(new, Same):
        return f"changed{what}: another object, {new!r}"
    if isinstance(old, Held) and isinstance(new, Held) and Bits.__eq__(old, new):
        return describe_change(old.beside, new.beside)
    if _short(old) == _short(new):
        return f"changed{what}: {_short(new)} holds other values"
    return f"changed{what}: {_short(old)} -> {_short(new)}"


def _narrowed(before: Any, after: Any) -> tuple[str, Any, Any]:
    """Follow a difference to where it lies, as far as there is only one: the way there, and what stood and stands there."""
    if isinstance(before, dict) and isinstance(after, dict):
        places = [(key.strip("'"), before.get(key, _MISSING), after.get(key, _MISSING)) for key in {**before, **after}]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        is_held = before and isinstance(before[0], Same)  # an object or a tensor, and behind it what it holds
        places = [("" if is_held else str(place - 1), one, other) for place, (one, other) in enumerate(zip(before, after, strict=True))]
    else:
        return "", before, after
    changed = [place for place in places if place[1] is _MISSING or place[2] is _MISSING or place[1] != place[2]]
    if len(changed) != 1:
        return (", ".join(place[0] for place in changed[:5]) if isinstance(before, dict) else ""), before, after
    name, old, new = changed[0]
    path, old, new = _narrowed(old, new)
    return ".".join(part for part in (name, path) if part), old, new


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
