"""NumericEqual: open sizes, outputs that are no tensors, graphs that refuse what the other takes, and what stands beside huge values."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from harness.onnx_graph.contracts.base import ContractResult, Holding
from harness.onnx_graph.contracts.numbers import NumericEqual
from harness.onnx_graph.graph.run_session import GraphRefused, Limit, output_row

OPEN = "(float[b, t, 16] x) => (float[b, t, 16] y)"
PARTS = "(float[b, t, 16] x) => (seq(float[b, t, 1]) y)"
NOISE = ("ONNXRuntimeError", "onnxruntime_src", "Status Message", "Non-zero")


def _model(text: str, signature: str = OPEN, domain: str = "com.acme", **held: object) -> onnx.ModelProto:
    made = parser.parse_graph(f"g {signature} {{ {text} }}")
    made.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in held.items())
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(domain, 1)]
    return helper.make_model(made, opset_imports=opsets, ir_version=9)


def _reshaped(*sizes: int) -> onnx.ModelProto:
    return _model("r = Reshape(x, to) s = Softmax<axis = 1>(r) y = Reshape(s, back)", to=[*sizes, 4, 4], back=[*sizes, 16])


def _placed(last: int) -> onnx.ModelProto:
    """A table of places, up to the last one."""
    text = (
        "n = Shape<start = 1, end = 2>(x) m = Squeeze(n) r = Range(none, m, one) c = Clip(r, none, last) p = Gather(table, c) y = Add(x, p)"
    )
    return _model(text, none=0, one=1, last=last, table=np.arange(64 * 16, dtype=np.float32).reshape(64, 16))


def _check(before: onnx.ModelProto, after: onnx.ModelProto) -> ContractResult:
    assert NumericEqual().check(before, before).holds
    result = NumericEqual().check(before, after)
    assert not any(word in result.message for word in NOISE)
    return result


@pytest.mark.parametrize("frozen", [(2, -1), (-1, 7), (1, -1), (-1, 8)])
def test_an_open_size_that_was_frozen_is_seen_whatever_it_was_frozen_at(frozen: tuple[int, int]) -> None:
    assert NumericEqual().check(_reshaped(0, -1), _reshaped(0, 0)).holds
    assert _check(_reshaped(0, -1), _reshaped(*frozen)).holding is Holding.VIOLATED


@pytest.mark.parametrize("last", [6, 7, 9])
def test_places_that_were_cut_off_behind_the_length_of_most_drawings_are_seen(last: int) -> None:
    assert _check(_placed(63), _placed(last - 1)).holding is Holding.VIOLATED


def test_sizes_that_the_exported_graph_refuses_are_named() -> None:
    said = "the exported graph refuses open sizes, which were not looked at: a length of 1; one row of length 1"
    assert said in _check(_reshaped(-1, 7), _reshaped(-1, 7)).message
    assert "refuses" not in _check(_reshaped(0, -1), _reshaped(0, -1)).message


def test_an_output_that_never_changes_is_noted_also_where_its_size_does() -> None:
    model = _model("z = Mul(x, none) y = Add(z, row)", none=np.float32(0), row=np.arange(16, dtype=np.float32))
    assert "output y did not change with the inputs that were drawn" in NumericEqual().check(model, model).message


def test_the_elements_of_a_sequence_are_compared_one_by_one() -> None:
    split = "{0} y = SplitToSequence<axis = 2>(r)"
    before = _model(split.format("r = Relu(x)"), PARTS)
    wrong = _check(before, _model(split.format("a = Mul(x, near) r = Relu(a)"), PARTS, near=np.float32(1.001)))
    assert wrong.holding is Holding.VIOLATED and "output y[" in wrong.message
    fewer = _check(before, _model("r = Relu(x) y = SplitToSequence<axis = 2>(r, two)", PARTS, two=2))
    assert "output y: 16 arrays in it became 8" in fewer.message


def _later() -> onnx.ModelProto:
    """What optimizers write that follow the newest ONNX."""
    model = _reshaped(0, -1)
    model.ir_version = 99
    return model


REFUSED = {
    "frozen": (_reshaped(-1, 8), Holding.VIOLATED, "the optimized graph cannot run on x [2, 7, 16]: running Reshape node"),
    "broken": (_model("y = MatMul(x, w)", w=np.ones((3, 3), np.float32)), Holding.VIOLATED, "the optimized graph cannot be loaded"),
    "foreign": (_model("y = com.acme.Foo(x)"), Holding.NOT_ANALYSED, "the optimized graph cannot be loaded: Fatal error: com.acme:Foo"),
    "later": (_later(), Holding.NOT_ANALYSED, "the optimized graph cannot be loaded: Unsupported model IR version: 99"),
    "asks": (_model("y = Mul(x, k)", f"(float[16] k, {OPEN[1:]}"), Holding.VIOLATED, "input k is new: the optimized graph"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_exported_graph_takes_and_the_optimized_one_refuses_is_told(case: str) -> None:
    after, holding, words = REFUSED[case]
    result = _check(_reshaped(0, -1), after)
    assert result.holding is holding and words in result.message, result.message


def test_an_opset_that_is_newer_than_onnxruntime_says_nothing_of_the_graph() -> None:
    """In the words of onnxruntime 1.31, for which of them it knows depends on the release."""
    said = (
        "[ONNXRuntimeError] : 1 : FAIL : Load model from /tmp/m.onnx failed:/src/core/model_load_utils.h:46 void "
        "onnxruntime::model_load_utils::ValidateOpsetForDomain(const std::string&, int) ONNX Runtime only *guarantees* support for models "
        "stamped with official released onnx opset versions. Current official support for domain ai.onnx is till opset 26.\n"
    )
    refused = GraphRefused(RuntimeError(said), "the optimized graph", "be loaded")
    assert refused.is_unknown
    assert str(refused).startswith("onnxruntime: the optimized graph cannot be loaded: ONNX Runtime only")
    assert str(refused).endswith("is till opset 26")


def test_a_type_without_kernels_is_named_with_a_remedy() -> None:
    weight = helper.make_tensor("w", TensorProto.BFLOAT16, [4, 4], np.ones(16))
    x, y = (helper.make_tensor_value_info(name, TensorProto.BFLOAT16, [2, 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    result = NumericEqual().check(model, model)
    assert result.holding is Holding.NOT_ANALYSED
    assert "it holds bfloat16, which few kernels of a CPU take; export in float32 to compare numbers" in result.message


def _with_default(text: str, *listed: str, held: str = "k") -> onnx.ModelProto:
    model = _model(text, **{name: np.float32(2) for name in held})
    model.graph.input.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in listed)
    model.ir_version = 9
    return model


def test_what_a_caller_may_give_the_exported_graph_the_optimized_one_takes() -> None:
    unread = _check(_with_default("y = Neg(x)", "z", held=""), _with_default("y = Neg(x)", held=""))
    assert unread.holding is Holding.VIOLATED and "input z is gone: the optimized graph refuses who gives it" in unread.message
    before = _with_default("y = Mul(x, k)", "k")
    asked = _check(before, _with_default("y = Mul(x, k)", "k", held=""))
    assert asked.holding is Holding.VIOLATED and "input k has lost its value" in asked.message
    folded = _check(before, _with_default("y = Mul(x, k)"))
    assert folded.holds and "k had a value in the file, could be given another, and no longer can" in folded.message


@pytest.mark.parametrize("case", ["broken", "foreign"])
def test_an_exported_graph_that_does_not_run_is_not_analysed(case: str) -> None:
    result = NumericEqual().check(REFUSED[case][0], REFUSED[case][0])
    assert result.holding is Holding.NOT_ANALYSED and "the exported graph cannot be loaded" in result.message


def _columns(values: np.ndarray) -> None:
    values[:, :3] = np.finfo(np.float32).min


def _scattered(values: np.ndarray) -> None:
    values[np.arange(40) % 8, np.arange(40)] = -1e9


def _twice(values: np.ndarray) -> None:
    values[0, :20], values[1, :20], values[2, 5:9] = -1e4, -2e4, np.finfo(np.float32).min


def _copied(values: np.ndarray) -> None:
    """An input beside numbers that are small."""
    values[:, :20] = np.random.default_rng(1).standard_normal((8, 20)) * 1e8


@pytest.mark.parametrize("fill", [_columns, _scattered, _twice, _copied])
@pytest.mark.parametrize(("error", "limit_db", "is_wrong"), [(1e-6, 90.0, False), (0.1, 90.0, True), (0.1, 35.0, True)])
def test_what_both_graphs_fill_in_hides_nothing(fill, error: float, limit_db: float, is_wrong: bool) -> None:
    before = np.random.default_rng(0).standard_normal((8, 40)).astype(np.float32)
    after = before * np.float32(1 + error)
    for values in (before, after):
        fill(values)
    told = is_wrong and not (fill is _copied and limit_db == 35.0)  # no fill, and a slice may be wrong there
    assert output_row("y", before, after).wrong(Limit.of(limit_db)) is told


@pytest.mark.parametrize("fill", [-1e9, 1e300])
def test_a_fill_that_moved_by_its_own_rounding_passes_and_one_that_moved_further_does_not(fill: float) -> None:
    before = np.random.default_rng(0).standard_normal((8, 40))
    before[:, :3] = fill
    for factor, is_wrong in ((1 + 1e-7, False), (1.1, True)):
        after = before.copy()
        after[:, :3] *= factor
        assert output_row("y", before, after).wrong(Limit.of(90.0)) is is_wrong
