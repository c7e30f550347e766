"""A graph seen by what flows through it: which values are constant, which inputs of a node carry activations, and walks along those.

Shapes, indices, scales and zero points are values as well, and following them leads anywhere. DATA_INPUTS says which inputs of an
operator carry what it transforms; operators that are not in the table carry it in all of them. Nothing here knows attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.inliner import inline_local_functions

from compressor.errors import UserInputError

# Is a graph in order: is every value computed before it is used? Walks along a graph rely on it, and readers of graphs do not ask.


def check_order(proto: onnx.ModelProto) -> None:
    """Refuse a graph that no program can run, in the words of the graph.

    Args:
        proto: not modified.

    Raises:
        UserInputError: it names no version of its operators, or a value is used or given out before a node computes it, or by none.
    """
    if not proto.opset_import:
        raise UserInputError("graph: it does not say which version of the operators it uses (opset_import is empty); export it again")
    _check(proto.graph, frozenset())


def _check(graph: onnx.GraphProto, around: Set[str]) -> None:
    known = {*around, *(one.name for one in graph.input), *(one.name for one in graph.initializer)}
    known.update(one.values.name for one in graph.sparse_initializer)
    for node in graph.node:
        where = f"{node.op_type} {node.name or next(iter(node.output), '')}".strip()
        for name in node.input:
            if name and name not in known:
                raise UserInputError(f"graph: {where} uses {name!r}, {_why(graph, name)}")
        if not any(node.output):
            raise UserInputError(f"graph: {where} has no output; export it again")
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                _check(inner, known)
        known.update(node.output)
    for one in graph.output:
        if one.name not in known:
            raise UserInputError(f"graph: its output is {one.name!r}, {_why(graph, one.name)}")


def _why(graph: onnx.GraphProto, name: str) -> str:
    if any(name in node.output for node in graph.node):
        return "which is computed later: its nodes are out of order, or run in a circle; sort them"
    return "which nothing computes; export it again"


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


_PACKED_BITS = {
    getattr(onnx.TensorProto, name): bits
    for name, bits in {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2}.items()
    if hasattr(onnx.TensorProto, name)
}


def load_graph(source: Any) -> ir.Model:
    """Read a model and inline its local functions, so that what they hide is seen.

    Args:
        source: path, serialized bytes, ModelProto or onnx_ir Model.

    Returns:
        The model as onnx_ir; a ModelProto that was given is not modified.

    Raises:
        UserInputError: not an ONNX file, truncated, external data missing, empty, out of order, or of sizes that do not fit.
    """
    if isinstance(source, ir.Model):
        return source
    proto = source if isinstance(source, onnx.ModelProto) else read_proto(source)
    if not proto.graph.node or not proto.graph.output:
        lacks = "node" if not proto.graph.node else "output"
        raise UserInputError(f"graph: the model holds no {lacks}, so there is nothing to analyse; give an exported model")
    if proto.graph.sparse_initializer:
        proto = _dense(proto)
    if proto.functions:
        proto = inlined(proto)
    check_order(proto)
    _check_sizes(proto)
    _check_operators(proto.graph, _check_versions(proto))
    try:
        return ir.from_proto(proto)
    except ir.serde.SerdeError as error:
        raise UserInputError(f"graph: the model is not valid ({error.__cause__ or error}); check it with onnx.checker") from error


def inlined(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Write the local functions of a model out where they are called.

    Args:
        proto: not modified.

    Returns:
        A model without local functions.

    Raises:
        UserInputError: the functions are not valid.
    """
    from onnx.checker import ValidationError

    try:
        return inline_local_functions(proto)
    except (ValidationError, RuntimeError) as error:  # the inliner's own assertions
        raise UserInputError(f"graph: its local functions cannot be inlined ({error}); check it with onnx.checker") from error


