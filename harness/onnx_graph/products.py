"""Products of two activations: where one activation is summed with weights that come from another, whatever operator does it.

A product is a matrix product, an Einsum or a convolution of two activations, or an elementwise one that softmax weights and a sum
follows; without these, an elementwise product on the same axes is a gate and mixes nothing. What else mixes two activations is in mixing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from harness.onnx_graph.flow import MAKES_SHAPES, FlowMap, Shapes, is_attention, is_opaque, operands
from harness.onnx_graph.graph import GraphView, domain, has_subgraph, label
from harness.onnx_graph.mixing import Mixing

SOFTMAX = frozenset({"Softmax", "QLinearSoftmax", "BiasSoftmax"})
_NORMALISES = SOFTMAX | {"LogSoftmax", "Hardmax"}
_ELEMENTWISE = frozenset({"Mul", "QLinearMul", "MulInteger"})
_LAYOUT = frozenset({"Reshape", "Transpose", "Cast", "Unsqueeze", "Squeeze", "Identity", "Flatten"})
_SUMS = frozenset({"ReduceSum", "ReduceMean", "CumSum", "GlobalAveragePool"})
_HOLDS_LAYERS = frozenset({"LSTM", "GRU", "RNN", "MoE", "QMoE"})


@dataclass(frozen=True)
class Equation:
    """The subscripts of an Einsum; `.` stands for an ellipsis."""

    inputs: tuple[str, ...]
    output: str

    @classmethod
    def of(cls, node: ir.Node) -> Equation:
        """Read the equation of a node.

        Args:
            node: an Einsum.

        Returns:
            The subscripts; an output that is left out is spelled out.
        """
        left, arrow, right = node.attributes["equation"].as_string().replace(" ", "").replace("...", ".").partition("->")
        if not arrow:
            letters = left.replace(",", "")
            right = "." * ("." in letters) + "".join(sorted(one for one in set(letters) - {"."} if letters.count(one) == 1))
        return cls(tuple(left.split(",")), right)

    def mixes(self, first: int, second: int) -> bool:
        """Whether two inputs are summed over an axis that both have, or make a new pair of axes."""
        one, other = set(self.inputs[first]), set(self.inputs[second])
        return bool((one & other) - set(self.output)) or (bool(one - other) and bool(other - one) and "." not in one ^ other)


class Products:
    """The products of a graph, and walks between them."""

    def __init__(self, view: GraphView, flow: FlowMap, shapes: Shapes) -> None:
        """Find them.

        Args:
            view: of the graph.
            flow: of its values.
            shapes: of its values.
        """
        self._view, self._flow = view, flow
        self._set = frozenset(node for node in view.nodes if self._is_product(node))
        mixing = Mixing(view, flow, shapes, self)
        self._set |= {node for node in view.nodes if node not in self._set and mixing.is_product(node)}

    def __contains__(self, node: object) -> bool:
        """Whether a node is a product of two activations."""
        return node in self._set

    def ends_walk(self, node: ir.Node) -> bool:
        """Whether what lies behind a node is something else than what lies before it: a layer, a product, or what cannot be followed."""
        return node in self._set or self.is_layer(node) or is_attention(node) or node.op_type in _HOLDS_LAYERS

    def is_layer(self, node: ir.Node) -> bool:
        """Whether a node multiplies one activation by something that is none, or cannot be read."""
        return self._flow.is_layer(node) or is_opaque(node) or has_subgraph(node)

    def is_weighted(self, node: ir.Node) -> bool:
        """Whether one factor of a product is normalised as by a softmax, or is itself a product of the others."""
        if node.op_type in _ELEMENTWISE:  # attention pooling that is spelled out
            return self._is_weighted_sum(node)
        factors = self._flow.factors(node)
        return len(factors) > 2 or any(self._behind(value, _NORMALISES) for value in factors)

    def goes_on(self, node: ir.Node) -> bool:
        """Whether the result of a product enters a layer or another product, and does not only leave the graph."""
        return any(self.ends_walk(user) for user in self.users(node))

    def users(self, start: ir.Node) -> Iterator[ir.Node]:
        """Nodes that the result of a product flows into, also as an index, up to and with those that end the walk."""
        seen: set[ir.Node] = set()
        waiting = list(start.outputs)
        while waiting:
            value = waiting.pop()
            for user, _ in value.uses():
                if user in seen or user.op_type in MAKES_SHAPES:
                    continue
                seen.add(user)
                yield user
                if not self.ends_walk(user):
                    waiting += user.outputs

    def _is_product(self, node: ir.Node) -> bool:
        if node.op_type in _ELEMENTWISE:
            return self._is_weighted_sum(node)
        factors = self._flow.factors(node)
        if node.op_type != "Einsum" or len(factors) != 2:
            return len(factors) > 1
        first, second = (position for position, value in enumerate(node.inputs) if self._flow.is_activation(value))
        return Equation.of(node).mixes(first, second)

    def _is_weighted_sum(self, node: ir.Node) -> bool:
        """Whether an elementwise product is one of softmax weights that a sum follows."""
        one, other = (node.inputs[position] for position in ((0, 3) if node.op_type == "QLinearMul" else (0, 1)))
        if one is None or other is None or one is other or not (self._flow.is_activation(one) and self._flow.is_activation(other)):
            return False
        return self._is_summed(node) and any(self._weights(value) for value in (one, other))

    def _is_summed(self, node: ir.Node) -> bool:
        waiting = [node]
        while waiting:
            for below in [user for output in waiting.pop().outputs for user, _ in output.uses()]:
                if below.op_type in _SUMS:
                    return True
                if below.op_type in _LAYOUT:
                    waiting.append(below)
        return False

    def _weights(self, value: ir.Value) -> bool:
        """Whether a factor is a softmax over what is summed. That of a router, which a TopK cuts, weighs experts."""
        return self._behind(value, _NORMALISES | {"Exp"}) and not self._behind(value, {"TopK"})

    def _behind(self, value: ir.Value, operators: frozenset[str] | set[str]) -> bool:
        return bool(self._view.walk_back(value, lambda node: node.op_type in operators, self._is_end_of_factor))

    def _is_end_of_factor(self, node: ir.Node) -> bool:
        return self.is_layer(node) or len(self._flow.factors(node)) > 1


def is_matrix_product(node: ir.Node) -> bool:
    """Whether a product is one of two matrices, so that its axes can be followed."""
    return "Conv" not in node.op_type and node.op_type not in _ELEMENTWISE | {"CDist"} and len(operands(node)) == 2


def shown(nodes: Sequence[ir.Node]) -> str:
    """Name nodes for people, at most three."""
    names = [f"{domain(node)}::{node.op_type} {label(node)}" if is_opaque(node) else f"{node.op_type} {label(node)}" for node in nodes[:3]]
    return ", ".join(names) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
