"""Which activation a value is a form of: layers, norms and additions of constants keep it, another activation that joins makes a new one.

So Q and K of self-attention are known to come from one activation however many layers, norms and position embeddings lie between.
"""

from __future__ import annotations

import onnx_ir as ir

from harness.onnx_graph.flow import FlowMap
from harness.onnx_graph.graph import GraphView
from harness.onnx_graph.products import Products


class Streams:
    """The stream of every activation of a graph."""

    def __init__(self, view: GraphView, flow: FlowMap, products: Products) -> None:
        """Go through the graph once.

        Args:
            view: of the graph.
            flow: of its values.
            products: of the graph.
        """
        self._view = view
        self._rank = {node: rank for rank, node in enumerate(view.nodes)}
        self._of: dict[ir.Value, ir.Value] = {}
        for node in view.nodes:
            above = {self.of(value) for value in view.data_inputs(node) if flow.is_activation(value)}
            joins = node in products or len(above) != 1
            for output in node.outputs:
                self._of[output] = output if joins else next(iter(above))

    def of(self, value: ir.Value) -> ir.Value:
        """Return the activation that a value is a form of.

        Args:
            value: of the graph.

        Returns:
            An input of the graph, an embedding, a product, or where several activations were joined.
        """
        return self._of.get(value, value)

    def leads(self, node: ir.Node, value: ir.Value) -> bool:
        """Whether a node lies upstream of a value.

        Args:
            node: of the graph.
            value: of the graph.

        Returns:
            True if data flow from the one to the other.
        """
        first, seen, waiting = self._rank[node], set(), [value]
        while waiting:
            above = waiting.pop().producer()
            if above is None or above in seen or self._rank.get(above, -1) < first:
                continue
            if above is node:
                return True
            seen.add(above)
            waiting += self._view.data_inputs(above)
        return False
