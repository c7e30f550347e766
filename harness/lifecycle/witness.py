"""What everybody else sees of a forward: the arguments and the output of every module, told by hooks that run behind all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from harness.lifecycle.driving.flowing import flowing

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
    """Values, and which of them carry gradients."""
    return flowing(values), [leaf.requires_grad for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
