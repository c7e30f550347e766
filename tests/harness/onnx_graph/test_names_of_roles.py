"""Q, K and V get their right names: packed, shared, batched, latent and missing projections, and operators of other domains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor.errors import UserInputError
from harness.onnx_graph.census.block_picture import picture_of
from harness.onnx_graph.census.census import Census, census
from harness.onnx_graph.contracts.base import Holding
from harness.onnx_graph.contracts.registry import contract_from_names
from harness.onnx_graph.graph.reading import load_graph
from harness.onnx_graph.graph.view import GraphView

WIDTH, LENGTH = 8, 5
ROLES = contract_from_names("separate-qkv,same-block-count,role-weights")


class Maker:
    """Writes one graph with the input `x` and the output `y`; layers are named after what they make."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.held: list[onnx.TensorProto] = []
        self.shapes: list[onnx.ValueInfoProto] = []
        self.inputs = ["x"]
        self._draw = np.random.default_rng(0)

    def weight(self, name: str, *shape: int) -> str:
        return self.constant(name, self._draw.standard_normal(shape).astype(np.float32))

    def constant(self, name: str, array: Any) -> str:
        self.held.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def op(self, operator: str, inputs: list[str], output: str | list[str], domain: str = "", **settings: Any) -> str:
        outputs = [output] if isinstance(output, str) else output
        self.nodes.append(helper.make_node(operator, inputs, outputs, name=outputs[0], domain=domain, **settings))
        return outputs[0]

    def layer(self, source: str, name: str, num_out: int = WIDTH, num_in: int = WIDTH) -> str:
        return self.op("MatMul", [source, self.weight(f"w_{name}", num_in, num_out)], name)

    def norm(self, source: str, name: str, width: int = WIDTH) -> str:
        return self.op("LayerNormalization", [source, self.constant(f"g_{name}", np.ones(width, np.float32))], name)

    def attend(self, q: str, k: str, v: str, output: str = "y") -> str:
        self.op("Transpose", [k], f"{output}_kt", perm=[0, 2, 1])
        self.op("MatMul", [q, f"{output}_kt"], f"{output}_scores")
        self.op("Softmax", [f"{output}_scores"], f"{output}_weights", axis=-1)
        return self.op("MatMul", [f"{output}_weights", v], output)

    def three(self, source: str, names: str = "qkv") -> list[str]:
        return [self.layer(source, name) for name in names]

    def model(self) -> onnx.ModelProto:
        inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, LENGTH, WIDTH]) for name in self.inputs]
        output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
        graph = helper.make_graph(self.nodes, "graph", inputs, [output], self.held, value_info=self.shapes)
        opsets = [helper.make_opsetid(name, version) for name, version in (("", 17), ("com.microsoft", 1), ("acme", 1))]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def _made(write: Callable[[Maker], object]) -> tuple[Census, Holding, onnx.ModelProto]:
    maker = Maker()
    write(maker)
    model = maker.model()
    return census(model), ROLES.check(model, model).holding, model


def _einsum(maker: Maker) -> None:
    h = maker.norm("x", "h")
    q, k, v = (maker.op("Einsum", [h, maker.weight(f"w{name}", WIDTH, 2, 4)], name, equation="...td,dhk->...htk") for name in "qkv")
    maker.op("Einsum", [k, q], "scores", equation="bhkd,bhqd->bhqk")
    maker.op("Softmax", ["scores"], "weights", axis=3)
    maker.op("Einsum", ["weights", v], "y", equation="bhqk,bhkd->bqhd")


def _heads(maker: Maker) -> None:
    h = maker.op("Unsqueeze", [maker.norm("x", "h"), maker.constant("axis", np.array([1]))], "per_head")
    q, k, v = (maker.op("MatMul", [h, maker.weight(f"w{name}", 2, WIDTH, 4)], name) for name in "qkv")
    maker.op("Transpose", [k], "kt", perm=[0, 1, 3, 2])
    maker.op("MatMul", [q, "kt"], "scores")
    maker.op("Softmax", ["scores"], "weights", axis=-1)
    maker.op("MatMul", ["weights", v], "y")