def _check_sizes(proto: onnx.ModelProto) -> None:
    """Tensors have as many bytes as they say; what is read later relies on it."""
    for tensor in proto.graph.initializer:
        bits = _bits(tensor)
        wanted = -(-math.prod(tensor.dims) * bits // 8)
        if min(tensor.dims, default=0) < 0 or (tensor.HasField("raw_data") and len(tensor.raw_data) != wanted):
            held = f"{list(tensor.dims)} of {bits} bits, and {len(tensor.raw_data)} bytes"
            raise UserInputError(f"graph: initializer {tensor.name} says {held}, which do not fit; export the model again")


_UNNAMED = "com.microsoft"
"""The domain whose version onnxruntime does not ask for, and its optimizer of transformers leaves out in memory."""


def _check_operators(graph: onnx.GraphProto, versions: Mapping[str, int]) -> None:
    """Operators have the inputs and attributes that they need, of the types that they need; what is read later relies on it."""
    for node in graph.node:
        where = f"graph: {node.op_type} {node.name or next(iter(node.output), '')}".strip()
        name = "" if node.domain == "ai.onnx" else node.domain
        if name not in versions and name != _UNNAMED:
            raise UserInputError(f"{where} is of domain {name!r}, of which no version is named (opset_import); export the model again")
        if wrong := _misuse(node, name, versions.get(name, 1)):
            raise UserInputError(f"{where} {wrong}; export the model again")
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                _check_operators(inner, versions)


_READ_NUMBERS = {"MatMulNBits": {"K": range(1, 1 << 31), "N": range(1, 1 << 31), "bits": (2, 4, 8), "block_size": range(16, 1 << 31)}}
"""Attributes that are read of operators that onnx has no schema of, and the numbers that they may be (source: ContribOperators.md)."""


def _misuse(node: onnx.NodeProto, domain: str, version: int) -> str:
    """Say in words how a node breaks its operator's definition; nothing where it does not, or onnx has none."""
    given = {attribute.name: attribute for attribute in node.attribute if not attribute.ref_attr_name}
    for name, allowed in _READ_NUMBERS.get(node.op_type, {}).items():
        if name not in given and name in ("K", "N"):
            return f"lacks {name}, which it needs"
        if name in given and (given[name].type != onnx.AttributeProto.INT or given[name].i not in allowed):
            return f"has {name}={onnx.helper.get_attribute_value(given[name])!r}, which is no number that it takes"
    try:
        schema = onnx.defs.get_schema(node.op_type, version, domain)
    except onnx.defs.SchemaError:
        return ""  # an operator that onnx does not know is a block of unknown role where it mixes activations
    if not schema.min_input <= len(node.input) <= schema.max_input:
        needs = f"{schema.min_input}" if schema.min_input == schema.max_input else f"{schema.min_input} to {schema.max_input}"
        return f"has {len(node.input)} inputs and needs {needs}"
    known: Any  # the stub of onnx calls the types of attributes a plain class, and they are an enum
    for name, known in schema.attributes.items():
        if name not in given:
            if known.required and not any(attribute.name == name for attribute in node.attribute):
                return f"lacks {name}, which it needs"
        elif (kind := onnx.AttributeProto.AttributeType.Name(given[name].type)) != known.type.name:
            return f"has {name} of type {kind}, where {known.type.name} belongs"
    return _no_order(given.get("perm")) if node.op_type == "Transpose" else ""


def _no_order(perm: onnx.AttributeProto | None) -> str:
    return (
        "" if perm is None or sorted(perm.ints) == list(range(len(perm.ints))) else f"has perm={list(perm.ints)}, which is no order of axes"
    )


def _check_versions(proto: onnx.ModelProto) -> dict[str, int]:
    """Versions by domain; those of onnx's own must be ones that the installed onnx knows, for without a definition nothing is checked."""
    versions = {"" if entry.domain == "ai.onnx" else entry.domain: entry.version for entry in proto.opset_import}
    newest = onnx.defs.onnx_opset_version()
    if "" in versions and not 1 <= versions[""] <= newest:
        raise UserInputError(
            f"graph: opset {versions['']} is none that onnx {onnx.__version__} knows; export it for 1 to {newest}, or install a newer onnx"
        )
    return versions


def _bits(tensor: onnx.TensorProto) -> int:
    """Bits of an element."""
    try:
        return _PACKED_BITS.get(tensor.data_type) or 8 * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except KeyError as error:
        raise UserInputError(
            f"graph: initializer {tensor.name} has type {tensor.data_type}, which onnx {onnx.__version__} does not know; export it again"
        ) from error


def _dense(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Store sparse initializers as ordinary ones, in a copy."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for sparse in copy.graph.sparse_initializer:
        values, places = onnx.numpy_helper.to_array(sparse.values), onnx.numpy_helper.to_array(sparse.indices)
        array = np.zeros(tuple(sparse.dims), values.dtype)
        if places.ndim == 1:
            array.reshape(-1)[places] = values
        else:
            array[tuple(places.T)] = values
        copy.graph.initializer.append(onnx.numpy_helper.from_array(array, sparse.values.name))
    del copy.graph.sparse_initializer[:]
    return copy


def _overridable(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{shown}: initializers that are inputs as well, read as constants; who runs the graph may override them"


def read_proto(source: Any) -> onnx.ModelProto:
    """Read a model with its external data.

    Args:
        source: path or serialized bytes.

    Returns:
        The model.

    Raises:
        UserInputError: the file is missing, is no ONNX model, is truncated, or its external data is.
    """
    from google.protobuf.message import DecodeError
    from onnx.checker import ValidationError

    where = "graph" if isinstance(source, bytes) else str(source)
    if not isinstance(source, bytes) and not Path(source).is_file():
        raise UserInputError(f"{where}: {_what_else(Path(source))}; give an .onnx file")
    try:
        proto = onnx.load_from_string(source) if isinstance(source, bytes) else onnx.load(source)
    except DecodeError as error:
        raise UserInputError(f"{where}: this is no ONNX model, or a truncated one ({error}); export it again") from error
    except (ValidationError, OSError, ValueError) as error:
        said = str(error).rstrip(".")
        raise UserInputError(
            f"{where}: the model or its external data cannot be read: {said}; keep both in one folder, as files and not as links to them "
            "(`cp -L` follows links)"
        ) from error
    if not proto.HasField("graph"):
        raise UserInputError(f"{where}: this is no ONNX model, for it holds no graph; give the .onnx file")
    return proto


def _what_else(path: Path) -> str:
    if path.is_dir():
        return "this is a folder"
    return (
        "this is a pipe or a device, and external data are looked for beside a file" if path.exists() else "there is no such file or folder"
    )


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
