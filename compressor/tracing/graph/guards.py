"""Which guards can be checked before the first stage: those over the inputs at once, those over shapes behind a target by a dry run.

A guard over a value that a target computes can never be decided in advance, because compression changes what the target computes.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compressor.tracing.graph.calls import DATA_SIZED
from compressor.tracing.graph.execute import needed_for
from compressor.tracing.graph.nodes import guard
from compressor.tracing.graph.program import Program
from compressor.tracing.graph.refusal import Place
from compressor.tracing.graph.wording import Wording
from compressor.tracing.records import Guard

# Answers of a tensor that depend on its shape and not on its values.
_SHAPE_ATTRIBUTES = frozenset(("shape", "ndim", "nbytes"))
_SHAPE_METHODS = frozenset(
    ("size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "is_contiguous", "__len__", "data_ptr")
)


@dataclass(frozen=True)
class GuardPlan:
    """How the guards of a program are decided.

    Attributes:
        entry: nodes that must run to check the guards over the inputs, in program order.
        by_shape: all guards depend on the shapes of the inputs only.
        late_shapes: guards over shapes behind a target.
        late_values: guards over values that a target computes, or over its weights.
    """

    entry: tuple[fx.Node, ...]
    by_shape: bool
    late_shapes: tuple[fx.Node, ...]
    late_values: tuple[fx.Node, ...]


def plan_guards(program: Program, groups: Sequence[str]) -> GuardPlan:
    """Sort the guards of a program.

    Args:
        program: a recorded forward.
        groups: dotted names of all targets.

    Returns:
        What to run for them, and those that no early check can decide.
    """
    nodes = list(program.flat.nodes)
    targets = {name or "_root" for name in groups}
    early, late_shapes, late_values = [], [], []
    by_shape = True
    writers = _writers(nodes)
    for node in program.guard_nodes:
        needs = needed_for([node], nodes)
        behind = any(one.op == "call_module" and one.target in targets for one in needs)
        sources = _value_sources(node, {used: [one for one in those if one in needs] for used, those in writers.items()})
        if any(_is_of(one, targets) for one in sources):
            late_values.append(node)
        elif not behind:
            early.append(node)
            by_shape = by_shape and not any(one.op == "placeholder" for one in sources)
        elif node.meta["guard"] == "structure" and _is_of_module(node):
            continue  # how a module builds its result is checked when it is there
        elif node.meta["guard"] == "structure":
            late_shapes.append(node)  # a leaf's choice between a tensor and None: taken from the inputs, of which each batch has its own
            by_shape = False
        elif any(one.op == "call_module" and one.target in targets for one in sources):
            late_values.append(node)
        else:
            late_shapes.append(node)
            by_shape = by_shape and not any(one.op == "placeholder" for one in sources)
    return GuardPlan(tuple(needed_for(early, nodes)) if early else (), by_shape, tuple(late_shapes), tuple(late_values))


def _is_length_of_result(asked: Any) -> bool:
    """True for the number of things that a module or leaf returns: how its result is built."""
    return asked.target is len and isinstance(asked.args[0], fx.Node) and "context" in asked.args[0].meta


def _is_of(node: fx.Node, targets: Collection[str]) -> bool:
    """True for a weight of a target."""
    return node.op == "get_attr" and any(str(node.target).startswith(f"{target}.") for target in targets)


def _is_of_module(node: fx.Node) -> bool:
    """True for the guard on the structure of a module's result, False for that of a leaf's."""
    asked: Any = node.args[0]
    return isinstance(asked.args[0], fx.Node) and asked.args[0].op == "call_module"


def _writers(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """List, for every node, the calls that write to something through it."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        for used in node.all_input_nodes if node.meta.get("effect") else ():
            found.setdefault(used, []).append(node)
    return found


def _value_sources(goal: fx.Node, writers: Mapping[fx.Node, Sequence[fx.Node]]) -> set[fx.Node]:
    """Collect the nodes whose values, and not only shapes, a guard depends on."""
    found: set[tuple[fx.Node, bool]] = set()
    todo = [(goal, True)]
    while todo:
        node, by_value = todo.pop()
        if (node, by_value) in found:
            continue
        found.add((node, by_value))
        todo += [(writer, True) for writer in writers.get(node, ()) if by_value]
        below = by_value and not _asks_shape(node)
        below = below or (not by_value and _is_data_sized(node))
        todo += [(used, below or not _carries_shape(used)) for used in node.all_input_nodes]
    return {node for node, by_value in found if by_value}


def _asks_shape(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _SHAPE_METHODS
    return node.target is len or (node.target is getattr and node.args[1] in _SHAPE_ATTRIBUTES)


def _carries_shape(node: fx.Node) -> bool:
    """True for tensors and what holds them; a number among the arguments of a shape-giving call is a value."""
    return not node.meta.get("number")


def _is_data_sized(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == "repeat_interleave":  # by a number of repeats, or by a tensor of them
        repeats = node.args[1] if len(node.args) > 1 else node.kwargs.get("repeats")
        return isinstance(repeats, fx.Node) and "tensor" in repeats.meta and "output_size" not in node.kwargs
    if name in DATA_SIZED or (name == "where" and len(node.args) == 1):
        return True
    return node.target is operator.getitem and len(node.args) == 2 and isinstance(node.args[1], fx.Node | tuple) and _indexes_by_mask(node)


def _indexes_by_mask(node: fx.Node) -> bool:
    index: Any = node.args[1]
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, fx.Node) and part.meta.get("tensor", (0, None))[1] is torch.bool for part in parts)


def describe_guard(node: fx.Node, segment: int, variant: int, wording: Wording) -> Guard | None:
    """Make the record of a guard.

    Args:
        node: of the guard.
        segment: in which it lies.
        variant: number of the program.
        wording: writes it.

    Returns:
        The record; None for one that holds for every batch that can take the program.
    """
    assert node.target is guard
    place: Place = node.meta["place"]
    is_value = node.meta["guard"] == "value" and not _is_length_of_result(node.args[0])
    text = wording.claim(node.args[0], node.args[1]) if is_value else ""
    if text is None:
        return None
    value = wording.expression(node.args[0])
    return Guard(place.file, place.line, place.function, value, node.args[1], segment - 1, variant, is_value, text)