def _batched(maker: Maker) -> None:
    maker.op("Einsum", [maker.norm("x", "h"), maker.weight("w", 3, WIDTH, WIDTH)], "all", equation="btd,sde->sbte")
    maker.attend(*(maker.op("Gather", ["all", maker.constant(f"i{name}", place)], name, axis=0) for place, name in enumerate("qkv")))


def _gathered(maker: Maker) -> None:
    h = maker.norm("x", "h")
    maker.weight("w", 3, WIDTH, WIDTH)
    for place, name in enumerate("qkv"):
        maker.op("Gather", ["w", maker.constant(f"i{name}", place)], f"w{name}", axis=0)
        maker.op("MatMul", [h, f"w{name}"], name)
    maker.attend("q", "k", "v")


def _split(maker: Maker) -> None:
    h = maker.norm("x", "h")
    maker.op("Split", [maker.weight("w", WIDTH, 3 * WIDTH), maker.constant("sizes", np.array([WIDTH] * 3))], ["wq", "wk", "wv"], axis=1)
    maker.attend(*(maker.op("MatMul", [h, f"w{name}"], name) for name in "qkv"))


def _one_weight(maker: Maker) -> None:
    h = maker.norm("x", "h")
    maker.weight("w", WIDTH, WIDTH)
    maker.attend(*(maker.op("MatMul", [h, "w"], name) for name in "qkv"))


def _microsoft(operator: str, *names: str) -> Callable[[Maker], None]:
    def write(maker: Maker) -> None:
        h = maker.norm("x", "h")
        given = [maker.layer(h, name, len(name) * WIDTH) if name else "" for name in names]
        maker.op(operator, given, "y", "com.microsoft", num_heads=2)

    return write


def _latent(maker: Maker) -> None:
    h = maker.norm("x", "h")
    q = maker.layer(maker.norm(maker.layer(h, "qa", 4), "qn", 4), "q", 12, 4)
    maker.op("Split", [maker.layer(h, "kva"), maker.constant("low", np.array([4, 4]))], ["latent", "rotated"], axis=-1)
    maker.op(
        "Split", [maker.layer(maker.norm("latent", "kvn", 4), "kvb", 16, 4), maker.constant("high", np.array([8, 8]))], ["kn", "v"], axis=-1
    )
    maker.attend(q, maker.op("Concat", ["kn", "rotated"], "k", axis=-1), "v")


def _absorbed(maker: Maker) -> None:
    h = maker.norm("x", "h")
    maker.op("DecoderAttention", [h, h, maker.weight("wq", WIDTH, WIDTH), maker.weight("wkv", WIDTH, 2 * WIDTH)], "y", "com.microsoft")


FORMS: dict[str, tuple[Callable[[Maker], object], str, Holding]] = {
    "einsum projections": (_einsum, "SEPARATE", Holding.HOLDS),
    "a matrix per head": (_heads, "SEPARATE", Holding.HOLDS),
    "one batched product": (_batched, "FUSED", Holding.VIOLATED),
    "slices of a batched weight": (_gathered, "FUSED", Holding.VIOLATED),
    "slices of a packed weight": (_split, "FUSED", Holding.VIOLATED),
    "one weight for all": (_one_weight, "FUSED", Holding.VIOLATED),
    "MultiHeadAttention": (_microsoft("MultiHeadAttention", "q", "k", "v"), "SEPARATE", Holding.HOLDS),
    "MultiHeadAttention, K and V packed": (_microsoft("MultiHeadAttention", "q", "kv", ""), "PARTLY_FUSED", Holding.VIOLATED),
    "MultiHeadAttention, all packed": (_microsoft("MultiHeadAttention", "qkv", "", ""), "FUSED", Holding.VIOLATED),
    "DecoderAttention": (_absorbed, "ABSORBED", Holding.VIOLATED),
    "an attention of tomorrow": (_microsoft("TomorrowsAttention", "q", "k", "v"), "UNKNOWN", Holding.NOT_ANALYSED),
    "latent attention": (_latent, "PARTLY_FUSED", Holding.VIOLATED),
}


