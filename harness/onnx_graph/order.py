"""Is a graph in order: is every value computed before it is used? Walks along a graph rely on it, and readers of graphs do not ask."""

from __future__ import annotations

from collections.abc import Set

import onnx

from compressor.errors import UserInputError


def check_order(proto: onnx.ModelProto) -> None:
    """Refuse a graph that no program can run, in the words of the graph.

    Args:
        proto: not modified.

    Raises:
        UserInputError: it names no version of its operators, or a value is used or given out before a node computes it, or by none.
    """
    if not proto.opset_import:
        raise UserInputError("graph: it does not say which version of the operators it uses (opset_import is empty); export it again")
    _check(proto.graph, frozenset())


def _check(graph: onnx.GraphProto, around: Set[str]) -> None:
    known = {*around, *(one.name for one in graph.input), *(one.name for one in graph.initializer)}
    known.update(one.values.name for one in graph.sparse_initializer)
    for node in graph.node:
        where = f"{node.op_type} {node.name or next(iter(node.output), '')}".strip()
        for name in node.input:
            if name and name not in known:
                raise UserInputError(f"graph: {where} uses {name!r}, {_why(graph, name)}")
        if not any(node.output):
            raise UserInputError(f"graph: {where} has no output; export it again")
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                _check(inner, known)
        known.update(node.output)
    for one in graph.output:
        if one.name not in known:
            raise UserInputError(f"graph: its output is {one.name!r}, {_why(graph, one.name)}")


def _why(graph: onnx.GraphProto, name: str) -> str:
    if any(name in node.output for node in graph.node):
        return "which is computed later: its nodes are out of order, or run in a circle; sort them"
    return "which nothing computes; export it again"
