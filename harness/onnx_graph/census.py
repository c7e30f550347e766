"""The census: every attention block of a graph, and which linear layers its Q, K and V come from.

From each Softmax the walk goes back to the product of two activations (Q and K) and forward to the one with V; from Q, K and V back, each
to the first linear layer. No pattern of operators is matched: exporters and optimizers produce dozens of chains between these points.
Fused attention operators name their Q, K and V themselves. Three layers are SEPARATE, two PARTLY_FUSED, one FUSED; an operator that holds
the packed weight itself has ABSORBED them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import onnx_ir as ir

from harness.onnx_graph.constants import Constants
from harness.onnx_graph.graph import GraphView, domain, label, load_graph
from harness.onnx_graph.projections import Projection, find_projection

ROLES = ("q", "k", "v")


class Status(StrEnum):
    """What became of the three projections of one block."""

    SEPARATE = "SEPARATE"
    PARTLY_FUSED = "PARTLY_FUSED"
    FUSED = "FUSED"
    ABSORBED = "ABSORBED"
    MISSING = "MISSING"
    AMBIGUOUS = "AMBIGUOUS"


@dataclass(frozen=True, eq=False)
class Block:
    """One attention block.

    Attributes:
        index: position among the blocks of the graph.
        kind: `self`, or `cross` where K and V come from another activation than Q.
        operator: `Softmax`, or the fused attention operator.
        anchor: name of that node.
        projections: the linear layers that each role comes from; exactly one where the graph is clear.
        absorbed: the operator holds the packed weight itself.
        note: why the block is ambiguous or a role is missing; else empty.
    """

    index: int
    kind: str
    operator: str
    anchor: str
    projections: Mapping[str, tuple[Projection, ...]]
    absorbed: bool = False
    note: str = ""

    @property
    def status(self) -> Status:
        """How the projections lie."""
        if self.absorbed:
            return Status.ABSORBED
        counts = [len(self.projections[role]) for role in ROLES]
        if self.note and not all(counts):
            return Status.AMBIGUOUS if "subgraph" in self.note else Status.MISSING
        if not all(counts):
            return Status.MISSING
        if max(counts) > 1:
            return Status.AMBIGUOUS
        return {3: Status.SEPARATE, 2: Status.PARTLY_FUSED, 1: Status.FUSED}[len({self.projections[role][0].node for role in ROLES})]

    def projection(self, role: str) -> Projection | None:
        """Return the layer of a role, None where there is not exactly one."""
        found = self.projections[role]
        return found[0] if len(found) == 1 else None

    def to_dict(self) -> dict[str, Any]:
        """Return the block as JSON types."""
        roles = {role: [one.to_dict() for one in layers] for role, layers in self.projections.items()}
        fixed = {"index": self.index, "kind": self.kind, "operator": self.operator, "anchor": self.anchor, "note": self.note}
        return {**fixed, "status": self.status.value, "roles": roles}


@dataclass(frozen=True, eq=False)
class Census:
    """All blocks of a graph, in its order.

    Attributes:
        blocks: may be empty: then there is no attention, which no contract takes for a pass.
    """

    blocks: tuple[Block, ...]

    @property
    def counts(self) -> Counter[str]:
        """How many blocks there are of each status."""
        return Counter(block.status.value for block in self.blocks)

    def to_dict(self) -> dict[str, Any]:
        """Return the census as JSON types."""
        blocks = [block.to_dict() for block in self.blocks]
        return {"num_blocks": len(blocks), "counts": dict(sorted(self.counts.items())), "blocks": blocks}

    def text(self) -> str:
        """Return one line per block, for people."""
        lines = []
        for block in self.blocks:
            roles = (
                "; ".join(f"{role} {_shown(block.projections[role])}" for role in ROLES) if not block.absorbed else "packed in the operator"
            )
            note = f" ({block.note})" if block.note else ""
            lines.append(f"block {block.index} {block.kind:5} {block.operator:20} {block.status.value:12} {roles}{note}")
        return "\n".join(lines) or "no attention block was found"


_TWO_ACTIVATIONS = frozenset(
    {"MatMul", "Gemm", "FusedMatMul", "TransposeMatMul", "Einsum", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat"}
)
_SOFTMAX = frozenset({"Softmax", "QLinearSoftmax", "BiasSoftmax"})
_AFTER_SOFTMAX = frozenset(
    (
        *("Cast", "Dropout", "Identity", "Where", "Mul", "QuantizeLinear", "DequantizeLinear"),
        *("Reshape", "Transpose", "Expand", "Slice", "Squeeze"),
    )
)
_HOLDS_WEIGHT = frozenset({"Attention", "QAttention", "PackedAttention", "DecoderMaskedSelfAttention", "LongformerAttention"})
"""Operators of com.microsoft whose second input is the packed weight."""
_TAKES_PROJECTED = frozenset(
    {"MultiHeadAttention", "GroupQueryAttention", "PackedMultiHeadAttention", "DecoderMaskedMultiHeadAttention", "SparseAttention"}
)
_SAME_ACTIVATION = frozenset({"Identity", "Cast", "Reshape", "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Dropout"})


def census(model: Any) -> Census:
    """Find every attention block.

    Args:
        model: path, bytes, ModelProto or onnx_ir Model.

    Returns:
        Blocks in the order of the graph.

    Raises:
        UserInputError: the model cannot be read.
    """
    return _Search(GraphView(load_graph(model))).run()


class _Search:
    """One walk over one graph."""

    def __init__(self, view: GraphView) -> None:
        self._view = view
        self._constants = Constants(view)
        self._projections: dict[ir.Node, Projection | None] = {}
        self._blocks: list[Block] = []

    def run(self) -> Census:
        for node in self._view.nodes:
            if domain(node) == "com.microsoft" and node.op_type in _HOLDS_WEIGHT:
                self._add(node, {role: () for role in ROLES}, absorbed=True)
            elif node.op_type in _TAKES_PROJECTED or (not domain(node) and node.op_type == "Attention"):
                self._add_fused(node)
            elif node.op_type in _SOFTMAX:
                self._add_decomposed(node)
        for node in self._view.subgraph_nodes():
            if node.op_type in _SOFTMAX | _TAKES_PROJECTED | _HOLDS_WEIGHT:
                self._add(node, {role: () for role in ROLES}, note="it lies inside a subgraph of If, Loop or Scan, which is not followed")
        return Census(tuple(self._blocks))

    def _add_fused(self, node: ir.Node) -> None:
        inputs = [*node.inputs, None, None][:3]
        if inputs[1] is None and inputs[2] is None:  # Q, K and V come packed in the first input
            inputs = [inputs[0]] * 3
        self._add(node, {role: self._layers(value) for role, value in zip(ROLES, inputs, strict=True)})

    def _add_decomposed(self, node: ir.Node) -> None:
        scores = self._view.walk_back(node.inputs[0], self._joins_two, barrier=self._is_projection)
        mixes = self._view.walk_forward(node.outputs[0], self._joins_two, lambda below: below.op_type in _AFTER_SOFTMAX)
        if not scores or not mixes:
            return  # the softmax of a classifier or a router
        mix, position = mixes[0]
        left, right = self._view.data_inputs(scores[0])
        others = [value for value in self._view.data_inputs(mix) if value is not mix.inputs[position]]
        roles = {"q": self._layers(left), "k": self._layers(right), "v": self._layers(others[0] if others else None)}
        several = len(scores) > 1 or len({below for below, _ in mixes}) > 1
        self._add(node, roles, note="several products of two activations meet at this softmax" if several else "")

    def _add(self, node: ir.Node, roles: Mapping[str, tuple[Projection, ...]], absorbed: bool = False, note: str = "") -> None:
        if not absorbed and not note:
            empty = [role for role in ROLES if not roles[role]]
            note = f"no linear layer leads to {', '.join(empty)}" if empty else ""
        self._blocks.append(Block(len(self._blocks), self._kind(roles), node.op_type, label(node), roles, absorbed, note))

    def _layers(self, value: ir.Value | None) -> tuple[Projection, ...]:
        nodes = self._view.walk_back(value, self._is_projection)
        return tuple(found for node in nodes if (found := self._projection(node)) is not None)

    def _kind(self, roles: Mapping[str, Sequence[Projection]]) -> str:
        if any(len(roles[role]) != 1 for role in ROLES):
            return "self"
        q, k, v = (self._source(roles[role][0].activation) for role in ROLES)
        return "cross" if k is v and q is not k else "self"

    def _source(self, value: ir.Value) -> ir.Value:
        """Go back over nodes that leave an activation what it is."""
        while (node := value.producer()) is not None and node.op_type in _SAME_ACTIVATION and node.inputs[0] is not None:
            value = node.inputs[0]
        return value

    def _joins_two(self, node: ir.Node) -> bool:
        return node.op_type in _TWO_ACTIVATIONS and len(self._view.data_inputs(node)) == 2

    def _is_projection(self, node: ir.Node) -> bool:
        return self._projection(node) is not None

    def _projection(self, node: ir.Node) -> Projection | None:
        if node not in self._projections:
            self._projections[node] = find_projection(self._constants, node)
        return self._projections[node]


def _shown(layers: Sequence[Projection]) -> str:
    return ", ".join(f"{one.op} {one.name} {one.shape[0]}x{one.shape[1]}" for one in layers) or "-"