@pytest.mark.parametrize("name", FORMS)
def test_packed_and_shared_projections_get_their_name(name: str) -> None:
    write, status, holding = FORMS[name]
    found, held, _ = _made(write)
    assert found.counts == {status: 1} and held is holding, found.text()
    roles = found.blocks[0].projections
    if status == "SEPARATE":
        assert [roles[role][0].name for role in "qkv"] == ["q", "k", "v"]
        assert {roles[role][0].shape for role in "qkv"} == {(WIDTH, WIDTH)}


def test_ranks_that_no_shape_states_are_read_off_the_nodes() -> None:
    """A softmax over axis 2 of scores whose keys lie in the rows; heads are cut by a shape that the graph computes."""

    def write(maker: Maker) -> None:
        h = maker.norm("x", "h")
        maker.op("NonZero", ["x"], "places")
        sizes = maker.op("Gather", ["places", maker.constant("zero", 0)], "sizes", axis=0)
        q, k, v = (
            maker.op("Transpose", [maker.op("Reshape", [one, sizes], f"{one}_cut")], f"{one}_heads", perm=[0, 2, 1, 3])
            for one in maker.three(h)
        )
        maker.op("MatMul", [k, maker.op("Transpose", [q], "qt", perm=[0, 1, 3, 2])], "scores")
        maker.op("Softmax", ["scores"], "weights", axis=2)
        maker.op("MatMul", [maker.op("Transpose", ["weights"], "turned", perm=[0, 1, 3, 2]), v], "y")

    found, holding, _ = _made(write)
    assert found.counts == {"SEPARATE": 1} and holding is Holding.HOLDS, found.text()
    assert [found.blocks[0].projections[role][0].name for role in "qkv"] == ["q", "k", "v"]


def test_a_batched_weight_is_read_as_the_matrix_that_it_is() -> None:
    for write in (_einsum, _heads):
        found, _, model = _made(write)
        weight = next(numpy_helper.to_array(one) for one in model.graph.initializer if one.name == "wq")
        columns = weight.reshape(WIDTH, WIDTH) if write is _einsum else np.concatenate(list(weight), axis=1)
        assert np.array_equal(found.blocks[0].projections["q"][0].matrix_IO, columns)


def test_latent_attention_says_what_goes_past_its_layers() -> None:
    found, _, _ = _made(_latent)
    assert [found.blocks[0].projections[role][0].name for role in "qkv"] == ["q", "kvb", "kvb"] and found.blocks[0].kind == "self"
    assert "K takes a part from MatMul kva 8x8, past its own layer" in found.text()


def _raw(role: str, normed: bool) -> Callable[[Maker], None]:
    def write(maker: Maker) -> None:
        stream = maker.layer("x", "embedded")
        source = maker.norm(stream, "h") if normed else stream
        maker.attend(*(stream if name == role else maker.layer(source, name) for name in "qkv"))

    return write


@pytest.mark.parametrize("normed", [False, True], ids=["as projected", "before the norm"])
@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_a_role_without_a_projection_is_missing_though_a_layer_lies_further_up(role: str, normed: bool) -> None:
    found, holding, _ = _made(_raw(role, normed))
    assert found.counts == {"MISSING": 1} and holding is Holding.NOT_ANALYSED, found.text()
    assert f"{role.upper()} has no linear layer of its own" in found.text()


def _sources(q: str, k: str, v: str) -> Callable[[Maker], None]:
    """Each role from `x` or a memory, `+` stands for positions that are added."""

    def write(maker: Maker) -> None:
        maker.inputs += sorted({one.strip("+") for one in (q, k, v)} - {"x"})
        maker.weight("positions", 1, LENGTH, WIDTH)
        placed = {one: maker.op("Add", [one.strip("+"), "positions"], f"{one.strip('+')}_placed") for one in {q, k, v} if "+" in one}
        maker.attend(*(maker.layer(placed.get(one, one), name) for name, one in zip("qkv", (q, k, v), strict=True)))

    return write


