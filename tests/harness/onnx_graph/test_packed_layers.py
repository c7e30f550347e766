"""What each role takes of a layer that several share, whatever the layout; equal copies, selections, and what weighs inside a subgraph."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from harness.onnx_graph.census.census import census
from harness.onnx_graph.contracts.base import Holding
from harness.onnx_graph.contracts.registry import contract_from_names
from harness.onnx_graph.contracts.roles import RoleWeights, SeparateQKV

BATCH, LENGTH, HEADS, EACH = 2, 5, 4, 8
WIDTH = HEADS * EACH
ROLES = contract_from_names("separate-qkv,same-block-count,role-weights")
HALF = "{0}1, {0}2 = Split<axis = 3, num_outputs = 2>({0}) {0}n = Neg({0}2) {0}r = Concat<axis = 3>({0}n, {0}1) "
ROTARY = HALF + "{0}c = Mul({0}, cos) {0}s = Mul({0}r, sin) {0}x = Add({0}c, {0}s) "
TURNED = "{0}r = MatMul({0}, turn) {0}c = Mul({0}, cos) {0}s = Mul({0}r, sin) {0}x = Add({0}c, {0}s) "
LAYOUTS = {
    "split": "p = MatMul(x, packed) a0, a1, a2 = Split<axis = 2, num_outputs = 3>(p)",
    "per head": "p = MatMul(x, packed) h = Reshape(p, per_head) a0, a1, a2 = Split<axis = 3, num_outputs = 3>(h)",
    "every third": "p = MatMul(x, packed) a0 = Slice(p, n0, end, n2, n3) a1 = Slice(p, n1, end, n2, n3) a2 = Slice(p, n2, end, n2, n3)",
    "five axes": "p = MatMul(x, packed) f = Reshape(p, five) "
    "a0 = Gather<axis = 2>(f, i0) a1 = Gather<axis = 2>(f, i1) a2 = Gather<axis = 2>(f, i2)",
    "in a batch": "b = Reshape(x, flat) p = MatMul(b, batched) a0, a1, a2 = Split<axis = 0, num_outputs = 3>(p)",
    "by convolution": "t = Transpose<perm = [0, 2, 1]>(x) p = Conv(t, filters) a0, a1, a2 = Split<axis = 1, num_outputs = 3>(p)",
    "by einsum": 'p = Einsum<equation = "bsd,dre->rbse">(x, stacked) a0, a1, a2 = Split<axis = 0, num_outputs = 3>(p)',
    "by Gemm": "b = Reshape(x, rows) p = Gemm<transB = 1>(b, turned) a0, a1, a2 = Split<axis = 1, num_outputs = 3>(p)",
    "by selection": "p = MatMul(x, packed) a0 = MatMul(p, e0) a1 = MatMul(p, e1) a2 = MatMul(p, e2)",
    "from copies": "p0 = MatMul(x, packed) p1 = MatMul(x, copy1) p2 = MatMul(x, copy2) "
    "a0 = Slice(p0, n0, w1, n2) a1 = Slice(p1, w1, w2, n2) a2 = Slice(p2, w2, end, n2)",
}
CUT_WEIGHTS = {
    "one flat weight": "c0 = Slice(line, n0, l1, n0) c1 = Slice(line, l1, l2, n0) c2 = Slice(line, l2, l3, n0) "
    "b0 = Reshape(c0, square) b1 = Reshape(c1, square) b2 = Reshape(c2, square)",
    "equal copies": "b0 = Slice(packed, n0, w1, n1) b1 = Slice(copy1, w1, w2, n1) b2 = Slice(copy2, w2, end, n1)",
    "a copy that is turned": "b0 = Slice(packed, n0, w1, n1) b1 = Slice(copy1, w1, w2, n1) "
    "c2 = Slice(turned, w2, end, n0) b2 = Transpose<perm = [1, 0]>(c2)",
}
DERIVED = {
    "a sum": "b0 = Identity(apart0) b1 = Add(apart0, apart1) b2 = Identity(apart2)",
    "a difference": "b0 = Identity(apart0) b1 = Sub(apart1, apart2) b2 = Identity(apart2)",
    "a product": "b0 = Identity(apart0) b1 = MatMul(apart1, apart0) b2 = Identity(apart2)",
    "what is cut and scaled": "b0 = Slice(packed, n0, w1, n1) c1 = Slice(packed, w1, w2, n1) b1 = Mul(c1, apart1) b2 = Identity(apart2)",
    "one rotation": "b0 = MatMul(rotation, apart0) b1 = MatMul(rotation, apart1) b2 = MatMul(rotation, apart2)",
    "one gain": "b0 = Mul(apart0, gains) b1 = Mul(apart1, gains) b2 = Mul(apart2, gains)",
}
BETWEEN = {
    "nothing": "qx = Identity(q) kx = Identity(k) ",
    "rotary": ROTARY.format("q") + ROTARY.format("k"),
    "rotary by a product": TURNED.format("q") + TURNED.format("k"),
    "norms": "qx = LayerNormalization(q, gain) kx = LayerNormalization(k, gain) ",
    "other heads": "qx = Gather<axis = 1>(q, heads) kx = Identity(k) ",
    "other features": "qx = Gather<axis = 3>(q, features) kx = Identity(k) ",
}
CORE = "kt = Transpose<perm = [0, 1, 3, 2]>(kx) s = MatMul(qx, kt) w = Softmax(s) c = MatMul(w, v) y = Identity(c) "


def _constants() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    packed = draw.standard_normal((WIDTH, 3 * WIDTH)).astype(np.float32)
    one_hot = np.eye(3 * WIDTH, dtype=np.float32)
    held = {name: packed for name in ("packed", "copy1", "copy2")}
    held |= {name: draw.standard_normal(packed.shape).astype(np.float32) for name in ("other1", "other2")}
    held |= {f"apart{at}": draw.standard_normal((WIDTH, WIDTH)).astype(np.float32) for at in range(3)}
    held |= {"rotation": np.linalg.qr(held["apart0"] + held["apart1"])[0], "gains": np.ones(WIDTH, np.float32)}
    held |= {"batched": np.stack(np.split(packed, 3, 1)), "filters": packed.T[..., None], "turned": packed.T}
    held |= {"stacked": packed.reshape(WIDTH, 3, WIDTH), "gain": np.ones(EACH, np.float32)}
    held |= {f"e{at}": one_hot[:, at * WIDTH : (at + 1) * WIDTH] for at in range(3)}
    held |= {name: draw.uniform(0.2, 0.9, (1, 1, 1, EACH)).astype(np.float32) for name in ("cos", "sin")}
    held |= {f"n{at}": np.array([at]) for at in range(4)} | {f"i{at}": np.array(at) for at in range(3)}
    held |= {"w1": np.array([WIDTH]), "w2": np.array([2 * WIDTH]), "end": np.array([3 * WIDTH])}
    held |= {"line": np.concatenate([part.ravel() for part in np.split(packed, 3, 1)]), "square": np.array([WIDTH, WIDTH])}
    held |= {f"l{at}": np.array([at * WIDTH * WIDTH]) for at in (1, 2, 3)}
    held |= {"per_head": np.array([BATCH, LENGTH, HEADS, 3 * EACH]), "five": np.array([BATCH, LENGTH, 3, WIDTH])}
    held |= {"flat": np.array([1, BATCH * LENGTH, WIDTH]), "rows": np.array([BATCH * LENGTH, WIDTH])}
    turn = np.eye(EACH, dtype=np.float32)
    held |= {"turn": np.concatenate([turn[EACH // 2 :], -turn[: EACH // 2]])}
    held |= {"two_axes": np.array([-1, LENGTH]), "four_axes": np.array([BATCH, HEADS, LENGTH, LENGTH])}
    held |= {
        "by_head": np.array([BATCH, LENGTH, HEADS, EACH]),
        "heads": np.array([1, 0, 2, 3]),
        "features": np.array([1, 0, *range(2, EACH)]),
    }
    return held


def _model(text: str, sizes: Sequence[object] = (BATCH, LENGTH, WIDTH), more: str = "") -> onnx.ModelProto:
    made = parser.parse_graph(f"g (float[{', '.join(map(str, sizes))}] x{more}) => (float[] y) {{ {text} }}")
    made.initializer.extend(numpy_helper.from_array(array, name) for name, array in _constants().items() if name in text)
    made.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, None))
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def _packed(
    layout: str, order: Sequence[int] = (0, 1, 2), between: str = "nothing", sizes: Sequence[object] = (BATCH, LENGTH, WIDTH)
) -> onnx.ModelProto:
    turned = "".join(f"t{at} = Transpose<perm = [0, 2, 1]>(a{at}) " for at in range(3)) if "convolution" in layout else ""
    taken = "t" if turned else "a"
    heads = "".join(
        f"{role}4 = Reshape({taken}{at}, by_head) {role} = Transpose<perm = [0, 2, 1, 3]>({role}4) "
        for role, at in zip("qkv", order, strict=True)
    )
    return _model(f"{LAYOUTS[layout]} {turned}{heads}{BETWEEN[between]}{CORE}", sizes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_roles_of_a_packed_layer_that_are_exchanged_are_seen_in_every_layout(layout: str) -> None:
    model = _packed(layout)
    assert census(model).counts == {"FUSED": 1}, census(model).text()
    assert RoleWeights().check(model, model).holds, RoleWeights().check(model, model).message
    assert SeparateQKV().check(model, model).holding is Holding.VIOLATED
    for order in itertools.islice(itertools.permutations(range(3)), 1, None):
        result = RoleWeights().check(model, _packed(layout, order))
        moved = {role for role, at, own in zip("qkv", order, range(3), strict=True) if at != own}
        assert {finding.role for finding in result.findings} == moved and "expected columns" in result.message


@pytest.mark.parametrize("in_nodes", [False, True], ids=["initializers", "Constant nodes"])
@pytest.mark.parametrize("cut", CUT_WEIGHTS)
def test_products_on_parts_of_one_weight_or_of_its_copies_are_fused(cut: str, in_nodes: bool) -> None:
    text = f"{CUT_WEIGHTS[cut]} a0 = MatMul(x, b0) a1 = MatMul(x, b1) a2 = MatMul(x, b2) "
    heads = (f"{role}4 = Reshape(a{at}, by_head) {role} = Transpose<perm = [0, 2, 1, 3]>({role}4) " for at, role in enumerate("qkv"))
    model = _model(f"{text}{''.join(heads)}{BETWEEN['nothing']}{CORE}")
    if in_nodes:
        nodes = [helper.make_node("Constant", [], [one.name], value=one) for one in model.graph.initializer]
        own = [*nodes, *model.graph.node]
        del model.graph.initializer[:], model.graph.node[:]
        model.graph.node.extend(own)
    assert census(model).counts == {"FUSED": 1}, census(model).text()
    assert SeparateQKV().check(model, model).holding is Holding.VIOLATED


@pytest.mark.parametrize("way", DERIVED)
def test_a_weight_that_is_computed_from_anothers_is_not_its_own(way: str) -> None:
    text = f"{DERIVED[way]} a0 = MatMul(x, b0) a1 = MatMul(x, b1) a2 = MatMul(x, b2) "
    heads = (f"{role}4 = Reshape(a{at}, by_head) {role} = Transpose<perm = [0, 2, 1, 3]>({role}4) " for at, role in enumerate("qkv"))
    model = _model(f"{text}{''.join(heads)}{BETWEEN['nothing']}{CORE}")
    separate = way.startswith("one")
    assert census(model).counts == {"SEPARATE" if separate else "PARTLY_FUSED": 1}, census(model).text()
    assert SeparateQKV().check(model, model).holding is (Holding.HOLDS if separate else Holding.VIOLATED)


def test_weights_of_their_own_are_separate_though_each_is_cut_from_something() -> None:
    text = "b0 = Slice(packed, n0, w1, n1) b1 = Slice(other1, w1, w2, n1) b2 = Slice(other2, w2, end, n1) "
    text += "a0 = MatMul(x, b0) a1 = MatMul(x, b1) a2 = MatMul(x, b2) "
    heads = (f"{role}4 = Reshape(a{at}, by_head) {role} = Transpose<perm = [0, 2, 1, 3]>({role}4) " for at, role in enumerate("qkv"))
    assert census(_model(f"{text}{''.join(heads)}{BETWEEN['nothing']}{CORE}")).counts == {"SEPARATE": 1}


@pytest.mark.parametrize("between", ["rotary", "rotary by a product", "norms"])
@pytest.mark.parametrize("sizes", [(BATCH, LENGTH, WIDTH), ("batch", LENGTH, WIDTH)], ids=["fixed", "open"])
def test_columns_are_followed_through_what_joins_several(between: str, sizes: Sequence[object]) -> None:
    model = _packed("split", between=between, sizes=sizes)
    assert RoleWeights().check(model, model).holds
    assert RoleWeights().check(model, _packed("split", (1, 0, 2), between, sizes)).holding is Holding.VIOLATED


@pytest.mark.parametrize("between", ["other heads", "other features"])
def test_the_order_of_columns_counts(between: str) -> None:
    result = RoleWeights().check(_packed("split"), _packed("split", between=between))
    assert result.holding is Holding.VIOLATED and {finding.role for finding in result.findings} == {"q"}
    assert "expected columns 0:32 of MatMul p [32, 96], found columns" in result.message


def test_a_packed_layer_is_not_judged_where_the_graph_cannot_be_run() -> None:
    model = _packed("split")
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = LENGTH + 1  # the reshape to heads has no place for it
    result = RoleWeights().check(model, model)
    assert result.holding is Holding.NOT_ANALYSED and "which columns of its layer it takes cannot be read" in result.message


TAKES = "p = MatMul(x, packed) q, k, v = Split<axis = 2, num_outputs = 3>(p) kt = Transpose<perm = [0, 2, 1]>(k) "
WEIGHS = "pu = Unsqueeze(w, n3) vu = Unsqueeze(v, n1) pv = Mul(pu, vu) t = ReduceSum<keepdims = 0>(pv, n2)"
IN_A_BRANCH = {
    "a sum of softmax weights": TAKES + "s = MatMul(q, kt) w = Softmax(s) y = If <then_branch = yes () => (float[] t) {{ {0} }}, "
    "else_branch = no () => (float[] e) {{ e = Identity(v) }}> (c)",
    "a convolution with computed kernels": TAKES
    + "k1 = Gather<axis = 0>(k, i0) kk = Unsqueeze(k1, n2) qt = Transpose<perm = [0, 2, 1]>(q) "
    "y = If <then_branch = yes () => (float[] t) {{ t = Conv(qt, kk) }}, else_branch = no () => (float[] e) {{ e = Identity(qt) }}> (c)",
}


@pytest.mark.parametrize("name", IN_A_BRANCH)
def test_what_weighs_inside_of_a_branch_is_no_absence(name: str) -> None:
    model = _model(IN_A_BRANCH[name].format(WEIGHS), more=", bool c")
    found = census(model)
    assert sum(found.counts.values()) == 1 and not found.comparisons, found.text()
    assert ROLES.check(model, model).holding is Holding.NOT_ANALYSED


FLAT_SOFTMAX = "t = Reshape(s, two_axes) u = Softmax<axis = 1>(t) w = Reshape(u, four_axes) "
FORMS = {
    "rotary by a product": (BETWEEN["rotary by a product"], CORE),
    "rotary by a product, of q alone": (TURNED.format("q") + "kx = Identity(k) ", CORE),
    "softmax in two axes": (BETWEEN["nothing"], CORE.replace("w = Softmax(s) ", FLAT_SOFTMAX)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_packed_layer_is_read_behind_what_older_programs_write(form: str) -> None:
    between, core = FORMS[form]
    heads = "".join(f"{role}0 = Reshape(a{at}, by_head) {role} = Transpose<perm = [0, 2, 1, 3]>({role}0) " for at, role in enumerate("qkv"))
    packed = _model(f"{LAYOUTS['split']} {heads}{between}{core}")
    (block,) = census(packed).blocks
    assert (block.status.name, block.note) == ("FUSED", "")


HEAD = "{0}p = Reshape({1}, by_head) {0} = Transpose<perm = [0, 2, 1, 3]>({0}p) "
ATTENDS = "kt{0} = Transpose<perm = [0, 1, 3, 2]>(k{0}) u{0} = MatMul(q{0}, kt{0}) z{0} = Softmax(u{0}) c{0} = MatMul(z{0}, v{0}) "
SPLIT = "a{0}, a{1} = Split<axis = 2, num_outputs = 2>(p{0}) "
OTHERS = {
    "Q of two blocks": {0: 3},
    "Q with V of another": {0: 5},
    "Q with a gate": {0: 6},
    "every role with that of another": {0: 3, 1: 4, 2: 5},
    "Q and a gate on slices of one weight": {},
}


def _two_blocks(packed: dict[int, int], sliced: bool = False) -> onnx.ModelProto:
    """Two blocks beside a gate, some of whose seven layers lie packed in pairs: 0 to 2 and 3 to 5 are Q, K, V, 6 is the gate."""
    weights = np.split(np.random.default_rng(1).standard_normal((WIDTH, 7 * WIDTH)).astype(np.float32), 7, 1)
    held = {f"own{at}": weight for at, weight in enumerate(weights)} | _constants()
    text = "".join(f"p{one} = MatMul(x, both{one}_{other}) {SPLIT.format(one, other)}" for one, other in packed.items())
    held |= {f"both{one}_{other}": np.concatenate([weights[one], weights[other]], 1) for one, other in packed.items()}
    left = [at for at in range(7) if at not in (*packed, *packed.values())]
    if sliced:
        held["both0_6"], left = np.concatenate([weights[0], weights[6]], 1), [at for at in left if at not in (0, 6)]
        text += "s0 = Slice(both0_6, n0, w1, n1) s6 = Slice(both0_6, w1, w2, n1) a0 = MatMul(x, s0) a6 = MatMul(x, s6) "
    text += "".join(f"a{at} = MatMul(x, own{at}) " for at in left) + "g = Sigmoid(a6) gh = Reshape(g, by_head) "
    for block in range(2):
        text += "".join(HEAD.format(f"{role}{block}", f"a{3 * block + at}") for at, role in enumerate("qkv")) + ATTENDS.format(block)
    model = _model(text + "c = Add(c0, c1) t = Transpose<perm = [0, 2, 1, 3]>(c) y = Mul(t, gh)")
    del model.graph.initializer[:]
    used = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in held.items() if name in used)
    return model


@pytest.mark.parametrize("name", OTHERS)
def test_a_role_that_is_packed_with_what_is_no_role_of_its_block_has_no_layer_of_its_own(name: str) -> None:
    before, after = _two_blocks({}), _two_blocks(OTHERS[name], sliced="slices" in name)
    assert SeparateQKV().check(before, before).holds
    result = SeparateQKV().check(before, after)
    assert result.holding is Holding.VIOLATED, census(after).text()
    assert "block 0 (self) Q = a0: expected a layer of its own [32, 32], found" in result.message
    told = census(after).text()
    assert ("lies packed with" in told) is (name in ("Q of two blocks", "Q with V of another")), told
    assert ("takes a part of MatMul p0 32x64" in told) is (name == "Q with a gate"), told


UNNAMED = "t = Shape(x) t0 = Gather(t, i0) z = Sub(t0, t0) l = Max(by_head, z) kb = Transpose<perm = [0, 2, 1, 3]>(kx) kd = Reshape(kb, l) "


@pytest.mark.parametrize("wide", [False, True])
def test_a_layer_whose_halves_turn_before_a_size_that_nobody_knows_is_taken_whole(wide: bool) -> None:
    """Rotary positions cut K and join it; behind them the dynamo exporter reshapes to sizes that it computes. Half of a layer is a part."""
    layers = "a0 = MatMul(x, own0) p1 = MatMul(x, own1) a2 = MatMul(x, own2) "
    layers += "a1, gate = Split<axis = 2, num_outputs = 2>(p1) " if wide else "a1 = Identity(p1) "
    heads = "".join(HEAD.format(role, f"a{at}") for at, role in enumerate("qkv")) + ROTARY.format("q") + ROTARY.format("k")
    core = "kt = Transpose<perm = [0, 2, 3, 1]>(kd) s0 = MatMul(qx, kt) w = Softmax(s0) c = MatMul(w, v) y = Identity(c)"
    model = _model(f"{layers}{heads}{UNNAMED}{core}")
    for at, width in enumerate((WIDTH, WIDTH * (1 + wide), WIDTH)):
        weight = np.random.default_rng(at).standard_normal((WIDTH, width)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weight, f"own{at}"))
    (block,) = census(model).blocks
    assert (block.status.name, block.note) == ("SEPARATE", "K takes a part of MatMul p1 32x64" if wide else "")
