"""Models as they are read: whole, and in the order in which they can run, or refused under the name of their file.

Is every value computed before it is used, does every tensor have the bytes that it says, and every operator what it needs? Walks along a
graph rely on that, and onnx's own reader does not ask.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from compressor.errors import UserInputError
from harness.onnx_graph.graph.local_functions import inlined

_MOST_CHARS = 300  # of what a library says, which may quote a tensor with all its bytes


def read_proto(source: Any) -> onnx.ModelProto:
    """Read a model with its external data.

    Args:
        source: path or serialized bytes.

    Returns:
        The model.

    Raises:
        UserInputError: the file is missing, is no ONNX model, is truncated, or its external data is.
    """
    from google.protobuf import json_format, text_format
    from google.protobuf.message import DecodeError
    from onnx.checker import ValidationError

    where = _name(source)
    if not isinstance(source, bytes | str | Path):
        raise UserInputError(f"{where}: {type(source).__name__} was given where a model belongs; give a path, bytes or a ModelProto")
    if not isinstance(source, bytes) and not Path(source).is_file():
        raise UserInputError(f"{where}: {_what_else(Path(source))}; give an .onnx file")
    try:
        proto = onnx.load_from_string(source) if isinstance(source, bytes) else onnx.load(source)
    except (DecodeError, json_format.ParseError, text_format.ParseError, RecursionError) as error:  # the form goes by the file's suffix
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


def read_graph(source: Any) -> onnx.ModelProto:
    """Read a model, and refuse one that no program can run.

    Args:
        source: path or serialized bytes; or a ModelProto, which is returned as it is.

    Returns:
        The model.

    Raises:
        UserInputError: as `load_graph` does.
    """
    if isinstance(source, onnx.ModelProto):
        return source
    proto = read_proto(source)
    _loaded(proto, _name(source))
    return proto


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
    return _loaded(source if isinstance(source, onnx.ModelProto) else read_proto(source), _name(source))


def _name(source: Any) -> str:
    """What errors call a model: its file; what is in memory has no name."""
    return str(source) if isinstance(source, str | Path) else "graph"


def _loaded(proto: onnx.ModelProto, file: str) -> ir.Model:
    if not proto.graph.node or not proto.graph.output:
        lacks = "node" if not proto.graph.node else "output"
        raise UserInputError(f"{file}: the model holds no {lacks}, so there is nothing to analyse; give an exported model")
    if any(_held_sparse(proto)):
        proto = _dense(proto, file)
    if proto.functions:
        proto = inlined(proto, file)
    _check_order(proto, file)
    _check_sizes(proto.graph, file)
    _check_operators(proto.graph, _check_versions(proto, file), file)
    try:
        return ir.from_proto(proto)
    except ir.serde.SerdeError as error:
        why = textwrap.shorten(str(error.__cause__ or error), _MOST_CHARS)
        raise UserInputError(
            f"{file}: onnx_ir {ir.__version__} cannot read the model ({why}); check it with onnx.checker, and where that finds no fault "
            "install a newer onnx_ir"
        ) from error


def _check_order(proto: onnx.ModelProto, file: str) -> None:
    """Refuse a graph in which a value is used or given out before a node computes it, or by none."""
    if not proto.opset_import:
        raise UserInputError(f"{file}: it does not say which version of the operators it uses (opset_import is empty); export it again")
    _check_values(proto.graph, frozenset(), file)


def _check_values(graph: onnx.GraphProto, around: Set[str], file: str) -> None:
    known = {*around, *_names_given(graph, file)}
    for node in graph.node:
        where = f"{node.op_type} {node.name or next(iter(node.output), '')}".strip()
        for name in node.input:
            if name and name not in known:
                raise UserInputError(f"{file}: {where} uses {name!r}, {_why(graph, name)}")
        if not any(node.output):
            raise UserInputError(f"{file}: {where} has no output; export it again")
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                _check_values(inner, known, file)
        known.update(node.output)
    for one in graph.output:
        if one.name not in known:
            raise UserInputError(f"{file}: its output is {one.name!r}, {_why(graph, one.name)}")


def _names_given(graph: onnx.GraphProto, file: str) -> set[str]:
    """Names of inputs and initializers, after none was found twice: of two programs take one, and not all the same."""
    inputs, held = [one.name for one in graph.input], [one.name for one in graph.initializer]
    held += [one.values.name for one in graph.sparse_initializer]
    given = {*inputs, *held}  # an initializer may be the default of an input
    for what, names in {"input": inputs, "initializer": held, "output of a node": _computed(graph, given)}.items():
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            raise UserInputError(f"{file}: {twice!r} is the name of another value, too, and of an {what}; give each its own name")
    return given


def _computed(graph: onnx.GraphProto, given: Set[str]) -> list[str]:
    """Names that nodes give, and those of them again that stand for something else."""
    names = [name for node in graph.node for name in node.output if name]
    return [*names, *(name for name in names if name in given)]


def _why(graph: onnx.GraphProto, name: str) -> str:
    if any(name in node.output for node in graph.node):
        return "which is computed later: its nodes are out of order, or run in a circle; sort them"
    return "which nothing computes; export it again"


_FEW_BITS = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}
_PACKED_BITS = {getattr(onnx.TensorProto, name): bits for name, bits in _FEW_BITS.items() if hasattr(onnx.TensorProto, name)}
_COMPLEX = (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128)  # listed as two numbers each


def _check_sizes(graph: onnx.GraphProto, file: str) -> None:
    """Tensors, those of attributes and of branches too, have as many numbers as they say; what is read later relies on it."""
    for tensor in graph.initializer:
        _check_size(tensor, f"{file}: initializer {tensor.name}")
    for node in graph.node:
        where = f"{file}: {node.op_type} {node.name or next(iter(node.output), '')}".strip()
        for attribute in node.attribute:
            for tensor in (*((attribute.t,) if attribute.HasField("t") else ()), *attribute.tensors):
                _check_size(tensor, f"{where}: its attribute {attribute.name}")
            for inner in (attribute.g, *attribute.graphs):
                _check_sizes(inner, file)


def _check_size(tensor: onnx.TensorProto, where: str) -> None:
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return
    try:
        bits = _PACKED_BITS.get(tensor.data_type) or 8 * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        listed = getattr(tensor, onnx.helper.tensor_dtype_to_field(tensor.data_type))
    except KeyError as error:
        raise UserInputError(
            f"{where} has type {tensor.data_type}, which onnx {onnx.__version__} does not know; export it again"
        ) from error
    count, is_raw = math.prod(tensor.dims), tensor.HasField("raw_data")
    if is_raw or bits <= 4:  # codes of so few bits are listed by the byte, those of 6 bits one by one
        wanted = -(-count * bits // 8)
    else:
        wanted = count * (2 if tensor.data_type in _COMPLEX else 1)
    held = len(tensor.raw_data) if is_raw else len(listed)
    if min(tensor.dims, default=0) < 0 or held != wanted:
        says = f"{list(tensor.dims)} of {bits} bits, and {held} {'bytes' if is_raw else 'numbers'}"
        raise UserInputError(f"{where} says {says}, which do not fit; export the model again")


_UNNAMED = "com.microsoft"
"""The domain whose version onnxruntime does not ask for, and its optimizer of transformers leaves out in memory."""


def _check_operators(graph: onnx.GraphProto, versions: Mapping[str, int], file: str) -> None:
    """Operators have the inputs and attributes that they need, of the types that they need; what is read later relies on it."""
    for node in graph.node:
        where = f"{file}: {node.op_type} {node.name or next(iter(node.output), '')}".strip()
        name = "" if node.domain == "ai.onnx" else node.domain
        if name not in versions and name != _UNNAMED:
            raise UserInputError(f"{where} is of domain {name!r}, of which no version is named (opset_import); export the model again")
        if wrong := _misuse(node, name, versions.get(name, 1)):
            raise UserInputError(f"{where} {wrong}; export the model again")
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                _check_operators(inner, versions, file)


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
    return _no_order(given.get("perm")) if node.op_type == "Transpose" else _misuse_of_outputs(node, schema)


def _misuse_of_outputs(node: onnx.NodeProto, schema: onnx.defs.OpSchema) -> str:
    """Say which output has no name and needs one, or is one too many: a signal kills onnxruntime there, where it does not refuse."""
    numbers = {one.name: one.i for one in node.attribute}
    if node.op_type == "Split" and len(node.output) > numbers.get("num_outputs", len(node.output)):
        return f"has {len(node.output)} outputs and num_outputs={numbers['num_outputs']}"
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    is_training = node.op_type == "BatchNormalization" and numbers.get("training_mode")
    for place, name in enumerate(node.output):
        formal = schema.outputs[min(place, len(schema.outputs) - 1)]
        if not name and (is_training or formal.option != optional):
            return f"leaves out its output {place}, which it needs"
    return ""


def _no_order(perm: onnx.AttributeProto | None) -> str:
    return (
        "" if perm is None or sorted(perm.ints) == list(range(len(perm.ints))) else f"has perm={list(perm.ints)}, which is no order of axes"
    )


def _check_versions(proto: onnx.ModelProto, file: str) -> dict[str, int]:
    """Versions by domain; those of onnx's own must be ones that the installed onnx knows, for without a definition nothing is checked."""
    versions = {"" if entry.domain == "ai.onnx" else entry.domain: entry.version for entry in proto.opset_import}
    newest = onnx.defs.onnx_opset_version()
    if "" in versions and not 1 <= versions[""] <= newest:
        raise UserInputError(
            f"{file}: opset {versions['']} is none that onnx {onnx.__version__} knows; export it for 1 to {newest}, or install a newer onnx"
        )
    return versions


