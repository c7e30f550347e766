"""Which rows of its tables a graph reads on some inputs, however the ids were computed: what it computes them of is run alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx

from harness.onnx_graph.graph.indexed_tables import Table, constant_tables
from harness.onnx_graph.graph.local_functions import bodies_of, inlined
from harness.onnx_graph.graph.run_session import POLICIES, Session


def named_rows(model: onnx.ModelProto, drawn: Sequence[Mapping[str, np.ndarray]], added: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Count them.

    Args:
        model: not modified.
        drawn: inputs by name, which it takes.
        added: masks that it adds to scores (`added_masks`).

    Returns:
        Name of each table of constants to how many rows were read, and how many it has (`constant_tables`).

    Raises:
        GraphRefused: onnxruntime cannot run the part that computes ids.
    """
    whole = inlined(model) if model.functions else model
    tables = constant_tables(whole)
    ids = list(dict.fromkeys(table.ids for table in tables))
    if not ids:
        return {}
    session = Session(_part(whole, ids), POLICIES["golden"], "the part that computes ids", tuple(added))
    read = {table.name: np.zeros(table.rows, bool) for table in tables}
    for inputs in drawn:
        found = dict(zip(ids, session.run(inputs), strict=True))
        for table in tables:
            _mark(read[table.name], table, found[table.ids])
    return {name: (int(rows.sum()), rows.size) for name, rows in read.items()}


def _mark(read: np.ndarray, table: Table, ids: np.ndarray) -> None:
    """Negative ones count from the end."""
    at = np.unique(ids.astype(np.int64))
    at = np.where(at < 0, at + table.rows, at)
    read[at[(at >= 0) & (at < table.rows)]] = True


def _part(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """The nodes that some values are computed by, with these as outputs."""
    makes = {name: node for node in model.graph.node for name in node.output}
    needed, left = set[str](), list(names)
    while left:
        if (name := left.pop()) not in needed:
            needed.add(name)
            left += _reads(makes[name]) if name in makes else ()
    part = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    part.graph.name = model.graph.name
    part.graph.node.extend(node for node in model.graph.node if needed.intersection(node.output))
    part.graph.initializer.extend(one for one in model.graph.initializer if one.name in needed)
    part.graph.sparse_initializer.extend(one for one in model.graph.sparse_initializer if one.values.name in needed)
    part.graph.input.extend(one for one in model.graph.input if one.name in needed)
    part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return part


def _reads(node: onnx.NodeProto) -> list[str]:
    """What a node reads, in its bodies as well."""
    return [name for name in node.input if name] + [name for body in bodies_of(node) for inner in body.node for name in _reads(inner)]
