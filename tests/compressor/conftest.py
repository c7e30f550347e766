"""How much memory tensors take, counted by the operators that make them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Allocations(TorchDispatchMode):
    """Counts the bytes of storages that operators made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self.alive:
                    self.alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


@pytest.fixture(scope="session")
def int8_path() -> str:
    """The product of int8 codes that this CPU may use: torch's own where it sums exactly, which takes VNNI instructions."""
    x, weight = torch.full((33, 64), 127, dtype=torch.int8), torch.full((64, 33), 127, dtype=torch.int8)
    return "int_mm" if torch.equal(torch._int_mm(x, weight).long(), x.long() @ weight.long()) else "int_exact"


@pytest.fixture(scope="session")
def peak_bytes() -> Callable[[Callable[[], object]], int]:
    """Run a function and return the largest number of bytes that tensors made in it held at one time."""

    def measure(run: Callable[[], object]) -> int:
        with torch.no_grad(), _Allocations() as allocations:
            run()
        return allocations.peak

    return measure
