"""NumericEqual looks at what masks, flags and ids do: every input has several drawings."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from compressor.errors import UserInputError
from harness.onnx_graph.contracts.base import Holding
from harness.onnx_graph.contracts.numbers import NumericEqual
from harness.onnx_graph.graph.drawn_inputs import example_inputs, other_inputs
from harness.onnx_graph.graph.reading import load_graph

MASKED = "f = Cast<to = 1>({0}) i = Sub(one, f) b = Mul(i, far) r = Add(x, b) w = Softmax(r) y = Mul(w, x)"
UNMASKED = "w = Softmax(x) y = Mul(w, x)"
FLAGGED = "n = Neg(x) y = Where(use_cache, x, n)"


def _model(inputs: str, text: str) -> onnx.ModelProto:
    made = parser.parse_graph(f"g (float[3, 6] x{inputs}) => (float[3, 6] y) {{ {text} }}")
    held = {
        "one": np.array(1, np.float32),
        "far": np.array(-1e9, np.float32),
        "two": np.array(2),
        "limit": np.array(1400, np.float32),
        "row": np.ones(1, np.float32),
    }
    made.initializer.extend(numpy_helper.from_array(array, name) for name, array in held.items() if name in text)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("kind", ["int64", "int32", "bool", "float"])
@pytest.mark.parametrize("name", ["attention_mask", "key_padding_mask", "mask"])
@pytest.mark.parametrize("policy", ["golden", "deploy"])
def test_a_mask_that_is_ignored_is_seen(kind: str, name: str, policy: str) -> None:
    inputs = f", {kind}[3, 6] {name}"
    model, damaged = _model(inputs, MASKED.format(name)), _model(inputs, UNMASKED)
    assert NumericEqual(policy).check(model, model).holds
    result = NumericEqual(policy).check(model, damaged)
    assert result.holding is Holding.VIOLATED and "on drawing 2 of 3" in result.message


def test_what_is_cut_off_where_all_floats_have_one_sign_is_seen() -> None:
    """As by a ReLU6 behind a sum over a bright picture: of numbers around zero the sum stays below."""
    text = "s = ReduceSum(x) {} m = Mul(x, c) y = Add(x, m)"
    model, cut = (_model("", text.format(how)) for how in ("c = Relu(s)", "r = Relu(s) c = Min(r, {})".format("limit")))
    for one in cut.graph.initializer:
        one.CopyFrom(numpy_helper.from_array(np.array(100, np.float32), one.name))
    result = NumericEqual().check(model, cut)
    assert result.holding is Holding.VIOLATED and "where all inputs are large" in result.message


LARGE = "p = Mul(x, x) s = ReduceSum(p) l = Sub(s, limit) o = Relu(l) y = Add(x, o)"


def test_what_large_inputs_alone_reach_is_seen() -> None:
    """As scores outgrow a mask that is too soft: the sum of squares stays below the limit unless all inputs are large at once."""
    model, other = _model("", LARGE), _model("", "y = Identity(x)")
    assert NumericEqual().check(model, model).holds
    for before, after in ((model, other), (other, model)):
        result = NumericEqual().check(before, after)
        assert result.holding is Holding.VIOLATED and "where all inputs are large" in result.message
    given = {"x": np.eye(3, 6, dtype=np.float32)}
    assert NumericEqual(inputs=given).check(model, other).holds


LOW = "a = Abs(x) k = Transpose<perm = [0, 2, 1]>(a) p = MatMul(a, k) n = Neg(p) s = Mul(n, small)"  # all below a soft fill where large
BOTH = "k = Transpose<perm = [0, 2, 1]>(x) p = MatMul(x, k) s = Mul(p, small)"  # what is hidden above the others by more than is taken off
SOFTENED = {
    "true keeps": ("bool[2, 1, 7] m", f"{LOW} r = Where(m, s, far)"),
    "true hides": ("bool[2, 1, 7] hidden", f"{LOW} r = Where(hidden, far, s)"),
    "integers": ("int64[2, 1, 7] attention_mask", f"{BOTH} f = Cast<to = 1>(attention_mask) i = Sub(one, f) b = Mul(i, far) r = Add(s, b)"),
    "floats": ("float[2, 1, 7] padding_mask", f"{BOTH} i = Sub(one, padding_mask) b = Mul(i, far) r = Add(s, b)"),
    "a flag hides": ("bool[1] keep", f"{LOW} h = Or(keep, even) r = Where(h, s, far)"),
}


def _masked(given: str, text: str, far: float) -> onnx.ModelProto:
    """Attention of two sentences of seven tokens."""
    body = f"{text} w = Softmax(r) y = MatMul(w, x)"
    made = parser.parse_graph(f"g (float[2, 7, 16] x, {given}) => (float[2, 7, 16] y) {{ {body} }}")
    held = {"far": np.float32(far), "one": np.float32(1), "small": np.float32(0.2), "even": np.arange(7) % 2 == 0}
    made.initializer.extend(numpy_helper.from_array(np.asarray(one), name) for name, one in held.items() if name in body)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("mask", SOFTENED)
def test_a_mask_that_large_scores_outgrow_is_seen_whatever_its_type(mask: str) -> None:
    """Of either polarity: as the large drawing has the holes of the others, and their flags."""
    sound, soft = (_masked(*SOFTENED[mask], far) for far in (-1e9, -100.0))
    assert NumericEqual().check(sound, sound).holds
    assert NumericEqual().check(sound, soft).holding is Holding.VIOLATED


def test_where_rounding_decides_large_inputs_say_nothing() -> None:
    """Exported by one program and another: sums of another order, whose rounding a sine makes as large as its output."""
    first = "p = Mul(x, x) s = ReduceSum(p) a = Mul(s, s) b = Mul(a, s) y = Sin(b)"
    report = NumericEqual().check(_model("", first), _model("", first))
    assert report.holds and any("says nothing where all inputs are large" in note for note in report.notes)


SIZES = {
    "[2, 6], [2, 5]": "input x: [2, 6] became [2, 5]",
    "[n, 6], [2, 6]": "input x: [n, 6] became [2, 6]",
    "[2, 6], [2, 6, 1]": "input x: [2, 6] became [2, 6, 1]",
    "[2, 6], [n, m]": "",
    "[n, 6], [k, 6]": "",
}


@pytest.mark.parametrize("sizes", SIZES)
def test_an_input_that_takes_less_than_before_is_a_violation(sizes: str) -> None:
    before, after = (
        helper.make_model(
            parser.parse_graph(f"g (float[{one}] x) => (float[a, b] y) {{ y = Neg(x) }}"),
            opset_imports=[helper.make_opsetid("", 18)],
            ir_version=9,
        )
        for one in sizes.strip("[]").split("], [")
    )
    report = NumericEqual().check(before, after)
    assert report.holds is not bool(SIZES[sizes]) and SIZES[sizes] in report.message


def test_both_values_of_a_flag_are_tried() -> None:
    model = _model(", bool use_cache", FLAGGED)
    assert NumericEqual().check(model, model).holds
    assert NumericEqual().check(model, _model(", bool use_cache", "y = Identity(x)")).holding is Holding.VIOLATED


@pytest.mark.parametrize("sizes", [[2, 7], [1, 5], [2, 1, 7, 7], [2, 3], [3, 2]])
def test_masks_hold_both_values_in_every_row_and_rows_differ(sizes: list[int]) -> None:
    values = [helper.make_tensor_value_info(name, kind, sizes) for name, kind in (("mask", TensorProto.BOOL), ("ids", TensorProto.INT64))]
    model = helper.make_model(helper.make_graph([helper.make_node("Cast", ["mask"], ["y"], to=1)], "g", values, []))
    first = example_inputs(model)
    for other in other_inputs(model, first):
        assert all(other[name].dtype == first[name].dtype and not np.array_equal(other[name], first[name]) for name in first)
        rows = other["mask"].reshape(-1, sizes[-1])
        assert rows.any(axis=1).all() and not rows.all(axis=1).any()
        assert sizes[-1] == 2 or all((one != two).any() for one, two in itertools.pairwise(rows))


def test_inputs_that_the_graph_refuses_keep_their_values_and_are_named() -> None:
    """The mask is an index of a table with one row from its end: what it leaves out lies outside of the table."""
    text = "m = Sub(mask, two) g = Gather(row, m) a = Add(x, g) n = Neg(a) y = Where(flag, a, {0})"
    inputs = ", int64[3, 6] mask, bool flag"
    model = _model(inputs, text.format("n"))
    result = NumericEqual().check(model, model)
    assert result.holds and "this was not seen in full: mask had the same values throughout" in result.message
    assert NumericEqual().check(model, _model(inputs, text.format("a"))).holding is Holding.VIOLATED


def test_an_output_with_a_new_name_is_noted_and_one_that_moved_is_damage() -> None:
    model = _model("", "y = Neg(x)")
    renamed = onnx.ModelProto()
    renamed.CopyFrom(model)
    renamed.graph.node[0].output[0] = renamed.graph.output[0].name = "z"
    result = NumericEqual().check(model, renamed)
    assert result.holds and "output y is named z now, and programs that fetch it by name break" in result.message
    both = _model("", "y = Neg(x) z = Neg(x)")
    both.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [3, 6]))
    moved = onnx.ModelProto()
    moved.CopyFrom(both)
    moved.graph.output.reverse()
    result = NumericEqual().check(both, moved)
    assert result.holding is Holding.VIOLATED and "output y: z is found in its place" in result.message


def test_a_pipe_or_a_device_is_named_as_what_it_is() -> None:
    with pytest.raises(UserInputError, match="/dev/null: this is a pipe or a device"):
        NumericEqual().check("/dev/null", "/dev/null")


@pytest.mark.parametrize("before", ["Identity", "Neg"])
@pytest.mark.parametrize(
    "damage", ["c = Cast<to = 16>(x) d = Cast<to = 1>(c)", "c = Cast<to = 10>(x) d = Cast<to = 1>(c)", "d = Clip(x, low, high)"]
)
def test_an_input_that_is_rounded_or_cut_off_is_seen(before: str, damage: str) -> None:
    sound, damaged = _model("", f"y = {before}(x)"), _model("", f"{damage} y = {before}(d)")
    damaged.graph.initializer.extend(numpy_helper.from_array(np.float32(at), name) for at, name in ((-4, "low"), (4, "high")))
    assert NumericEqual().check(sound, sound).holds
    assert NumericEqual().check(sound, damaged).holding is Holding.VIOLATED


@pytest.mark.parametrize("damage", ["c = Cast<to = 3>(n) d = Cast<to = 7>(c)", "d = Abs(n)"])
def test_integers_that_index_no_table_are_drawn_wide(damage: str) -> None:
    sound, damaged = (_model(", int64[3, 6] n", f"{text} f = Cast<to = 1>(d) y = Add(x, f)") for text in ("d = Identity(n)", damage))
    assert NumericEqual().check(sound, damaged).holding is Holding.VIOLATED


def test_rows_of_a_table_that_no_id_named_are_counted_in_a_note() -> None:
    model = _model(", int64[3, 6] ids", "g = Gather(table, ids) y = Add(x, g)")
    model.graph.initializer.append(numpy_helper.from_array(np.arange(1000, dtype=np.float32), "table"))
    (note,) = [note for note in NumericEqual().check(model, model).notes if "rows of" in note]
    assert "of tables only these rows were looked at" in note and " of 1,000 rows of table" in note


def test_rows_that_ids_of_any_size_named_are_counted() -> None:
    """A row counts as looked at if, and only if, its damage is told."""
    text = "g (int64[batch, seq] ids) => (float[batch, seq] y) { y = Gather(table, ids) }"

    def graph(damaged: int | None = None) -> onnx.ModelProto:
        made, table = parser.parse_graph(text), np.arange(97, dtype=np.float32)
        table[slice(0, 0) if damaged is None else damaged] += 50
        made.initializer.append(numpy_helper.from_array(table, "table"))
        return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)

    told = sum(not NumericEqual().check(graph(), graph(row)).holds for row in range(97))
    (note,) = [one for one in NumericEqual().check(graph(), graph()).notes if "rows of" in one]
    assert note.endswith(f" {told} of 97 rows of table")


COMPUTED = {
    "of buckets": "n = Div(ids, seven) g = Gather(table, n)",
    "of the second half": "b = Sub(ids, half) m = Max(b, zero) g = Gather(table, m)",
    "of places": "s = Shape<start = 1, end = 2>(ids) q = Squeeze(s) r = Range(zero, q, one) n = Div(r, seven) g = Gather(table, n)",
    "from the end": "n = Neg(ids) g = Gather(table, n)",
    "of the first of two": (
        "d = Div(ids, seven) h = Unsqueeze(d, last) o = Mul(h, zero) z = Add(o, far) n = Concat<axis = -1>(h, z) g = GatherND(square, n)"
    ),
    "cut to a length": "s = Shape<start = 1, end = 2>(ids) h = Div(s, seven) g = Slice(table, flat, h, flat)",
    "of a router": "h = Unsqueeze(ids, last) l = Mul(h, few) n = ArgMax<axis = -1, keepdims = 0>(l) g = Gather(table, n)",
    "in a branch": "n = Div(ids, seven) g = If(yes) <then_branch=a() => (h) {h = Gather(table, n)}, else_branch=b() => (k) {k = Neg(w)}>",
}
NUMBERS = {
    "seven": np.array(7),
    "far": np.array(20),
    "half": np.array(12),
    "zero": np.array(0),
    "one": np.array(1),
    "last": np.array([-1]),
    "yes": np.array(True),
    "flat": np.array([0]),
    "few": np.array([1, -1, 0]),
    "w": np.float32(2),
}


@pytest.mark.parametrize("way", COMPUTED)
def test_rows_that_computed_ids_named_are_counted(way: str) -> None:
    """Each row is damaged in turn: those that are told are those that the note counts."""
    text, rows = COMPUTED[way], 24

    def graph(damaged: int | None = None) -> onnx.ModelProto:
        made, table = parser.parse_graph(f"g (int64[batch, seq] ids) => (float[m, n] y) {{ {text} y = Neg(g) }}"), np.arange(rows) + 1.0
        table[slice(0, 0) if damaged is None else damaged] += 50
        tables = {"table": table.astype(np.float32), "square": np.tile(table[:, None], rows).astype(np.float32)}
        arrays = {
            name: one
            for name, one in (NUMBERS | tables).items()
            if name in text.replace(",", " ").replace(")", " ").replace("(", " ").split()
        }
        made.initializer.extend(numpy_helper.from_array(one, name) for name, one in arrays.items())
        made.output[0].type.tensor_type.ClearField("shape")
        return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)

    told = sum(not NumericEqual().check(graph(), graph(row)).holds for row in range(rows))
    notes = [one for one in NumericEqual().check(graph(), graph()).notes if "rows of" in one]
    assert 0 < told < rows and [
        note.endswith(f": {told} of {rows} rows of {'square' if 'square' in text else 'table'}") for note in notes
    ] == [True]


def test_a_table_that_is_read_along_two_axes_is_counted_along_each() -> None:
    model = _indexed(
        "n = Reshape(ids, flat) t = Mod(n, two) r = Gather(table, n) c = Gather<axis = 1>(table, t) "
        "m = ReduceMax<keepdims = 1>(c) g = Add(r, m)",
        np.arange(60)[:, None] * np.array([[1, 2, 3]]),
    )
    notes = [one for one in NumericEqual().check(model, model).notes if "rows of" in one]
    assert len(notes) == 1 and " of 60 rows of table" in notes[0] and ": 2 of 3 rows of table" in notes[0]


IDS = {
    "reshaped": "n = Reshape(ids, flat) g = Gather(table, n)",
    "moved by several": "c = Cast<to = 6>(ids) u = Unsqueeze(c, zero) t = Transpose(u) n = Reshape(t, flat) g = Gather(table, n)",
    "wrapped where negative": "s = Less(ids, zero) w = Add(ids, rows) m = Where(s, w, ids) n = Reshape(m, flat) g = Gather(table, n)",
    "on another axis": "n = Reshape(ids, flat) t = Transpose(table) h = Gather<axis = 1>(t, n) g = Transpose(h)",
    "of a table in codes": "d = DequantizeLinear(codes, one) n = Reshape(ids, flat) g = Gather(d, n)",
    "behind a sum": "a = Add(ids, two) n = Reshape(a, flat) g = Gather(table, n)",
    "in a branch": (
        "n = Reshape(ids, flat) "
        "g = If(yes) <then_branch = a () => (h) {h = Gather(table, n)}, else_branch = b () => (k) {k = Gather(table, n)}>"
    ),
}
HELD = {
    "flat": np.array([-1]),
    "zero": np.array([0]),
    "two": np.array([2]),
    "rows": np.array([60]),
    "yes": np.array(True),
    "one": np.float32(1),
}


def _indexed(text: str, table: np.ndarray) -> onnx.ModelProto:
    made = parser.parse_graph(f"g (int64[2, 9] ids) => (float[m, d] y) {{ {text} y = Neg(g) }}")
    tables = {"table": table.astype(np.float32), "codes": table.astype(np.int8)}
    made.initializer.extend(numpy_helper.from_array(one, name) for name, one in (HELD | tables).items() if name in text)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("way", IDS)
def test_ids_are_drawn_over_their_table_whatever_lies_between(way: str) -> None:
    """Of 60 rows 40 are reversed: one id throughout, or a zero and a one, do not see it."""
    table = np.arange(60)[:, None] * np.array([[1, 2]])
    wrong = np.concatenate([table[:10], table[10:50][::-1], table[50:]])
    sound = _indexed(IDS[way], table)
    report = NumericEqual().check(sound, sound)
    assert report.holds and "same values" not in report.message and " of 60 rows of " in report.message
    assert NumericEqual().check(sound, _indexed(IDS[way], wrong)).holding is Holding.VIOLATED


def test_ids_that_cannot_be_drawn_over_their_table_are_no_evidence() -> None:
    """A zero and a one are taken, and name one row."""
    model = _indexed("a = Mul(ids, rows) b = Add(a, far) n = Reshape(b, flat) g = Gather(table, n)", np.arange(120).reshape(60, 2))
    model.graph.initializer.append(numpy_helper.from_array(np.array([-59]), "far"))
    report = NumericEqual().check(model, model)
    assert report.holding is Holding.NOT_ANALYSED and "input ids: the exported graph refuses the other ids" in report.message
    assert NumericEqual(inputs={"ids": np.ones((2, 9), np.int64)}).check(model, model).holds


SELECTED = {
    "rotation, com.microsoft": "float[b, s, 8] x, int64[b, s] p|y = com.microsoft.RotaryEmbedding <num_heads = 2> (x, p, cos, sin)",
    "rotation, first row": "float[b, s, 8] x, int64[1] p|y = com.microsoft.RotaryEmbedding <num_heads = 2> (x, p, cos, sin)",
    "rotation, ai.onnx": "float[b, s, 8] x, int64[b, s] p|y = RotaryEmbedding <num_heads = 2> (x, cos, sin, p)",
    "rotation, computed": "float[b, s, 8] x, int64[b, s] p|c = Abs(cos) d = Add(sin, c) y = RotaryEmbedding <num_heads = 2> (x, c, d, p)",
    "an activation": "float[60, 2] x, int64[3] p|n = Mul(x, cos) y = Gather(n, p)",
    "single elements": "float[60, 2] x, int64[3, 2] p|n = Mul(x, cos) y = GatherElements(n, p)",
    "whole places": "float[60, 2] x, int64[3, 1] p|n = Mul(x, cos) y = GatherND(n, p)",
    "scattered": "float[60, 2] x, int64[3, 1] p|y = ScatterND(cos, p, part)",
    "cut off": "float[60, 2] x, int64[3] p|q = Clip(p, low, high) y = Gather(cos, q)",
    "one-hot": "float[60, 2] x, int64[9] p|q = OneHot(p, rows, values) y = MatMul(q, cos)",
    "by way of floats": "float[60, 2] x, int64[9] p|f = Cast <to = 1> (p) h = Mul(f, one) q = Cast <to = 7> (h) y = Gather(cos, q)",
    "places of an embedding": (
        "int32[b, s] i, int32[b, s] p|j = Mul(i, none) y, m = com.microsoft.EmbedLayerNormalization(j, j, cos, sin, cos, g, g, , p)"
    ),
}


def _selecting(inputs: str, text: str, wrong: bool) -> onnx.ModelProto:
    """With tables of 60 rows, of which the last 58 stand in another order."""
    angles = np.arange(60)[:, None] / np.array([1, 10])
    order = np.r_[0, 1, np.arange(2, 60)[:: -1 if wrong else 1]]
    held = {
        "cos": np.cos(angles)[order].astype(np.float32),
        "sin": np.sin(angles)[order].astype(np.float32),
        "none": np.array([0], np.int32),
        "low": np.array(0),
        "high": np.array(59),
        "rows": np.array(60),
        "values": np.array([0, 1], np.float32),
        "one": np.float32(1),
        "part": np.ones((3, 2), np.float32),
        "g": np.ones(2, np.float32),
        "far": np.array([-59]),
    }
    made = parser.parse_graph(f"g ({inputs}) => (float[] y) {{ {text} }}")
    made.output[0].type.tensor_type.ClearField("shape")
    made.initializer.extend(numpy_helper.from_array(np.asarray(one), name) for name, one in held.items())
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)], ir_version=10)


@pytest.mark.parametrize("way", SELECTED)
def test_what_integers_select_is_looked_at_whatever_operator_takes_them(way: str) -> None:
    """Zeros and ones name the first two rows alone, and wider integers are refused or name none."""
    sound, wrong = (_selecting(*SELECTED[way].split("|"), wrong=wrong) for wrong in (False, True))
    report = NumericEqual().check(sound, sound)
    assert report.holds and "same values" not in report.message
    assert NumericEqual().check(sound, wrong).holding is Holding.VIOLATED


def test_integers_that_select_and_could_not_be_varied_are_no_evidence_and_a_length_that_is_forced_is_a_note() -> None:
    alias = "n = Abs(x) a = Mul(p, rows) q = Add(a, far) y = Gather(n, q)"
    model = _selecting("float[60, 2] x, int64[3] p", alias, wrong=False)
    report = NumericEqual().check(model, model)
    assert report.holding is Holding.NOT_ANALYSED and "input p: the exported graph refuses the other ids" in report.message
    forced = "z = Constant <value_ints = [0]> () e = Constant <value_ints = [1]> () o = Constant <value_int = 1> () i = Range(low, n, o) "
    model = _selecting(
        "float[1, 2] x, int64 n", f"{forced} t = Slice(cos, z, e) l = Gather(t, i) r = Reshape(l, two) y = Add(x, r)", wrong=False
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 2]), "two"))
    report = NumericEqual(seed=4).check(model, model)  # draws n = 1, the one length that it takes
    assert report.holds and "n had the same values throughout" in report.message


def _short(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].raw_data = model.graph.initializer[0].raw_data[:1]


def _huge(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].dims[:] = [1 << 40]


def _few_numbers(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].CopyFrom(helper.make_tensor("one", onnx.TensorProto.FLOAT, [3], [1, 1, 1]))
    del model.graph.initializer[0].float_data[-1]


def _constant(model: onnx.ModelProto, dims: list[int]) -> None:
    node = helper.make_node("Constant", [], ["one"], value=numpy_helper.from_array(np.ones(3, np.float32)))
    node.attribute[0].t.dims[:] = dims
    del model.graph.initializer[:]
    model.graph.node.insert(0, node)


def _in_a_branch(model: onnx.ModelProto) -> None:
    held = model.graph.initializer[0]
    branch = helper.make_graph([helper.make_node("Neg", ["own"], ["z"])], "b", [], [helper.make_tensor_value_info("z", 1, None)])
    branch.initializer.add().CopyFrom(held)
    branch.initializer[0].name, branch.initializer[0].dims[:] = "own", [7]
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    model.graph.node.append(helper.make_node("If", ["yes"], ["unread"], then_branch=branch, else_branch=branch))


def _unknown(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].data_type = 99


def _one_input(model: onnx.ModelProto) -> None:
    del model.graph.node[0].input[1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_short, "initializer one says .* do not fit"),
        (_huge, "initializer one says .* do not fit"),
        (_few_numbers, "initializer one says .* 2 numbers, which do not fit"),
        (partial(_constant, dims=[4]), "Constant one: its attribute value says .* do not fit"),
        (partial(_constant, dims=[-3]), "Constant one: its attribute value says .* do not fit"),
        (_in_a_branch, "initializer own says .* do not fit"),
        (_unknown, "initializer one has type 99, which onnx .* does not know|99 is not a valid DataType"),
        (_one_input, "Add .* has 1 inputs and needs 2"),
    ],
)
def test_a_file_whose_sizes_do_not_fit_is_said_to_be_one(damage, message: str) -> None:
    model = _model("", "y = Add(x, one)")
    damage(model)
    with pytest.raises(UserInputError, match=message):
        NumericEqual().check(model, model)


_BRANCHES = (
    "then_branch = t () => (float p, float q) {p = Exp(x) q = Abs(x)}, else_branch = e () => (float p, float q) {p = Exp(x) q = Abs(x)}"
)
_BODY = "body = b (int64 i, bool c, float[2, 2] v) => (bool d, float[2, 2] w, float[2, 2] s) {d = Identity(c) w = Exp(v) s = Abs(v)}"


@pytest.mark.parametrize(
    "call",
    [
        "Split<axis = 0, num_outputs = 2>(x)",
        "TopK(x, k)",
        f"If<{_BRANCHES}>(flag)",
        f"Loop<{_BODY}>(k, flag, x)",
        "BatchNormalization<training_mode = 1>(x, ones, ones, ones, ones)",
    ],
)
def test_an_output_that_must_have_a_name_and_has_none_is_refused(call: str) -> None:
    """A signal of onnxruntime killed the whole comparison there."""
    outputs = ["y", "z", "u"] if "Batch" in call else ["y", "z"]
    model = _model("", f"k = Constant<value_ints = [1]>() flag = Equal(k, k) ones = Shape(x) {', '.join(outputs)} = {call}")
    load_graph(model)
    model.graph.node[-1].output[-1] = ""
    with pytest.raises(UserInputError, match=f"leaves out its output {len(outputs) - 1}"):
        load_graph(model)
    optional = _model("", "y, mask = Dropout(x)")
    optional.graph.node[-1].output[-1] = ""
    load_graph(optional)


def test_a_split_into_more_than_it_says_is_refused() -> None:
    load_graph(_model("", "y, z = Split<axis = 0, num_outputs = 2>(x)"))
    with pytest.raises(UserInputError, match="Split y has 3 outputs and num_outputs=2"):
        load_graph(_model("", "y, z, u = Split<axis = 0, num_outputs = 2>(x)"))


@pytest.mark.parametrize("kind", [one for one in onnx.TensorProto.DataType.values() if one not in (0, onnx.TensorProto.STRING)])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_tensors_of_every_type_are_read_as_onnx_writes_them(kind: int, count: int) -> None:
    """Codes of 2, 4 and 6 bits are packed, complex numbers listed as two."""
    numbers = np.ones(count, helper.tensor_dtype_to_np_dtype(kind))
    for tensor in (numpy_helper.from_array(numbers), helper.make_tensor("", kind, [count], numbers)):
        model = _model("", "y = Add(x, one)")
        tensor.name = "unread"
        model.graph.initializer.append(tensor)
        if kind not in set(ir.DataType):  # onnx 1.23 has two that onnx_ir knows from 1.1 on
            with pytest.raises(UserInputError, match=f"onnx_ir .* cannot read the model .{kind} is not a valid DataType.*a newer onnx_ir"):
                load_graph(model)
            continue
        assert load_graph(model).graph.initializers["unread"].shape == (count,)
