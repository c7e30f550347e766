"""Attention written out and as one operator is the same, with grouped queries and a cache too; scattered weights are each's own."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from harness.onnx_graph.census.census import census
from harness.onnx_graph.contracts.base import Holding
from harness.onnx_graph.contracts.numbers import NumericEqual
from harness.onnx_graph.contracts.roles import RoleWeights, SeparateQKV

HEADS, GROUPS, EACH, PAST, WIDTH = 4, 2, 8, 3, 32
KINDS = {"own": (HEADS, False), "grouped": (GROUPS, False), "cached": (HEADS, True), "grouped and cached": (GROUPS, True)}
LAYERS = "q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv) "
HEADED = "{0}4 = Reshape({0}, {0}shape) {0}h = Transpose<perm = [0, 2, 1, 3]>({0}4) "
REPEATED = "{0}u = Unsqueeze({1}, two) {0}uu = Concat<axis = {2}>({0}u, {0}u) {0}f = Reshape({0}uu, whole) "
CORE = (
    "kt = Transpose<perm = [0, 1, 3, 2]>(kf) s = MatMul(qh, kt) ss = Mul(s, scale) w = Softmax(ss) c = MatMul(w, vf) "
    "ct = Transpose<perm = [0, 2, 1, 3]>(c) y = Reshape(ct, out) "
)


def _model(text: str, key_heads: int, cached: bool, opset: int = 23) -> onnx.ModelProto:
    draw = np.random.default_rng(0)
    past = f", float[1, {key_heads}, {PAST}, {EACH}] pastk, float[1, {key_heads}, {PAST}, {EACH}] pastv"
    graph = parser.parse_graph(f"g (float[1, 5, {WIDTH}] x{past if cached else ''}) => (float[] y) {{ {text} }}")
    held = {f"w{role}": draw.standard_normal((WIDTH, EACH * (HEADS if role == "q" else key_heads))).astype(np.float32) for role in "qkv"}
    held |= {f"{role}shape": np.array([0, 0, HEADS if role == "q" else key_heads, EACH]) for role in "qkv"}
    held |= {"two": np.array([2]), "whole": np.array([0, HEADS, -1, EACH]), "out": np.array([0, 0, WIDTH])}
    held |= {"scale": np.array(EACH**-0.5, np.float32)}
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in held.items() if name in text)
    outputs = ["y", "presentk", "presentv"] if cached else ["y"]
    del graph.output[:]
    graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)


def _written_out(key_heads: int, cached: bool, axis: int = 2) -> onnx.ModelProto:
    """`axis`: 2 repeats each head, as grouped queries mean it; 1 repeats all heads, which is another model."""
    text = LAYERS + "".join(HEADED.format(role) for role in "qkv")
    for role in "kv":
        came = f"present{role}" if cached else f"{role}h"
        text += f"{came} = Concat<axis = 2>(past{role}, {role}h) " if cached else ""
        if key_heads == HEADS:
            text += f"{role}f = Identity({came}) "
        else:
            text += REPEATED.format(role, came, axis) if axis == 2 else f"{role}f = Concat<axis = 1>({came}, {came}) "
    return _model(text + CORE, key_heads, cached)


def _as_operator(key_heads: int, cached: bool, order: str = "qkv") -> onnx.ModelProto:
    given, made = (", , pastk, pastv", ", presentk, presentv") if cached else ("", "")
    operator = f"Attention<q_num_heads = {HEADS}, kv_num_heads = {key_heads}>({', '.join(order)}{given})"
    return _model(f"{LAYERS} y{made} = {operator}", key_heads, cached)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_written_out_and_as_one_operator_holds_the_same_weights(kind: str) -> None:
    key_heads, cached = KINDS[kind]
    forms = _written_out(key_heads, cached), _as_operator(key_heads, cached)
    for before, after in itertools.permutations(forms):
        result = (SeparateQKV() & RoleWeights() & NumericEqual("golden")).check(before, after)
        assert result.holds, result.message
    exchanged = RoleWeights().check(forms[0], _as_operator(key_heads, cached, "qvk"))
    assert exchanged.holding is Holding.VIOLATED and {finding.role for finding in exchanged.findings} == {"k", "v"}


def test_heads_that_are_repeated_in_another_order_are_not_the_same() -> None:
    before, after = _as_operator(GROUPS, cached=False), _written_out(GROUPS, cached=False, axis=1)
    assert RoleWeights().check(before, after).holding is Holding.NOT_ANALYSED
    assert NumericEqual("golden").check(before, after).holding is Holding.VIOLATED


SCATTERED = "{0}c = ConstantOfShape(shape) w{0} = ScatterND({0}c, {1}, {2}) "
FOUND = {"w{0} = Gather(book{0}, {1}) ": "a codebook", SCATTERED.replace("{2}", "book{0}"): "scattered values"}


@pytest.mark.parametrize("form", FOUND, ids=FOUND.get)
def test_a_pattern_of_places_that_all_share_makes_no_weight_of_three(form: str) -> None:
    draw = np.random.default_rng(0)
    places = np.arange(64).reshape(8, 8) if "Gather" in form else np.argwhere(np.ones((8, 8), bool))
    text = "".join(form.format(role, "places") for role in "qkv") + LAYERS
    text += "kt = Transpose<perm = [0, 2, 1]>(k) s = MatMul(q, kt) w = Softmax(s) y = MatMul(w, v)"
    held = {f"book{role}": draw.standard_normal(64).astype(np.float32) for role in "qkv"} | {"places": places, "shape": np.array([8, 8])}

    def made(written: str) -> onnx.ModelProto:
        graph = parser.parse_graph(f"g (float[1, 5, 8] x) => (float[1, 5, 8] y) {{ {written} }}")
        graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in held.items() if name in written)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)

    assert census(made(text)).counts == {"SEPARATE": 1}, census(made(text)).text()
    one = text.replace("bookk", "bookq").replace("bookv", "bookq")
    assert census(made(one)).counts == {"FUSED": 1}, census(made(one)).text()


def test_a_shape_that_each_role_looks_up_for_itself_makes_no_weight_of_its_own() -> None:
    text = "".join(f"{role}s = Gather(shape{role}, order) w{role} = Reshape(whole, {role}s) " for role in "qkv") + LAYERS
    text += "kt = Transpose<perm = [0, 2, 1]>(k) s = MatMul(q, kt) w = Softmax(s) y = MatMul(w, v)"
    whole = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    held = {f"shape{role}": np.array([8, 8]) for role in "qkv"} | {"order": np.array([0, 1]), "whole": whole}
    graph = parser.parse_graph(f"g (float[1, 5, 8] x) => (float[1, 5, 8] y) {{ {text} }}")
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in held.items())
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    assert census(model).counts == {"FUSED": 1}, census(model).text()
