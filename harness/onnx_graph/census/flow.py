"""What flows through a graph: which values are activations, what is known of their shapes, and which operators can be read at all.

A value that is not constant need not be an activation: a constant that is expanded to the batch, positions, masks, and the weight of an
expert that is looked up are none, and a product with them mixes nothing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from enum import IntEnum

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from harness.onnx_graph.graph.view import DATA_INPUTS, GraphView, domain, has_subgraph, nodes_inside


class Flow(IntEnum):
    """What a value carries; of several inputs the highest counts."""

    CONSTANT = 0
    SHAPE = 1
    INDEX = 2
    ACTIVATION = 3


OPERANDS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(
        (
            *("MatMul", "Gemm", "FusedMatMul", "TransposeMatMul", "FusedGemm", "FusedMatMulActivation", "GemmFastGelu", "GemmFloat8"),
            *("MatMulInteger", "MatMulInteger16", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "SparseToDenseMatMul", "CDist"),
            *("Conv", "ConvTranspose", "ConvInteger", "FusedConv", "NhwcConv", "NhwcFusedConv", "DeformConv"),
        ),
        (0, 1),
    ),
    **dict.fromkeys(("QLinearMatMul", "QGemm", "QLinearConv"), (0, 3)),
    **dict.fromkeys(("MatMulNBits", "MatMulBnb4", "MatMulFpQ4"), (0,)),
}
"""Operators that sum products, to the positions of what they multiply; an Einsum multiplies all of its inputs."""

PROJECTED_ATTENTION = frozenset(
    {
        *("MultiHeadAttention", "GroupQueryAttention", "PackedMultiHeadAttention", "DecoderMaskedMultiHeadAttention", "SparseAttention"),
        *("PagedAttention", "SparsePagedAttention", "DynamicSparseAttention", "LinearAttention", "GatedDeltaNet"),
    }
)
"""Operators of com.microsoft whose first three inputs are Q, K and V; those left out are packed in the one before."""
PACKED_ATTENTION = frozenset(
    {
        *("Attention", "QAttention", "PackedAttention", "DecoderMaskedSelfAttention", "LongformerAttention", "DecoderAttention"),
        *("QOrderedAttention", "QOrderedLongformerAttention"),
    }
)
"""Operators of com.microsoft that hold the weights of the projections themselves."""

_READ_DOMAINS = frozenset({"", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc"})
_RUNTIME_STANDARD = frozenset(
    {
        *("SimplifiedLayerNormalization", "Affine", "Crop", "DynamicSlice", "GivenTensorFill", "ImageScaler", "ParametricSoftplus"),
        *("Scale", "ScaledTanh"),
    }
)
"""Operators that onnxruntime adds to the standard domain."""
_UNREAD_MICROSOFT = frozenset(
    {
        *("AttnLSTM", "BeamSearch", "WhisperBeamSearch", "GreedySearch", "Sampling", "MatMulNBitsQkv", "EngramGate", "EPContext", "Snpe"),
        *("SparseAttentionIndexer", "PackedSparseAttentionIndexer"),
    }
)
LOOKUPS = frozenset({"Gather", "GatherElements", "GatherND", "GatherBlockQuantized", "TorchEmbedding"})
_MAKES_FEATURES = frozenset({"EmbedLayerNormalization", "QEmbedLayerNormalization", "WordConvEmbedding"})
MAKES_SHAPES = frozenset({"Shape", "Size", "ConstantOfShape", "EyeLike"})
_MAKES_INDICES = frozenset(
    {
        *("ArgMax", "ArgMin", "NonZero", "OneHot", "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "And", "Or", "Not", "Xor"),
        *("IsInf", "IsNaN", "Unique"),
    }
)
_EMBEDDING_RANK = 2
_MATRIX_PRODUCTS = frozenset({"FusedMatMul", "TransposeMatMul"})
_KEEPS_SHAPE = frozenset(
    {
        *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "SimplifiedLayerNormalization", "SkipGroupNorm", "GroupNorm"),
        *("Gelu", "FastGelu", "BiasGelu", "QuickGelu", "BiasSoftmax", "BiasDropout", "BiasAdd", "RotaryEmbedding"),
    }
)
"""Operators of com.microsoft whose first output has the shape of their first input; onnx knows nothing of them."""


class FlowMap:
    """What every value of a graph carries."""

    def __init__(self, view: GraphView) -> None:
        """Go through the graph once.

        Args:
            view: of the graph.
        """
        self._view = view
        self._of: dict[ir.Value, Flow] = {}
        for value in view.model.graph.inputs:
            self._of[value] = Flow.ACTIVATION if value.dtype is None or value.dtype.is_floating_point() else Flow.INDEX
        for node in view.nodes:
            flow = self._made_by(node)
            for output in node.outputs:
                self._of[output] = Flow.INDEX if _is_side_output(node, output) else flow

    def of(self, value: ir.Value | None) -> Flow:
        """Return what a value carries."""
        return Flow.CONSTANT if value is None or self._view.is_constant(value) else self._of.get(value, Flow.ACTIVATION)

    def is_activation(self, value: ir.Value | None) -> bool:
        """Whether a value carries what the model computes from its inputs."""
        return self.of(value) is Flow.ACTIVATION

    def factors(self, node: ir.Node) -> list[ir.Value]:
        """The activations that a node multiplies with each other or with constants, in the order of its inputs."""
        return [value for value in operands(node) if value is not None and self.is_activation(value)]

    def is_layer(self, node: ir.Node) -> bool:
        """Whether a node multiplies one activation by something that is none: a linear layer, whether or not its weight can be read."""
        given = operands(node)
        if (node.op_type == "Einsum" and len(given) < 2) or _is_depthwise(node):
            return False
        return any(not self._view.is_constant(value) for value in given) and len(self.factors(node)) < 2

    def _made_by(self, node: ir.Node) -> Flow:
        if node.op_type in MAKES_SHAPES:
            return Flow.SHAPE
        if is_opaque(node) or node.op_type in _MAKES_FEATURES:
            return Flow.ACTIVATION
        if has_subgraph(node):
            return self._made_inside(node)
        if node.op_type in LOOKUPS and self.of(node.inputs[0]) <= Flow.SHAPE:
            return self._looked_up(node)
        positions = DATA_INPUTS.get(node.op_type)
        read = [value for position, value in enumerate(node.inputs) if positions is None or position in positions]
        flow = max((self.of(value) for value in read), default=Flow.CONSTANT)
        if node.op_type == "Where":
            flow = max(flow, min(self.of(node.inputs[0]), Flow.INDEX))
        if node.op_type in _MAKES_INDICES:
            return min(flow, Flow.INDEX)
        return Flow.ACTIVATION if flow is Flow.INDEX and operands(node) else flow  # a layer makes features of indices

    def _made_inside(self, node: ir.Node) -> Flow:
        """A loop over positions, as exporters write repetition, gives positions; one that holds a layer or a table gives features."""
        inside = list(nodes_inside(node))
        if any(operands(one) or is_opaque(one) or one.op_type in _MAKES_FEATURES | LOOKUPS for one in inside):
            return Flow.ACTIVATION
        given = [value for one in (node, *inside) for value in one.inputs if value in self._of]
        return max((self.of(value) for value in given), default=Flow.CONSTANT)

    def _looked_up(self, node: ir.Node) -> Flow:
        """An embedding is a lookup of rows; a lookup of matrices chooses a weight."""
        index = max((self.of(value) for value in node.inputs[1:]), default=Flow.CONSTANT)
        shape = node.inputs[0].shape if node.inputs[0] is not None else None
        rows = shape is None or shape.rank() <= _EMBEDDING_RANK
        return (Flow.ACTIVATION if rows else Flow.SHAPE) if index >= Flow.INDEX else max(index, self.of(node.inputs[0]))


class Shapes:
    """Shapes of values: as the graph states them, else inferred, once and only when one is missing."""

    def __init__(self, view: GraphView) -> None:
        """Infer nothing yet.

        Args:
            view: of the graph.
        """
        self._view = view

    def of(self, value: ir.Value) -> ir.Shape | None:
        """Return a shape, None where nothing says it."""
        return value.shape if value.shape is not None else self._inferred.get(value.name)

    def rank(self, value: ir.Value) -> int | None:
        """Return the number of axes, None where nothing says it."""
        shape = self.of(value)
        return None if shape is None else shape.rank()

    @functools.cached_property
    def _inferred(self) -> dict[str | None, ir.Shape]:
        model = self._view.model.clone()
        for node in model.graph:
            if node.op_type in _MATRIX_PRODUCTS and domain(node) == "com.microsoft":
                _write_as_einsum(node)
            elif node.op_type in _KEEPS_SHAPE and domain(node) == "com.microsoft" and node.inputs[0] is not None:
                ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0], replace_graph_outputs=True)
        log = logging.getLogger("onnx_ir.passes.common.shape_inference")  # a traceback of shapes left unknown
        was, log.disabled = log.disabled, True
        try:
            ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
        finally:
            log.disabled = was
        return {value.name: value.shape for node in model.graph for value in node.outputs if value.shape is not None}


def _write_as_einsum(node: ir.Node) -> None:
    """Write a matrix product of com.microsoft as what onnx can infer shapes of. Changes the node."""
    flags = [name in node.attributes and node.attributes[name].as_int() for name in ("transA", "transB")]
    equation = f"...{'ji' if flags[0] else 'ij'},...{'kj' if flags[1] else 'jk'}->...ik"
    node.op_type, node.domain = "Einsum", ""
    node.attributes.clear()
    node.attributes["equation"] = ir.AttrString("equation", equation)


def operands(node: ir.Node) -> Sequence[ir.Value | None]:
    """What a node multiplies and sums; empty for operators that do not."""
    if node.op_type == "Einsum":
        return node.inputs
    return [node.inputs[position] for position in OPERANDS.get(node.op_type, ()) if position < len(node.inputs)]


def is_opaque(node: ir.Node) -> bool:
    """Whether nobody says what an operator computes: it is of a foreign domain, or of a known one and not known there."""
    name = domain(node)
    if name == "com.microsoft":
        handled = node.op_type in PROJECTED_ATTENTION | PACKED_ATTENTION
        return node.op_type in _UNREAD_MICROSOFT or ("Attention" in node.op_type and not handled)
    return name not in _READ_DOMAINS or (not name and node.op_type not in _RUNTIME_STANDARD and not onnx.defs.has(node.op_type))


def is_attention(node: ir.Node) -> bool:
    """Whether an operator computes attention by its definition."""
    name = domain(node)
    known = PROJECTED_ATTENTION | PACKED_ATTENTION if name == "com.microsoft" else {"Attention"}
    return name in ("", "com.microsoft") and node.op_type in known


def _is_depthwise(node: ir.Node) -> bool:
    """A convolution of each channel by itself leaves channels what they are."""
    if "Conv" not in node.op_type or len(node.inputs) < 2 or (weight := node.inputs[1]) is None:
        return False
    group = node.attributes.get("group")
    return group is not None and group.as_int() > 1 and weight.shape is not None and weight.shape[1] == 1


def _is_side_output(node: ir.Node, value: ir.Value) -> bool:
    """Scales beside a quantized activation, and the places beside the largest values."""
    return node.op_type in ("DynamicQuantizeLinear", "TopK") and value.index() != 0
