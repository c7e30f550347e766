"""What a role takes of the layer that it comes from: all of it, or some columns of a packed one."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set

import onnx_ir as ir

from harness.onnx_graph.census.flow import Shapes
from harness.onnx_graph.census.projections import Projection
from harness.onnx_graph.graph.constants import Constants
from harness.onnx_graph.graph.view import GraphView

_CUTS = frozenset({"Split", "Slice", "Gather", "GatherND", "GatherElements", "Compress", "SplitToSequence", "SequenceAt", "DynamicSlice"})

_KEEPS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Identity", "Cast", "Mul", "Div", "Add", "Sub", "Neg"})
"""Operators behind which there is as much as before them."""

_MOVES = _CUTS | {"Concat", "Tile", "ScatterElements", "ScatterND", "Pad", "ReverseSequence"}


def path_between(view: GraphView, layer: Projection, value: ir.Value, data_only: bool = False) -> list[ir.Node]:
    """Find what lies between a layer and a value behind it.

    Args:
        view: of the graph.
        layer: of that graph.
        value: of that graph.
        data_only: leave out what computes shapes and places.

    Returns:
        Nodes in the order of the graph; empty if the value is the layer's own result.
    """

    def carried(node: ir.Node) -> Sequence[ir.Value | None]:
        return view.data_inputs(node) if data_only else node.inputs

    behind = set(layer.node.outputs)
    for node in view.nodes:
        if any(one in behind for one in carried(node)):
            behind.update(node.outputs)
    found: set[ir.Node] = set()
    waiting = [value]
    while waiting:
        above = waiting.pop().producer()
        if above is not None and above is not layer.node and above not in found and behind.intersection(above.outputs):
            found.add(above)
            waiting += [one for one in carried(above) if one is not None and one in behind]
    return [node for node in view.nodes if node in found]


def takes_a_part(view: GraphView, shapes: Shapes, layer: Projection, value: ir.Value | None) -> bool:
    """Whether less than a layer computes arrives at a value. Where no shape says it, whether anything is cut on the way.

    Args:
        view: of the graph.
        shapes: of its values.
        layer: of that graph.
        value: what a product takes for a role.

    Returns:
        False for all of it, also if it is repeated.
    """
    if value is None:
        return False
    path = path_between(view, layer, value, data_only=True)
    whole = _size(shapes.of(layer.node.outputs[0]))
    taken = None if whole is None else _last_size(view, shapes, {layer.node, *path}, value, whole[1])
    if whole is not None and taken is not None:
        return taken < whole[0]
    return any(node.op_type in _CUTS or _is_narrow(shapes, node) for node in path)


def shared_across_blocks(
    view: GraphView, shapes: Shapes, taken: Mapping[tuple[int, str], tuple[Projection, ir.Value | None]]
) -> dict[int, list[str]]:
    """Find roles that take their parts of a layer, or of one weight, of which a role of another block takes a part, too.

    Blocks all of whose roles come from the same weights are the heads or windows of one attention, and no others to each other.

    Args:
        view: of the graph.
        shapes: of its values.
        taken: (block, role) to its layer, and what the block's product takes for it.

    Returns:
        Block to what it shares, in words.
    """
    weights: dict[int, dict[str, object]] = {}
    for (index, role), (layer, _) in taken.items():
        weights.setdefault(index, {})[role] = layer.sources
    found: dict[int, list[str]] = {}
    for (index, role), (other, other_role) in itertools.permutations(taken, 2):
        (layer, value), (beside, beside_value) = taken[index, role], taken[other, other_role]
        if index == other or layer.sources != beside.sources or weights[index] == weights[other]:
            continue
        if layer.node is beside.node:
            is_shared = takes_a_part(view, shapes, layer, value) and takes_a_part(view, shapes, beside, beside_value)
        else:
            is_shared = bool(layer.cut_from and beside.cut_from) and layer.fingerprint != beside.fingerprint
        if is_shared:
            found.setdefault(index, []).append(f"{role.upper()} lies packed with {other_role.upper()} of block {other}")
    return found


def moves(view: GraphView, layer: Projection, value: ir.Value | None) -> Counter[str]:
    """Tell what cuts, joins or repeats the columns of a layer on their way to a value. Equal for equal ways.

    Args:
        view: of the graph.
        layer: of that graph.
        value: what a product takes for a role.

    Returns:
        Each such operator with its settings and constants, and how often it occurs.
    """
    path = [] if value is None else path_between(view, layer, value, data_only=True)
    constants = Constants(view)
    return Counter(_told(constants, node) for node in path if node.op_type in _MOVES)


def _told(constants: Constants, node: ir.Node) -> str:
    held = [constants.of(one) for one in node.inputs[1:]]
    given = [None if one is None else (one.shape, one.tobytes()) for one in held]
    return f"{node.op_type} {sorted((name, str(one.value)) for name, one in node.attributes.items())} {len(node.outputs)} {given}"


def _last_size(view: GraphView, shapes: Shapes, path: Set[ir.Node], value: ir.Value, names: Counter[str]) -> int | None:
    """The size of the last value, over axes of these names, that all of this one comes from: exporters reshape to what they compute."""
    while (size := _size(shapes.of(value))) is None or size[1] != names:
        node = value.producer()
        carrying = [] if node is None or node.op_type not in _KEEPS else [one for one in view.data_inputs(node) if one.producer() in path]
        if len(carrying) != 1:
            return None
        value = carrying[0]
    return size[0]


def _is_narrow(shapes: Shapes, node: ir.Node) -> bool:
    """Whether a matrix product gives fewer columns than it takes, as one that selects does."""
    if node.op_type not in ("MatMul", "Gemm") or node.inputs[0] is None:
        return False
    before, after = shapes.of(node.inputs[0]), shapes.of(node.outputs[0])
    lengths: Sequence[object] = [] if before is None or after is None else [before.dims[-1], after.dims[-1]]
    return len(lengths) > 1 and all(isinstance(one, int) for one in lengths) and lengths[1] != lengths[0]


def _size(shape: ir.Shape | None) -> tuple[int, Counter[str]] | None:
    """The number of elements, and the names of the axes whose length nobody states."""
    if shape is None or any(not isinstance(one, int) and one.value is None for one in shape.dims):
        return None
    return math.prod(one for one in shape.dims if isinstance(one, int)), Counter(str(one) for one in shape.dims if not isinstance(one, int))