@pytest.mark.parametrize(
    ("sources", "kind"),
    [
        (("x", "x", "x"), "self"),
        (("x+", "x+", "x"), "self"),
        (("x", "m", "m"), "cross"),
        (("x+", "m+", "m"), "cross"),
        (("x", "m", "n"), "cross"),
        (("x", "x", "m"), "cross"),
    ],
    ids=" ".join,
)
def test_the_kind_says_whether_k_or_v_come_from_elsewhere(sources: tuple[str, str, str], kind: str) -> None:
    found, holding, _ = _made(_sources(*sources))
    assert found.counts == {"SEPARATE": 1} and found.blocks[0].kind == kind and holding is Holding.HOLDS


def _second(form: str, other: str, halves: bool) -> Callable[[Maker], None]:
    """Two blocks behind each other, the second of which takes a role from what the first one has read."""

    def layer(maker: Maker, source: str, name: str) -> str:
        if not halves:
            return maker.layer(source, name)
        first, second = maker.op("Split", [source], [f"{name}1", f"{name}2"], axis=-1), f"{name}2"
        sums = [maker.layer(half, f"{half}_layer", num_in=WIDTH // 2) for half in (first, second)]
        return maker.op("Add", sums, name)

    def attend(maker: Maker, given: list[str], output: str) -> str:
        if form == "written out":
            return maker.attend(*given, output=output)
        return maker.op("MultiHeadAttention", given, output, "com.microsoft", num_heads=2)

    def write(maker: Maker) -> None:
        before = maker.norm("x", "n1")
        first = attend(maker, [layer(maker, before, f"{role}1_") for role in "qkv"], "first")
        after = maker.norm(maker.op("Add", ["x", first], "on"), "n2")
        attend(maker, [layer(maker, before if role in other else after, f"{role}2_") for role in "qkv"], "y")

    return write


@pytest.mark.parametrize("halves", [False, True], ids=["layers", "sums of half layers"])
@pytest.mark.parametrize("form", ["written out", "one operator"])
@pytest.mark.parametrize(
    ("other", "kind"), [("", "self"), ("k", "cross"), ("v", "cross"), ("q", "cross"), ("kv", "cross"), ("qkv", "self")]
)
def test_what_an_earlier_block_has_read_is_another_activation(form: str, other: str, kind: str, halves: bool) -> None:
    right, _, base = _made(_second(form, "", halves))
    found, _, model = _made(_second(form, other, halves))
    assert [block.kind for block in right.blocks] == ["self", "self"]
    assert [block.kind for block in found.blocks] == ["self", kind], found.text()
    held = contract_from_names("same-block-count").check(base, model).holding
    assert held is (Holding.HOLDS if kind == "self" else Holding.VIOLATED)


@pytest.mark.parametrize("form", ["written out", "one operator"])
def test_keys_and_values_that_a_later_block_takes_again_are_its_own(form: str) -> None:
    def write(maker: Maker) -> None:
        def attend(given: list[str], output: str) -> str:
            if form == "written out":
                return maker.attend(*given, output=output)
            return maker.op("MultiHeadAttention", given, output, "com.microsoft", num_heads=2)

        query, *kept = maker.three(maker.norm("x", "n1"))
        first = attend([query, *kept], "first")
        attend([maker.layer(maker.norm(maker.op("Add", ["x", first], "on"), "n2"), "q2"), *kept], "y")

    found, holding, _ = _made(write)
    assert found.counts == {"SEPARATE": 2} and [one.kind for one in found.blocks] == ["self", "cross"] and holding is Holding.HOLDS
    assert "K is shared with block 0; V is shared with block 0" in found.text()


def _in_a_loop(maker: Maker, source: str, output: str) -> str:
    """Attention without layers, once, in the body of a Loop whose only activation is its state."""
    inner = Maker()
    inner.attend("state", "state", "state", output="next")
    inner.op("Identity", ["go"], "goes_on")
    ends = [helper.make_tensor_value_info(name, kind, None) for name, kind in (("goes_on", TensorProto.BOOL), ("next", TensorProto.FLOAT))]
    given = [("count", TensorProto.INT64, []), ("go", TensorProto.BOOL, []), ("state", TensorProto.FLOAT, [1, LENGTH, WIDTH])]
    body = helper.make_graph(inner.nodes, "body", [helper.make_tensor_value_info(*one) for one in given], ends)
    limits = [maker.constant("once", np.array(1)), maker.constant("always", np.array(True))]
    return maker.op("Loop", [*limits, source], output, body=body)


@pytest.mark.parametrize("other", ["", "k"])
@pytest.mark.parametrize("form", ["loop", "foreign"])
def test_what_mixes_in_a_loop_or_a_foreign_operator_makes_another_activation(form: str, other: str) -> None:
    def write(maker: Maker) -> None:
        before = maker.norm("x", "n1")
        if form == "loop":
            _in_a_loop(maker, before, "first")
        else:
            maker.op("FlashAttention", maker.three(before, "abc"), "first", "acme")
            maker.shapes.append(helper.make_tensor_value_info("first", TensorProto.FLOAT, [1, LENGTH, WIDTH]))
        after = maker.norm(maker.op("Add", ["x", "first"], "on"), "n2")
        maker.attend(*(maker.layer(before if role == other else after, role) for role in "qkv"))

    found, _, _ = _made(write)
    assert found.blocks[0].kind == ("cross" if other else "self"), found.text()  # those that are not read come behind it


def _foreign(operator: str, *names: str, weights: bool = False) -> Callable[[Maker], None]:
    def write(maker: Maker) -> None:
        first = maker.attend(*maker.three(maker.norm("x", "h")), output="first")
        given = [maker.layer(first, f"f{name}", len(name) * WIDTH) for name in names]
        maker.op(operator, [*given, *([maker.weight("inside", WIDTH, WIDTH)] if weights else [])], "mixed", "acme")
        maker.layer("mixed", "y")
        shapes = {"mixed": WIDTH, **{f"f{name}": len(name) * WIDTH for name in names}}
        maker.shapes += [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, LENGTH, width]) for name, width in shapes.items()]

    return write


