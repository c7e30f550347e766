"""How each operator of a tape is repeated: called again, through its `out=` overload, or computed and copied."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from compressor.training.capture.operators import IDLE, Kind, Op
from compressor.training.step.collectives import is_collective, repeating

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
