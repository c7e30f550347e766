"""Local functions are read as onnxruntime runs them, or refused by their name."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from compressor.errors import UserInputError
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
