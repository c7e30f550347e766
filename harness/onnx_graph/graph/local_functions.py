"""Local functions, written out where they are called as onnxruntime runs them, or refused: onnx's own inliner leaves some as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import onnx
from onnx.inliner import inline_local_functions

from compressor.errors import UserInputError

_Functions = Mapping[tuple[str, str, str], onnx.FunctionProto]


def inlined(proto: onnx.ModelProto, file: str = "graph") -> onnx.ModelProto:
    """Write the local functions of a model out where they are called.

    Args:
        proto: not modified.
        file: where it is from, for errors.

    Returns:
        A model without local functions.

    Raises:
        UserInputError: the functions are not valid, or what of them runs is not known.
    """
    from onnx.checker import ValidationError

    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    functions = {_id(one.domain, one.name, one.overload): one for one in copy.functions}
    versions = _versions(copy)
    for graph in (copy.graph, *copy.functions):
        _prepare_calls(graph, functions, file)
    for function in copy.functions:
        _raise_versions(function, versions, functions, file)
    try:
        return inline_local_functions(copy)
    except (ValidationError, RuntimeError) as error:  # the inliner's own assertions
        raise UserInputError(f"{file}: its local functions cannot be inlined ({error}); check it with onnx.checker") from error


def calls(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Find the calls of local functions, which are no more there once they are inlined.

    Args:
        proto: not modified.

    Yields:
        Nodes of the graph, of its branches and of functions.
    """
    functions = {_id(one.domain, one.name, one.overload) for one in proto.functions}
    for holder in (proto.graph, *proto.functions):
        yield from (node for node in all_nodes(holder.node) if _id(node.domain, node.op_type, node.overload) in functions)


def _id(domain: str, name: str, overload: str) -> tuple[str, str, str]:
    return _domain(domain), name, overload


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def bodies_of(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Return the bodies of a branch or a loop.

    Args:
        node: any.

    Returns:
        The graphs that its attributes hold; mostly none.
    """
    return [body for one in node.attribute for body in ((one.g, *one.graphs) if one.HasField("g") else one.graphs)]


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Walk through nodes and those of their bodies.

    Args:
        nodes: of a graph or function.

    Yields:
        Every node, before those in it.
    """
    for node in nodes:
        yield node
        for body in bodies_of(node):
            yield from all_nodes(body.node)


def _prepare_calls(graph: onnx.GraphProto | onnx.FunctionProto, functions: _Functions, file: str) -> None:
    """Write defaults of attributes into calls, for the inliner drops them; refuse calls of what onnxruntime has a kernel for."""
    for node in all_nodes(graph.node):
        if (function := functions.get(_id(node.domain, node.op_type, node.overload))) is None:
            continue
        _check_name(function, file)
        given = {one.name: one.ref_attr_name for one in node.attribute}
        for default in function.attribute_proto:
            if default.name not in given:
                node.attribute.append(default)
            elif isinstance(graph, onnx.FunctionProto) and given[default.name] in graph.attribute:
                raise UserInputError(
                    f"{file}: the local function {graph.name} hands its attribute {given[default.name]} on to {function.name}, which has "
                    f"a default of it, and has none itself; give {graph.name} a default"
                )


def _versions(holder: onnx.ModelProto | onnx.FunctionProto) -> dict[str, int]:
    return {_domain(one.domain): one.version for one in holder.opset_import}


def _raise_versions(function: onnx.FunctionProto, of_model: Mapping[str, int], functions: _Functions, file: str) -> None:
    """Give a function the model's versions of operators, which onnxruntime runs there, too; the inliner leaves other ones alone."""
    own = _versions(function)
    others = {name: version for name, version in own.items() if version != of_model.get(name, version)}
    for node in all_nodes(function.node):
        domain = _domain(node.domain)
        if domain in others and _id(domain, node.op_type, node.overload) not in functions:
            before, after = (_definition(node.op_type, domain, version) for version in (own[domain], of_model[domain]))
            if before is None or before != after:
                raise UserInputError(
                    f"{file}: the local function {function.name} uses {node.op_type} of {domain or 'ai.onnx'} {own[domain]}, and the model "
                    f"{of_model[domain]}, which may define it otherwise; export both for one"
                )
    for entry in function.opset_import:
        entry.version = of_model.get(_domain(entry.domain), entry.version)


def _definition(name: str, domain: str, version: int) -> tuple[Any, ...] | None:
    """What an operator takes and gives, without the types, which later versions add to; None where onnx does not know it."""
    try:
        schema = onnx.defs.get_schema(name, version, domain)
    except onnx.defs.SchemaError:
        return None
    attributes = {one.name: (one.required, one.default_value.SerializeToString()) for one in schema.attributes.values()}
    return attributes, *([(one.name, one.option) for one in ways] for ways in (schema.inputs, schema.outputs))


@cache
def _operators_of_onnxruntime() -> frozenset[tuple[str, str]]:
    """Domain and name of every operator that it knows; onnx lists only its own."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    return frozenset((_domain(schema.domain), schema.name) for schema in get_all_operator_schema())


def _check_name(function: onnx.FunctionProto, file: str) -> None:
    domain, name, _ = _id(function.domain, function.name, "")
    if onnx.defs.has(name, domain) or (domain, name) in _operators_of_onnxruntime():
        raise UserInputError(
            f"{file}: the local function {domain or 'ai.onnx'}::{name} has the name of an operator, and onnxruntime runs its own kernel "
            "in its place; give it a domain of its own"
        )
