"""Which inputs of a graph index a table, how many rows it has, and with which numbers they are compared: ids, token types, places.

Ids are followed by name from the input to the Gather, through what only moves them; the table may be stored in codes or turned, and may
be an activation, or what is scattered into.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import onnx

from harness.onnx_graph.graph.local_functions import all_nodes, bodies_of, inlined
from harness.onnx_graph.graph.view import DATA_INPUTS

MOVES = frozenset(
    {
        *("Identity", "Cast", "CastLike", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile", "Slice", "Split"),
        *("Concat", "Gather", "GatherElements", "GatherND", "Where"),
    }
)
"""Operators whose outputs hold values of their inputs and no others."""

_FLOATS = frozenset(getattr(onnx.TensorProto, name) for name in ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE"))

_INDEXED: Mapping[str, Sequence[tuple[int, int]]] = {
    **dict.fromkeys(("Gather", "GatherElements", "GatherND", "GatherBlockQuantized", "ArrayFeatureExtractor"), ((1, 0),)),
    **dict.fromkeys(("ScatterND", "ScatterElements", "Scatter"), ((1, 0),)),
    **dict.fromkeys(("TensorScatter", "RoiAlign"), ((2, 0),)),
    "TorchEmbedding": ((1, 0),),
    "OneHot": ((0, 1),),
    "EmbedLayerNormalization": ((0, 2), (1, 4), (8, 3)),
    "QEmbedLayerNormalization": ((0, 2), (1, 4)),
    "RotaryEmbedding": ((3, 1), (3, 2)),
    "com.microsoft::RotaryEmbedding": ((1, 2), (1, 3)),
    "MRotaryEmbedding": ((1, 2), (1, 3)),
    "GroupQueryAttention": ((9, 7), (9, 8)),
}
"""Operator to the positions of ids and of the table that they index; of OneHot that is the number of its rows."""

_WRITES = frozenset({"ScatterND", "ScatterElements", "Scatter", "TensorScatter", "OneHot"})
"""Of these, which read no row of a table by its id."""

_AXIS: Mapping[str, tuple[str, int]] = {
    **dict.fromkeys(("Gather", "GatherElements", "ScatterElements", "Scatter"), ("axis", 0)),
    "GatherBlockQuantized": ("gather_axis", 0),
    "TensorScatter": ("axis", -2),
    "ArrayFeatureExtractor": ("", -1),
}
"""Operator to the attribute that names the axis of the rows, and what it is where it is not given; 0 in all others."""

_COMPARED = frozenset({"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Sub", "Min", "Max", "Clip"})
"""Operators by which one number is told from others: padding, the end of a text."""

_MOST_NUMBERS = 16
"""More of them are a table, and no special ids."""


def id_limits(model: onnx.ModelProto) -> dict[str, int]:
    """Find the inputs whose values index a table as they are.

    Args:
        model: not modified.

    Returns:
        Name to the number of rows of the smallest table.
    """
    return {name: rows for name, rows in _Walk(_moves_ids).through(model).found.items() if rows}


def reached_tables(model: onnx.ModelProto) -> dict[str, int]:
    """Find the inputs that index a table as they are, or something that is computed of them in integers.

    Args:
        model: not modified.

    Returns:
        Name to the number of rows of the smallest table, of those that it indexes as it is where there is one; 0 where it is not known.
    """
    return _Walk(lambda node: _cast_to(node) not in _FLOATS).through(model).found | id_limits(model)


class Table(NamedTuple):
    """A table of constants: its name, the value that holds the ids of rows, how many it has, and whether an id is the first of several."""

    name: str
    ids: str
    rows: int
    is_first: bool = False


def constant_tables(model: onnx.ModelProto) -> list[Table]:
    """Find the tables of constants that something computed looks up in; in the bodies of branches and loops by ids from outside of them.

    Args:
        model: without local functions; not modified.

    Returns:
        One per operator that reads them and takes one number as an id, in the order of nodes, where the number of rows is known.
    """
    walk = _Walk(lambda _: False).through(model)
    found = [
        Table(node.input[table], node.input[ids], walk.rows(node, node.input[ids], node.input[table]), node.op_type == "GatherND")
        for node in all_nodes(model.graph.node)
        for ids, table in _indexed(node)
        if node.op_type not in _WRITES and len(node.input) > max(ids, table)
    ]
    outside = {one.name for one in model.graph.input} | {name for node in model.graph.node for name in node.output}
    return [one for one in found if one.rows and one.name in walk.sizes and one.ids in outside - walk.sizes.keys()]


def special_ids(model: onnx.ModelProto) -> dict[str, set[int]]:
    """Find the numbers that a graph compares ids with: what is padding, and where a text ends.

    Args:
        model: not modified.

    Returns:
        Name of an input that holds integers to the numbers.
    """
    return _Walk(_moves_ids).through(model).special


def _indexed(node: onnx.NodeProto) -> Sequence[tuple[int, int]]:
    return _INDEXED.get(f"{node.domain}::{node.op_type}", _INDEXED.get(node.op_type, ()))


def _moves_ids(node: onnx.NodeProto) -> bool:
    return node.op_type in MOVES and node.op_type != "GatherND"


def _cast_to(node: onnx.NodeProto) -> int | None:
    return next((one.i for one in node.attribute if node.op_type == "Cast" and one.name == "to"), None)


@dataclass
class _Walk:
    """One way through a graph, in the order of its nodes.

    Attributes:
        carries: whether ids come through an operator.
        sizes: of constants; None where they are not known.
        declared: of other values, as far as the file says them; 0 is an open one.
        numbers: what constants of few elements hold.
        ids: value to the inputs whose integers it holds.
        found: input to the rows of the smallest table that it indexes.
        special: input to the numbers that it is compared with.
    """

    carries: Callable[[onnx.NodeProto], bool]
    sizes: dict[str, Sequence[int] | None] = field(default_factory=dict)
    declared: dict[str, Sequence[int]] = field(default_factory=dict)
    numbers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ids: dict[str, set[str]] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)
    special: dict[str, set[int]] = field(default_factory=dict)

    def through(self, model: onnx.ModelProto) -> _Walk:
        graph = inlined(model).graph if model.functions else model.graph
        self.ids = {value.name: {value.name} for value in graph.input if value.type.tensor_type.elem_type not in _FLOATS}
        self._through(graph)
        return self

    def _through(self, graph: onnx.GraphProto) -> None:
        self.sizes |= {tensor.name: tensor.dims for tensor in graph.initializer}
        self.numbers |= _numbers((tensor.name, tensor) for tensor in graph.initializer)
        for value in (*graph.input, *graph.value_info):
            if value.type.tensor_type.HasField("shape"):
                self.declared[value.name] = [max(0, one.dim_value) for one in value.type.tensor_type.shape.dim]
        for tensor in graph.initializer:
            self.ids.pop(tensor.name, None)
        for node in graph.node:
            for inner in bodies_of(node):
                self._through(inner)
            for ids, table in _indexed(node):
                if len(node.input) > max(ids, table) and node.input[table]:
                    self._index(self.ids.get(node.input[ids], set()), self.rows(node, node.input[ids], node.input[table]))
            if node.op_type in _COMPARED:
                self._compare([name for name in node.input if name])
            self._pass(node)

    def rows(self, node: onnx.NodeProto, ids: str, table: str) -> int:
        """How many rows a table has; 0 where it is not known, or where one id says where all that are read begin."""
        if node.op_type == "OneHot":
            return next(iter(self.numbers.get(table, ())), 0)
        if node.op_type == "RotaryEmbedding" and len(self.declared.get(ids, ())) == 1:
            return 0
        size = self.sizes.get(table) or self.declared.get(table)
        name, axis = _AXIS.get(node.op_type, ("", 0))
        axis = next((one.i for one in node.attribute if name and one.name == name), axis)
        return size[axis] if size and -len(size) <= axis < len(size) else 0

    def _index(self, names: set[str], rows: int) -> None:
        for name in names:
            self.found[name] = min(self.found.get(name) or rows, rows or self.found.get(name, 0))

    def _compare(self, names: Sequence[str]) -> None:
        for one in set().union(*(self.ids.get(name, set()) for name in names)):
            self.special.setdefault(one, set()).update(number for name in names for number in self.numbers.get(name, ()))

    def _pass(self, node: onnx.NodeProto) -> None:
        """Say what the outputs of a node are: constants, or values that hold ids."""
        data = [node.input[at] for at in DATA_INPUTS.get(node.op_type, range(len(node.input))) if at < len(node.input)]
        if node.op_type in ("Constant", "ConstantOfShape"):
            self.numbers |= _numbers((node.output[0], one.t) for one in node.attribute if one.HasField("t"))
        elif _moves_ids(node) and data and all(name in self.numbers for name in data):
            self.numbers |= dict.fromkeys(node.output, tuple(number for name in data for number in self.numbers[name]))
        if all(name in self.sizes for name in node.input if name) and not any(one.HasField("g") for one in node.attribute):
            self.sizes |= dict.fromkeys(node.output, _size(node, [self.sizes[name] for name in node.input if name]))
        elif self.carries(node):
            self.ids |= {name: set().union(*(self.ids.get(one, set()) for one in data)) for name in node.output}


def _numbers(named: Iterable[tuple[str, onnx.TensorProto]]) -> dict[str, tuple[int, ...]]:
    """What tensors of few integers hold; an integer may be stored as a float."""
    few = [(name, one) for name, one in named if 0 < math.prod(one.dims) <= _MOST_NUMBERS and not one.external_data]
    arrays = {name: onnx.numpy_helper.to_array(one) for name, one in few}
    return {
        name: tuple(int(number) for number in one.ravel())
        for name, one in arrays.items()
        if one.dtype.kind in "iu" or (one.dtype.kind == "f" and bool((np.isfinite(one) & (one == np.rint(one))).all()))
    }


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
