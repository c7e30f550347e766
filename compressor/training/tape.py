"""A recorded step as a list of operators on fixed storages, and its replay.

Every operator of the step was seen below autograd, with detached aliases of its operands. A replay skips views and allocations, runs
mutating operators again, and writes the results of functional ones into the storages that they had at capture: through the `out=`
overload where one with the same arguments exists, else by computing and copying. It runs under `inference_mode`, without dispatch to
autograd, and leaves every Python line of the step out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


class Kind(StrEnum):
    """How an operator is repeated."""

    VIEW = "view"  # not at all: it only made an alias
    ALLOCATE = "allocate"  # not at all: the storage stays
    MUTATE = "mutate"  # called again
    OUT = "out"  # through its out= overload
    COPY = "copy"  # called again, then the result is copied
    CHECK = "check"  # called again; it returns nothing


ALLOCATIONS = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
)
# They give back the values of their first argument and nothing else.
_PLAIN_COPIES = frozenset({"aten::_to_copy", "aten::clone", "aten::lift_fresh", "aten::lift_fresh_copy"})


# It leaves out its workspace where gradients are disabled, as they are in a replay.
_ASKS_GRAD_MODE = frozenset({"aten::mkldnn_rnn_layer"})


@dataclass(slots=True)
class Op:
    """One operator of a recorded step.

    Attributes:
        index: its position.
        func: the overload that was called.
        args: its arguments, tensors as detached aliases.
        kwargs: its keyword arguments, likewise.
        outs: the tensors that it returned, likewise.
        fresh: for each of them, whether the operator made its storage.
        kind: how it is repeated.
        phase: the phase of the step.
        module: dotted name of the module that called it, or whose backward it is; "" where there is none.
        line: the operator as one line of the signature.
        run: repeats it; None where nothing is to be done.
    """

    index: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[Tensor]
    fresh: list[bool]
    kind: Kind
    phase: str
    module: str
    line: str
    run: Callable[[], object] | None = None

    @property
    def place(self) -> str:
        """Where the operator stands, for messages."""
        return spell_place(self.index, self.phase, self.module, self.func)

    def written(self) -> list[Tensor]:
        """Return the outputs and the arguments that the operator writes."""
        return [*self.outs, *written_arguments(self.func, self.args, self.kwargs)]


def spell_place(index: int, phase: str, module: str, func: object) -> str:
    """Spell where an operator stands.

    Args:
        index: its position in the step.
        phase: the phase of the step.
        module: dotted name of its module, or "".
        func: the overload.

    Returns:
        For example `op 12 (forward, layers.0.mlp): aten.mm.default`.
    """
    return f"op {index} ({phase}{', ' + module if module else ''}): {func}"


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that an operator writes, whether its schema says so or not.

    Args:
        func: the overload.
        args: its arguments.
        kwargs: its keyword arguments.

    Returns:
        Tensors, in the order of the schema.
    """
    hidden = HIDDEN_WRITES.get(func._schema.name, frozenset())
    found: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in hidden:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


# Batch norms change their running statistics without saying so in their schemas.
_STATISTICS = frozenset({"running_mean", "running_var"})
HIDDEN_WRITES = {f"aten::{name}": _STATISTICS for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")}


@functools.cache
def _out_overload(func: Any) -> tuple[Any, tuple[str, ...]] | None:
    """Find the overload that takes the same arguments and writes into given tensors."""
    given = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    packet = func._overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)
        outs = tuple(argument.name for argument in overload._schema.arguments if argument.is_out)
        rest = [(argument.name, str(argument.type)) for argument in overload._schema.arguments if not argument.is_out]
        if outs and rest == given and len(outs) == len(func._schema.returns):
            return overload, outs
    return None


