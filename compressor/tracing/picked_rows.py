"""Which modules give rows that a forward has picked by values: tokens that a router chose, in the order of its scores.

Two models with other weights pick other rows, and row i of one then has nothing to do with row i of the other. Shapes do not tell: of
[batch, k, channels] the second dimension may hold patches, which stay, or the k tokens that scored best. So the operations of a forward are
followed. A comparison, an argmax or a sort of scores that depend on the weights is a choice, and integers and truth values made of it carry
it on. Taking rows by a choice moves them; taking them, or putting them back, by the same scores once more brings them home.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compressor.data import Batch
from compressor.data.layouts import has_memory
from compressor.tracing.targets.call_order import plain_forward

_TAKES = {"gather": 2, "index_select": 2, "index": 1, "unsafe_index": 1, "take": 1, "masked_select": 1}
_PUTS = {
    "scatter": (2, 3),
    "scatter_add": (2, 3),
    "scatter_reduce": (2, 3),
    "index_add": (2, 3),
    "index_copy": (2, 3),
    "index_reduce": (2, 3),
    "index_put": (1, 2),
    "index_put_impl": (1, 2),
    "unsafe_index_put": (1, 2),
    "masked_scatter": (1, 2),
}
"""Places of the index and of what is put, by the name of the operation."""
_BY_LIST = ("index", "unsafe_index", "index_put", "index_put_impl", "unsafe_index_put")  # with an index, or None, for each dimension
_PRODUCTS = ("mm", "mv", "addmm", "addmv", "linear", "convolution", "grouped_mm")  # of data and weights, in either order
_ROWS_OF_FIRST = ("bmm", "matmul")  # of data and data; beside what is called so


class _Label(NamedTuple):
    """What is known of the numbers in one piece of memory.

    Attributes:
        is_data: they depend on the batch.
        varies: they depend on weights that will change.
        choices: by which they point at rows, each told by the memory of the scores.
        picked: choices by which their rows were moved.
    """

    is_data: bool = False
    varies: bool = False
    choices: frozenset[int] = frozenset()
    picked: frozenset[int] = frozenset()

    def joined(self, other: _Label) -> _Label:
        return _Label(self.is_data or other.is_data, self.varies or other.varies, self.choices | other.choices, self.picked | other.picked)


class _Follower(TorchDispatchMode):
    """Labels what the operations of one forward make."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._labels: dict[int, tuple[StorageWeakRef, _Label]] = {}  # the reference keeps the key from being used for other memory

    def label(self, value: Any) -> _Label:
        """What is known of all tensors in a value."""
        found = _Label()
        for tensor in _tensors(value):
            found = found.joined(self._labels.get(tensor.untyped_storage()._cdata, (None, found))[1])
        return found

    def mark(self, value: Any, label: _Label) -> None:
        """Label all tensors in a value."""
        for tensor in _tensors(value):
            storage = tensor.untyped_storage()
            self._labels[storage._cdata] = StorageWeakRef(storage), label

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, then label what it gives."""
        del types
        kwargs = kwargs or {}
        name = getattr(getattr(func, "overloadpacket", func), "__name__", "").strip("_")
        is_blank = name.endswith("_like") or name.startswith("new_")  # of the shape of something, and without its numbers
        known = _Label() if is_blank else self.label((args, kwargs))
        scores = frozenset[int]()
        if known != _Label():
            floats = (one for one in _tensors((args, kwargs)) if one.is_floating_point() and self.label(one).varies)
            scores = frozenset(one.untyped_storage()._cdata for one in floats)
            known = known._replace(varies=known.varies or bool(known.choices), picked=self._picked(name, args, known))
        given = func(*args, **kwargs)
        for tensor in _tensors(given):
            self.mark(tensor, known._replace(choices=frozenset() if tensor.is_floating_point() else known.choices | scores))
        return given

    def _picked(self, name: str, args: Sequence[Any], known: _Label) -> frozenset[int]:
        """Choices by which the rows of what an operation gives were moved."""
        if name in _TAKES:
            return self._moved(args[0], self._choices(name, args, _TAKES[name]))
        if name in _PUTS:
            place, what = _PUTS[name]
            return self.label(args[0]).picked | self._moved(args[what : what + 1], self._choices(name, args, place))
        if name in _ROWS_OF_FIRST or name.startswith("scaled_dot_product"):
            return self.label(args[0]).picked
        if name in _PRODUCTS:
            labels = [self.label(one) for one in args[name.startswith("add") :]]
            return next((one.picked for one in labels if one.is_data), known.picked)
        return known.picked

    def _moved(self, what: Any, choices: frozenset[int]) -> frozenset[int]:
        label = self.label(what)
        if not label.is_data:  # rows of a table: what is found there belongs to who asked
            return frozenset()
        return label.picked - choices if label.picked & choices else label.picked | choices

    def _choices(self, name: str, args: Sequence[Any], place: int) -> frozenset[int]:
        """By what rows are chosen; within the last dimension each row chooses of its own numbers."""
        last = args[0].dim() - 1
        if name in _BY_LIST:
            return self.label([one for dim, one in enumerate(args[place]) if one is not None and (dim < last or not last)]).choices
        is_within = place == 2 and args[1] in (last, -1) and last > 0
        return frozenset() if is_within else self.label(args[place]).choices


def rows_picked_by_values(model: nn.Module, batch: Batch, varying: Collection[str], names: Collection[str]) -> set[str]:
    """Run a plain forward and find the modules that give rows which were picked by values.

    Args:
        model: what the forward leaves on it stays.
        batch: on the device of the model; not modified.
        varying: dotted names of the modules whose weights will change, and so what they give.
        names: dotted names of the modules to look at.

    Returns:
        Those of the names whose rows would be others with other weights.
    """
    found: set[str] = set()
    follower = _Follower()
    follower.mark(batch, _Label(is_data=True))

    def look(name: str, given: Any) -> None:
        if name in varying:
            for tensor in _tensors(given):
                follower.mark(tensor, follower.label(tensor)._replace(is_data=True, varies=True))
        if name in names and follower.label(given).picked:
            found.add(name)

    with ExitStack() as held:
        for name in {*varying, *names}:
            module = model.get_submodule(name)
            if not isinstance(module, torch.jit.ScriptModule):
                held.callback(module.register_forward_hook(lambda module, args, given, name=name: look(name, given)).remove)
        held.enter_context(follower)
        plain_forward(model, batch)
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    found = (one for one in tree_leaves(value) if isinstance(one, Tensor))
    return (one for one in found if has_memory(one) and not torch._C._functorch.is_functorch_wrapped_tensor(one))
