"""Layers that attend with the keys and values of an earlier one (YOCO, Gemma 3n): named by the block that has them, and judged."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from harness.onnx_graph.census.census import Census, census
from harness.onnx_graph.contracts.base import Holding
from harness.onnx_graph.contracts.registry import contract_from_names

WIDTH = 32
CONTRACTS = contract_from_names("separate-qkv,same-block-count,role-weights,numeric-equal")


def _attention(number: int, x: str, q: str, k: str, v: str) -> str:
    """Text of one layer from its flat projections; in torchscript's way sizes are computed from the layer's own result."""
    text = f"size{number} = Shape({q}) rows{number} = Gather(size{number}, first) shape{number} = Concat<axis = 0>(rows{number}, rest) "
    for role, flat, perm in (("q", q, [0, 2, 1, 3]), ("k", k, [0, 2, 3, 1]), ("v", v, [0, 2, 1, 3])):
        text += f"{role}s{number} = Reshape({flat}, shape{number}) {role}h{number} = Transpose<perm = {perm}>({role}s{number}) "
    text += f"s{number} = MatMul(qh{number}, kh{number}) w{number} = Softmax(s{number}) c{number} = MatMul(w{number}, vh{number}) "
    text += f"t{number} = Transpose<perm = [0, 2, 1, 3]>(c{number}) f{number} = Reshape(t{number}, flat) "
    return text + f"o{number} = MatMul(f{number}, wo{number}) x{number + 1} = Add({x}, o{number}) "


OWN = "q0 = MatMul(x0, wq0) k0 = MatMul(x0, wk0) v0 = MatMul(x0, wv0) "
PACKED = "p0 = MatMul(x0, packed) q0, k0, v0 = Split<axis = 2, num_outputs = 3>(p0) "
FIRST = OWN + _attention(0, "x0", "q0", "k0", "v0")
LAYERS = {
    "both": (FIRST + "q1 = MatMul(x1, wq1) " + _attention(1, "x1", "q1", "k0", "v0"), "K is shared with block 0; V is shared with block 0"),
    "keys alone": (
        FIRST + "q1 = MatMul(x1, wq1) v1 = MatMul(x1, wv1) " + _attention(1, "x1", "q1", "k0", "v1"),
        "K is shared with block 0",
    ),
}


def _model(text: str, **changed: np.ndarray) -> onnx.ModelProto:
    draw = np.random.default_rng(0)
    names = [f"w{role}{number}" for number in range(2) for role in "qkvo"]
    held = {name: draw.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 6 for name in names} | changed
    held["packed"] = np.concatenate([held[f"w{role}0"] for role in "qkv"], 1)
    held |= {"first": np.array([0]), "rest": np.array([-1, 4, WIDTH // 4]), "flat": np.array([0, -1, WIDTH])}
    made = parser.parse_graph(f"g (float[2, 5, {WIDTH}] x0) => (float[] y) {{ {text} y = Identity(x2) }}")
    made.initializer.extend(numpy_helper.from_array(array, name) for name, array in held.items() if name in text)
    made.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 5, WIDTH]))
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def _statuses(found: Census) -> list[str]:
    return [block.status.value for block in found.blocks]


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_that_attends_with_the_keys_of_an_earlier_one_is_named_by_it_and_its_weights_are_held(kind: str) -> None:
    text, note = LAYERS[kind]
    right = _model(text)
    found = census(right)
    assert (_statuses(found), [block.note for block in found.blocks]) == (["SEPARATE", "SEPARATE"], ["", note])
    assert found.blocks[1].projections["k"][0].node is found.blocks[0].projections["k"][0].node
    assert CONTRACTS.check(right, right).holding is Holding.HOLDS
    draw = np.random.default_rng(1).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    for name in ("wk0", "wq1"):
        result = contract_from_names("role-weights").check(right, _model(text, **{name: draw}))
        assert result.holding is Holding.VIOLATED and "block 1" in result.message, name


def test_an_optimizer_that_packs_the_first_layer_has_packed_what_the_second_takes() -> None:
    right, packed = _model(LAYERS["both"][0]), _model(LAYERS["both"][0].replace(OWN, PACKED))
    assert _statuses(census(packed)) == ["FUSED", "PARTLY_FUSED"]
    result = CONTRACTS.check(right, packed)
    assert result.holding is Holding.VIOLATED
    assert {(one.block, one.role) for one in result.findings} == {*((0, role) for role in "qkv"), (1, "k"), (1, "v")}


def test_what_q_is_projected_from_is_no_key_of_its_own_though_another_layer_has_it() -> None:
    text = FIRST + "q1 = MatMul(k0, wq1) " + _attention(1, "x1", "q1", "k0", "v0")
    assert _statuses(census(_model(text))) == ["SEPARATE", "MISSING"]