@pytest.mark.parametrize(
    "write",
    [
        _foreign("FlashMix", "q", "k", "v"),
        _foreign("FlashMix", "qkv"),
        _foreign("FlashMix", "q", "kv"),
        _foreign("SelfAttention", "q"),
        _foreign("Mix", "q", weights=True),
        _foreign("MultiHeadAttention", "q", "k", "v"),
    ],
    ids=["three", "packed", "K and V packed", "by name", "with its weight", "with a known name"],
)
def test_a_foreign_operator_beside_a_block_is_a_block_of_unknown_roles(write: Callable[[Maker], object]) -> None:
    found, holding, model = _made(write)
    assert found.counts == {"SEPARATE": 1, "UNKNOWN": 1} and holding is Holding.NOT_ANALYSED, found.text()
    assert "acme::" in ROLES.check(model, model).message


def test_a_foreign_activation_function_is_no_block() -> None:
    found, holding, _ = _made(_foreign("Swish", "q"))
    assert found.counts == {"SEPARATE": 1} and holding is Holding.HOLDS, found.text()


def test_a_projection_that_cannot_be_read_does_not_lend_the_one_before_it() -> None:
    def write(maker: Maker) -> None:
        source = maker.layer("x", "before")
        maker.attend(*(maker.op("Linear", [source, maker.weight(f"w{name}", WIDTH, WIDTH)], name, "acme") for name in "qkv"))

    found, holding, _ = _made(write)
    assert found.read[0].status.value == "MISSING" and holding is Holding.NOT_ANALYSED
    assert "Q comes out of acme::Linear q, which is not read" in found.text()


