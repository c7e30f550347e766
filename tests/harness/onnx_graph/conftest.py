"""Graphs small enough to be optimized hundreds of times, and the third party's code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper


def prenorm_attention(width: int = 32, heads: int = 2, length: int = 5, seed: int = 0) -> onnx.ModelProto:
    """Multi-head attention behind a LayerNormalization, with three projections of [width, width]: what `fuse_qkv` fuses."""
    draw = np.random.default_rng(seed)
    weights = {name: draw.standard_normal((width, width)).astype(np.float32) for name in ("wq", "wk", "wv", "wo")}
    initializers = [numpy_helper.from_array(weight, name) for name, weight in weights.items()]
    initializers += [
        numpy_helper.from_array(np.ones(width, np.float32), "gamma"),
        numpy_helper.from_array(np.array([1, length, heads, width // heads]), "split_heads"),
        numpy_helper.from_array(np.array([1, length, width]), "join_heads"),
        numpy_helper.from_array(np.array((width // heads) ** -0.5, np.float32), "root"),
    ]
    nodes = [helper.make_node("LayerNormalization", ["x", "gamma"], ["h"], name="norm")]
    for role, axes in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        nodes += [
            helper.make_node("MatMul", ["h", f"w{role}"], [f"{role}_flat"], name=f"project_{role}"),
            helper.make_node("Reshape", [f"{role}_flat", "split_heads"], [f"{role}_heads"], name=f"reshape_{role}"),
            helper.make_node("Transpose", [f"{role}_heads"], [role], perm=axes, name=f"transpose_{role}"),
        ]
    nodes += [
        helper.make_node("MatMul", ["q", "k"], ["scores"], name="scores"),
        helper.make_node("Mul", ["scores", "root"], ["scaled"], name="scale"),
        helper.make_node("Softmax", ["scaled"], ["weights"], axis=-1, name="softmax"),
        helper.make_node("MatMul", ["weights", "v"], ["mixed"], name="mix"),
        helper.make_node("Transpose", ["mixed"], ["joined"], perm=[0, 2, 1, 3], name="join"),
        helper.make_node("Reshape", ["joined", "join_heads"], ["flat"], name="flatten"),
        helper.make_node("MatMul", ["flat", "wo"], ["y"], name="project_out"),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, length, width]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "prenorm_attention", values[:1], values[1:], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.fixture
def attention_graph() -> onnx.ModelProto:
    """Four [32, 32] projections, three of which fuse."""
    return prenorm_attention()


@pytest.fixture(scope="session")
def third_party() -> Iterator[ModuleType]:
    """Code that is not ours and that took hold of the native functions long before."""
    place = str(Path(__file__).parent)
    sys.path.insert(0, place)
    yield importlib.import_module("third_party.deploy")
    sys.path.remove(place)
