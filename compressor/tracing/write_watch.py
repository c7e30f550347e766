"""Writes to the tensors of a model, seen before they happen, for models of which no copy is kept: what is about to change is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from compressor.data.layouts import has_memory


class WriteWatch(TorchDispatchMode):
    """Tells of every torch operation that is about to write to one of some storages. What writes past torch (numpy) is not seen."""

    supports_higher_order_operators = True

    def __init__(self, storages: Mapping[int, Any], tell: Callable[[int], None]) -> None:
        """Watch nothing before it is entered.

        Args:
            storages: keys are those of storages (`_cdata`), which somebody keeps alive.
            tell: called with the key of a storage before each write to it.
        """
        super().__init__()
        self._storages, self._tell = storages, tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the arguments that an operation writes to, then run it."""
        kwargs = kwargs or {}
        for place, name in _written(func):
            given = args[place] if place < len(args) else kwargs.get(name)
            for tensor in _tensors(given):
                key = tensor.untyped_storage()._cdata
                if key in self._storages:
                    self._tell(key)
        return func(*args, **kwargs)


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of the arguments that an operation writes to, by its schema."""
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    return tuple((place, one.name) for place, one in enumerate(arguments) if one.alias_info is not None and one.alias_info.is_write)


def _tensors(given: Any) -> Iterator[Tensor]:
    for item in given if isinstance(given, list | tuple) else (given,):
        if isinstance(item, Tensor) and has_memory(item):
            yield item
