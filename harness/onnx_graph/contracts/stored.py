"""How a graph stores the numbers of its layers and tables: as floats, or in codes, dequantized or taken by an operator as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from harness.onnx_graph.census.projections import find_projection, fingerprint
from harness.onnx_graph.graph.constants import Constants, is_code
from harness.onnx_graph.graph.view import GraphView, label, tensor_of

_WEIGHT = {"Gather": 0, "Conv": 1, "FusedConv": 1, "ConvTranspose": 1}
"""Operators that are no product of two matrices, and where they hold their numbers."""
_UNREAD = frozenset({"ConvInteger", "GatherBlockQuantized", "QLinearConv", "MatMulBnb4", "QMoE", "QAttention", "QEmbedLayerNormalization"})
"""Operators that hold codes which nobody reads here, of QLinearConv those of groups."""


@dataclass(frozen=True)
class StoredNumbers:
    """What lies in a graph.

    Attributes:
        numbers: by `number_mark` operators and names, apart for `codes` and `float`.
        codes: by `number_mark` hashes of the codes themselves.
        held: hashes of all codes in the graph.
        unread: how many operators of a kind hold codes that are not read.
    """

    numbers: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    codes: dict[str, frozenset[str]] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    unread: Counter[str] = field(default_factory=Counter)

    @property
    def loose(self) -> set[str]:
        """Hashes of codes that no layer or table is read from here, as where bits are unpacked or a list of values is looked up."""
        return self.held.difference(*self.codes.values())


def stored_numbers(view: GraphView) -> StoredNumbers:
    """Look at every node, also inside of subgraphs.

    Args:
        view: of the graph.

    Returns:
        All layers and tables.
    """
    constants, found = Constants(view), StoredNumbers()
    for node in view.model.graph.all_nodes():
        codes = _codes_of(constants, node)
        found.held.update(codes)
        layer = find_projection(constants, node)
        array, stored = (layer.matrix_IO, layer.stored) if layer is not None else _table(constants, node)
        if array is not None and array.ndim > 1:
            kinds = found.numbers.setdefault(number_mark(array), {})
            kinds.setdefault(stored, []).append(f"{node.op_type} {label(node)}")
            if stored == "codes":
                found.codes[number_mark(array)] = codes
        elif node.op_type in _UNREAD:
            found.unread[node.op_type] += 1
    return found


class Lost(NamedTuple):
    """What left its codes: pairs of what was stored in codes and what holds its numbers as floats; and what cannot be found again."""

    floats: list[tuple[str, str]]
    gone: list[str]


def codes_lost(before: StoredNumbers, after: StoredNumbers, told: Collection[str] = (), roles: Collection[str] = ()) -> Lost:
    """Find what was stored in codes and no longer is. What has neither its numbers nor its codes may have been merged, folded or lost.

    Args:
        before: of a graph.
        after: of another.
        told: marks of what was told elsewhere.
        roles: marks of what is looked for elsewhere.

    Returns:
        Operators and names.
    """
    lost = Lost([], [])
    for mark, stored in before.numbers.items():
        now = after.numbers.get(mark, {})
        if mark in told or len(now.get("codes", ())) >= len(stored.get("codes", ())):
            continue
        if len(now.get("float", ())) > len(stored.get("float", ())):
            lost.floats.append((stored["codes"][0], now["float"][-1]))
        elif not now and mark not in roles and not (before.codes[mark] and before.codes[mark] <= after.held):
            lost.gone.extend(stored["codes"])
    if loose := before.loose - after.held:
        lost.gone.append(f"{len(loose)} that are unpacked or looked up")
    lost.gone.extend(f"{count} {operator}" for operator, count in (before.unread - after.unread).items())
    return lost


def _table(constants: Constants, node: ir.Node) -> tuple[np.ndarray | None, str]:
    place = _WEIGHT.get(node.op_type, len(node.inputs))
    value = node.inputs[place] if place < len(node.inputs) else None
    array = constants.of(value)
    if node.op_type == "Gather" and array is not None and is_code(array):
        return _dequantized_behind(constants, node, array), "codes"
    if array is None or array.dtype.kind in "biu":
        return None, ""
    return array, "codes" if constants.is_dequantized(value) else "float"


def _dequantized_behind(constants: Constants, node: ir.Node, codes_RC: np.ndarray) -> np.ndarray | None:
    """The numbers of a table whose rows are dequantized behind the Gather, as onnxruntime's quantizer writes it; None for other forms."""
    users = [use.node for use in node.outputs[0].uses()]
    if len(users) != 1 or users[0].op_type != "DequantizeLinear" or codes_RC.ndim != 2:
        return None
    scale, zero_point = (constants.of(value) for value in (*users[0].inputs[1:], None)[:2])
    if scale is None or scale.size != 1 or (len(users[0].inputs) > 2 and users[0].inputs[2] is not None and zero_point is None):
        return None
    offset = 0 if zero_point is None else zero_point.astype(np.int32)
    return (codes_RC.astype(np.int32) - offset).astype(scale.dtype) * scale


def _codes_of(constants: Constants, node: ir.Node) -> frozenset[str]:
    """Hashes of the matrices of integers that the numbers of an operator are computed from."""
    held = (
        tensor_of(source)
        for value in node.inputs
        if value is not None and constants.view.is_constant(value)
        for source in constants.sources(value)
    )
    return frozenset(number_mark(one) for one in held if one is not None and one.ndim > 1 and is_code(one))


def number_mark(array: np.ndarray) -> str:
    """Hash the numbers of a layer or table, of a matrix and its transpose alike.

    Args:
        array: of two dimensions or more.

    Returns:
        Hexadecimal digits.
    """
    matrix = array.reshape(len(array), -1)
    return min(fingerprint(matrix), fingerprint(matrix.T))