def link(op: Op, seeded: bool, grad_mode: bool = False) -> None:
    """Decide how an operator is repeated. Sets its `run`, and narrows its `kind`.

    Args:
        op: the operator; `kind` is VIEW, ALLOCATE, MUTATE, CHECK or COPY.
        seeded: it draws random numbers; then only the very same overload draws the same ones.
        grad_mode: whether gradients were enabled where it was called.
    """
    func, args, kwargs, outs = op.func._op, op.args, op.kwargs, op.outs
    if op.kind in (Kind.VIEW, Kind.ALLOCATE):
        return
    if op.kind is Kind.CHECK or (op.kind is Kind.MUTATE and not any(op.fresh)):
        op.run = lambda: func(*args, **kwargs)
        return
    if op.func._schema.name in _PLAIN_COPIES:
        source, out = args[0], outs[0]
        op.run = lambda: out.copy_(source)
        return
    overload = None if seeded or op.kind is Kind.MUTATE or not all(op.fresh) or "mkldnn" in op.func._schema.name else _out_overload(op.func)
    if overload is not None and len(overload[1]) == len(outs):
        into, named = overload[0]._op, {**kwargs, **dict(zip(overload[1], outs, strict=True))}
        op.kind = Kind.OUT
        op.run = lambda: into(*args, **named)
        return
    _link_copies(op)
    if op.func._schema.name in _ASKS_GRAD_MODE:
        op.run = _under_grad_mode(op.run, grad_mode)


def _under_grad_mode(run: Callable[[], object] | None, enabled: bool) -> Callable[[], object]:
    assert run is not None

    def wrapped() -> None:
        with torch.set_grad_enabled(enabled):
            run()

    return wrapped


def _link_copies(op: Op) -> None:
    func, args, kwargs, outs = op.func._op, op.args, op.kwargs, op.outs
    if len(outs) == 1:
        only = outs[0]
        op.run = lambda: only.copy_(func(*args, **kwargs))
        return
    targets = [(position, out) for position, (out, fresh) in enumerate(zip(outs, op.fresh, strict=True)) if fresh]

    def run() -> None:
        results = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
        for position, out in targets:
            out.copy_(results[position])

    op.run = run


def spoil(storage: torch.UntypedStorage) -> None:
    """Overwrite a storage with 0xA5.

    Args:
        storage: the storage; its content is lost.
    """
    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(0xA5)


class Tape:
    """The CPU's executable form of a step: it was recorded while the step ran, so a capture counts as one step.

    Args:
        ops: the recorded operators.
        loss: the tensor that the step returned, as an alias.
        scratch: the storages that the step made.
    """

    ran_at_capture = True

    def __init__(self, ops: list[Op], loss: Tensor, scratch: list[torch.UntypedStorage]) -> None:
        self.ops, self.loss, self._scratch = ops, loss, scratch
        self.generators = list(
            {id(leaf): leaf for op in ops for leaf in tree_leaves((op.args, op.kwargs)) if isinstance(leaf, torch.Generator)}.values()
        )
        self._program: list[Callable[[], object]] = []
        self.relink()

    @property
    def lines(self) -> list[str]:
        """The signature, a line per operator."""
        return [op.line for op in self.ops]

    @property
    def scratch_bytes(self) -> int:
        """Memory that the tape holds beside the model, the optimizer and the inputs."""
        return sum(storage.nbytes() for storage in self._scratch)

    def relink(self) -> None:
        """Take the operators' `run` as they are now, after one of them was exchanged."""
        self._program = [op.run for op in self.ops if op.run is not None]

    def replay(self) -> None:
        """Perform one step on the recorded storages."""
        with torch.inference_mode():
            for run in self._program:
                run()

    def replay_watched(self, see: Callable[[Op], None]) -> None:
        """Perform one step, and show every operator once it has run.

        Args:
            see: called with each operator in turn.
        """
        with torch.no_grad():
            for op in self.ops:
                if op.run is not None:
                    op.run()
                see(op)

    def poison(self) -> None:
        """Fill every storage that the step makes with 0xA5, so that nothing stale can pass for a result."""
        for storage in self._scratch:
            spoil(storage)
