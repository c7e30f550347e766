"""What is left over: products of two activations that belong to no block that is read, and operators that nobody can read.

What is not read is not absent. A product whose result is used by the model, or whose weights are normalised, may be any kind of
attention, and makes a block of unknown roles. One that only leaves the graph, like the logits of CLIP, compares and mixes nothing.

Not seen: recurrences (LSTM, GRU, RNN), a Loop, Scan or If without a matrix product, sorting, lookups of what a single layer chose (routers,
detectors), messages along edges that are given, and sampling, Fourier transforms or repetition that other operators spell out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import onnx_ir as ir

from harness.onnx_graph.census.flow import FlowMap, is_attention, is_opaque
from harness.onnx_graph.census.products import SOFTMAX, Products
from harness.onnx_graph.graph.view import GraphView, has_subgraph, nodes_inside

# Which activation a value is a form of: layers, norms and additions of constants keep it, another activation that joins makes a new one.
#
# So Q and K of self-attention are known to come from one activation however many layers, norms and position embeddings lie between.


class Streams:
    """The stream of every activation of a graph."""

    def __init__(self, view: GraphView, flow: FlowMap, products: Products) -> None:
        """Go through the graph once.

        Args:
            view: of the graph.
            flow: of its values.
            products: of the graph.
        """
        self._view, self._products = view, products
        self._rank = {node: rank for rank, node in enumerate(view.nodes)}
        self._of: dict[ir.Value, ir.Value] = {}
        self._mixing: set[ir.Node] = set()
        for node in view.nodes:
            above = {self.of(value) for value in view.data_inputs(node) if flow.is_activation(value)}
            if self._mixes(node, flow):
                self._mixing.add(node)
            joins = len(above) != 1 or node in self._mixing
            for output in node.outputs:
                self._of[output] = output if joins else next(iter(above))

    def _mixes(self, node: ir.Node, flow: FlowMap) -> bool:
        """Whether a node does, or may do, what several products do, such as an attention operator whose inputs are all of one stream."""
        is_unread = has_subgraph(node) or (is_opaque(node) and _may_mix(self._view, flow, node))
        return node in self._products or is_attention(node) or is_unread

    def of(self, value: ir.Value) -> ir.Value:
        """Return the activation that a value is a form of.

        Args:
            value: of the graph.

        Returns:
            An input of the graph, an embedding, a product, or where several activations were joined.
        """
        return self._of.get(value, value)

    def leads(self, node: ir.Node, value: ir.Value, past_products: bool = True) -> bool:
        """Whether a node lies upstream of a value.

        Args:
            node: of the graph.
            value: of the graph.
            past_products: also where products of two activations, or operators that stand for some, lie between.

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
            if above in self._mixing and not past_products:
                continue
            seen.add(above)
            waiting += self._view.data_inputs(above)
        return False


@dataclass(frozen=True)
class Unread:
    """What is left over of a graph.

    Attributes:
        blocks: nodes that mix activations, those of one block together, in the order of the graph.
        comparisons: products that only leave the graph.
    """

    blocks: list[list[ir.Node]]
    comparisons: list[ir.Node]


def find_unread(view: GraphView, flow: FlowMap, products: Products, read: Set[ir.Node]) -> Unread:
    """Look for what no block claims.

    Args:
        view: of the graph.
        flow: of its values.
        products: of the graph.
        read: products of the blocks that are read.

    Returns:
        What is left over.
    """
    used = [node for node in view.nodes if any(value.uses() or value.is_graph_output() for value in node.outputs)]
    opaque = {node for node in used if is_opaque(node) and _may_mix(view, flow, node)}
    left = [node for node in used if node in opaque or (node in products and node not in read)]
    mixing = [node for node in left if node in opaque or products.goes_on(node) or products.is_weighted(node)]
    rank = {node: number for number, node in enumerate(view.nodes)}
    groups = sorted((sorted(group, key=rank.__getitem__) for group in _groups(view, products, left)), key=lambda group: rank[group[0]])
    blocks = [group for group in groups if any(node in mixing for node in group)]
    return Unread(blocks, [node for group in groups if group not in blocks for node in group])


