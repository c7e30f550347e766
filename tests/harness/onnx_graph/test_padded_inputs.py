"""NumericEqual looks at masks that pad rows, whatever the other inputs are, and asks nothing of what such a mask does not decide."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from harness.onnx_graph.contracts.base import Holding
from harness.onnx_graph.contracts.nodes import NumericEqual
from harness.onnx_graph.graph.drawn_inputs import example_inputs
from harness.onnx_graph.graph.padded_inputs import padded_inputs

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
    assert result.holding is Holding.VIOLATED and "where rows are padded on the" in result.message


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
    whole, left, right = [1] * 5, [0, 0, 1, 1, 1], [1, 1, 1, 0, 0]
    assert [one["mask"].tolist() for one in found] == [[left, right, left], [right, left, right], [[0] * 5, whole, [0] * 5]]
    assert all(one[name] is first[name] for one in found for name in ("use_cache", "ids"))
    assert not list(padded_inputs({name: first[name] for name in ("use_cache", "ids")}))
