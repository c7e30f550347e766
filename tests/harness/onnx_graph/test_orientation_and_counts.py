"""Weights are read in the orientation in which they are used; blocks that vanish and limits that are missed are seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from harness.onnx_graph.census.baseline import packed_in, take_baseline
from harness.onnx_graph.census.census import census
from harness.onnx_graph.census.projections import find_projection
from harness.onnx_graph.contracts.base import Holding
from harness.onnx_graph.contracts.roles import RoleWeights, SameBlockCount, SeparateQKV
from harness.onnx_graph.graph.constants import Constants
from harness.onnx_graph.graph.reading import load_graph
from harness.onnx_graph.graph.view import GraphView
from harness.onnx_graph.roundtrip.export import EXPORTERS, export
from harness.onnx_graph.roundtrip.optimizers import optimize

WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)


def _linear(operator: str, inputs: list[str], domain: str = "", **settings: Any) -> onnx.ModelProto:
    node = helper.make_node(operator, inputs, ["y"], domain=domain, **settings)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "y")]
    graph = helper.make_graph([node], "linear", values[:1], values[1:], [numpy_helper.from_array(WEIGHT, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)])


@pytest.mark.parametrize(
    ("model", "expected_IO"),
    [
        (_linear("MatMul", ["x", "w"]), WEIGHT),
        (_linear("MatMul", ["w", "x"]), WEIGHT.T),
        (_linear("Gemm", ["x", "w"]), WEIGHT),
        (_linear("Gemm", ["x", "w"], transB=1), WEIGHT.T),
        (_linear("FusedMatMul", ["x", "w"], "com.microsoft", transB=1), WEIGHT.T),
        (_linear("Gemm", ["x", "w"], alpha=-5.0), -5 * WEIGHT),
        (_linear("Gemm", ["x", "w"], alpha=0.5, transB=1), WEIGHT.T / 2),
        (_linear("FusedMatMul", ["x", "w"], "com.microsoft", alpha=0.0), 0 * WEIGHT),
        (_linear("FusedGemm", ["x", "w"], "com.microsoft", alpha=3.0), 3 * WEIGHT),
    ],
    ids=["right", "left", "gemm", "gemm transposed", "fused transposed", "negated", "halved", "zeroed", "tripled"],
)
def test_the_matrix_is_what_the_activation_is_multiplied_with(model: onnx.ModelProto, expected_IO: np.ndarray) -> None:
    view = GraphView(load_graph(model))
    found = find_projection(Constants(view), view.nodes[0])
    assert found is not None and np.array_equal(found.matrix_IO, expected_IO)


def _without_softmax(model: onnx.ModelProto) -> onnx.ModelProto:
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    node = next(one for one in changed.graph.node if one.name == "softmax")
    node.op_type = "Relu"
    del node.attribute[:]
    return changed


def _without_mixing(model: onnx.ModelProto) -> onnx.ModelProto:
    cut = onnx.ModelProto()
    cut.CopyFrom(model)
    last = next(position for position, node in enumerate(cut.graph.node) if node.name == "softmax")
    del cut.graph.node[last + 1 :]
    cut.graph.output[0].CopyFrom(helper.make_tensor_value_info("weights", TensorProto.FLOAT, None))
    return cut


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("rest", "holding"), [(0.0, Holding.HOLDS), (1.0, Holding.VIOLATED)])
def test_a_weight_that_zeros_pad_is_still_one_of_its_own(
    attention_graph: onnx.ModelProto, axis: int, rest: float, holding: Holding
) -> None:
    padded = onnx.ModelProto.FromString(attention_graph.SerializeToString())
    tensor = next(one for one in padded.graph.initializer if one.name == "wq")
    pads = [(0, 8 * (at == axis)) for at in range(2)]
    tensor.CopyFrom(numpy_helper.from_array(np.pad(numpy_helper.to_array(tensor), pads, constant_values=rest), "padded"))
    padded.graph.node.insert(0, helper.make_node("Slice", ["padded", "start", "end", "axis"], ["wq"]))
    held = {"start": [0], "end": [32], "axis": [axis]}
    padded.graph.initializer.extend(numpy_helper.from_array(np.array(one), name) for name, one in held.items())
    assert SeparateQKV().check(attention_graph, padded).holding is holding
    assert RoleWeights().check(attention_graph, padded).holds


@pytest.mark.parametrize("contract", [SeparateQKV(), SameBlockCount()], ids=lambda contract: contract.name)
def test_a_block_that_vanished_is_a_violation(attention_graph: onnx.ModelProto, contract: Any) -> None:
    result = contract.check(attention_graph, _without_mixing(attention_graph))
    assert result.holding is Holding.VIOLATED and "1 attention blocks before, 0 after" in result.message


@pytest.mark.parametrize("contract", [SeparateQKV(), SameBlockCount()], ids=lambda contract: contract.name)
def test_a_block_that_may_be_what_cannot_be_read_any_more_is_not_known_to_be_gone(attention_graph: onnx.ModelProto, contract: Any) -> None:
    """Its softmax may be written otherwise, or be another function: of that the contract about values tells."""
    result = contract.check(attention_graph, _without_softmax(attention_graph))
    assert result.holding is Holding.NOT_ANALYSED and "1 attention blocks before, 0 after" in result.message
    assert "what is new and cannot be read (1) may be what is missing" in result.message


def test_scores_that_nothing_mixes_are_no_attention(attention_graph: onnx.ModelProto) -> None:
    assert census(_without_mixing(attention_graph)).blocks == ()


def test_a_limit_on_role_weights_is_held(attention_graph: onnx.ModelProto) -> None:
    noisy = onnx.ModelProto()
    noisy.CopyFrom(attention_graph)
    tensor = next(one for one in noisy.graph.initializer if one.name == "wk")
    weight = numpy_helper.to_array(tensor)
    noise = np.random.default_rng(1).standard_normal(weight.shape).astype(np.float32)
    tensor.CopyFrom(numpy_helper.from_array(weight + noise / 10, "wk"))  # 20 dB
    assert RoleWeights(min_sqnr_db=15).check(attention_graph, noisy).holds
    result = RoleWeights(min_sqnr_db=25).check(attention_graph, noisy)
    assert [finding.role for finding in result.findings] == ["k"] and "dB from its own" in result.message


def test_each_role_is_found_in_a_packed_weight_the_last_one_too(attention_graph: onnx.ModelProto) -> None:
    block = census(optimize(attention_graph, "onnxsim")).blocks[0]
    places = [packed_in(one.projection.matrix_IO, block).partition(" of ")[0] for one in take_baseline(attention_graph).of_block(0)]
    assert places == ["columns 0:32", "columns 32:64", "columns 64:96"]


def test_a_weight_that_is_unpacked_is_said_to_be_its_columns(attention_graph: onnx.ModelProto) -> None:
    texts = [one.text for one in RoleWeights().check(optimize(attention_graph, "onnxsim"), attention_graph).findings]
    places = [text.partition(" [32, 32] with ")[2] for text in texts]
    assert places == [f"columns {at}:{at + 32} alone of its own [32, 96]" for at in (0, 32, 64)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weight: weight[:, :16][:, ::-1], "another weight, [32, 16] in place of the [32, 32] of its own"),
        (lambda weight: weight[:, ::-1], "its own columns in another order, and what takes them back is not followed"),
        (lambda weight: np.where(weight > 0, weight, np.nan), "another weight, with NaN or infinite numbers in it or in its own"),
    ],
)
def test_weights_that_no_ratio_compares_are_told_by_what_differs(
    attention_graph: onnx.ModelProto, change: Callable[[np.ndarray], np.ndarray], said: str
) -> None:
    other = onnx.ModelProto.FromString(attention_graph.SerializeToString())
    for name in ("wq", "wk"):
        tensor = next(one for one in other.graph.initializer if one.name == name)
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(change(numpy_helper.to_array(tensor))), name))
    for role in "qk":
        shape = next(one for one in other.graph.initializer if one.name == f"split_{role}")
        shape.CopyFrom(numpy_helper.from_array(np.array([*numpy_helper.to_array(shape)[:3], -1]), f"split_{role}"))
    findings = RoleWeights().check(attention_graph, other).findings
    assert [one.role for one in findings] == ["q", "k"] and all(one.text.endswith(said) for one in findings)


def test_one_step_of_one_weight_is_not_called_the_same_weight(attention_graph: onnx.ModelProto) -> None:
    near = onnx.ModelProto()
    near.CopyFrom(attention_graph)
    tensor = next(one for one in near.graph.initializer if one.name == "wk")
    weight = numpy_helper.to_array(tensor).copy()
    weight[0, 0] = np.nextafter(weight[0, 0], np.float32(9))
    tensor.CopyFrom(numpy_helper.from_array(weight, "wk"))
    result = RoleWeights().check(attention_graph, near)
    assert result.holding is Holding.VIOLATED and "nearly the same weight" in result.message


class _Places(nn.Module):
    """Projections that are convolutions over single places."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Conv1d(16, 16, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x).transpose(1, 2) @ self.key(x)
        return self.value(x) @ scores.softmax(-1).transpose(1, 2)


class _Bare(nn.Module):
    """Projections that are parameters, as in `nn.MultiheadAttention(kdim=, vdim=)`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, kdim=12, vdim=10, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.inner(x, x[..., :12], x[..., :10], need_weights=False)[0]
        return mixed


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize(
    ("module", "names"),
    [
        (_Places(), ["query", "key", "value"]),
        (_Bare(), ["inner.q_proj_weight", "inner.k_proj_weight", "inner.v_proj_weight"]),
    ],
    ids=["convolutions", "parameters"],
)
def test_roles_have_the_names_of_the_module(module: nn.Module, names: list[str], exporter: str) -> None:
    graph = export(module, {"x": torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0))}, exporter=exporter).model
    assert [one.module for one in take_baseline(graph, module).of_block(0)] == names