def _groups(view: GraphView, products: Products, left: list[ir.Node]) -> list[list[ir.Node]]:
    """Put together the products whose results meet, and those on the two sides of a softmax with layers between."""
    group_of = {node: {node} for node in left}

    def join(nodes: list[ir.Node]) -> None:
        together = set().union(*(group_of[node] for node in nodes if node in group_of))
        for node in together:
            group_of[node] = together

    met: dict[ir.Node, ir.Node] = {}
    for node in left:
        for user in products.users(node):
            if not products.is_layer(user):
                join([node, user, met.setdefault(user, node)])
    for softmax in view.nodes:
        if softmax.op_type in SOFTMAX:
            after = [node for node, _ in view.walk_forward(softmax.outputs[0], products.__contains__, lambda node: True)]
            if any(node in group_of for node in after):
                join([*view.walk_back(softmax.inputs[0], products.__contains__)[:1], *after])
    return list({id(group): list(group) for group in group_of.values()}.values())


def _may_mix(view: GraphView, flow: FlowMap, node: ir.Node) -> bool:
    """Whether an operator that nobody can read takes several activations, holds a weight, or gives something of another size."""
    given = [value for value in node.inputs if value is not None]
    activations = [value for value in given if flow.is_activation(value)]
    weights = [value for value in given if view.is_constant(value) and value.shape is not None and len(value.shape) > 1]
    if len(activations) != 1 or weights or "attention" in node.op_type.lower():
        return True
    before, after = activations[0].shape, node.outputs[0].shape
    return before is None or after is None or math.prod(map(_size, before)) != math.prod(map(_size, after))


def _size(length: object) -> int:
    return length if isinstance(length, int) else 1


# Which block feeds which, and which outputs of the graph it reaches: the place of a block in the data flow.
#
# Optimizers change the order in which nodes are listed, never this; so weights that turn up at another place have been exchanged.


@dataclass(frozen=True)
class BlockPlace:
    """Where a block lies.

    Attributes:
        above: indices of the blocks whose results flow into it.
        below: indices of the blocks that its result flows into.
        outputs: positions of the graph outputs that its result flows into.
        beside: indices of the blocks inside of the same If, Loop or Scan, among which nobody follows what flows where.
        inputs: names of the graph inputs that flow into it.
    """

    above: frozenset[int] = frozenset()
    below: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()
    beside: frozenset[int] = frozenset()
    inputs: frozenset[str] = frozenset()


def block_places(view: GraphView, anchors: Sequence[ir.Node]) -> list[BlockPlace]:
    """Follow the activations once through the graph.

    Args:
        view: of the graph.
        anchors: the node of each block; one inside of a subgraph lies where the node lies that holds it.

    Returns:
        A place per anchor.
    """
    inside = {node: list(nodes_inside(node)) for node in view.nodes if has_subgraph(node)}
    holder = {inner: node for node, inners in inside.items() for inner in inners}
    held: dict[ir.Node, list[int]] = {}
    for position, anchor in enumerate(anchors):
        held.setdefault(holder.get(anchor, anchor), []).append(position)
    # A bit per block that the value comes from, and behind them one per graph input.
    carried: dict[ir.Value, int] = {value: 1 << len(anchors) + place for place, value in enumerate(view.model.graph.inputs)}
    above = [0] * len(anchors)
    for node in view.nodes:
        mask = 0
        for value in (*view.data_inputs(node), *(value for inner in inside.get(node, ()) for value in inner.inputs)):
            mask |= carried.get(value, 0) if value is not None else 0
        for position in held.get(node, ()):
            above[position] = mask
        own = mask | sum(1 << position for position in held.get(node, ()))
        # What an attention operator gives beside its result, as the keys and values for the next token, comes past the block.
        results = node.outputs if node in inside else node.outputs[:1]
        carried |= dict.fromkeys(node.outputs, mask) | dict.fromkeys(results, own)
    ends = [carried.get(value, 0) for value in view.model.graph.outputs]
    return [
        BlockPlace(
            frozenset(other for other in range(len(anchors)) if above[one] >> other & 1),
            frozenset(other for other, mask in enumerate(above) if mask >> one & 1),
            frozenset(position for position, mask in enumerate(ends) if mask >> one & 1),
            frozenset(held[holder.get(anchor, anchor)]) - {one},
            frozenset(str(value.name) for value in view.model.graph.inputs if above[one] & carried[value]),
        )
        for one, anchor in enumerate(anchors)
    ]
