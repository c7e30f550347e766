"""What everybody else sees of a forward: the arguments and the output of every module, told by hooks that run behind all others.

Values are compared by what they say: a forward makes caches and functions anew each time it runs.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from harness.lifecycle.driving.snapshot import MAX_DEPTH, freeze

# Past this many tensors, more of them are not remembered; a modifier that keeps activations keeps some of the first.
MOST_STORAGES = 4096


class Witness:
    """Hangs its hooks up behind all others for the time of a forward.

    Args:
        model: whose modules are watched.

    Attributes:
        seen: what went into and came out of the modules in the latest forward, in order: the place in words, and the values.
        called: the modules of the latest forward, in the order in which they came to their ends.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._storages: list[tuple[str, StorageWeakRef]] = []
        self.seen: list[tuple[str, object]] = []
        self.called: list[nn.Module] = []

    def run(self, forward: Callable[[], object]) -> object:
        """Run a forward with the hooks in place, and return its output."""
        self.seen, self.called = [], []
        with self._in_place():
            return forward()

    def held(self) -> list[str]:
        """Return which of the tensors that flowed are still in memory, by the place where they were first seen."""
        own = {StorageWeakRef(tensor.untyped_storage()) for tensor in (*self._model.parameters(), *self._model.buffers())}
        return [place for place, storage in self._storages if not storage.expired() and storage not in own]

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        handles = []
        try:
            for name, module in self._model.named_modules():
                handles.append(module.register_forward_pre_hook(self._on_the_way_in(name), with_kwargs=True))
                handles.append(module.register_forward_hook(self._on_the_way_out(name), with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _on_the_way_in(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: object, kwargs: object) -> None:
            self.seen.append((f"the input of {name or 'the model'}", _looked_at((args, kwargs))))

        return look

    def _on_the_way_out(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: object, kwargs: object, output: Any) -> None:
            self.called.append(module)
            place = f"the output of {name or 'the model'}"
            self.seen.append((place, _looked_at((output, args, kwargs))))
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and len(self._storages) < MOST_STORAGES:
                    self._storages.append((place, StorageWeakRef(tensor.untyped_storage())))

        return look


def _looked_at(values: object) -> object:
    """Values, and how tensors among them carry gradients and lie in memory: a `view` behind a hook fails where it lies another way."""
    return flowing(values), [(leaf.requires_grad, strides(leaf)) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor; none where it has no such layout."""
    return tensor.stride() if tensor.layout is torch.strided else ()


# Values that flow through a forward, by what they say.


def flowing(value: object, depth: int = MAX_DEPTH, above: tuple[int, ...] = ()) -> object:
    """Return something that stays as it is and equals what another forward of the same values gives.

    Objects are compared by their type and attributes and functions by their code, where `freeze` compares both by identity: a KV cache
    is another object in every forward.

    Args:
        value: anything; not modified.
        depth: how far containers and objects are followed.
        above: objects around the value, so that a cycle ends.

    Returns:
        Plain data, copies of tensors, and identities of modules and types.
    """
    if isinstance(value, Tensor | nn.Module | type):
        return freeze(value)
    if depth == 0 or id(value) in above:
        return _type_of(value)
    below = (*above, id(value))
    if isinstance(value, Mapping):
        return {_key(key): flowing(item, depth - 1, below) for key, item in value.items()} | {"its type": _type_of(value)}
    if isinstance(value, list | tuple):
        return [_type_of(value), *(flowing(item, depth - 1, below) for item in value)]
    if isinstance(value, set | frozenset):
        return {_key(item) for item in value}
    if callable(value) or hasattr(value, "__dict__") or hasattr(value, "__slots__"):
        return [_type_of(value), *(flowing(part, depth - 1, below) for part in _parts(value))]
    frozen = freeze(value)
    return frozen if isinstance(frozen, type(value)) or isinstance(value, float) else _type_of(value)


def _parts(value: Any) -> tuple[object, ...]:
    """What an object or function is made of."""
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.FunctionType):
        cells = tuple(cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType())
        return value.__code__.co_filename, value.__code__.co_firstlineno, value.__defaults__, cells
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if hasattr(value, name)]
    return getattr(value, "__dict__", {}), {name: getattr(value, name) for name in slots if name != "__dict__"}


def _key(key: object) -> str:
    """A name for a key: objects without a text of their own show their address in it."""
    text = repr(key)
    return _type_of(key) if " at 0x" in text else text


def _type_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
