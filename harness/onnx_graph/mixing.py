"""Ways to mix two activations that are no matrix product: pairs, samples, spectra and lookups.

A pair is what broadcasting makes of queries against keys, whatever operator joins them: each is repeated along an axis of the other. It
counts if what comes of it is reduced or enters a layer; one that is only added to scores is a bias of positions. Samples are taken of one
activation at places that another computed, products of spectra go back through a Fourier transform, and a lookup takes the places that
were chosen among products. Places that a single layer chose, as a router or a detector does, are no lookup of this kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from harness.onnx_graph.flow import LOOKUPS, Flow, FlowMap, Shapes
from harness.onnx_graph.graph import GraphView, tensor_of

if TYPE_CHECKING:
    from harness.onnx_graph.products import Products

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
        return self._is_pair(node) or self._is_sample(node) or self._is_lookup(node) or (self._spectra and self._joins_spectra(node))

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

    def _is_lookup(self, node: ir.Node) -> bool:
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
