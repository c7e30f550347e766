"""A recorded step as a list of operators on one arena of memory per device, and its replay.

Every operator of the step was seen below autograd. Its storages are laid into an arena where they share bytes unless they are needed at
the same time. A replay skips views and allocations, runs mutating operators again, and writes the results of functional ones into their
places: through the `out=` overload where one with the same arguments exists, else by computing and copying. It runs under
`inference_mode`, without dispatch to autograd, and leaves every Python line of the step out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from compressor.training.capture.operands import operands, with_operands
from compressor.training.capture.operators import Extent, Kind, Op, Record
from compressor.training.capture.storages import Storages
from compressor.training.engines.memory_plan import Arena, lay_out
from compressor.training.engines.out_variants import link

__all__ = ["Kind", "Op", "Tape", "spoil"]
_SPOILED = 0xA5


class Tape:
    """The CPU's executable form of a step: it was recorded while the step ran, so a capture counts as one step.

    Args:
        records: the recorded operators.
        loss: the tensor that the step returned: an extent of a storage of the step, or an alias of a tensor that stays.
        value: its value at capture.
        storages: the storages that the step made.
        arena: the memory to replay on; other tapes may have it too, since nothing but the loss is read after a replay, and that at once.

    Attributes:
        ops: the operators on the tape's memory.
        layout: where each storage lies in it.
        loss: where a replay leaves the loss.
        generators: random generators, beside the default one, that the step draws from.
        live_peak_bytes: the most bytes of its storages that the recorded step needed at a time.
    """

    ran_at_capture = True

    def __init__(self, records: Sequence[Record], loss: Extent | Tensor, value: Tensor, storages: Storages, arena: Arena) -> None:
        kept = [loss.storage] if isinstance(loss, Extent) else []
        self.layout = layout = lay_out(records, storages.sizes, storages.devices, kept)
        self.live_peak_bytes = storages.peak_bytes
        self._arenas = {device: arena.at_least(device, count) for device, count in layout.arena_bytes.items()}
        ranges = zip(layout.devices, layout.offsets, layout.sizes, strict=True)
        places = [self._arenas[device][begin : begin + size] for device, begin, size in ranges]
        self._bytes = [_as_bytes(place) for place in places]
        self._tensors: dict[Extent, Tensor] = {}
        self.ops = [self._bind(record, places) for record in records]
        self.loss = loss if isinstance(loss, Tensor) else self._tensor(loss, places)
        if isinstance(loss, Extent):
            self.loss.copy_(value)
        leaves = [leaf for op in self.ops for leaf in operands((op.args, op.kwargs))]
        self.generators = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Generator)}.values())
        self._runs: list[Callable[[], object] | None] = []
        self._program: list[Callable[[], object]] = []
        self.relink()

    @property
    def lines(self) -> list[str]:
        """The signature, a line per operator."""
        return [op.line for op in self.ops]

    @property
    def scratch_bytes(self) -> int:
        """Memory that the tape holds beside the model, the optimizer and the inputs."""
        constants = (op.args[0].untyped_storage().nbytes() for op in self.ops if op.func._schema.name == "aten::lift_fresh")
        return sum(self.layout.arena_bytes.values()) + sum(constants)

    def relink(self) -> None:
        """Take the operators' `run` as they are now, after one of them was exchanged."""
        self._runs = [op.run for op in self.ops]
        self._program = [run for run in self._runs if run is not None]

    def replay(self) -> None:
        """Perform one step on the tape's memory."""
        with torch.inference_mode():
            for run in self._program:
                run()

    def replay_spoiled(self) -> None:
        """Perform one step in which everything holds 0xA5 that no operator has made, or that none is to need any more."""
        with torch.inference_mode():
            self._run_spoiled(_ignore)

    def replay_watched(self, see: Callable[[Op], None]) -> None:
        """Perform one step as `replay_spoiled` does, and show every operator once it has run: its values are gone later.

        Args:
            see: called with each operator in turn.
        """
        with torch.no_grad():
            self._run_spoiled(see)

    def poison(self) -> None:
        """Fill the tape's memory with 0xA5, so that nothing stale can pass for a result."""
        for arena in self._arenas.values():
            spoil(arena)

    def _run_spoiled(self, see: Callable[[Op], None]) -> None:
        born: dict[int, list[Tensor]] = {}
        dying: dict[int, list[Tensor]] = {}
        for storage, first, last in zip(self._bytes, self.layout.first, self.layout.last, strict=True):
            born.setdefault(first, []).append(storage)
            dying.setdefault(last, []).append(storage)
        self.poison()
        for op, run in zip(self.ops, self._runs, strict=True):
            for storage in born.get(op.index, ()):
                storage.fill_(_SPOILED)
            if run is not None:
                run()
            see(op)
            for storage in dying.get(op.index, ()):
                storage.fill_(_SPOILED)

    def _bind(self, record: Record, places: Sequence[torch.UntypedStorage]) -> Op:
        """Put an operator on the tape's memory."""
        args, kwargs, outs = with_operands(
            (record.args, record.kwargs, record.outs), lambda one: self._tensor(one, places) if isinstance(one, Extent) else one
        )
        op = Op(**{field.name: getattr(record, field.name) for field in fields(Record)} | {"args": args, "kwargs": kwargs, "outs": outs})
        link(op)
        return op

    def _tensor(self, extent: Extent, places: Sequence[torch.UntypedStorage]) -> Tensor:
        if extent not in self._tensors:
            self._tensors[extent] = extent.on(places[extent.storage])
        return self._tensors[extent]


def spoil(storage: torch.UntypedStorage) -> None:
    """Overwrite a storage with 0xA5.

    Args:
        storage: the storage; its content is lost.
    """
    _as_bytes(storage).fill_(_SPOILED)


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _ignore(op: Op) -> None:
    """Do nothing: nobody follows the operators."""
