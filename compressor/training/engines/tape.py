"""A recorded step as a list of operators on one arena of memory per device, and its replay.

Every operator of the step was seen below autograd. Its storages are laid into an arena where they share bytes unless they are needed at
the same time. A replay skips views and allocations, runs mutating operators again, and writes the results of functional ones into their
places: through the `out=` overload where one with the same arguments exists, else by computing and copying. It runs under
`inference_mode`, without dispatch to autograd, and leaves every Python line of the step out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from compressor.training.capture.operators import IDLE, Extent, Kind, Op, Record, operands, with_operands
from compressor.training.capture.storages import Storages
from compressor.training.engines.memory_plan import Arena, lay_out
from compressor.training.step.collectives import is_collective, repeating

# How each operator of a tape is repeated: called again, through its `out=` overload, or computed and copied.

# They give back the values of their first argument and nothing else.
_PLAIN_COPIES = frozenset({"aten::_to_copy", "aten::clone", "aten::lift_fresh", "aten::lift_fresh_copy"})
# Their out= overloads take another way for other layouts of the input.
_OUT_WANTS_CONTIGUOUS = frozenset({"aten::native_batch_norm"})
# Their out= overloads resize what they are given on the way (losses with a reduction), which in an arena is somebody else's bytes, or
# leave parts of it unwritten. Found by running 9,120 samples of torch's operator database through both overloads (torch 2.13).
_OUT_IS_NOT_THE_SAME = frozenset(
    f"aten::{name}"
    for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy", "linalg_lstsq", "_ctc_loss")
)
# It leaves out its workspace where gradients are disabled, as they are in a replay.
_ASKS_GRAD_MODE = frozenset({"aten::mkldnn_rnn_layer"})


def link(op: Op) -> None:
    """Decide how an operator is repeated. Sets its `run`, and narrows its `kind`.

    Args:
        op: the operator; `kind` is VIEW, ALLOCATE, MUTATE, CHECK or COPY.
    """
    func, args, kwargs, outs = op.func._op, op.args, op.kwargs, op.outs
    if op.kind in IDLE:
        return
    if is_collective(op.func):
        op.run = repeating(func, args, kwargs)
        return
    if op.kind is Kind.CHECK or (op.kind is Kind.MUTATE and not any(op.fresh)):
        op.run = lambda: func(*args, **kwargs)
        return
    if op.func._schema.name in _PLAIN_COPIES:
        source, out = args[0], outs[0]
        op.run = lambda: out.copy_(source)
        return
    overload = _out_overload(op.func) if _may_write_out(op) else None
    if overload is not None and len(overload[1]) == len(outs):
        into, named = overload[0]._op, {**kwargs, **dict(zip(overload[1], outs, strict=True))}
        op.kind = Kind.OUT
        op.run = lambda: into(*args, **named)
        return
    _link_copies(op)
    if op.func._schema.name in _ASKS_GRAD_MODE:
        op.run = _under_grad_mode(op.run, op.grad_mode)


def _may_write_out(op: Op) -> bool:
    """Say whether an `out=` overload can give the same bits."""
    if op.func._schema.name in _OUT_IS_NOT_THE_SAME:
        return False
    if op.seeded or op.kind is Kind.MUTATE or not all(op.fresh) or "mkldnn" in op.func._schema.name:
        return False  # only the very same overload draws the same random numbers
    return op.func._schema.name not in _OUT_WANTS_CONTIGUOUS or bool(op.args[0].is_contiguous())


@functools.cache
def _out_overload(func: Any) -> tuple[Any, tuple[str, ...]] | None:
    """Find the overload that takes the same arguments and writes into given tensors."""
    given = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    packet = func._overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)
        outs = tuple(argument.name for argument in overload._schema.arguments if argument.is_out)
        rest = [(argument.name, str(argument.type)) for argument in overload._schema.arguments if not argument.is_out]
        one_each = all(str(returned.type) == "Tensor" for returned in func._schema.returns)  # a list of results is many in one
        if outs and rest == given and one_each and len(outs) == len(func._schema.returns):
            return overload, outs
    return None


def _under_grad_mode(run: Callable[[], object] | None, enabled: bool) -> Callable[[], object]:
    assert run is not None

    def wrapped() -> None:
        with torch.set_grad_enabled(enabled):
            run()

    return wrapped


def _link_copies(op: Op) -> None:
    func, args, kwargs, outs = op.func._op, op.args, op.kwargs, op.outs
    if len(outs) == len(op.func._schema.returns) == 1 and str(op.func._schema.returns[0].type) == "Tensor":
        only = outs[0]
        op.run = lambda: only.copy_(func(*args, **kwargs))
        return
    targets = [(position, out) for position, (out, fresh) in enumerate(zip(outs, op.fresh, strict=True)) if fresh]

    def run() -> None:
        results = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
        for position, out in targets:
            out.copy_(results[position])

    op.run = run


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
