"""Local functions are read as onnxruntime runs them, or refused by their name."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import helper

from compressor.errors import UserInputError
from harness.onnx_graph.contracts.base import Holding
from harness.onnx_graph.contracts.domains import AllowedDomains
from harness.onnx_graph.contracts.numbers import NumericEqual
from harness.onnx_graph.graph.reading import load_graph
from harness.onnx_graph.graph.run_session import POLICIES, run_graph

X = np.array([[-1.0, 2.0, -3.0]], np.float32)


def _model(functions: list[onnx.FunctionProto], node: onnx.NodeProto, opset: int = 18) -> onnx.ModelProto:
    """One call of a function on X."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph([node], "g", [value("x", onnx.TensorProto.FLOAT, [1, 3])], [value("y", onnx.TensorProto.FLOAT, [1, 3])])
    imports = {one.domain: 1 for one in functions if one.domain != "ai.onnx"} | {"": opset}
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(*one) for one in imports.items()], ir_version=9, functions=functions)


def _function(domain: str, name: str, node: onnx.NodeProto, opset: int = 18, **rest: Any) -> onnx.FunctionProto:
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("local", 1)]
    return helper.make_function(domain, name, ["a"], ["b"], [node], imports, **rest)


def _refers(node: onnx.NodeProto, name: str, to: str) -> onnx.NodeProto:
    """The node, with an attribute of the function around it."""
    node.attribute.append(onnx.AttributeProto(name=name, ref_attr_name=to, type=onnx.AttributeProto.FLOAT))
    return node


def _ran(model: onnx.ModelProto) -> np.ndarray:
    return np.asarray(run_graph(model, {"x": X}, POLICIES["golden"])[0])


@pytest.mark.parametrize(("domain", "name"), [("", "Identity"), ("", "Abs"), ("ai.onnx", "HardSwish"), ("com.microsoft", "QuickGelu")])
def test_a_function_with_the_name_of_an_operator_is_refused(domain: str, name: str) -> None:
    """Onnxruntime runs its own kernel there: what the function holds says nothing."""
    negates = _function(domain, name, helper.make_node("Neg", ["a"], ["b"]))
    model = _model([negates], helper.make_node(name, ["x"], ["y"], domain=domain))
    assert not np.array_equal(_ran(model), -X)
    with pytest.raises(UserInputError, match=f"{name} has the name of an operator"):
        load_graph(model)
    load_graph(_model([negates], helper.make_node("Neg", ["x"], ["y"])))  # one that nothing calls is of no account


def test_a_function_in_a_domain_of_onnxruntime_that_has_no_such_operator_runs() -> None:
    negates = _function("com.microsoft", "OurOwn", helper.make_node("Neg", ["a"], ["b"]))
    model = _model([negates], helper.make_node("OurOwn", ["x"], ["y"], domain="com.microsoft"))
    assert np.array_equal(_ran(model), -X) and [node.op_type for node in load_graph(model).graph] == ["Neg"]


@pytest.mark.parametrize("place", ["the graph", "a branch", "a function"])
def test_the_domain_of_a_local_function_counts_wherever_it_is_called(place: str) -> None:
    """Not every runtime knows local functions, whatever they are made of."""
    functions = [_function("local", "F", helper.make_node("Neg", ["a"], ["b"]))]
    call = helper.make_node("F", ["x"], ["y"], domain="local")
    if place == "a function":
        functions.append(_function("outer", "G", helper.make_node("F", ["a"], ["b"], domain="local")))
        call = helper.make_node("G", ["x"], ["y"], domain="outer")
    elif place == "a branch":
        value = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 3])
        call = helper.make_node(
            "If", ["yes"], ["y"], **{f"{one}_branch": helper.make_graph([call], one, [], [value]) for one in ("then", "else")}
        )
    after = _model(functions, call)
    after.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "yes"))
    before = _model([], helper.make_node("Neg", ["x"], ["y"]))
    result = AllowedDomains().check(before, after)
    assert result.holding is Holding.VIOLATED and "local::F is used" in result.message
    assert NumericEqual().check(before, after).holds
    for pair, domains in (((after, after), None), ((before, after), ["local", "outer"]), ((after, before), None)):
        assert AllowedDomains(domains).check(*pair).holds


LEAKY = _function(
    "local",
    "Leaky",
    _refers(helper.make_node("LeakyRelu", ["a"], ["b"]), "alpha", "slope"),
    attribute_protos=[helper.make_attribute("slope", 0.5)],
)


def _outer(**declared: Any) -> onnx.FunctionProto:
    """A function that hands its own attribute on."""
    call = helper.make_node("Leaky", ["a"], ["b"], domain="local")
    return _function("local", "Outer", _refers(call, "slope", "outer") if declared else call, **declared)


@pytest.mark.parametrize("given", [{}, {"slope": 0.25}], ids=str)
def test_a_default_of_an_attribute_is_read_where_the_call_gives_none(given: dict[str, Any]) -> None:
    model = _model([LEAKY], helper.make_node("Leaky", ["x"], ["y"], domain="local", **given))
    _assert_read_as_run(model)


@pytest.mark.parametrize("declared", [{}, {"attribute_protos": [helper.make_attribute("outer", 0.125)]}], ids=["none", "its own"])
def test_a_default_is_read_inside_of_functions(declared: dict[str, Any]) -> None:
    _assert_read_as_run(_model([LEAKY, _outer(**declared)], helper.make_node("Outer", ["x"], ["y"], domain="local")))


def test_a_default_behind_an_attribute_that_may_be_missing_is_refused() -> None:
    model = _model([LEAKY, _outer(attributes=["outer"])], helper.make_node("Outer", ["x"], ["y"], domain="local"))
    assert _ran(model)[0, 0] == -0.5, "onnxruntime takes the inner default"
    with pytest.raises(UserInputError, match="Outer hands its attribute outer on to Leaky"):
        load_graph(model)


@pytest.mark.parametrize("opset", [13, 17, 18])
def test_a_function_of_another_opset_is_inlined_where_its_operators_are_the_same(opset: int) -> None:
    soft = _function("local", "Soft", helper.make_node("Softmax", ["a"], ["b"]), opset)
    model = _model([soft], helper.make_node("Soft", ["x"], ["y"], domain="local"))
    assert [node.op_type for node in load_graph(model).graph] == ["Softmax"], "onnx's inliner leaves another opset as it is"
    _assert_read_as_run(model)
    same = _function("local", "Same", helper.make_node("Identity", ["a"], ["b"]), opset)
    _assert_read_as_run(_model([same], helper.make_node("Same", ["x"], ["y"], domain="local"), opset=21))  # of which it takes more types


@pytest.mark.parametrize("opset", [11, 12])
def test_a_function_of_an_opset_that_means_something_else_is_refused(opset: int) -> None:
    soft = _function("local", "Soft", helper.make_node("Softmax", ["a"], ["b"]), opset)
    model = _model([soft], helper.make_node("Soft", ["x"], ["y"], domain="local"))
    with pytest.raises(UserInputError, match=rf"Soft uses Softmax of ai\.onnx {opset}, and the model 18"):
        load_graph(model)
    model.opset_import[1].version = opset
    load_graph(model)


def _assert_read_as_run(model: onnx.ModelProto) -> None:
    read = onnx_ir.to_proto(load_graph(model))
    assert not read.functions and all(node.domain == "" for node in read.graph.node)
    assert np.array_equal(_ran(read), _ran(model))
