"""Mixtures of experts that every token goes through: a router's softmax weighs what experts make of one token, and mixes no two tokens.

That is proven, not guessed by names or lengths: the router and all experts come from one activation by nothing but layers over its last
axis and elementwise operators, so that each place of the other axes is computed from itself alone, and what is summed is the axis along
which the experts were stacked. Whatever cuts, rolls, transposes or pools on the way ends the proof.
"""

from __future__ import annotations

from collections.abc import Set

import onnx_ir as ir

from harness.onnx_graph.census.flow import FlowMap, Shapes
from harness.onnx_graph.graph.view import GraphView, tensor_of

_ELEMENTWISE = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Sum", "Where", "Cast", "Identity", "Dropout", "Clip", "Neg", "Abs", "Sqrt"),
        *("Exp", "Log", "Erf", "Tanh", "Sigmoid", "HardSigmoid", "HardSwish", "Relu", "LeakyRelu", "Elu", "Selu", "Celu", "Gelu", "Mish"),
        *("Softplus", "Softsign", "FastGelu", "QuickGelu", "QuantizeLinear", "DequantizeLinear"),
    }
)
_ALONG_AN_AXIS = frozenset({"Softmax", "LogSoftmax", "LayerNormalization"})
_CHOOSES = frozenset({"TopK", "ArgMax"})
_SUMS = frozenset({"ReduceSum", "ReduceMean"})
_LAST_AXIS_BY_DEFAULT = 13
"""The opset from which a Softmax runs over one axis, by default the last one."""


