"""A graph seen by what flows through it: which values are constant, which inputs of a node carry activations, and walks along those.

Shapes, indices, scales and zero points are values as well, and following them leads anywhere. DATA_INPUTS says which inputs of an
operator carry what it transforms; operators that are not in the table carry it in all of them. Nothing here knows attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import onnx_ir as ir

DATA_INPUTS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(
        (
            *("Reshape", "Expand", "Slice", "Gather", "Unsqueeze", "Squeeze", "Pad", "Tile", "Split", "Clip", "CastLike", "Trilu", "TopK"),
            *("DequantizeLinear", "QuantizeLinear", "DynamicQuantizeLinear", "RotaryEmbedding", "LayerNormalization", "RMSNormalization"),
            *("SimplifiedLayerNormalization", "GroupNormalization", "InstanceNormalization", "BatchNormalization", "Resize"),
        ),
        (0,),
    ),
    **dict.fromkeys(("Shape", "Size", "ConstantOfShape", "Range", "EyeLike"), ()),
    **dict.fromkeys(("QLinearMatMul", "QGemm"), (0, 3)),
    **dict.fromkeys(("ScatterND", "ScatterElements", "Scatter"), (0, 2)),
    **dict.fromkeys(("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"), (0, 1)),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), (0, 1)),
    "TensorScatter": (0, 1),
    "MatMulNBits": (0,),
    "Where": (1, 2),
    "GatherElements": (0,),
    "GatherND": (0,),
}
"""Operator to the positions of the inputs that carry data."""

INITIALIZERS_ARE_INPUTS = 3
"""The last IR version that requires every initializer to be an input; in later ones such an input is a default that may be overridden."""

RANDOM = frozenset({"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"})
"""Operators that draw random numbers."""


def _overridable(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{shown}: initializers that are inputs as well, read as constants; who runs the graph may override them"


class GraphView:
    """One model, with what is constant in it worked out once.

    Attributes:
        model: as onnx_ir; not modified.
        nodes: of the main graph, in its order.
        notes: what is taken for granted: that nobody overrides a weight that is an input as well.
    """

    def __init__(self, model: ir.Model) -> None:
        """Look at a model.

        Args:
            model: without local functions.
        """
        self.model = model
        self.nodes = tuple(model.graph)
        self._constant: dict[ir.Value, bool] = {}
        self._initializers = frozenset(model.graph.initializers.values())  # IR 3 lists each of them among the inputs, too
        both = [str(value.name) for value in model.graph.inputs if value in self._initializers]
        self.notes = (_overridable(both),) if both and model.ir_version > INITIALIZERS_ARE_INPUTS else ()
        for node in self.nodes:
            self._mark(node)

    def _mark(self, node: ir.Node) -> None:
        """Decide for the outputs of one node; its inputs come earlier, for graphs are sorted."""
        constant = node.op_type not in RANDOM and not has_subgraph(node) and all(self.is_constant(value) for value in node.inputs)
        for output in node.outputs:
            self._constant[output] = constant

    def is_constant(self, value: ir.Value | None) -> bool:
        """Whether a value depends on no input of the graph.

        Args:
            value: None stands for an input that is left out.

        Returns:
            True for initializers, constants, and what is computed from these alone.
        """
        if value is None or value in self._initializers:
            return True
        if value.producer() is None:
            return value.const_value is not None
        return self._constant.get(value, False)

    def data_inputs(self, node: ir.Node) -> list[ir.Value]:
        """Inputs that carry activations: neither constants nor shapes, indices or scales.

        Args:
            node: of this graph.

        Returns:
            Values in the order of the inputs.
        """
        positions = DATA_INPUTS.get(node.op_type)
        chosen = [value for position, value in enumerate(node.inputs) if positions is None or position in positions]
        return [value for value in chosen if value is not None and not self.is_constant(value)]

    def walk_back(
        self, start: ir.Value | None, stop: Callable[[ir.Node], bool], barrier: Callable[[ir.Node], bool] = lambda node: False
    ) -> list[ir.Node]:
        """Collect the nodes at which a walk against the data flow first stops.

        Args:
            start: where the walk begins.
            stop: the nodes that are looked for; the walk does not go beyond one.
            barrier: nodes that end the walk without being collected.

        Returns:
            Each node once, nearest first.
        """
        found: list[ir.Node] = []
        seen: set[ir.Value] = set()
        waiting = [start]
        while waiting:
            value = waiting.pop(0)
            if value is None or value in seen:
                continue
            seen.add(value)
            node = value.producer()
            if node is None or _is_side_output(node, value):
                continue
            if stop(node):
                if node not in found:
                    found.append(node)
            elif not barrier(node):
                waiting += self.data_inputs(node)
        return found

    def walk_forward(
        self, start: ir.Value, stop: Callable[[ir.Node], bool], through: Callable[[ir.Node], bool]
    ) -> list[tuple[ir.Node, int]]:
        """Collect the nodes at which a walk with the data flow first stops.

        Args:
            start: where the walk begins.
            stop: the nodes that are looked for.
            through: the nodes that the walk passes.

        Returns:
            (node, position of the input by which it was reached), each once.
        """
        found: list[tuple[ir.Node, int]] = []
        seen: set[ir.Value] = set()
        waiting = [start]
        while waiting:
            value = waiting.pop(0)
            if value in seen:
                continue
            seen.add(value)
            for node, position in value.uses():
                if stop(node):
                    if (node, position) not in found:
                        found.append((node, position))
                elif through(node):
                    waiting += node.outputs
        return found

    def subgraph_nodes(self) -> Iterator[ir.Node]:
        """Nodes inside of If, Loop and Scan, which no walk enters.

        Yields:
            Each node.
        """
        main = set(self.nodes)
        for node in self.model.graph.all_nodes():
            if node not in main:
                yield node

    def is_constant_inside(self, value: ir.Value | None) -> bool:
        """Whether a value of a subgraph is computed from constants alone.

        Args:
            value: of any graph.

        Returns:
            False for what is computed from an input, or given to the subgraph.
        """
        if value is None or value.const_value is not None or self.is_constant(value):
            return True
        node = value.producer()
        return node is not None and value not in self._constant and all(map(self.is_constant_inside, node.inputs))


def label(node: ir.Node) -> str:
    """Name a node for people.

    Args:
        node: of any graph.

    Returns:
        Its name, or that of its first output where it has none.
    """
    return node.name or node.outputs[0].name or node.op_type


def domain(node: ir.Node) -> str:
    """Return the domain of a node's operator, empty for the standard one."""
    return "" if node.domain == "ai.onnx" else node.domain


def tensor_of(value: ir.Value) -> np.ndarray | None:
    """Return what an initializer or a Constant holds, None for other values."""
    if value.const_value is not None:
        return np.asarray(value.const_value.numpy())
    node = value.producer()
    if node is not None and node.op_type == "Constant" and "value" in node.attributes:
        return np.asarray(node.attributes["value"].as_tensor().numpy())
    return None


def _is_side_output(node: ir.Node, value: ir.Value) -> bool:
    """Scale and zero point that DynamicQuantizeLinear gives beside the activation."""
    return node.op_type == "DynamicQuantizeLinear" and value.index() != 0


def has_subgraph(node: ir.Node) -> bool:
    """Whether a node holds graphs of its own, as If, Loop and Scan do."""
    return any(attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attribute in node.attributes.values())


def nodes_inside(node: ir.Node) -> Iterator[ir.Node]:
    """Nodes of the graphs that a node holds, and of those inside of them.

    Args:
        node: If, Loop or Scan; others hold none.

    Yields:
        Each node.
    """
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.GRAPH:
            yield from attribute.as_graph().all_nodes()
        elif attribute.type is ir.AttributeType.GRAPHS:
            for graph in attribute.as_graphs():
                yield from graph.all_nodes()
