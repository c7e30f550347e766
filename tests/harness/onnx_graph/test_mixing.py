"""Activations mixed without a matrix product: pairs, samples at computed places, products of spectra, lookups of what products chose."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from harness.onnx_graph.census.census import census
from harness.onnx_graph.contracts.base import Holding
from harness.onnx_graph.contracts.registry import contract_from_names

ROLES = contract_from_names("separate-qkv,same-block-count,role-weights")
LENGTH, WIDTH = 4, 8
WEIGHTS = {
    **dict.fromkeys(("wq", "wk", "wv", "wa", "wb", "wc", "wo"), (WIDTH, WIDTH)),
    "w2": (WIDTH, 2),
    "w_boxes": (WIDTH, 4),
    "filter": (1, 1, 1, 1),
}
READ = """
q0 = MatMul(x, wq) k0 = MatMul(x, wk) v0 = MatMul(x, wv)
k0t = Transpose<perm = [0, 2, 1]>(k0) s0 = MatMul(q0, k0t) p0 = Softmax(s0) h = MatMul(p0, v0)
a = MatMul(h, wa) b = MatMul(h, wb) c = MatMul(h, wc)
"""
IMAGE = "image = Unsqueeze(c, one) "
SPECTRA = "fa = DFT<axis = 1>(a4) fb = DFT<axis = 1>(b4) "
BOTH = "a4 = Unsqueeze(a, last) b4 = Unsqueeze(b, last) "
QK = "a4 = Unsqueeze(a, two) b4 = Unsqueeze(b, one) "
PAIR = "m1 = Unsqueeze({0}, one) m2 = Unsqueeze({0}, two) "
SCORES = "bt = Transpose<perm = [0, 2, 1]>(b) s = MatMul(a, bt) "
LOOP = """
steps = Constant<value = int64 {2}>() yes = Equal(steps, steps) loop = Loop <body = body (int64 i, bool on, int64[1, 4] s)
=> (bool go, int64[1, 4] t) { go = Identity(on) t = Add(s, s) }> (steps, yes, ids) at = Cast<to = 1>(loop)
"""
UNKNOWN = {
    "sampled where an activation says": IMAGE + "at = MatMul(a, w2) grid = Unsqueeze(at, one) m = GridSample(image, grid)",
    "regions that are computed": IMAGE + "at = MatMul(a, w_boxes) boxes = Squeeze(at, zero) m = RoiAlign(image, boxes, batches)",
    "computed offsets": IMAGE + "at = MatMul(a, w2) o = Reshape(at, by_kernel) m = DeformConv(image, filter, o)",
    "product of spectra": BOTH + SPECTRA + "ab = Mul(fa, fb) back = DFT<axis = 1, inverse = 1>(ab) m = Identity(back)",
    "looked up by ArgMax": SCORES + "i = ArgMax<axis = 2, keepdims = 0>(s) j = Squeeze(i, zero) m = Gather<axis = 1>(c, j)",
    "looked up by TopK": SCORES + "best, i = TopK(s, one) e = Expand(i, as_c) m = GatherElements<axis = 1>(c, e)",
    "one hot, scattered": SCORES + "best, i = TopK(s, one) hot = ScatterElements<axis = 2>(zeros, i, ones) m = MatMul(hot, c)",
    "bits compared": QK + "sa = Greater(a4, half) sb = Greater(b4, half) e = Equal(sa, sb) f = Cast<to = 1>(e) m = ReduceSum(f, last)",
    "a pair that is written out": QK + "ea = Expand(a4, pairs) eb = Expand(b4, pairs) ab = Add(ea, eb) m = ReduceMax<axes = [2]>(ab)",
}
KNOWN = {
    "positions out of a loop": LOOP + PAIR.format("at") + "pair = Add(m1, m2) r = ReduceMax<axes = [2]>(pair) m = Mul(c, r)",
    "sampled where a constant says": IMAGE + "m = GridSample(image, fixed_grid)",
    "fixed offsets": IMAGE + "m = DeformConv(image, filter, fixed_offsets)",
    "a filter over a spectrum": BOTH + SPECTRA + "fg = Mul(fa, half) m = DFT<axis = 1, inverse = 1>(fg)",
    "a power spectrum": BOTH + SPECTRA + "m = Mul(fa, fa)",
    "tokens that a layer chose": "s = MatMul(a, w2) best, i = TopK<axis = 1>(s, one) j = Reshape(i, flat) m = Gather<axis = 1>(c, j)",
    "the token that an input chose": "i = ArgMax<axis = 1, keepdims = 0>(ids) m = Gather<axis = 1>(c, i)",
    "a mask of pairs that is given": PAIR.format("mask") + "pair = Mul(m1, m2) r = ReduceSum(pair, two) m = Mul(c, r)",
    "positions on two axes": PAIR.format("rows") + "grid = Add(m1, m2) g = ReduceMax<axes = [1]>(grid) m = Add(c, g)",
}


APART = QK + "d = Sub(a4, b4) dd = Mul(d, d) s = ReduceSum<keepdims = 0>(dd, last) "
AT_THE_END = {
    "nearest": APART + "i = ArgMin<axis = 2>(s) e = Expand(i, as_c) m = GatherElements<axis = 1>(c, e)",
    "all that are near": APART + "n = Less(s, half) n4 = Unsqueeze(n, last) c4 = Unsqueeze(c, one) w = Where(n4, c4, none) "
    "m = ReduceSum<keepdims = 0>(w, two)",
    "given to the nearest": APART + 'i = ArgMin<axis = 2>(s) e = Expand(i, as_c) m = ScatterElements<axis = 1, reduction = "add">(x, e, c)',
    "given to the best": SCORES + "i = ArgMax<axis = 2>(s) e = Expand(i, as_c) m = ScatterElements<axis = 1>(x, e, c)",
}


def _graph(text: str, read: str = READ, end: str = "MatMul(m, wo)") -> onnx.ModelProto:
    draw = np.random.default_rng(0)
    inputs = f"float[1, {LENGTH}, {WIDTH}] x, int64[1, {LENGTH}] ids, float[1, {LENGTH}] mask"
    made = parser.parse_graph(f"g ({inputs}) => (float[] y) {{ {read} {text} y = {end} }}")
    held = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in WEIGHTS.items()}
    held |= {name: np.array([axis]) for name, axis in (("zero", 0), ("one", 1), ("two", 2), ("last", -1), ("flat", -1))}
    held |= {"as_c": np.array([1, LENGTH, WIDTH]), "pairs": np.array([1, LENGTH, LENGTH, WIDTH]), "batches": np.zeros(LENGTH, np.int64)}
    held["ones"] = np.ones((1, LENGTH, 1), np.float32)
    held |= {
        "by_kernel": np.array([1, 2, LENGTH, 1]),
        "half": np.array(0.5, np.float32),
        "none": np.array(0, np.float32),
        "zeros": np.zeros((1, LENGTH, LENGTH), np.float32),
    }
    held |= {"fixed_grid": np.zeros((1, LENGTH, WIDTH, 2), np.float32), "fixed_offsets": np.zeros((1, 2, LENGTH, WIDTH), np.float32)}
    held["rows"] = np.ones((1, LENGTH, WIDTH), np.float32)
    made.initializer.extend(numpy_helper.from_array(array, name) for name, array in held.items())
    made.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, None))
    versions = {"": 17 if "ReduceMax" in text else 19, "com.microsoft": 1, "acme": 1}
    return helper.make_model(made, opset_imports=[helper.make_opsetid(*one) for one in versions.items()], ir_version=9)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_mixes_activations_in_another_way_is_a_block_of_unknown_roles(name: str) -> None:
    model = _graph(UNKNOWN[name])
    found = census(model)
    assert found.counts == {"SEPARATE": 1, "UNKNOWN": 1}, found.text()
    assert {one.shape for one in found.unknown[0].leading} >= {(WIDTH, WIDTH)}, found.text()
    assert ROLES.check(model, model).holding is Holding.NOT_ANALYSED


@pytest.mark.parametrize("name", KNOWN)
def test_places_filters_and_masks_that_no_activation_computed_are_none(name: str) -> None:
    model = _graph(KNOWN[name])
    found = census(model)
    assert found.counts == {"SEPARATE": 1} and not found.comparisons, found.text()
    assert ROLES.check(model, model).holds


@pytest.mark.parametrize("between", ["FastGelu(raw)", "FusedMatMul<transB = 1>(raw, wo)", "FusedMatMul(raw, wo)", "acme.Swish(raw)"])
def test_pairs_are_seen_behind_operators_whose_shapes_onnx_does_not_know(between: str) -> None:
    name = between if between.startswith("acme") else f"com.microsoft.{between}"
    text = QK + "ab = Sub(a4, b4) m = ReduceMax<axes = [2], keepdims = 0>(ab)"
    model = _graph(text, READ.replace("h = MatMul(p0, v0)", f"raw = MatMul(p0, v0) h = {name}"))
    found = census(model)
    assert any("not read: Sub " in block.note for block in found.unknown), found.text()


@pytest.mark.parametrize("name", AT_THE_END)
def test_what_is_chosen_by_pairs_or_products_is_no_comparison_where_the_graph_ends(name: str) -> None:
    found = census(_graph(AT_THE_END[name], end="Identity(m)"))
    assert found.counts == {"SEPARATE": 1, "UNKNOWN": 1} and not found.comparisons, found.text()