def _held_sparse(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto | onnx.NodeProto]:
    """Graphs with sparse initializers, and constants that are sparse, at any depth."""
    graphs = [proto.graph, *_inner_graphs(proto.graph.node), *(one for held in proto.functions for one in _inner_graphs(held.node))]
    yield from (graph for graph in graphs if graph.sparse_initializer)
    for node in itertools.chain(*(graph.node for graph in graphs), *(held.node for held in proto.functions)):
        if node.op_type == "Constant" and any(attribute.name == "sparse_value" for attribute in node.attribute):
            yield node


def _inner_graphs(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
            yield inner
            yield from _inner_graphs(inner.node)


def _dense(proto: onnx.ModelProto, file: str) -> onnx.ModelProto:
    """Store sparse tensors as ordinary ones, in a copy."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for holder in list(_held_sparse(copy)):
        if isinstance(holder, onnx.NodeProto):
            where = f"{file}: Constant {holder.name or next(iter(holder.output), '')}".strip()
            sparse = next(attribute.sparse_tensor for attribute in holder.attribute if attribute.name == "sparse_value")
            value = onnx.helper.make_attribute("value", _filled(sparse, where))
            del holder.attribute[:]
            holder.attribute.append(value)
        else:
            holder.initializer.extend(_filled(one, f"{file}: initializer {one.values.name}") for one in holder.sparse_initializer)
            del holder.sparse_initializer[:]
    return copy


def _filled(sparse: onnx.SparseTensorProto, where: str) -> onnx.TensorProto:
    try:
        values, places = onnx.numpy_helper.to_array(sparse.values), onnx.numpy_helper.to_array(sparse.indices)
        array = np.zeros(tuple(sparse.dims), values.dtype)
        if places.ndim == 1:
            array.reshape(-1)[places] = values
        else:
            array[tuple(places.T)] = values
    except (ValueError, IndexError) as error:
        raise UserInputError(f"{where} is sparse and not valid ({error}); export it again") from error
    return onnx.numpy_helper.from_array(array, sparse.values.name)
