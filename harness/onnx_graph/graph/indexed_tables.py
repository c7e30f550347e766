"""Which inputs of a graph index a table, and how many rows it has: ids, token types, places.

Ids are followed by name from the input to the Gather, through what only moves them; the table may be stored in codes or turned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from harness.onnx_graph.graph.local_functions import inlined
from harness.onnx_graph.graph.view import DATA_INPUTS

_MOVES = frozenset(
    {
        *("Identity", "Cast", "CastLike", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile", "Slice", "Split"),
        *("Concat", "Gather", "GatherElements", "GatherND", "Where"),
    }
)
"""Operators whose outputs hold values of their inputs and no others."""

_FLOATS = frozenset(getattr(onnx.TensorProto, name) for name in ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE"))

_INDEXED: Mapping[str, Sequence[tuple[int, int]]] = {
    **dict.fromkeys(("Gather", "GatherElements", "GatherND", "GatherBlockQuantized"), ((1, 0),)),
    "EmbedLayerNormalization": ((0, 2), (1, 4)),
}
"""Operator to the positions of ids and of the table that they index."""

_AXIS = {"Gather": "axis", "GatherElements": "axis", "GatherBlockQuantized": "gather_axis"}


def id_limits(model: onnx.ModelProto) -> dict[str, int]:
    """Find the inputs whose values index a table as they are.

    Args:
        model: not modified.

    Returns:
        Name to the number of rows of the smallest table.
    """
    limits = _Walk(lambda node: node.op_type in _MOVES and node.op_type != "GatherND").limits(model)
    return {name: rows for name, rows in limits.items() if rows}


def reached_tables(model: onnx.ModelProto) -> dict[str, int]:
    """Find the inputs that index a table as they are, or something that is computed of them in integers.

    Args:
        model: not modified.

    Returns:
        Name to the number of rows of the smallest table; 0 where it is not known.
    """
    return _Walk(lambda node: True).limits(model)


@dataclass
class _Walk:
    """One way through a graph, in the order of its nodes.

    Attributes:
        carries: whether ids come through an operator.
        sizes: of constants; None where they are not known.
        ids: value to the inputs whose integers it holds.
        found: input to the rows of the smallest table that it indexes.
    """

    carries: Callable[[onnx.NodeProto], bool]
    sizes: dict[str, Sequence[int] | None] = field(default_factory=dict)
    ids: dict[str, set[str]] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)

    def limits(self, model: onnx.ModelProto) -> dict[str, int]:
        graph = inlined(model).graph if model.functions else model.graph
        self.ids = {value.name: {value.name} for value in graph.input if value.type.tensor_type.elem_type not in _FLOATS}
        self._through(graph)
        return self.found

    def _through(self, graph: onnx.GraphProto) -> None:
        self.sizes |= {tensor.name: tensor.dims for tensor in graph.initializer}
        for tensor in graph.initializer:
            self.ids.pop(tensor.name, None)
        for node in graph.node:
            for attribute in node.attribute:
                for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                    self._through(inner)
            for ids, table in _INDEXED.get(node.op_type, ()):
                if len(node.input) > max(ids, table) and node.input[table] in self.sizes:
                    self._index(self.ids.get(node.input[ids], set()), _rows(node, self.sizes[node.input[table]]))
            self._pass(node)

    def _index(self, names: set[str], rows: int) -> None:
        for name in names:
            self.found[name] = min(self.found.get(name) or rows, rows or self.found.get(name, 0))

    def _pass(self, node: onnx.NodeProto) -> None:
        """Say what the outputs of a node are: constants, or values that hold ids."""
        if all(name in self.sizes for name in node.input if name) and not any(one.HasField("g") for one in node.attribute):
            self.sizes |= dict.fromkeys(node.output, _size(node, [self.sizes[name] for name in node.input if name]))
            return
        to = next((one.i for one in node.attribute if node.op_type == "Cast" and one.name == "to"), None)
        if self.carries(node) and to not in _FLOATS:
            data = [node.input[at] for at in DATA_INPUTS.get(node.op_type, range(len(node.input))) if at < len(node.input)]
            self.ids |= {name: set().union(*(self.ids.get(one, set()) for one in data)) for name in node.output}


def _rows(node: onnx.NodeProto, size: Sequence[int] | None) -> int:
    axis = next((one.i for one in node.attribute if one.name == _AXIS.get(node.op_type)), 0)
    return size[axis] if size and -len(size) <= axis < len(size) else 0


def _size(node: onnx.NodeProto, given: Sequence[Sequence[int] | None]) -> Sequence[int] | None:
    """The size of what is computed of constants alone, as far as it takes no look at their values."""
    if node.op_type == "Constant":
        return next((one.t.dims for one in node.attribute if one.name == "value"), None)
    if node.op_type in ("Identity", "Cast", "CastLike", "DequantizeLinear"):
        return given[0]
    if node.op_type == "Transpose" and given[0]:
        perm = next((one.ints for one in node.attribute if one.name == "perm"), range(len(given[0]))[::-1])
        return [given[0][axis] for axis in perm]
    return None
