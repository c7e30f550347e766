"""The census finds every block by role; the contracts see every mutation, and never pass for want of evidence."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor.errors import UserInputError
from harness.errors import ContractViolation
from harness.onnx_graph.census.baseline import take_baseline
from harness.onnx_graph.census.census import census
from harness.onnx_graph.census.projections import fingerprint
from harness.onnx_graph.contracts.base import AllOf, Holding
from harness.onnx_graph.contracts.domains import AllowedDomains
from harness.onnx_graph.contracts.numbers import NumericEqual
from harness.onnx_graph.contracts.registry import CONTRACTS, contract_from_names
from harness.onnx_graph.contracts.roles import ProjectionOp, QDQPreserved, RoleWeights, SameBlockCount, SeparateQKV
from harness.onnx_graph.roundtrip.optimizers import OPTIMIZERS, optimize

ALL = SeparateQKV() & SameBlockCount() & RoleWeights() & AllowedDomains() & ProjectionOp() & NumericEqual()
Mutation = Callable[[onnx.ModelProto], None]


def _initializer(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def _edit(model: onnx.ModelProto, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    tensor = _initializer(model, name)
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(change(numpy_helper.to_array(tensor).copy())), name))


def _node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.name == name)


def _one_element(weight: np.ndarray) -> np.ndarray:
    weight[3, 5] += 0.01
    return weight


def _swap(model: onnx.ModelProto) -> None:
    _node(model, "project_q").input[1], _node(model, "project_k").input[1] = "wk", "wq"


def _merge(model: onnx.ModelProto) -> None:
    _node(model, "project_k").input[1] = "wq"


def _merge_nodes(model: onnx.ModelProto) -> None:
    _node(model, "reshape_k").input[0] = "q_flat"


def _domain(model: onnx.ModelProto) -> None:
    node = _node(model, "scale")
    index = list(model.graph.node).index(node)
    model.graph.node.insert(index, helper.make_node("BiasGelu", ["scores", "root"], ["unused"], domain="com.microsoft"))
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def _conv_projection(model: onnx.ModelProto) -> None:
    node = _node(model, "project_q")
    index = list(model.graph.node).index(node)
    model.graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(_initializer(model, "wq")).T[..., None], "wq_conv"))
    new = [
        helper.make_node("Transpose", ["h"], ["h_channels"], perm=[0, 2, 1]),
        helper.make_node("Conv", ["h_channels", "wq_conv"], ["q_channels"], name="conv_q"),
        helper.make_node("Transpose", ["q_channels"], ["q_flat"], perm=[0, 2, 1]),
    ]
    del model.graph.node[index]
    for offset, one in enumerate(new):
        model.graph.node.insert(index + offset, one)


MUTATIONS: dict[str, Mutation] = {
    "two roles swapped": _swap,
    "one weight for two roles": _merge,
    "one layer for two roles": _merge_nodes,
    "a foreign domain": _domain,
    "another operator for a projection": _conv_projection,
    **{
        f"{role} {what}": (lambda model, role=role, change=change: _edit(model, f"w{role}", change))
        for role in "qkv"
        for what, change in {
            "transposed": lambda weight: weight.T,
            "scaled": lambda weight: weight * np.float32(1.5),
            "zeroed": lambda weight: weight * 0,
            "negated": lambda weight: -weight,
            "rolled": lambda weight: np.roll(weight, 1, axis=0),
            "one element off": _one_element,
            "in half precision": lambda weight: weight.astype(np.float16).astype(np.float32),
            "rows reversed": lambda weight: weight[::-1],
        }.items()
    },
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_the_contracts_together_see_every_mutation(attention_graph: onnx.ModelProto, mutation: Mutation) -> None:
    mutated = onnx.ModelProto()
    mutated.CopyFrom(attention_graph)
    mutation(mutated)
    quick = SeparateQKV() & SameBlockCount() & RoleWeights() & AllowedDomains() & ProjectionOp()
    result = quick.check(attention_graph, mutated)
    assert result.holding is Holding.VIOLATED and ("block 0" in result.message or "com.microsoft" in result.message)


def test_a_graph_against_itself_holds(attention_graph: onnx.ModelProto) -> None:
    result = ALL.check(attention_graph, attention_graph)
    assert result.holds and result.holding is Holding.HOLDS and "SQNR inf dB" in result.message
    result.raise_unless_holds()


def test_messages_name_block_role_module_expected_and_found(attention_graph: onnx.ModelProto) -> None:
    mutated = onnx.ModelProto()
    mutated.CopyFrom(attention_graph)
    _swap(mutated)
    result = RoleWeights().check(attention_graph, mutated)
    assert [(finding.block, finding.role) for finding in result.findings] == [(0, "q"), (0, "k")]
    assert "block 0 (self) Q = project_q: expected its own weight, found MatMul project_q [32, 32]" in result.message
    assert "with the weight of block 0 (self) K = project_k" in result.message
    with pytest.raises(ContractViolation, match="RoleWeights: violated"):
        result.raise_unless_holds()


@pytest.mark.parametrize(
    ("change", "words"),
    [(lambda weight: weight.T, "the same weight transposed"), (lambda weight: weight * np.float32(0.25), "the same weight times 0.25")],
)
def test_a_wrong_weight_is_told_apart(attention_graph: onnx.ModelProto, change: Callable[[np.ndarray], np.ndarray], words: str) -> None:
    mutated = onnx.ModelProto()
    mutated.CopyFrom(attention_graph)
    _edit(mutated, "wv", change)
    assert words in RoleWeights().check(attention_graph, mutated).message


def test_a_fused_projection_is_found_again_in_the_packed_weight(attention_graph: onnx.ModelProto) -> None:
    fused = optimize(attention_graph, "onnxsim")
    result = (SeparateQKV() & NumericEqual()).check(attention_graph, fused)
    assert result.holding is Holding.VIOLATED
    assert "packed as columns 32:64 of MatMul" in result.message and "[32, 96]" in result.message
    assert "NumericEqual(golden): output y: max abs 0" in result.message, "the numbers cannot see it"


def test_an_absorbed_block_is_no_separate_one(attention_graph: onnx.ModelProto) -> None:
    absorbed = optimize(attention_graph, "onnxsim", ["fuse_qkv"])
    assert census(absorbed).counts == {"ABSORBED": 1}
    result = (SeparateQKV() & RoleWeights() & ProjectionOp()).check(attention_graph, absorbed)
    assert result.holding is Holding.VIOLATED and "absorbed by Attention" in result.message
    assert {finding.holding for finding in result.findings} == {Holding.VIOLATED, Holding.NOT_ANALYSED}


def test_both_skips_keep_everything(attention_graph: onnx.ModelProto) -> None:
    assert ALL.check(attention_graph, optimize(attention_graph, "onnxsim", ["fuse_qkv", "fuse_attention"])).holds


def test_no_attention_is_never_a_pass() -> None:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Softmax", ["x"], ["y"])], "classifier", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    for contract in (SeparateQKV(), SameBlockCount(), RoleWeights(), ProjectionOp(), QDQPreserved()):
        assert contract.check(model, model).holding is Holding.NOT_ANALYSED, contract.name


def test_a_missing_or_ambiguous_role_is_never_a_pass(attention_graph: onnx.ModelProto) -> None:
    missing = onnx.ModelProto()
    missing.CopyFrom(attention_graph)
    _node(missing, "reshape_v").input[0] = "h"  # V is the activation itself
    assert census(missing).counts == {"MISSING": 1}
    assert SeparateQKV().check(attention_graph, missing).holding is Holding.NOT_ANALYSED
    ambiguous = onnx.ModelProto()
    ambiguous.CopyFrom(attention_graph)
    position = list(ambiguous.graph.node).index(_node(ambiguous, "reshape_v"))
    ambiguous.graph.node.insert(position, helper.make_node("Add", ["v_flat", "q_flat"], ["both"]))
    _node(ambiguous, "reshape_v").input[0] = "both"
    assert census(ambiguous).counts == {"AMBIGUOUS": 1}
    assert SeparateQKV().check(attention_graph, ambiguous).holding is Holding.NOT_ANALYSED


def _inside_an_if(model: onnx.ModelProto, first: str = "", last: str = "") -> onnx.ModelProto:
    """All nodes, or those whose names begin so, within a branch; what they read is captured."""
    held = [node for node in model.graph.node if node.name.startswith(first)]
    end = next(one for one in model.graph.output if one.name == last) if last in {one.name for one in model.graph.output} else None
    out = end or helper.make_tensor_value_info(last, TensorProto.FLOAT, None)
    read = next(node.input[0] for node in held)
    inner = helper.make_graph(held, "then", [], [out])
    other = helper.make_graph([helper.make_node("Identity", [read], [f"{last}_else"])], "else", [], [_renamed(out, f"{last}_else")])
    node = helper.make_node("If", ["condition"], [last], then_branch=inner, else_branch=other)
    made = onnx.ModelProto()
    made.CopyFrom(model)
    place = next(number for number, one in enumerate(model.graph.node) if one.name.startswith(first))
    rest = [one for one in model.graph.node if not one.name.startswith(first)]
    del made.graph.node[:]
    made.graph.node.extend([*rest[:place], node, *rest[place:]])
    made.graph.input.append(helper.make_tensor_value_info("condition", TensorProto.BOOL, []))
    return made


def _renamed(value: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
    other = onnx.ValueInfoProto()
    other.CopyFrom(value)
    other.name = name
    return other


def test_attention_inside_an_if_is_reported_and_not_passed(attention_graph: onnx.ModelProto) -> None:
    model = _inside_an_if(attention_graph, last="y")
    found = census(model)
    assert found.counts == {"AMBIGUOUS": 1} and "inside a subgraph" in found.text()
    assert SeparateQKV().check(model, model).holding is Holding.NOT_ANALYSED


def _chain(block: onnx.ModelProto, count: int) -> onnx.ModelProto:
    """The block several times, each with weights of its own."""
    chain = onnx.compose.add_prefix(block, "a_")
    for number, prefix in enumerate("bcd"[: count - 1], 1):
        other = onnx.compose.add_prefix(block, f"{prefix}_")
        for weight in other.graph.initializer:
            if weight.data_type == TensorProto.FLOAT:
                weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * (1 + number / 8), weight.name))
        ends = [(chain.graph.output[0].name, other.graph.input[0].name)]
        chain = onnx.compose.merge_models(chain, other, io_map=ends)
    return chain


@pytest.mark.parametrize("block", ["a", "b", "c"])
def test_a_block_that_enters_or_leaves_an_if_is_not_analysed_and_none_is_called_moved(block: str, attention_graph: onnx.ModelProto) -> None:
    plain = _chain(attention_graph, 3)
    other = _inside_an_if(plain, f"{block}_", f"{block}_y")
    places = [
        [(len(one.place.above), len(one.place.below), set(one.place.outputs)) for one in census(model).read] for model in (plain, other)
    ]
    assert sorted(places[0], key=str) == sorted(places[1], key=str) == [(0, 2, {0}), (1, 1, {0}), (2, 0, {0})]
    for before, after in ((plain, other), (other, plain)):
        report = RoleWeights().check(before, after)
        assert report.holding is Holding.NOT_ANALYSED, report


def test_several_blocks_inside_of_one_if_are_in_no_order_that_is_known(attention_graph: onnx.ModelProto) -> None:
    plain = _chain(attention_graph, 2)
    other = _inside_an_if(plain, "", "b_y")
    assert [one.place.beside for one in census(other).blocks] == [{1}, {0}]
    assert RoleWeights().check(plain, other).holding is RoleWeights().check(other, plain).holding is Holding.NOT_ANALYSED


def test_local_functions_are_looked_into(attention_graph: onnx.ModelProto) -> None:
    nodes = [node for node in attention_graph.graph.node if node.name.startswith("project_") and node.name != "project_out"]
    function = helper.make_function(
        "local", "Project", ["h", "w"], ["p"], [helper.make_node("MatMul", ["h", "w"], ["p"])], [helper.make_opsetid("", 17)]
    )
    model = onnx.ModelProto()
    model.CopyFrom(attention_graph)
    for node in nodes:
        mine = _node(model, node.name)
        mine.op_type, mine.domain = "Project", "local"
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("local", 1))
    assert census(model).counts == {"SEPARATE": 1}
    assert RoleWeights().check(attention_graph, model).holds


def test_the_orientation_is_part_of_the_fingerprint() -> None:
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert fingerprint(weight) != fingerprint(weight.T)
    assert fingerprint(weight) == fingerprint(np.asfortranarray(weight)) and fingerprint(-np.zeros((2, 2))) == fingerprint(np.zeros((2, 2)))


def test_contracts_combine_and_have_names(attention_graph: onnx.ModelProto) -> None:
    combined = contract_from_names("separate-qkv, role-weights,numeric-equal")
    assert isinstance(combined, AllOf) and combined.name == "SeparateQKV & RoleWeights & NumericEqual(golden)"
    assert all(one.make().name for one in CONTRACTS.values())
    with pytest.raises(UserInputError, match="did you mean 'separate-qkv'"):
        contract_from_names("separate_qkv")
    with pytest.raises(UserInputError, match="nothing to check is never a pass"):
        contract_from_names(" , ")


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x07" * 40])
def test_what_is_no_model_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(UserInputError, match=r"model\.onnx|holds no node"):
        census(path)


def test_missing_external_data_and_missing_files_are_named(attention_graph: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(attention_graph, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    (tmp_path / "m.data").unlink()
    with pytest.raises(UserInputError, match="external data cannot be read"):
        census(tmp_path / "m.onnx")
    with pytest.raises(UserInputError, match="there is no such file"):
        census(tmp_path / "none.onnx")


def _quantized(model: onnx.ModelProto) -> onnx.ModelProto:
    """Store the three projections in blocks of four bits."""
    graph = onnx.ModelProto()
    graph.CopyFrom(model)
    for role in "qkv":
        weight = numpy_helper.to_array(_initializer(graph, f"w{role}"))
        scale = np.abs(weight).reshape(2, 16, 32).max(axis=1) / 7
        codes = np.clip(np.rint(weight / np.repeat(scale, 16, axis=0)), -8, 7).astype(np.int8)
        graph.graph.initializer.remove(_initializer(graph, f"w{role}"))
        graph.graph.initializer.append(helper.make_tensor(f"c{role}", TensorProto.INT4, codes.shape, codes.flatten()))
        graph.graph.initializer.append(numpy_helper.from_array(scale.astype(np.float32), f"s{role}"))
        graph.graph.node.insert(0, helper.make_node("DequantizeLinear", [f"c{role}", f"s{role}"], [f"w{role}"], axis=0, block_size=16))
    graph.opset_import[0].version, graph.ir_version = 21, 10
    onnx.checker.check_model(graph, full_check=True)
    return graph


@pytest.mark.parametrize("layer", ["table", "project_out"])
def test_codes_of_what_is_no_role_are_looked_for_where_roles_have_none(attention_graph: onnx.ModelProto, layer: str) -> None:
    graph = attention_graph.graph
    graph.node.insert(0, helper.make_node("Gather", ["table", "ids"], ["x"], name="table"))
    shape = [one.dim_value for one in graph.input[0].type.tensor_type.shape.dim]
    graph.input[0].CopyFrom(helper.make_tensor_value_info("ids", TensorProto.INT64, shape[:2]))
    graph.initializer.append(numpy_helper.from_array(np.random.default_rng(0).standard_normal((9, shape[2])).astype(np.float32), "table"))
    place = list(_node(attention_graph, layer).input).index(name := "table" if layer == "table" else "wo")
    codes = np.rint(numpy_helper.to_array(_initializer(attention_graph, name)) * 16).clip(-99, 99).astype(np.int8)

    def stored(more: float | None) -> onnx.ModelProto:
        """In codes, or as floats that are so much more."""
        made = onnx.ModelProto.FromString(attention_graph.SerializeToString())
        if more is not None:
            _edit(made, name, lambda _: codes * np.float32(1 / 16) + np.float32(more))
            return made
        _node(made, layer).input[place] = "numbers"
        made.graph.node.insert(0, helper.make_node("DequantizeLinear", ["codes", "scale"], ["numbers"]))
        made.graph.initializer.extend(numpy_helper.from_array(one, of) for of, one in (("codes", codes), ("scale", np.float32(1 / 16))))
        return made

    in_codes = stored(None)
    assert QDQPreserved().check(in_codes, in_codes).holds and QDQPreserved().check(in_codes, optimize(in_codes, "ort-basic")).holds
    for more in (0, 0.01):
        assert QDQPreserved().check(in_codes, stored(more)).holding is Holding.VIOLATED
    assert QDQPreserved().check(stored(0), in_codes).holding is Holding.NOT_ANALYSED
    absorbed = optimize(in_codes, "onnxsim", skip=["fuse_qkv"])
    assert census(absorbed).counts == {"ABSORBED": 1}
    assert QDQPreserved().check(absorbed, absorbed).holding is Holding.NOT_ANALYSED


def test_quantized_projections_are_read_as_what_they_mean(attention_graph: onnx.ModelProto) -> None:
    quantized = _quantized(attention_graph)
    found = census(quantized)
    assert found.counts == {"SEPARATE": 1} and {found.blocks[0].projections[role][0].stored for role in "qkv"} == {"codes"}
    assert RoleWeights(min_sqnr_db=15).check(attention_graph, quantized).holds
    assert RoleWeights().check(attention_graph, quantized).holding is Holding.VIOLATED
    assert QDQPreserved().check(quantized, quantized).holds
    assert QDQPreserved().check(quantized, attention_graph).holding is Holding.VIOLATED
    kernels = optimize(quantized, "ort-all")
    assert "MatMulNBits" in {node.op_type for node in kernels.graph.node}
    assert (QDQPreserved() & SeparateQKV() & RoleWeights()).check(quantized, kernels).holds, "MatMulNBits holds the same numbers"
    numbers = np.arange(32, dtype=np.int32) // 16  # the group of each column, as those of GPTQ with an order of activations
    assert (QDQPreserved() & RoleWeights()).check(quantized, _in_groups(kernels, numbers)).holds
    for contract in (QDQPreserved(), RoleWeights()):
        assert contract.check(quantized, _in_groups(kernels, numbers[::-1])).holding is Holding.VIOLATED
    packed = _in_groups(kernels, numbers)
    for node in packed.graph.node:
        if node.op_type == "MatMulNBits":
            node.attribute.append(helper.make_attribute("weight_prepacked", 1))  # in whatever order a back end likes
    for unread in (_in_groups(kernels, numbers + 5), packed):
        assert RoleWeights().check(quantized, unread).holding is Holding.NOT_ANALYSED


def test_codes_that_were_packed_are_told_as_packed(attention_graph: onnx.ModelProto) -> None:
    quantized = _quantized(attention_graph)
    packed = onnx.ModelProto.FromString(quantized.SerializeToString())
    layers = [next(node for node in packed.graph.node if f"w{role}" in node.input) for role in "qkv"]
    codes, scales = (np.concatenate([numpy_helper.to_array(_initializer(packed, f"{of}{role}")) for role in "qkv"], 1) for of in "cs")
    packed.graph.initializer.append(helper.make_tensor("codes", TensorProto.INT4, codes.shape, codes.astype(np.int8).flatten()))
    packed.graph.initializer.append(numpy_helper.from_array(scales, "scales"))
    nodes = [
        helper.make_node("DequantizeLinear", ["codes", "scales"], ["weight"], axis=0, block_size=16),
        helper.make_node("MatMul", [layers[0].input[0], "weight"], ["all"], name="qkv"),
        helper.make_node("Split", ["all"], [node.output[0] for node in layers], axis=-1, num_outputs=3),
    ]
    at = list(packed.graph.node).index(layers[0])
    others = list(packed.graph.node)
    kept = [*others[:at], *nodes, *(node for node in others[at:] if node not in layers)]
    packed.graph.ClearField("node")
    packed.graph.node.extend(kept)
    result = QDQPreserved().check(quantized, packed)
    assert result.holding is Holding.VIOLATED
    for finding, columns in zip(result.findings, ("0:32", "32:64", "64:96"), strict=True):
        assert f"packed as columns {columns} of MatMul qkv [32, 96]" in finding.text


def _in_groups(kernels: onnx.ModelProto, numbers: np.ndarray) -> onnx.ModelProto:
    graph = onnx.ModelProto()
    graph.CopyFrom(kernels)
    graph.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(numbers), "groups"))
    for node in graph.graph.node:
        if node.op_type == "MatMulNBits":
            node.input.extend([""] * (4 - len(node.input)) + ["groups"])
    return graph


def test_numbers_have_a_policy_and_a_limit(attention_graph: onnx.ModelProto) -> None:
    close = onnx.ModelProto()
    close.CopyFrom(attention_graph)
    _edit(close, "wo", lambda weight: weight * np.float32(1.001))
    assert NumericEqual("golden").check(attention_graph, close).holding is Holding.VIOLATED
    assert NumericEqual("deploy").check(attention_graph, close).holds
    _edit(close, "wo", lambda weight: weight * np.float32(np.nan))
    assert NumericEqual("deploy").check(attention_graph, close).holding is Holding.VIOLATED
    with pytest.raises(UserInputError, match="no policy 'loose'"):
        NumericEqual("loose")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        *((lambda limit=limit: RoleWeights(limit), "is no limit") for limit in (0, -10, float("-inf"), float("inf"), float("nan"))),
        *((lambda limit=limit: RoleWeights(limit), "min_sqnr_db: ") for limit in (True, "15")),
        *((lambda other=other: SeparateQKV() & other, "combines no two contracts") for other in ("role-weights", None, NumericEqual)),
        (lambda: NumericEqual(inputs={"x": [[1.0]]}), "a mapping of names to numpy arrays belongs"),
        (lambda: NumericEqual(seed=-1), "seed=-1 is below 0"),
        (lambda: NumericEqual(seed="a"), "a whole number belongs"),
        (lambda: AllowedDomains("com.microsoft"), "a list of names belongs"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(UserInputError, match=said):
        make()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_give_the_projections_their_names() -> None:
    torch = pytest.importorskip("torch")

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(16)
            self.query, self.key, self.value = (torch.nn.Linear(16, 16, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(x)
            return torch.softmax(self.query(h) @ self.key(h).transpose(-1, -2), -1) @ self.value(h)

    module = Attention().eval()
    buffer = io.BytesIO()
    torch.onnx.export(module, (torch.ones(1, 4, 16),), buffer, dynamo=False, opset_version=17)
    baseline = take_baseline(buffer.getvalue(), module)
    assert [one.module for one in baseline.of_block(0)] == ["query", "key", "value"]


@pytest.mark.parametrize("name", [name for name, one in OPTIMIZERS.items() if one.installed])
def test_every_optimizer_runs_and_leaves_the_given_model_alone(attention_graph: onnx.ModelProto, name: str) -> None:
    before = attention_graph.SerializeToString()
    result = (SameBlockCount() & NumericEqual("golden")).check(attention_graph, optimize(attention_graph, name))
    assert result.holds, result.message
    assert attention_graph.SerializeToString() == before


def test_an_optimizer_that_crashes_or_does_not_exist_is_named(attention_graph: onnx.ModelProto, third_party: ModuleType) -> None:
    from harness.onnx_graph.roundtrip.optimizers import OptimizerFailure

    broken = onnx.ModelProto()
    broken.CopyFrom(attention_graph)
    _node(broken, "scale").op_type = "NoSuchOperator"
    with pytest.raises(OptimizerFailure, match="ort-all: it failed with"):
        optimize(broken, "ort-all")
    with pytest.raises(UserInputError, match="'onnxsimm' is none that is known"):
        optimize(attention_graph, "onnxsimm")
    with pytest.raises(UserInputError, match="onnxslim has no passes that can be skipped"):
        optimize(attention_graph, "onnxslim", ["fuse_qkv"])
