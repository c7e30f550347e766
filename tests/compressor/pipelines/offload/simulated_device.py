"""A device that is made of main memory: it refuses tensors of the other side, counts what is copied to it, and may be too small.

A device on PrivateUse1 cannot stand for one here: its tensors cannot become the data of a parameter that waits in main memory.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compressor.pipelines.offload.onload import OnloadedWeights


class Sides(TorchDispatchMode):
    """Two sides of one memory: an operation on tensors of both is refused, as torch refuses it for two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.here: dict[int, Tensor] = {}  # by address: weights on the device
        self.there: dict[int, Tensor] = {}  # and those that wait

    def side_of(self, tensor: Tensor) -> str | None:
        address = tensor.untyped_storage().data_ptr()
        if address in self.here:
            return "device"
        return "host" if address in self.there else getattr(tensor, "side", None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        sides = {side for leaf in given if (side := self.side_of(leaf)) is not None}
        if len(sides) > 1 and func._overloadpacket is not torch.ops.aten.copy_:
            raise AssertionError(f"{func}: tensors of both sides")
        made = func(*args, **(kwargs or {}))
        # What is copied to the CPU is on neither side.
        for leaf in tree_leaves(made) if sides and not (kwargs or {}).get("device") else ():
            if isinstance(leaf, Tensor):
                leaf.side = next(iter(sides))  # type: ignore[attr-defined]
        return made


class Simulated(OnloadedWeights):
    """Weights of a device that counts.

    Attributes:
        room: bytes that it has for weights.
        fails_at: number of the copy that fails, from 1 on; 0 for none.
        last: of the last run.
        sides: what refuses tensors of both.
        most_at_hand: stretches at one time.
        events: what was `asked` for, `needed` and `used`, and of which stretch; None for what lies in none.
        resident, most_resident: bytes on it now, and at most.
        num_copies: tensors that were copied to it.
    """

    room: ClassVar[float] = float("inf")
    fails_at: ClassVar[int] = 0
    last: ClassVar[Simulated]

    def __enter__(self) -> Any:
        type(self).last = self
        self.events: list[tuple[str, str | None]] = []
        self.resident = self.most_resident = self.num_copies = self.most_at_hand = 0
        self._counting = threading.Lock()
        self.sides = Sides()
        self.sides.there = {one.untyped_storage().data_ptr(): one.detach() for one in (*self._model.parameters(), *self._model.buffers())}
        super().__enter__()
        self.sides.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.sides.__exit__(None, None, None)
        super().__exit__(*exc_info)

    def _ask(self, own: list[Tensor]) -> Any:
        places = [target for target in self._targets if own and any(own[0] is one for one in self._own(target))]
        self.events.append(("asked", places[0] if places else None))
        return super()._ask(own)

    def _bring(self, target: str) -> None:
        self.events.append(("needed", target))
        super()._bring(target)

    @torch.no_grad()
    def _copies(self, tensors: list[Tensor]) -> Any:
        needed = 0
        for one in tensors:
            self.num_copies, needed = self.num_copies + 1, needed + one.nbytes
            if self.num_copies == self.fails_at:
                raise RuntimeError("simulated: a copy has failed")
            if self.resident + needed > self.room:
                raise torch.OutOfMemoryError(f"simulated: out of memory. Tried to allocate {one.nbytes} bytes")
        self._count(needed)
        found = super()._copies(tensors)
        for made in found.tensors:
            weakref.finalize(made.untyped_storage(), self._count, -made.nbytes)
        return found

    def _count(self, num_bytes: int) -> None:
        with self._counting:  # copies are made in a thread, and freed in another
            self.resident += num_bytes
            self.most_resident = max(self.most_resident, self.resident)

    def _install(self, target: str | None, coming: Any) -> None:
        self.sides.here |= {made.untyped_storage().data_ptr(): made for made in coming.copies.result().tensors}
        super()._install(target, coming)
        self.events.append(("used", target))
        self.most_at_hand = max(self.most_at_hand, len(self._lent) - 1)

    def _return(self, target: str | None) -> None:
        gone = {lent.own.untyped_storage().data_ptr() for lent in self._lent.get(target, ())}
        super()._return(target)
        for address in gone:
            self.sides.here.pop(address, None)
