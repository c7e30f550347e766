"""Which columns of a layer a role takes, and in which order: found by changing one column of the layer's result and looking who sees it.

So whatever lies between is read: Split, Slice, Gather, heads of any layout, rotary positions, norms. The graph runs once to give what
comes in from the side; then only the nodes between the layer and the role run, on the same drawn numbers before and after.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from compressor.errors import UserInputError
from harness.errors import HarnessError
from harness.onnx_graph.census.census import ROLES, Block, Census
from harness.onnx_graph.census.flow import Shapes, operands
from harness.onnx_graph.census.parts import moves, path_between, takes_a_part
from harness.onnx_graph.census.products import Equation
from harness.onnx_graph.census.projections import Projection
from harness.onnx_graph.graph.constants import Constants
from harness.onnx_graph.graph.run_session import POLICIES, Session
from harness.onnx_graph.graph.view import GraphView, has_subgraph

_LEAST_SHARE = 0.05
"""Of the largest change: a smaller one is noise of codes whose scale moved."""


@dataclass(frozen=True)
class Columns:
    """What a role takes.

    Attributes:
        order: the column that each element of one token comes from.
        operator: where the block's operator takes its part itself, its name and settings; else empty.
        heads: of K or V that the block's operator repeats itself, as grouped queries ask; else 1.
        repeats: how often it repeats each.
    """

    order: tuple[int, ...]
    operator: str = ""
    heads: int = 1
    repeats: int = 1

    def is_same(self, other: Columns) -> bool:
        """Whether a role takes the same, no matter whether the graph repeats the heads of K and V or the operator does."""
        return self.order in (other.order, other._repeated) or other.order in (self.order, self._repeated)

    @property
    def _repeated(self) -> tuple[int, ...]:
        width = len(self.order) // self.heads
        return tuple(one for start in range(0, len(self.order), width) for one in self.order[start : start + width] * self.repeats)

    def text(self) -> str:
        """Return the columns as ranges, for people."""
        ends = [0, *(at for at in range(1, len(self.order)) if self.order[at] != self.order[at - 1] + 1), len(self.order)]
        runs = [f"{self.order[start]}:{self.order[end - 1] + 1}" for start, end in itertools.pairwise(ends)]
        return "columns " + ", ".join(runs[:4]) + (f" and {len(runs) - 4} more runs" if len(runs) > 4 else "")


def columns_told(found: Census) -> dict[tuple[int, str], Counter[str] | None]:
    """Tell how each role takes its columns, as far as that can be told without running the graph.

    Args:
        found: of a graph.

    Returns:
        (block, role) to what moves columns on the way; None where the role takes a part of its layer, or shares it with another role.
    """
    view = found.view
    layers = [(block, role, one) for block in found.read for role in ROLES if (one := block.projection(role)) is not None]
    if view is None:
        return {}
    shapes, told = Shapes(view), dict[tuple[int, str], Counter[str] | None]()
    for block, role, layer in layers:
        shared = any(
            (block.index, role) != (other.index, another)
            and (one.node is layer.node or (other is block and one.fingerprint == layer.fingerprint))
            for other, another, one in layers
        )
        value = block.taken.get(role)
        told[block.index, role] = None if shared or takes_a_part(view, shapes, layer, value) else moves(view, layer, value)
    return told


def columns_taken(found: Census, wanted: Sequence[tuple[Block, str]], inputs: Mapping[str, np.ndarray]) -> list[Columns | str]:
    """Find what roles take of their layers.

    Args:
        found: of the graph.
        wanted: blocks of that census and a role of each, which has exactly one layer.
        inputs: on which the graph runs once.

    Returns:
        For each what it takes, or in words why nobody knows.
    """
    assert found.view is not None
    try:
        probes = [_Probe(found.view, block, role) for block, role in wanted]
        held = _run_once(found.view, {one for probe in probes for one in probe.needed}, inputs)
        return [probe.read(held) for probe in probes]
    except (HarnessError, UserInputError) as error:
        return [str(error)] * len(wanted)


def _run_once(view: GraphView, needed: set[ir.Value], inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    proto = ir.to_proto(view.model)
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(str(one.name) for one in needed))
    return dict(zip([one.name for one in proto.graph.output], Session(proto, POLICIES["golden"]).run(inputs), strict=True))


class _Probe:
    """The nodes between one layer and one role."""

    def __init__(self, view: GraphView, block: Block, role: str) -> None:
        layer, value = block.projection(role), block.taken.get(role)
        if layer is None or value is None:
            raise HarnessError("what the role takes cannot be followed")
        self._view, self._layer, self._value = view, layer, value
        self._nodes = path_between(view, layer, value)
        if any(has_subgraph(node) for node in self._nodes):
            raise HarnessError("an If, Loop or Scan lies between the layer and the role")
        made = {one for node in self._nodes for one in node.outputs} | {layer.node.outputs[0]}
        self._beside = list(dict.fromkeys(one for node in self._nodes for one in node.inputs if one is not None and one not in made))
        self.needed = {layer.node.outputs[0], *self._beside}
        shared = sum(one is value for one in block.taken.values()) > 1
        node = next((one for one in view.nodes if block.anchor in (one.name, one.outputs[0].name)), None)
        self._operator = f"{block.operator} {role} {_told(node)}" if shared else ""
        self._heads = (1, 1) if shared or role == "q" or node is None else _grouped(node, Shapes(view))

    def read(self, held: Mapping[str, np.ndarray]) -> Columns | str:
        """Change columns and look who sees it."""
        start = held[str(self._layer.node.outputs[0].name)]
        axes = _column_axes(self._view, self._layer, start.ndim)
        count = math.prod(start.shape[axis] for axis in axes)
        if not axes or count != self._layer.shape[1]:
            return "the columns of the layer cannot be told in its result"
        if not self._nodes:
            return self._columns(range(count))
        session = self._session(held, start)
        for share in (1.0, 0.0, 0.5):  # the last token first; where only some tokens are taken, another
            token = [range(length) if axis in axes else [round(share * (length - 1))] for axis, length in enumerate(start.shape)]
            places = np.ravel_multi_index(tuple(one.reshape(-1) for one in np.meshgrid(*token, indexing="ij")), start.shape)
            if order := _Changes(session, start, places).order():
                return self._columns(order)
        return "no column of the layer changes what the role takes"

    def _columns(self, order: Sequence[int]) -> Columns:
        heads, repeats = self._heads if len(order) % self._heads[0] == 0 else (1, 1)
        return Columns(tuple(order), self._operator, heads, repeats)

    def _session(self, held: Mapping[str, np.ndarray], start: np.ndarray) -> Session:
        name = str(self._layer.node.outputs[0].name)
        beside = [onnx.numpy_helper.from_array(np.asarray(held[str(one.name)]), str(one.name)) for one in self._beside]
        entry = onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(start.dtype), start.shape)
        nodes = [ir.serde.serialize_node(node) for node in self._nodes]
        graph = onnx.helper.make_graph(nodes, "between", [entry], [onnx.ValueInfoProto(name=self._value.name)], beside)
        opsets = [onnx.helper.make_opsetid(*one) for one in self._view.model.opset_imports.items()]
        return Session(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=self._view.model.ir_version), POLICIES["golden"])


class _Changes:
    """What changes behind a layer when columns of its result do."""

    def __init__(self, session: Session, start: np.ndarray, places: np.ndarray) -> None:
        self._session, self._places = session, places
        draw = np.random.default_rng(0)
        is_float = start.dtype.kind == "f"
        drawn = draw.integers(32, 128, start.shape) / 64 if is_float else draw.integers(16, 48, start.shape)
        self._start = drawn.astype(start.dtype)
        self._even = np.full(len(places), 0.125 if is_float else 64, start.dtype)
        self._uneven = (
            self._even * (1 + np.arange(len(places)) * 5 % 7).astype(start.dtype) if is_float else self._even
        )  # norms see no shift
        self._name = next(iter(session.names))
        self._before = self._run(self._start)

    def order(self) -> tuple[int, ...]:
        """The column of each element that depends on one: by the digits of its number, or the one that counts most of several."""
        numbers = np.arange(len(self._places))
        digits = range(max(1, (len(numbers) - 1).bit_length()))
        seen = np.array([[self._changed(numbers >> digit & 1 == wanted, self._uneven) > 0 for wanted in (1, 0)] for digit in digits])
        reached = seen.any(axis=(0, 1))
        if (seen[:, 0] != seen[:, 1])[:, reached].all():
            return tuple(int(one) for one in sum(seen[digit, 0][reached] << digit for digit in digits))
        able = np.ones((int(reached.sum()), len(numbers)), bool)  # whether an element may depend on a column, as the digits tell
        for digit in digits:
            able &= np.where(numbers >> digit & 1, seen[digit, 0][reached, None], seen[digit, 1][reached, None])
        most, column = np.zeros(len(able)), np.zeros(len(able), np.int64)
        able[~able.any(axis=1)] = True
        for together in _apart(able):
            change = self._changed(np.isin(numbers, together), self._even)[reached]
            which = np.array(together)[able[:, together].argmax(axis=1)]
            counts = able[:, together].any(axis=1) & (change > most)
            column, most = np.where(counts, which, column), np.where(counts, change, most)
        return tuple(int(one) for one in column[most > _LEAST_SHARE * most.max()])

    def _changed(self, columns: np.ndarray, steps: np.ndarray) -> np.ndarray:
        other = self._start.copy()
        other.reshape(-1)[self._places[columns]] += steps[columns]
        return np.abs(self._run(other) - self._before)

    def _run(self, array: np.ndarray) -> np.ndarray:
        return np.nan_to_num(np.asarray(self._session.run({self._name: array})[0]).astype(np.float64).reshape(-1))


def _apart(able: np.ndarray) -> list[list[int]]:
    """Columns in groups of which no element may depend on two, so that they can change together."""
    groups: list[list[int]] = []
    taken: list[np.ndarray] = []
    for column in np.flatnonzero(able.any(axis=0)):
        at = next((at for at, elements in enumerate(taken) if not (elements & able[:, column]).any()), len(groups))
        if at == len(groups):
            groups.append([])
            taken.append(np.zeros(len(able), bool))
        groups[at].append(int(column))
        taken[at] |= able[:, column]
    return groups


def _column_axes(view: GraphView, layer: Projection, rank: int) -> list[int]:
    """The axes of a layer's result along which its columns lie, in the order of the columns."""
    node = layer.node
    given = operands(node)
    held = next((position for position, value in enumerate(given) if value is not layer.activation), 1)
    if node.op_type == "Einsum":
        equation = Equation.of(node)
        letters = equation.output if "." not in equation.output else ""
        return [place for place, letter in enumerate(letters) if letter in equation.inputs[held]]
    if "Conv" in node.op_type:
        return [1]
    weight = Constants(view).of(node.inputs[held]) if "MatMul" in node.op_type and node.op_type != "MatMulNBits" else None
    above = [] if weight is None else [rank - weight.ndim + axis for axis, length in enumerate(weight.shape[:-2]) if length > 1]
    return [*above, rank - 2 if held == 0 and len(given) > 1 else rank - 1]


def _told(node: ir.Node | None) -> dict[str, int]:
    """What an operator that takes its part itself is told."""
    names = () if node is None else ("q_num_heads", "num_heads", "kv_num_heads")
    return {name: node.attributes[name].as_int() for name in names if node is not None and name in node.attributes}


def _grouped(node: ir.Node, shapes: Shapes) -> tuple[int, int]:
    """The heads of K and V, and how many heads of Q share each; (1, 1) if each has its own, or nobody knows."""
    told = _told(node)
    heads: list[object] = [told.get("q_num_heads", told.get("num_heads")), told.get("kv_num_heads")]
    if None in heads and node.op_type == "Attention":  # of rank 4, the heads are an axis
        given = [shapes.of(one) for one in node.inputs[:2] if one is not None]
        heads = [one.dims[1] if one is not None and len(one.dims) == 4 else None for one in given]
    match heads:
        case [int(queries), int(keys)] if keys > 0 and queries > keys:
            return keys, queries // keys
    return 1, 1
