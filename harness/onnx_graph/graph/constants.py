"""The values of constants in a graph: initializers, and whatever is computed from them alone, evaluated once."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from harness.onnx_graph.graph.view import GraphView, tensor_of


class _Part(enum.Enum):
    """What an input is of what is computed from it."""

    ANY = enum.auto()
    VALUES = enum.auto()
    PLACES = enum.auto()


_PARTS: Mapping[str, tuple[_Part, ...]] = {
    **dict.fromkeys(("Reshape", "Expand", "Slice", "Split", "Squeeze", "Unsqueeze", "Pad", "Tile"), (_Part.ANY, *[_Part.PLACES] * 4)),
    **dict.fromkeys(("Gather", "GatherElements", "GatherND"), (_Part.VALUES, _Part.PLACES)),
    **dict.fromkeys(("ScatterND", "ScatterElements", "Scatter"), (_Part.ANY, _Part.PLACES, _Part.VALUES)),
}


class Constants:
    """The values of constants, each evaluated once.

    Attributes:
        view: of the graph.
    """

    def __init__(self, view: GraphView) -> None:
        """Evaluate nothing yet.

        Args:
            view: of the graph.
        """
        self.view = view
        self._known: dict[ir.Value, np.ndarray | None] = {}

    def of(self, value: ir.Value | None) -> np.ndarray | None:
        """Evaluate.

        Args:
            value: of the graph.

        Returns:
            The array; None if the value is missing, not constant, or computed by an operator that the reference evaluator lacks.
        """
        if value is None or not self.view.is_constant(value):
            return None
        if value not in self._known:
            held = tensor_of(value)
            self._known[value] = self._evaluate(value) if held is None else held
        return self._known[value]

    def is_dequantized(self, value: ir.Value | None) -> bool:
        """Whether a constant is computed from codes, by DequantizeLinear or a cast, and nothing larger than these is held for it."""
        if value is None or not self.view.is_constant(value):
            return False
        if not any(node.op_type == "DequantizeLinear" or _casts_codes(node) for node in self._ancestors(value)):
            return False
        held, made = [one for source in self.sources(value) if (one := tensor_of(source)) is not None], self.of(value)
        if not held or made is None:
            return False
        largest = max(held, key=lambda one: (one.nbytes, one.size))
        return is_code(largest) or (largest.dtype.kind in "iu" and largest.size < made.size)  # words that hold several

    def sources(self, value: ir.Value) -> frozenset[ir.Value]:
        """Find what holds a constant: the matrices, codebooks and scattered values that it is computed from, or where there are none all.

        Places at which values are looked up or put are no weight: several may share one pattern.

        Args:
            value: a constant.

        Returns:
            Initializers and outputs of Constants; slices of one packed weight have the same.
        """
        leaves, holding = set[ir.Value](), set[ir.Value]()
        waiting, seen = [(value, _Part.ANY)], set[tuple[ir.Value, _Part]]()
        while waiting:
            one, part = asked = waiting.pop()
            if asked in seen:
                continue
            seen.add(asked)
            node = one.producer()
            if (held := tensor_of(one)) is not None:
                leaves |= set() if part is _Part.PLACES else {one}
                holding |= {one} if part is _Part.VALUES or (part is _Part.ANY and held.ndim > 1) else set()
            elif node is not None:
                parts = (*_PARTS.get(node.op_type, ()), *[_Part.ANY] * len(node.inputs))
                asks = zip(node.inputs, parts, strict=False)
                waiting += [(below, _Part.PLACES if part is _Part.PLACES else how) for below, how in asks if below is not None]
        return frozenset(holding or leaves)

    def _ancestors(self, value: ir.Value) -> list[ir.Node]:
        """Nodes that a constant is computed from, in the order of the graph."""
        found: set[ir.Node] = set()
        waiting = [value]
        while waiting:
            node = waiting.pop().producer()
            if node is not None and node not in found:
                found.add(node)
                waiting += [below for below in node.inputs if below is not None]
        return sorted(found, key=self._rank.__getitem__)

    @functools.cached_property
    def _rank(self) -> dict[ir.Node, int]:
        return {node: rank for rank, node in enumerate(self.view.nodes)}

    def _evaluate(self, value: ir.Value) -> np.ndarray | None:
        from onnx.reference import ReferenceEvaluator

        nodes = self._ancestors(value)
        protos = [_standard(ir.serde.serialize_node(node)) for node in nodes]
        leaves = {below for node in nodes for below in node.inputs if below is not None and below.producer() is None}
        tensors = [_named(below) for below in leaves if below.const_value is not None]
        output = onnx.helper.make_tensor_value_info(str(value.name), onnx.TensorProto.UNDEFINED, None)
        graph = onnx.helper.make_graph(protos, "constant", [], [output], tensors)
        opsets = _evaluated_opsets(self.view.model.opset_imports, protos)
        try:
            evaluator = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=opsets))
            outputs: Any = evaluator.run(None, {})
            return np.asarray(outputs[0])
        except (NotImplementedError, RuntimeError, TypeError, ValueError, AssertionError, LookupError, ArithmeticError):
            return None  # an operator that the reference evaluator lacks: the caller says which weight could not be read


def _casts_codes(node: ir.Node) -> bool:
    held = tensor_of(node.inputs[0]) if node.op_type == "Cast" and node.inputs[0] is not None else None
    return held is not None and held.ndim > 1 and is_code(held)


def is_code(array: np.ndarray) -> bool:
    """Say whether an array holds codes: of two bytes at most, which no float of a weight is but float8 and float4."""
    return array.dtype.itemsize <= 2 and array.dtype.name not in ("float16", "bfloat16", "bool")


def _evaluated_opsets(imports: Mapping[str, int], nodes: Sequence[onnx.NodeProto]) -> list[onnx.OperatorSetIdProto]:
    """The model's own versions, but for DequantizeLinear, which the evaluator has from 19 on, with the meaning that it had before."""
    least = 21 if any(node.op_type == "DequantizeLinear" for node in nodes) else 0
    return [onnx.helper.make_opsetid(name, version if name else max(version, least)) for name, version in imports.items()]


def _named(value: ir.Value) -> onnx.TensorProto:
    assert value.const_value is not None
    tensor = ir.serde.serialize_tensor(value.const_value)
    tensor.name = str(value.name)
    return tensor


def _standard(node: onnx.NodeProto) -> onnx.NodeProto:
    """onnxruntime has quantize and dequantize in a domain of its own, with the meaning of the standard ones."""
    if node.domain == "com.microsoft" and node.op_type in ("DequantizeLinear", "QuantizeLinear"):
        node.domain = ""
    return node
