"""NumericEqual looks at masks that pad rows, whatever the other inputs are, and asks nothing of what such a mask does not decide."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from harness.onnx_graph.contracts.base import Holding
from harness.onnx_graph.contracts.numbers import NumericEqual
from harness.onnx_graph.graph.drawn_inputs import example_inputs
from harness.onnx_graph.graph.indexed_tables import special_ids
from harness.onnx_graph.graph.padded_inputs import padded_inputs, special_inputs

SIZES = ["B, S", "2, 7", "1, 7"]


def _parsed(inputs: str, outputs: str, text: str, **held: object) -> onnx.ModelProto:
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g ({inputs}) => ({outputs}) {{ {text} }}')
    used = {name: np.asarray(one) for name, one in held.items() if f"{name})" in text or f"{name}," in text}
    model.graph.initializer.extend(numpy_helper.from_array(one, name) for name, one in used.items())
    return model


def _looked_up(sizes: str, text: str) -> onnx.ModelProto:
    """A table, and what a mask makes of its rows."""
    held = {"table": np.arange(1, 19, dtype=np.float32).reshape(9, 2), "last": [2], "one": 1, "zero": 0}
    inputs = f"int64[{sizes}] input_ids, int64[{sizes}] attention_mask"
    return _parsed(inputs, f"float[{sizes}, 2] y", f"g = Gather(table, input_ids) {text}", **held)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_what_padding_alone_reaches_is_seen_where_all_inputs_are_integers(sizes: str, side: str) -> None:
    text = f"n = Neg(g) c = CumSum<reverse = {int(side == 'right')}>(attention_mask, one) e = Equal(c, zero) u = Unsqueeze(e, last)"
    sound, damaged = _looked_up(sizes, f"{text} y = Where(u, n, g)"), _looked_up(sizes, "y = Identity(g)")
    assert NumericEqual().check(sound, sound).holds
    result = NumericEqual().check(sound, damaged)
    seen = "where rows are padded on the" in result.message or "on drawing" in result.message  # one row of 131 may end in a hole
    assert result.holding is Holding.VIOLATED and seen


@pytest.mark.parametrize("kind", ["int64", "bool", "float"])
def test_a_mean_over_no_token_is_seen(kind: str) -> None:
    def pooled(divide: str) -> onnx.ModelProto:
        text = "f = Cast<to = 1>(attention_mask) u = Unsqueeze(f, last) m = Mul(x, u) s = ReduceSum<keepdims = 0>(m, axis) "
        inputs = f"{kind}[B, S] attention_mask, float[B, S, 8] x"
        held = {"last": [2], "axis": [1], "least": np.float32(1e-9)}
        return _parsed(inputs, "float[B, 8] y", f"{text} c = ReduceSum<keepdims = 0>(u, axis) {divide}", **held)

    sound, damaged = pooled("k = Max(c, least) y = Div(s, k)"), pooled("y = Div(s, c)")
    assert NumericEqual().check(sound, sound).holds
    result = NumericEqual().check(sound, damaged)
    assert result.holding is Holding.VIOLATED and "where a row is empty" in result.message
    assert NumericEqual().check(damaged, damaged).holds


def _attention(sizes: str, fill: float, guard: bool = False, first: bool = False) -> onnx.ModelProto:
    """Causal attention over looked up rows; where a mask leaves nothing, a finite fill chooses among what is hidden."""
    table = np.random.default_rng(0).normal(size=(9, 8)).astype(np.float32)
    text = "t = Transpose<perm = [0, 2, 1]>(g) s = MatMul(g, t) k = Unsqueeze(attention_mask, axis) b = Cast<to = 9>(k) "
    text += "o = Or(b, kept) a = And(o, seen) h = Where(a, zero, fill) m = Add(s, h) w = Softmax(m) i = IsNaN(w) v = Where(i, zero, w) "
    text += f"y = MatMul({'v' if guard else 'w'}, g)"
    held = {"table": table, "seen": np.tril(np.ones((7, 7), np.bool_)), "kept": first & (np.arange(7) == 0), "axis": [1]}
    held |= {"zero": np.float32(0), "fill": np.float32(fill)}
    inputs = f"int64[{sizes}] input_ids, int64[{sizes}] attention_mask"
    return _parsed(inputs, f"float[{sizes}, 8] y", f"g = Gather(table, input_ids) {text}", **held)


@pytest.mark.parametrize("sizes", ["2, 7", "1, 7", "B, 7"])
def test_another_finite_fill_decides_only_what_sees_nothing(sizes: str) -> None:
    least = float(np.finfo(np.float32).min)
    guarded = _attention(sizes, -np.inf, guard=True)
    for before, after in itertools.permutations((_attention(sizes, least), _attention(sizes, -1e4), guarded), 2):
        result = NumericEqual().check(before, after)
        assert result.holds and "but only at places that see nothing which the mask leaves" in result.message


def test_another_fill_decides_only_what_sees_nothing_where_inputs_are_large() -> None:
    """A first key that is hidden leaves the first query nothing; scores of large inputs outgrow -1e4, but not the least number."""

    def attention(fill: float) -> onnx.ModelProto:
        text = "t = Transpose<perm = [0, 2, 1]>(x) s = MatMul(x, t) k = Unsqueeze(attention_mask, axis) b = Cast<to = 9>(k) "
        text += "a = And(b, seen) h = Where(a, zero, fill) m = Add(s, h) w = Softmax(m) y = MatMul(w, x)"
        held = {"seen": np.tril(np.ones((7, 7), np.bool_)), "axis": [1], "fill": np.float32(fill), "zero": np.float32(0)}
        return _parsed("float[B, 7, 8] x, int64[B, 7] attention_mask", "float[B, 7, 8] y", text, **held)

    result = NumericEqual().check(attention(float(np.finfo(np.float32).min)), attention(-1e5))
    assert result.holds and "but only at places that see nothing" in result.message
    soft = NumericEqual().check(attention(float(np.finfo(np.float32).min)), attention(-1e3))
    assert soft.holding is Holding.VIOLATED and "where all inputs are large" in soft.message


def test_a_guard_against_nan_that_is_gone_is_seen() -> None:
    guarded, bare = (_attention("B, 7", -np.inf, guard) for guard in (True, False))
    assert NumericEqual().check(guarded, guarded).holds and NumericEqual().check(bare, bare).holds
    result = NumericEqual().check(guarded, bare)
    assert result.holding is Holding.VIOLATED and "NaN" in result.message and "where rows are padded on the left" in result.message
    assert NumericEqual().check(_attention("B, 7", -1e4), bare).holding is Holding.VIOLATED


def test_a_first_key_that_stays_in_sight_is_seen_though_what_sees_nothing_is_undecided() -> None:
    sound, damaged = _attention("B, 7", -1e4), _attention("B, 7", -1e4, first=True)
    result = NumericEqual().check(sound, damaged)
    assert result.holding is Holding.VIOLATED and "where rows are padded on the left" in result.message


def test_masks_are_padded_at_both_ends_and_rows_are_empty_and_flags_stay() -> None:
    model = _parsed("int64[3, 5] mask, bool[1] use_cache, int64[3, 5] ids", "int64[3, 5] y", "y = Add(mask, ids)")
    first = example_inputs(model)
    found = [inputs for _, inputs in padded_inputs(first)]
    whole, left, right, lefter, righter = [1] * 5, [0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 1, 1], [1, 1, 0, 0, 0]
    assert [one["mask"].tolist() for one in found] == [[left, right, lefter], [right, left, righter], [[0] * 5, whole, [0] * 5]]
    assert all(one[name] is first[name] for one in found for name in ("use_cache", "ids"))
    assert not list(padded_inputs({name: first[name] for name in ("use_cache", "ids")}))


def _marked(special: int, how: str = "") -> onnx.ModelProto:
    """Rows of a large table, and where an id is special, their negatives."""
    table = np.random.default_rng(0).normal(size=(30_000, 4)).astype(np.float32)
    as_it_is = "k = Identity(special)"
    text = f"g = Gather(table, input_ids) {how or as_it_is} e = Equal(input_ids, k) u = Unsqueeze(e, last) n = Neg(g) y = Where(u, n, g)"
    return _parsed("int64[B, S] input_ids", "float[B, S, 4] y", text, table=table, special=special, last=[2])


@pytest.mark.parametrize(
    "how",
    [
        "",
        "s = Shape(input_ids) k = ConstantOfShape<value = int64[1] {29000}>(s)",
        "s = Shape(input_ids) k = Expand(special, s)",
        "f = Cast<to = 1>(special) k = Cast<to = 7>(f)",
    ],
)
def test_an_id_that_either_graph_compares_with_is_drawn_from_any_vocabulary(how: str) -> None:
    sound, blind = _marked(29_000, how), _marked(-5)
    assert special_ids(sound) == {"input_ids": {29_000}}
    for pair in ((sound, blind), (blind, sound), (sound, _marked(28_999))):
        assert NumericEqual().check(*pair).holding is Holding.VIOLATED
    assert NumericEqual().check(sound, _marked(29_000)).holds


@pytest.mark.parametrize("shape", ["", "[1]"])
@pytest.mark.parametrize(
    ("sound", "damaged"),
    [
        ("c = LessOrEqual(places, n)", "b = Less(n, two) o = Cast<to = 7>(b) m = Add(n, o) c = Less(places, m)"),  # right of 0 and 1
        ("c = Equal(places, n)", "e = Equal(places, n) b = Less(n, two) c = And(e, b)"),
    ],
)
def test_a_single_integer_counts_places_too(shape: str, sound: str, damaged: str) -> None:
    """As the width of a window or the length of a text does; of a wide range no number lies among the places of a graph."""
    before, after = (
        _parsed(f"float[2, 7] x, int64{shape} n", "float[2, 7] y", f"{how} z = Neg(x) y = Where(c, x, z)", places=range(7), two=2)
        for how in (sound, damaged)
    )
    report = NumericEqual().check(before, before)
    assert report.holds and "was not seen in full" not in report.message
    assert NumericEqual().check(before, after).holding is Holding.VIOLATED


def test_an_input_that_changes_nothing_is_noted() -> None:
    """Lengths in samples, of which a frame takes thousands: whatever is drawn, every mask is empty."""
    text = "f = Div(lengths, frame) c = Less(places, f) m = Neg(x) y = Where(c, x, m)"
    model = _parsed("float[2, 7] x, int64[2, 1] lengths", "float[2, 7] y", text, places=range(7), frame=3200)
    assert (
        "this was not seen in full: lengths had many values, of which none changed an output" in NumericEqual().check(model, model).message
    )


def test_special_ids_beyond_those_that_are_drawn_are_said() -> None:
    numbers = np.arange(100, 112)
    text = "g = Gather(table, input_ids) c = Unsqueeze(input_ids, last) e = Equal(c, special) f = Cast<to = 1>(e) y = MatMul(f, held)"
    table, held = np.ones((300, 2), np.float32), np.arange(24, dtype=np.float32).reshape(12, 2)
    model = _parsed("int64[B, S] input_ids", "float[B, S, 2] y", text, table=table, special=numbers, last=[2], held=held)
    result = NumericEqual().check(model, model)
    assert "of the numbers that input_ids is compared with, only the first 8 were looked at" in result.message


def test_a_special_id_is_seen_where_masks_hide_it_and_where_it_pads_alone() -> None:
    first = {"ids": np.full((2, 5), 3), "mask": np.ones((2, 5), np.int64)}
    whole = [inputs["ids"].tolist() for _, _, inputs in special_inputs(first, {"ids": [9]})]
    assert whole == [[[9, 9, 3, 3, 3], [3, 3, 3, 9, 9]], [[3, 3, 3, 9, 9], [9, 9, 3, 3, 3]]]
    hidden = [inputs for where, inputs in padded_inputs(first, {"ids": [9]}) if "ids is 9 there" in where]
    assert len(hidden) == 3 and all(((one["mask"] == 0) == (one["ids"] == 9)).all() for one in hidden)
    assert special_ids(_parsed("int64[2, 5] ids, float[2, 5] x", "bool[2, 5] y", "y = Equal(ids, ids)")) == {"ids": set()}


def test_every_value_of_eight_bits_is_drawn() -> None:
    sound, damaged = (
        _parsed("uint8[64, 64] pixels", "float[64, 64] y", "f = Cast<to = 1>(pixels) y = Min(f, most)", most=np.float32(most))
        for most in (255, 250)
    )
    assert NumericEqual().check(sound, damaged).holding is Holding.VIOLATED