@pytest.mark.parametrize("operator", ["LSTM", "MultiHeadAttention"])
def test_what_holds_layers_or_attention_does_not_lend_what_lies_before_it(operator: str) -> None:
    def write(maker: Maker) -> None:
        h = maker.norm("x", "h")
        if operator == "LSTM":
            held = [maker.weight("w_in", 1, 4 * WIDTH, WIDTH), maker.weight("w_back", 1, 4 * WIDTH, WIDTH)]
            maker.op("LSTM", [maker.layer(h, "before"), *held], "state", hidden_size=WIDTH)
            maker.op("Squeeze", ["state", maker.constant("axis", np.array([1]))], "q")
        else:
            maker.op(operator, maker.three(h, "abc"), "q", "com.microsoft", num_heads=2)
        maker.attend("q", maker.layer(h, "k"), maker.layer(h, "v"))

    found, holding, _ = _made(write)
    assert found.read[-1].status.value == "MISSING" and holding is Holding.NOT_ANALYSED, found.text()
    assert f"Q comes out of {operator}" in found.text()


def test_products_inside_of_a_loop_are_reported() -> None:
    body_in = [helper.make_tensor_value_info(name, kind, None) for name, kind in (("i", 7), ("on", 9), ("state", 1))]
    body_out = [helper.make_tensor_value_info(name, kind, None) for name, kind in (("go", 9), ("next", 1))]
    nodes = [helper.make_node("Identity", ["on"], ["go"]), helper.make_node("MatMul", ["state", "state"], ["next"])]
    maker = Maker()
    maker.attend(*maker.three(maker.norm("x", "h")), output="first")
    maker.constant("steps", np.array(2))
    maker.constant("yes", np.array(True))
    maker.nodes.append(helper.make_node("Loop", ["steps", "yes", "first"], ["y"], body=helper.make_graph(nodes, "body", body_in, body_out)))
    model = maker.model()
    found = census(model)
    assert found.counts == {"SEPARATE": 1, "AMBIGUOUS": 1} and "inside a subgraph" in found.text()
    assert ROLES.check(model, model).holding is Holding.NOT_ANALYSED
    view = GraphView(load_graph(model))
    assert [len(picture_of(view, block).boxes) > 1 for block in census(view.model).blocks] == [True, False], "a loop has no picture"


def test_a_block_of_unknown_roles_is_drawn_from_the_layers_that_lead_to_it() -> None:
    _, _, model = _made(_foreign("FlashMix", "q", "k", "v"))
    view = GraphView(load_graph(model))
    texts = [box.text for box in picture_of(view, census(view.model).unknown[0]).boxes]
    assert texts.count("MatMul\n?  8 x 8") == 3 and "FlashMix" in texts


def test_blocks_are_found_again_in_another_order() -> None:
    maker = Maker()
    for place, names in enumerate(("qkv", "abc")):
        maker.attend(*maker.three(maker.norm("x", f"h{place}"), names), output=f"block{place}")
    maker.op("Add", ["block0", "block1"], "y")
    model, turned = maker.model(), maker.model()
    half = len(turned.graph.node) // 2
    nodes = list(turned.graph.node)
    del turned.graph.node[:]
    turned.graph.node.extend([*nodes[half:-1], *nodes[:half], nodes[-1]])
    assert [block.projections["q"][0].name for block in census(turned).blocks] == ["a", "q"]
    assert ROLES.check(model, turned).holds, ROLES.check(model, turned).message
    next(one for one in turned.graph.node if one.name == "a").input[1] = "w_b"
    result = ROLES.check(model, turned)
    assert [(finding.block, finding.role) for finding in result.findings if finding.contract == "RoleWeights"] == [(1, "q")]


def test_one_product_of_three_activations_is_no_comparison() -> None:
    def write(maker: Maker) -> None:
        first = maker.attend(*maker.three(maker.norm("x", "h")), output="first")
        maker.op("Einsum", maker.three(first, "abc"), "y", equation="bqd,bkd,bke->bqe")

    found, holding, _ = _made(write)
    assert found.counts == {"SEPARATE": 1, "UNKNOWN": 1} and holding is Holding.NOT_ANALYSED


def test_a_graph_that_is_not_valid_is_named() -> None:
    maker = Maker()
    maker.layer("x", "y")
    maker.op("Identity", ["x"], "y")
    with pytest.raises(UserInputError, match="'y' is the name of another value, too, and of an output of a node"):
        census(maker.model())
