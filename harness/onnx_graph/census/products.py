"""Ways to mix two activations that are no matrix product: pairs, samples, spectra and lookups.

A pair is what broadcasting makes of queries against keys, whatever operator joins them: each is repeated along an axis of the other. It
counts if what comes of it is reduced or enters a layer; one that is only added to scores is a bias of positions. Samples are taken of one
activation at places that another computed, products of spectra go back through a Fourier transform, and a lookup takes the places that
were chosen among products. Places that a single layer chose, as a router or a detector does, are no lookup of this kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from harness.onnx_graph.census.experts import Experts
from harness.onnx_graph.census.flow import LOOKUPS, MAKES_SHAPES, Flow, FlowMap, Shapes, is_attention, is_opaque, operands
from harness.onnx_graph.census.weighing import Weighing
from harness.onnx_graph.graph.view import GraphView, domain, has_subgraph, label, nodes_inside, tensor_of

# Products of two activations: where one activation is summed with weights that come from another, whatever operator does it.
#
# A product is a matrix product, an Einsum or a convolution of two activations, or an elementwise one that softmax weights and a sum
# follows; without these, an elementwise product on the same axes is a gate and mixes nothing. What else mixes two activations is in mixing.

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
        self._holder = {inner: node for node in view.nodes for inner in nodes_inside(node)}
        self._experts = Experts(view, flow, shapes)
        self._set = frozenset(node for node in view.nodes if self._is_product(node))
        mixing = Mixing(view, flow, shapes, self)
        self._set |= {node for node in view.nodes if node not in self._set and mixing.is_product(node)}
        self._weighing = Weighing(view, flow, shapes, self.ends_walk)
        self._set |= self._weighing.found(self._set)
        while found := {node for node in view.nodes if node not in self._set and mixing.is_lookup(node)}:  # at places chosen among those
            self._set |= found

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
        factors = self._flow.factors(node)
        if self._weighing.weighed_by(node, bool(factors)):
            return True
        if node.op_type in _ELEMENTWISE:  # attention pooling that is spelled out
            return self._is_weighted_sum(node)
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
            for inner, _ in value.uses():
                user = self._holder.get(inner, inner)  # what a subgraph does with it is not followed: it may weigh there
                if user in seen or inner.op_type in MAKES_SHAPES:
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
        weighs = self._is_summed(node) and any(self._weights(value) for value in (one, other))
        return weighs and not self._experts.are_weighed_by(node)

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
        """Whether a factor is a softmax over what is summed. That of a router, of which few were chosen, weighs experts."""
        is_chosen = bool(self._view.walk_back(value, self._experts.are_chosen_by, self._is_end_of_factor))
        return not is_chosen and self._behind(value, _NORMALISES | {"Exp"})

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


Lengths = tuple[object, ...]
"""Of the axes of a value, the last one first; 1 where it is repeated."""

_JOINS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Pow", "Mod", "PRelu", "MulInteger"), (0, 1)),
    **dict.fromkeys(("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "And", "Or", "Xor"), (0, 1)),
    **dict.fromkeys(("QLinearAdd", "QLinearMul"), (0, 3)),
    "Where": (1, 2),
}
"""Elementwise operators to what they join; those of any number of inputs are not here."""
_JOINS_ALL = frozenset({"Sum", "Max", "Min", "Mean", "Concat"})
_REDUCES = frozenset({"ArgMax", "ArgMin", "TopK", "CumSum", "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", "AveragePool", "MaxPool"})
_SAMPLES: Mapping[str, int] = {"GridSample": 1, "RoiAlign": 1, "MaxRoiPool": 1, "CropAndResize": 1, "DeformConv": 2}
"""Operators that sample their first input, to the input that says where."""
_SPECTRUM = frozenset({"DFT", "STFT", "Rfft", "Irfft"})
_KEEPS_AXES = frozenset({"Expand", "Tile", "Cast", "Identity", "Mul", "Add", "Sub", "Div", "Neg", "Abs", "Exp", "Tanh", "Relu", "Sigmoid"})


class Mixing:
    """What is found beside matrix products."""

    def __init__(self, view: GraphView, flow: FlowMap, shapes: Shapes, products: Products) -> None:
        """Look for nothing yet.

        Args:
            view: of the graph.
            flow: of its values.
            shapes: of its values.
            products: the matrix products of the graph, at which walks end.
        """
        self._view, self._flow, self._shapes, self._products = view, flow, shapes, products
        self._spectra = any(node.op_type in _SPECTRUM for node in view.nodes)

    def is_product(self, node: ir.Node) -> bool:
        """Whether a node mixes two activations in one of these ways."""
        return self._is_pair(node) or self._is_sample(node) or (self._spectra and self._joins_spectra(node))

    def _joined(self, node: ir.Node) -> list[ir.Value]:
        places = _JOINS.get(node.op_type, range(len(node.inputs)) if node.op_type in _JOINS_ALL else ())
        given = [node.inputs[place] for place in places if place < len(node.inputs)]
        return list(dict.fromkeys(value for value in given if value is not None and self._chosen_from(value)))

    def _is_pair(self, node: ir.Node) -> bool:
        joined = self._joined(node)
        if len(joined) < 2:
            return False
        pairs = [pair for pair in itertools.combinations(joined, 2) if self._is_outer(*pair)]
        return any(self._is_computed(one) or self._is_computed(other) for one, other in pairs) and self._counts(node)

    def _is_outer(self, one: ir.Value, other: ir.Value) -> bool:
        """Whether each of two values is repeated along an axis of the other."""
        first, second = self._lengths(one), self._lengths(other)
        if first is None or second is None:  # behind an operator that nobody knows: what was inserted is seen all the same
            added = self._inserted(one), self._inserted(other)
            return bool(added[0] - added[1]) and bool(added[1] - added[0])
        pairs = list(itertools.zip_longest(first, second, fillvalue=1))
        return any(a == 1 and b != 1 for a, b in pairs) and any(a != 1 and b == 1 for a, b in pairs)

    def _lengths(self, value: ir.Value) -> Lengths | None:
        """Lengths of the axes; an exporter may write out the repetition, which makes them look alike."""
        node = value.producer()
        shape = self._shapes.of(value)
        given = [one for one in (() if node is None else self._view.data_inputs(node)) if self._flow.is_activation(one)]
        if node is None or len(given) != 1 or shape is None:
            return None if shape is None else tuple(reversed(shape.dims))
        before = self._shapes.of(given[0])
        if node.op_type in ("Expand", "Tile"):
            inner = self._lengths(given[0]) or ()
            return tuple(1 if one == 1 else length for one, length in itertools.zip_longest(inner, reversed(shape.dims), fillvalue=1))
        if before == shape and node.op_type not in ("Transpose", "Reshape") and not self._products.ends_walk(node):
            return self._lengths(given[0])
        return tuple(reversed(shape.dims))

    def _inserted(self, value: ir.Value) -> frozenset[int]:
        """The axes of length 1 that an Unsqueeze or a Reshape made, counted from the front."""
        node = value.producer()
        if node is None or self._products.ends_walk(node):
            return frozenset()
        if node.op_type in ("Unsqueeze", "Reshape"):
            written = node.attributes["axes"].as_ints() if "axes" in node.attributes else _integers(node.inputs[1])
            return frozenset(written if node.op_type == "Unsqueeze" else (axis for axis, length in enumerate(written) if length == 1))
        given = [one for one in self._view.data_inputs(node) if self._flow.is_activation(one)]
        return self._inserted(given[0]) if len(given) == 1 and node.op_type in _KEEPS_AXES else frozenset()

    def _is_computed(self, value: ir.Value) -> bool:
        """Whether a layer or a product lies behind a value; masks and positions that are given have none."""
        return bool(self._view.walk_back(value, self._products.ends_walk))

    def _counts(self, node: ir.Node) -> bool:
        """Whether what comes of a pair is reduced, enters a layer or leaves the graph, and is not only added to scores."""
        below: Sequence[ir.Node] = (node, *self._products.users(node))
        ends = (one.op_type.startswith("Reduce") or one.op_type in _REDUCES or self._products.is_layer(one) for one in below)
        return any(ends) or any(value.is_graph_output() for one in below for value in one.outputs if one not in self._products)

    def _is_sample(self, node: ir.Node) -> bool:
        place = _SAMPLES.get(node.op_type)
        if place is None or place >= len(node.inputs) or not self._flow.is_activation(node.inputs[0]):
            return False
        where = node.inputs[place]
        return where is not None and self._flow.is_activation(where) and self._is_computed(where)

    def _joins_spectra(self, node: ir.Node) -> bool:
        if "Mul" not in node.op_type or len(joined := self._joined(node)) < 2:
            return False
        back = any(one.op_type in _SPECTRUM for one in self._products.users(node))
        return back and all(self._view.walk_back(value, lambda one: one.op_type in _SPECTRUM, self._products.ends_walk) for value in joined)

    def is_lookup(self, node: ir.Node) -> bool:
        """Whether an activation is looked up at places that were chosen among products."""
        if node.op_type not in LOOKUPS or not self._flow.is_activation(node.inputs[0]):
            return False
        return any(one in self._products for value in self._chosen_from(node.inputs[1]) for one in self._first_ends(value))

    def _first_ends(self, value: ir.Value) -> list[ir.Node]:
        return self._view.walk_back(value, self._products.ends_walk)

    def _chosen_from(self, index: ir.Value | None) -> list[ir.Value]:
        """The activations that an index was computed from, by ArgMax, TopK, a comparison or whatever else; of an activation, itself."""
        found, seen, waiting = [], set[ir.Value](), [index]
        while waiting:
            value = waiting.pop()
            if value is None or value in seen or self._flow.of(value) < Flow.INDEX:
                continue
            seen.add(value)
            node = value.producer()
            if self._flow.is_activation(value):
                found.append(value)
            elif node is not None:
                waiting += node.inputs
        return found


def _integers(value: ir.Value | None) -> list[int]:
    held = None if value is None else tensor_of(value)
    return [] if held is None else [int(one) for one in held.reshape(-1)]
