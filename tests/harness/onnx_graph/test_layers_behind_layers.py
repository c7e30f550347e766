"""Constants behind a projection, layers before it, scales of integer products, and ways that change: none hides what became of a weight."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser
from onnxruntime.quantization import quantize_dynamic

from compressor.errors import UserInputError
from harness.onnx_graph.census.census import census
from harness.onnx_graph.contracts.base import Holding
from harness.onnx_graph.contracts.registry import contract_from_names
from harness.onnx_graph.contracts.roles import RoleWeights, SeparateQKV
from harness.onnx_graph.roundtrip.fusing_cost import fusing_cost

LENGTH, WIDTH, HEADS, EACH = 6, 32, 4, 8
OWN = "q0 = MatMul(x, wq) k0 = MatMul(x, wk) v0 = MatMul(x, wv) "
BEHIND = {
    "Linformer": OWN + "q1 = Identity(q0) k1 = MatMul(fewer, k0) v1 = MatMul(others, v0) ",
    "one Linformer matrix": OWN + "q1 = Identity(q0) k1 = MatMul(fewer, k0) v1 = MatMul(fewer, v0) ",
    "one Hadamard matrix": OWN + "q1 = MatMul(q0, turn) k1 = MatMul(k0, turn) v1 = Identity(v0) ",
    "three rotations": OWN + "q1 = MatMul(q0, turn) k1 = MatMul(k0, turned) v1 = MatMul(v0, again) ",
    "low rank": "ql = MatMul(x, wq) kl = MatMul(x, wk) vl = MatMul(x, wv) q1 = MatMul(ql, upq) k1 = MatMul(kl, upk) v1 = MatMul(vl, upv) ",
    "absorbed": "ql = MatMul(x, wq) q1 = MatMul(ql, upq) k1 = MatMul(x, wk) v1 = MatMul(x, wv) ",
    "half turned": "q0 = MatMul(x, wq) qr = MatMul(q0, half) qs = Mul(qr, sin) qc = Mul(q0, cos) q1 = Add(qs, qc) "
    "k0 = MatMul(x, wk) kr = MatMul(k0, half) ks = Mul(kr, sin) kc = Mul(k0, cos) k1 = Add(ks, kc) v1 = MatMul(x, wv) ",
}
TURNED = {"q": [0, 2, 1, 3], "k": [0, 2, 3, 1], "v": [0, 2, 1, 3]}
CORE = "".join(f"{role}2 = Reshape({role}1, by_head) {role} = Transpose<perm = {perm}>({role}2) " for role, perm in TURNED.items())
CORE += "s = MatMul(q, k) w = Softmax(s) c = MatMul(w, v) y = Identity(c) "
PACKED = (
    "p = MatMul(x, packed) q0, k0, v0 = Split<axis = 2, num_outputs = 3>(p) "
    "q1 = MatMul(q0, turn) k1 = MatMul(k0, turned) v1 = MatMul(v0, again) "
)
ROLES = contract_from_names("separate-qkv,same-block-count,role-weights")


def _constants() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    names = ("wq", "wk", "wv", "upq", "upk", "upv")
    held = {name: draw.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 6 for name in names}
    held |= {name: draw.standard_normal((3, LENGTH)).astype(np.float32) for name in ("fewer", "others")}
    held |= {name: np.linalg.qr(draw.standard_normal((WIDTH, WIDTH)))[0].astype(np.float32) for name in ("turn", "turned", "again")}
    held |= {name: draw.uniform(0.2, 0.9, (1, LENGTH, WIDTH)).astype(np.float32) for name in ("cos", "sin")}
    held["half"] = np.roll(np.diag([-1.0, 1.0] * (WIDTH // 2)), WIDTH // 2, axis=1).astype(np.float32)
    held["packed"] = np.concatenate([held[name] for name in names[:3]], 1)
    held["wide"] = draw.standard_normal((2 * WIDTH, WIDTH)).astype(np.float32)
    held["by_head"] = np.array([0, -1, HEADS, EACH])
    return held


def _model(text: str, inputs: str = f"float[2, {LENGTH}, {WIDTH}] x", **changed: np.ndarray) -> onnx.ModelProto:
    made = parser.parse_graph(f"g ({inputs}) => (float[] y) {{ {text} }}")
    made.initializer.extend(numpy_helper.from_array(array, name) for name, array in {**_constants(), **changed}.items() if name in text)
    made.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, None))
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("form", BEHIND)
def test_what_stands_behind_a_projection_hides_no_change_of_it(form):
    held, right = _constants(), _model(BEHIND[form] + CORE)
    assert census(right).counts == {"SEPARATE": 1}
    assert ROLES.check(right, _model(BEHIND[form] + CORE)).holding is Holding.HOLDS
    weights = {name for name in held if name in BEHIND[form] and held[name].ndim == 2}
    for name in sorted(weights):
        assert RoleWeights().check(right, _model(BEHIND[form] + CORE, **{name: held[name] * 0})).holding is Holding.VIOLATED, name
    for one, other in itertools.combinations(("wq", "wk", "wv"), 2):
        wrong = _model(BEHIND[form] + CORE, **{one: held[other], other: held[one]})
        assert RoleWeights().check(right, wrong).holding is Holding.VIOLATED, (one, other)


def test_parts_of_one_layer_that_go_on_through_others_are_not_called_separate():
    found = census(_model(PACKED + CORE))
    assert found.counts == {"AMBIGUOUS": 1} and "parts of MatMul" in found.blocks[0].note
    assert SeparateQKV().check(_model(BEHIND["three rotations"] + CORE), _model(PACKED + CORE)).holding is Holding.NOT_ANALYSED


def test_one_layer_before_all_three_is_none_of_theirs():
    before = "b = MatMul(x, turn) q1 = MatMul(b, wq) k1 = MatMul(b, wk) v1 = MatMul(b, wv) "
    right, wrong = _model(before + CORE), _model(before + CORE, turn=_constants()["again"])
    assert census(right).counts == {"SEPARATE": 1}
    assert all(one.projection(role).beside == () for one in census(right).blocks for role in "qkv")
    assert ROLES.check(right, wrong).holding is Holding.HOLDS


@pytest.mark.parametrize("per_channel", [False, True])
def test_the_scale_of_an_integer_product_belongs_to_its_weight(tmp_path: Path, per_channel: bool):
    onnx.save(_model(OWN.replace("0 =", "1 =") + CORE), tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "int8.onnx", per_channel=per_channel)
    right = onnx.load(tmp_path / "int8.onnx")
    assert "MatMulInteger" in {node.op_type for node in right.graph.node}
    contract = contract_from_names("role-weights-quantized,separate-qkv")
    assert contract.check(tmp_path / "float.onnx", right).holding is Holding.HOLDS
    for factor in (3, -1, 0):
        wrong = onnx.ModelProto()
        wrong.CopyFrom(right)
        for one in wrong.graph.initializer:
            if one.name == "wk_scale":
                one.CopyFrom(numpy_helper.from_array((numpy_helper.to_array(one) * factor).astype(np.float32), one.name))
        for name in ("qdq-preserved", "role-weights", "role-weights-quantized"):
            assert contract_from_names(name).check(right, wrong).holding is Holding.VIOLATED, (factor, name)


@pytest.mark.parametrize("index", [[0, 0, 0, 0], [0, 1, 0, 1], [1, 1, 0, 0]])
def test_a_role_that_takes_other_columns_of_its_own_layer_afterwards_is_found(index):
    heads = CORE.replace("k2 = Reshape(k1, by_head)", "kn = Reshape(k1, by_narrow) k2 = Gather<axis = 2>(kn, repeat)")
    repeat = OWN.replace("0 =", "1 =") + heads
    narrow = {"wk": _constants()["wk"][:, : WIDTH // 2], "by_narrow": np.array([0, 0, HEADS // 2, EACH])}
    right, wrong = (_model(repeat, **narrow, repeat=np.array(one)) for one in ([0, 0, 1, 1], index))
    assert RoleWeights().check(right, right).holding is Holding.HOLDS
    verdict = RoleWeights().check(right, wrong)
    assert verdict.holding is Holding.VIOLATED and "columns" in verdict.findings[0].text


def test_what_takes_inputs_of_another_width_is_not_fused_with_the_rest():
    cross = "q1 = MatMul(x, wq) k1 = MatMul(z, wide) v1 = MatMul(z, wide2) " + CORE
    more = {"wide": _constants()["wide"], "wide2": _constants()["wide"] * 4}
    rows = {row.role: row for row in fusing_cost(_model(cross, f"float[2, {LENGTH}, {WIDTH}] x, float[2, 9, {2 * WIDTH}] z", **more))}
    assert rows["q"].cost_db == 0 and rows["k"].cost_db > 6 > rows["v"].cost_db
    silent = _model(OWN.replace("0 =", "1 =") + CORE, wk=np.zeros((WIDTH, WIDTH), np.float32))
    assert all(np.isfinite(row.cost_db) for row in fusing_cost(silent))
    broken = _model(OWN.replace("0 =", "1 =") + CORE, wk=np.full((WIDTH, WIDTH), np.nan, np.float32))
    with pytest.raises(UserInputError, match=r"fusing cost: block 0, k \(.*\): holds NaN or infinity"):
        fusing_cost(broken)


def test_a_lookup_that_is_written_as_a_product_is_no_layer():
    text = "q1 = MatMul(x, wq) k1 = MatMul(other, wk) v1 = MatMul(other, wv) " + CORE
    ids = f"int64[2, {LENGTH}] ids, float[2, {LENGTH}, {WIDTH}] other"
    table = np.random.default_rng(1).standard_normal((9, WIDTH)).astype(np.float32)
    values = {"table": table, "depth": np.array([9]), "off_on": np.array([0, 1], np.float32)}
    looked_up = _model(f"x = Gather(table, ids) {text}", ids, **values)
    for one_hot in ("h = OneHot<axis = -1>(ids, depth, off_on) ", "o = OneHot<axis = -1>(ids, depth, off_on) h = Identity(o) "):
        multiplied = _model(f"{one_hot} x = MatMul(h, table) {text}", ids, **values)
        for pair in ((looked_up, multiplied), (multiplied, looked_up)):
            assert contract_from_names("separate-qkv,same-block-count,role-weights,numeric-equal").check(*pair).holds
        exchanged = _model(f"{one_hot} x = MatMul(h, table) {text}", ids, **values, wq=_constants()["wk"], wk=_constants()["wq"])
        assert RoleWeights().check(looked_up, exchanged).holding is Holding.VIOLATED
