"""Which rows of its tables a graph reads on some inputs, however the ids were computed: what it computes them of is run alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx

from harness.onnx_graph.graph.indexed_tables import Table, constant_tables
from harness.onnx_graph.graph.local_functions import bodies_of, inlined
from harness.onnx_graph.graph.run_session import POLICIES, Session

_AXES = 3
"""Place of a Slice's axes."""
_CUT = "of tables that are cut"


class Read(NamedTuple):
    """A table, how many of its rows were read, and how many it has."""

    table: str
    used: int
    rows: int


def named_rows(model: onnx.ModelProto, drawn: Sequence[Mapping[str, np.ndarray]], added: Iterable[str]) -> list[Read]:
    """Count them.

    Args:
        model: not modified.
        drawn: inputs by name, which it takes.
        added: masks that it adds to scores (`added_masks`).

    Returns:
        One for each table of constants (`constant_tables`), or two where it is read along two axes of unequal length.

    Raises:
        GraphRefused: onnxruntime cannot run the part that computes ids.
    """
    whole = inlined(model) if model.functions else model
    cuts = _cuts(whole.graph)
    tables = [*constant_tables(whole), *cuts.tables]
    ids = list(dict.fromkeys(table.ids for table in tables))
    if not ids:
        return []
    session = Session(_part(whole, ids, cuts), POLICIES["golden"], "the part that computes ids", tuple(added))
    read = {(table.name, table.rows): np.zeros(table.rows, bool) for table in tables}
    for inputs in drawn:
        found = dict(zip(ids, session.run(inputs), strict=True))
        for table in tables:
            _mark(read[table.name, table.rows], table, found[table.ids])
    return [Read(name, int(rows.sum()), rows.size) for (name, _), rows in read.items()]


class _Cuts(NamedTuple):
    """What cuts the numbers of rows as a graph cuts tables."""

    tables: list[Table]
    nodes: list[onnx.NodeProto]
    initializers: list[onnx.TensorProto]


def _cuts(graph: onnx.GraphProto) -> _Cuts:
    """Find the tables that are cut to a computed length along one axis: those of positions, and causal masks."""
    held = {one.name: one for one in graph.initializer}
    held |= {node.output[0]: one.t for node in graph.node if node.op_type == "Constant" for one in node.attribute if one.name == "value"}
    found = _Cuts([], [], [onnx.numpy_helper.from_array(np.zeros(1, np.int64), f"the axis {_CUT}")])
    for at, node in enumerate(node for node in graph.node if node.op_type == "Slice" and len(node.input) > _AXES):
        bounds, axes = node.input[1:_AXES], held.get(node.input[_AXES])
        if node.input[0] not in held or axes is None or list(axes.dims) != [1] or all(name in held for name in bounds):
            continue
        size = held[node.input[0]].dims[int(onnx.numpy_helper.to_array(axes)[0])]
        numbers, rows = f"numbers {at} {_CUT}", f"rows {at} {_CUT}"
        found.initializers.append(onnx.numpy_helper.from_array(np.arange(size, dtype=np.int64), numbers))
        cut = [numbers, *bounds, found.initializers[0].name, *node.input[_AXES + 1 :]]
        found.nodes.append(onnx.helper.make_node("Slice", cut, [rows]))
        found.tables.append(Table(node.input[0], rows, size))
    return found


def _mark(read: np.ndarray, table: Table, ids: np.ndarray) -> None:
    """Negative ones count from the end."""
    at = np.unique((ids[..., 0] if table.is_first else ids).astype(np.int64))
    at = np.where(at < 0, at + table.rows, at)
    read[at[(at >= 0) & (at < table.rows)]] = True


def _part(model: onnx.ModelProto, names: Sequence[str], cuts: _Cuts) -> onnx.ModelProto:
    """The nodes that some values are computed by, with these as outputs."""
    nodes = [*model.graph.node, *cuts.nodes]
    makes = {name: node for node in nodes for name in node.output}
    needed, left = set[str](), list(names)
    while left:
        if (name := left.pop()) not in needed:
            needed.add(name)
            left += _reads(makes[name]) if name in makes else ()
    part = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    part.graph.name = model.graph.name
    part.graph.node.extend(node for node in nodes if needed.intersection(node.output))
    part.graph.initializer.extend(one for one in (*model.graph.initializer, *cuts.initializers) if one.name in needed)
    part.graph.sparse_initializer.extend(one for one in model.graph.sparse_initializer if one.values.name in needed)
    part.graph.input.extend(one for one in model.graph.input if one.name in needed)
    part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return part


def _reads(node: onnx.NodeProto) -> list[str]:
    """What a node reads, in its bodies as well."""
    return [name for name in node.input if name] + [name for body in bodies_of(node) for inner in body.node for name in _reads(inner)]