class Experts:
    """Weighted sums over experts, not over tokens."""

    def __init__(self, view: GraphView, flow: FlowMap, shapes: Shapes) -> None:
        """Look for nothing yet.

        Args:
            view: of the graph.
            flow: of its values.
            shapes: of its values.
        """
        self._view, self._flow, self._shapes = view, flow, shapes
        self._rank = {node: rank for rank, node in enumerate(view.nodes)}

    def are_weighed_by(self, product: ir.Node) -> bool:
        """Whether an elementwise product weighs experts of one token, whose sum is all that becomes of it.

        Args:
            product: of weights of a router and what experts stacked.

        Returns:
            True only if it is proven.
        """
        factors = [value for value in product.inputs if value is not None]
        return product.op_type == "Mul" and any(self._is_mixture(product, *pair) for pair in (factors, factors[::-1]))

    def are_chosen_by(self, node: ir.Node) -> bool:
        """Whether a node takes the weights of few experts out of those of all.

        Args:
            node: on the way to a factor of a product.

        Returns:
            True for a TopK, and of a softmax for its largest part and for those at places that a TopK or ArgMax chose.
        """
        if node.op_type == "TopK" or node.op_type not in ("ReduceMax", "GatherElements"):
            return node.op_type == "TopK"
        return self._is_behind(node.inputs[0], {"Softmax"}) and (node.op_type == "ReduceMax" or self._is_behind(node.inputs[1], _CHOOSES))

    def _is_behind(self, value: ir.Value | None, operators: Set[str]) -> bool:
        return value is not None and bool(self._view.walk_back(value, lambda node: node.op_type in operators, self._flow.is_layer))

    def _is_mixture(self, product: ir.Node, weights: ir.Value, stack: ir.Value) -> bool:
        stacked = self._stacked(stack)
        if stacked is None or self._shapes.rank(weights) != self._shapes.rank(stack):
            return False
        axis, parts = stacked
        sums = [user for value in product.outputs for user, _ in value.uses()]
        if not sums or product.outputs[0].is_graph_output() or any(self._summed(user) != [axis] for user in sums):
            return False
        source, between = self._source({weights, *parts})
        num_places = 0 if source is None else (self._shapes.rank(source) or 0) - 1
        is_known = source is not None and num_places > 0 and not self._is_turned(source)
        return is_known and axis >= num_places and all(self._keeps_places(node, num_places) for node in between)

    def _stacked(self, stack: ir.Value) -> tuple[int, list[ir.Value]] | None:
        """The axis along which values were stacked, and they."""
        node = stack.producer()
        made = [] if node is None or node.op_type != "Concat" else [value.producer() for value in node.inputs if value is not None]
        if node is None or not made or any(one is None or one.op_type != "Unsqueeze" for one in made):
            return None
        axis = self._axes(node, stack)
        if axis is None or any(one is None or self._axes(one, one.outputs[0]) != axis for one in made):
            return None
        return axis[0], [value for one in made if one is not None and (value := one.inputs[0]) is not None]

    def _summed(self, node: ir.Node) -> list[int] | None:
        value = node.inputs[0]
        return self._axes(node, value) if node.op_type in _SUMS and value is not None else None

    def _source(self, values: set[ir.Value]) -> tuple[ir.Value | None, list[ir.Node]]:
        """The nearest activation that values are all computed from, and the nodes between; None where there is none."""
        between: list[ir.Node] = []
        while len(values) > 1:
            last = max(values, key=lambda value: -1 if (node := value.producer()) is None else self._rank.get(node, -1))
            node = last.producer()
            if node is None or any(not self._flow.is_activation(value) and not self._view.is_constant(value) for value in node.inputs):
                return None, between
            values = (values - {last}) | {value for value in node.inputs if value is not None and self._flow.is_activation(value)}
            between.append(node)
        return next(iter(values)), between

    def _is_turned(self, source: ir.Value) -> bool:
        """Whether something may have put tokens on the last axis since the last layer."""
        ends = self._view.walk_back(source, lambda node: node.op_type in ("Transpose", "Reshape", "Flatten"), self._flow.is_layer)
        return any(not self._keeps_last(node) for node in ends)

    def _keeps_last(self, node: ir.Node) -> bool:
        order = node.attributes["perm"].as_ints() if "perm" in node.attributes else ()
        return node.op_type == "Transpose" and bool(order) and order[-1] == len(order) - 1

    def _keeps_places(self, node: ir.Node, num_places: int) -> bool:
        """Whether each place of the first axes of what a node gives is computed from that place alone."""
        given, made = node.inputs[0], node.outputs[0]
        rank = self._shapes.rank(made)
        if given is None or rank is None or node.domain not in ("", "com.microsoft"):
            return False
        if node.op_type == "Unsqueeze":
            axes = self._axes(node, made)
            return axes is not None and min(axes) >= num_places
        if node.op_type in _ALONG_AN_AXIS:
            return self._axis(node, rank) == rank - 1
        if any(self._shapes.rank(value) != rank for value in node.inputs if value is not None and self._flow.is_activation(value)):
            return False
        return node.op_type in _ELEMENTWISE or self._is_layer(node)

    def _is_layer(self, node: ir.Node) -> bool:
        """Whether a node multiplies the last axis of an activation by a matrix that is constant."""
        if node.op_type not in ("MatMul", "Gemm") or (node.op_type == "Gemm" and "transA" in node.attributes):
            return False
        first, second = node.inputs[:2]
        return self._flow.is_activation(first) and second is not None and self._shapes.rank(second) == len(("rows", "columns"))

    def _axis(self, node: ir.Node, rank: int) -> int | None:
        is_old = node.op_type != "LayerNormalization" and self._view.model.opset_imports.get("", 1) < _LAST_AXIS_BY_DEFAULT
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else (1 if is_old else -1)
        return axis % rank

    def _axes(self, node: ir.Node, value: ir.Value) -> list[int] | None:
        """The axes that a node names, counted from the front of a value; None where they cannot be told."""
        rank = self._shapes.rank(value)
        if "axes" in node.attributes:
            named = list(node.attributes["axes"].as_ints())
        elif "axis" in node.attributes:
            named = [node.attributes["axis"].as_int()]
        else:
            held = tensor_of(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
            named = [] if held is None else [int(one) for one in held.reshape(-1)]
        return sorted(axis % rank for axis in named) if rank and named else None
