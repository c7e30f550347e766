"""Attention without a matrix product: two activations are multiplied elementwise and summed, and what comes of it weighs a third one.

So is local attention written: each token against shifted ones, whatever shifts them, stacks the scores or normalises them. What is summed
or normalised by a softmax is a weight; where it meets what does not come out of the same product, it weighs. Norms and gates meet only what
they were computed from, or enter a layer before. Scores of another make, such as the sum of two tokens, are not looked for:
residuals and their gates are written so.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from harness.onnx_graph.census.experts import Experts
from harness.onnx_graph.census.flow import LOOKUPS, MAKES_SHAPES, FlowMap, Shapes, operands
from harness.onnx_graph.graph.constants import Constants
from harness.onnx_graph.graph.view import GraphView, has_subgraph, nodes_inside

_TIMES = frozenset({"Mul", "QLinearMul", "MulInteger", "Div"})
_STARTS = _TIMES | {"Sub"}
_ADDS = frozenset({"Add", "Sum", "Sub", "QLinearAdd"})
_SUMS = frozenset({"CumSum", "GlobalAveragePool", "AveragePool", "GlobalLpPool", "LpPool", "Softmax", "LogSoftmax", "Hardmax"})
_MOVES = frozenset({"Slice", "Gather", "GatherElements", "GatherND", "Pad", "Concat", "Split", "Conv", "Compress", "ScatterElements"})
_SCATTERS = frozenset({"ScatterElements", "ScatterND"})
_CUTS = frozenset({"Slice", "Split", "Gather", "GatherElements"})
_LAYOUT = frozenset({"Reshape", "Transpose", "Cast", "Unsqueeze", "Squeeze", "Identity", "Flatten", "Expand"})


@dataclass
class _Reach:
    """What comes of one product.

    Attributes:
        summed: value to whether it is a weight: summed, or normalised by a softmax.
        weighed: nodes where it meets another activation.
    """

    summed: dict[ir.Value, bool]
    weighed: list[ir.Node] = field(default_factory=list)


class Weighing:
    """Elementwise products that weigh."""

    def __init__(self, view: GraphView, flow: FlowMap, shapes: Shapes, ends_walk: Callable[[ir.Node], bool]) -> None:
        """Look for nothing yet.

        Args:
            view: of the graph.
            flow: of its values.
            shapes: of its values.
            ends_walk: whether a node is a layer, a matrix product, or cannot be followed.
        """
        self._view, self._flow, self._shapes, self._ends_walk = view, flow, shapes, ends_walk
        self._constants, self._experts = Constants(view), Experts(view, flow, shapes)
        self._rank = {node: rank for rank, node in enumerate(view.nodes)}
        self._holder = {inner: node for node in view.nodes for inner in nodes_inside(node)}

    def found(self, known: Iterable[ir.Node]) -> set[ir.Node]:
        """Find the products and where they weigh.

        Args:
            known: nodes that are products for another reason.

        Returns:
            Nodes of the graph.
        """
        given, found = set(known), set[ir.Node]()
        for node in self._view.nodes:
            if node.op_type in _STARTS and node not in given and self._is_start(node) and (weighed := self.weighed_by(node, False)):
                found |= {node, *(one for one in weighed if not has_subgraph(one))}
        return found

    def weighed_by(self, start: ir.Node, is_summed: bool) -> list[ir.Node]:
        """Follow what comes of a product up to layers and other products.

        Args:
            start: the product.
            is_summed: whether it sums already, as a matrix product does.

        Returns:
            Nodes where it weighs another activation, or that hold a subgraph which it enters as a weight.
        """
        reach = _Reach(dict.fromkeys(start.outputs, is_summed))
        waiting = self._users(start)
        heapq.heapify(waiting)
        seen = set(waiting)
        while waiting:
            node = self._view.nodes[heapq.heappop(waiting)]
            state = self._state(node, reach)
            if state is None:
                continue
            reach.summed.update(dict.fromkeys(node.outputs, state))
            for rank in self._users(node):
                if rank not in seen:
                    seen.add(rank)
                    heapq.heappush(waiting, rank)
        return reach.weighed

    def _users(self, node: ir.Node) -> list[int]:
        users = (self._holder.get(user, user) for value in node.outputs for user, _ in value.uses() if user.op_type not in MAKES_SHAPES)
        return list({self._rank[user] for user in users})

    def _is_start(self, node: ir.Node) -> bool:
        places = (0, 3) if node.op_type == "QLinearMul" else (0, 1)
        one, other = (node.inputs[place] for place in places)
        if one is None or other is None or one is other or not (self._flow.is_activation(one) and self._flow.is_activation(other)):
            return False
        computed = [self._is_computed(value) for value in (one, other)]
        alike = self._shapes.of(one) is not None and self._shapes.of(one) == self._shapes.of(other)
        if (not all(computed) and not (any(computed) and alike)) or self._experts.are_weighed_by(node):
            return False
        return not any(self._is_chosen(value) for value in (one, other)) and not self._derived(one, other) and not self._derived(other, one)

    def _is_computed(self, value: ir.Value) -> bool:
        return bool(self._view.walk_back(value, self._ends_walk))

    def _is_chosen(self, value: ir.Value) -> bool:
        """Whether it is the weight of an expert, one of few that were chosen."""
        return bool(self._view.walk_back(value, self._experts.are_chosen_by, self._ends_walk))

    def _derived(self, value: ir.Value, source: ir.Value) -> bool:
        """Whether a value is computed from another one at the same places, as a norm or a gate of itself is."""
        seen, waiting = set[ir.Value](), [value]
        while waiting:
            one = waiting.pop()
            if one is source:
                return True
            node = one.producer()
            if one in seen or node is None or node.op_type in _MOVES or self._ends_walk(node):
                continue
            seen.add(one)
            waiting += self._view.data_inputs(node)
        return False

    def _state(self, node: ir.Node, reach: _Reach) -> bool | None:
        """Whether what a node gives is a weight; None where nothing more comes of it. Says where it weighs."""
        states = [reach.summed[value] for value in node.inputs if value is not None and value in reach.summed]
        if has_subgraph(node):
            self._enter(node, states, reach)
            return None
        if self._ends_walk(node):
            return True if self._is_sum(node) else None
        if node.op_type.startswith("Reduce") or node.op_type in _SUMS or (node.op_type == "Einsum" and len(node.inputs) == 1):
            return True
        if node.op_type in _SCATTERS and node.inputs[2] in reach.summed and "reduction" in node.attributes:
            return True
        others = [value for value in node.inputs if value is not None and value not in reach.summed and self._flow.is_activation(value)]
        if self._weighs(node, all(states), others, reach):
            reach.weighed.append(node)
            return None
        if not all(states) and node.op_type in _ADDS:
            return self._added(node, others, reach)
        return all(states)

    def _is_sum(self, node: ir.Node) -> bool:
        """Whether a layer only adds up: all that its weight holds beside zeros is one number."""
        weights = [value for value in operands(node) if value is not None and self._view.is_constant(value)]
        if len(weights) != 1 or len(operands(node)) != 2 or self._constants.is_dequantized(weights[0]):
            return False
        held = self._constants.of(weights[0])
        kept = np.zeros(0) if held is None or held.dtype.kind not in "fiu" else held[held != 0]
        return bool(kept.size) and bool((kept == kept.flat[0]).all())

    def _enter(self, node: ir.Node, states: list[bool], reach: _Reach) -> None:
        inside = [reach.summed[value] for one in nodes_inside(node) for value in one.inputs if value is not None and value in reach.summed]
        if any((*states, *inside)):
            reach.weighed.append(node)

    def _weighs(self, node: ir.Node, is_weight: bool, others: list[ir.Value], reach: _Reach) -> bool:
        met = [value for value in others if self._is_computed(value) and not self._is_chosen(value)]
        if not is_weight or not met:
            return False
        if node.op_type in LOOKUPS | _SCATTERS:
            return node.inputs[1] in reach.summed
        return node.op_type in _TIMES or (node.op_type == "Where" and node.inputs[0] in reach.summed)

    def _added(self, node: ir.Node, others: list[ir.Value], reach: _Reach) -> bool | None:
        """Parts of one product that are added make a sum of it; a residual that is added makes it an activation like any other."""
        parts = [value for value in node.inputs if value is not None and value in reach.summed]
        if len(parts) > 1:
            return all(self._comes_from(value, _CUTS) for value in parts)
        return False if all(self._comes_from(value, _TIMES) for value in others) else None

    def _comes_from(self, value: ir.Value, operators: frozenset[str]) -> bool:
        node = value.producer()
        while node is not None and node.op_type in _LAYOUT and node.inputs[0] is not None:
            node = node.inputs[0].producer()
        return node is not None and node.op_type in operators
