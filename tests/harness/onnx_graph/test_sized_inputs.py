"""NumericEqual runs graphs at sizes that differ: long and short, in either order, one token behind many, none before the first."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from harness.onnx_graph.contracts.base import Holding
from harness.onnx_graph.contracts.numbers import NumericEqual
from harness.onnx_graph.graph.added_masks import added_masks
from harness.onnx_graph.graph.drawn_inputs import Sizes, example_inputs, zeroed_inputs
from harness.onnx_graph.graph.run_session import POLICIES, Session
from harness.onnx_graph.graph.sized_inputs import first_drawn, first_sizes, sizes_to_look_at

HELD = {
    **{name: [number] for name, number in (("zeros", 0), ("ones", 1), ("twos", 2), ("elevens", 11), ("sevens", 7))},
    "zero": 0,
    "one": 1,
    "none": np.float32(0),
    "unit": np.float32(1),
    "tiny": np.float32(1e-9),
    "small": np.float32(1e-6),
    "far": np.float32(-4.5),
    "most": np.float32(3e4),
}


def _graph(inputs: str, text: str, outputs: str = "float[b, t, 4] y") -> onnx.ModelProto:
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g ({inputs}) => ({outputs}) {{ {text} }}')
    words = text.replace(",", " ").replace(")", " ").replace("(", " ").split()
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(one), name) for name, one in HELD.items() if name in words)
    return model


def _violated(sound: onnx.ModelProto, damaged: onnx.ModelProto) -> str:
    for policy in ("golden", "deploy"):
        assert NumericEqual(policy).check(sound, sound).holds
        result = NumericEqual(policy).check(sound, damaged)
        assert result.holding is Holding.VIOLATED
    return result.message


@pytest.mark.parametrize("inputs", ["float[B, N, 4] x, float[B, M, 4] other", "float[B, M, 4] other, float[B, N, 4] x"])
def test_what_is_cut_to_the_length_of_another_is_seen_whichever_comes_first(inputs: str) -> None:
    """As the text of an encoder that is read only as far as the decoder's is long."""
    cut = "n = Shape<start = 1, end = 2>({0}) c = Slice({1}, zeros, n, ones) s = ReduceSum({2}, ones) y = Add(x, s)"
    for shorter, longer in (("x", "other"), ("other", "x")):
        whole, damaged = (cut.format(shorter, longer, which) for which in (longer, "c"))
        assert "on drawing" in _violated(_graph(inputs, whole), _graph(inputs, damaged))


@pytest.mark.parametrize(("shorter", "longer"), [("x", "other"), ("other", "x")])
def test_two_lengths_above_one_are_unequal_in_either_order(shorter: str, longer: str) -> None:
    text = (
        f"n = Shape<start = 1, end = 2>({shorter}) m = Shape<start = 1, end = 2>({longer}) a = Less(ones, n) b = Less(n, m) c = And(a, b)"
    )
    text += " f = Cast<to = 1>(c) s = ReduceSum(other, ones) t = Add(x, s) {0}"
    inputs = "float[B, N, 4] x, float[B, M, 4] other"
    assert "on drawing" in _violated(_graph(inputs, text.format("y = Identity(t)")), _graph(inputs, text.format("y = Add(t, f)")))


PAST = "float[B, P, 4] past, float[B, S, 4] x"
JOINED = "j = Concat<axis = 1>(past, x) p = Shape<start = 1, end = 2>(past) {0} c = Slice(j, zeros, m, ones)"
JOINED += " s = ReduceSum(c, ones) y = Add(x, s)"


@pytest.mark.parametrize(("m", "words"), [("m = Max(p, ones)", "past [2, 0, 4]"), ("m = Min(p, elevens)", "on drawing")])
def test_a_first_call_that_has_no_past_and_a_long_past_are_looked_at(m: str, words: str) -> None:
    assert words in _violated(_graph(PAST, JOINED.format("m = Identity(p)")), _graph(PAST, JOINED.format(m)))


def test_the_branch_of_a_merged_decoder_that_takes_no_past_is_looked_at() -> None:
    """Its mask is as long as past and new tokens, so that only where there is no past the flag may be off."""

    def merged(first: str) -> onnx.ModelProto:
        masked = "n = Shape<end = 2>({0}) r = Reshape(mask, n) u = Unsqueeze(r, twos) m = Mul({0}, u) s = ReduceSum(m, ones)"
        then = f"g1 () => (float[b, t, 4] a) {{ j = Concat<axis = 1>(past, x) {masked.format('j')} a = Add(x, s) }}"
        other = f"g2 () => (float[b, t, 4] a) {{ {masked.format('x')} {first} }}"
        inputs = f'{PAST}, float[B, "P + S"] mask, bool[1] use_cache_branch'
        return _graph(inputs, f"y = If (use_cache_branch) <then_branch = {then}, else_branch = {other}>")

    assert "past [2, 0, 4]" in _violated(merged("a = Add(x, s)"), merged("a = Sub(x, s)"))


def test_one_new_token_behind_a_long_past_is_looked_at() -> None:
    """Positions that count from zero where there is one new token and some past, as in every later step of a decoding."""
    text = "p = Shape<start = 1, end = 2>(past) n = Shape<start = 1, end = 2>(x) e = Equal(n, ones) l = Less(ones, p) a = And(e, l)"
    text += " f = Cast<to = 1>(a) j = Concat<axis = 1>(past, x) s = ReduceMean(j, ones) {0} y = Add(z, s)"
    assert "x [2, 1, 4]" in _violated(_graph(PAST, text.format("z = Identity(x)")), _graph(PAST, text.format("z = Sub(x, f)")))


def test_a_size_that_is_declared_as_a_sum_follows_from_the_others() -> None:
    inputs = f'{PAST}, float[B, "P + S"] mask'
    text = "j = Concat<axis = 1>(past, x) u = Unsqueeze(mask, twos) m = Mul(j, u) s = ReduceSum(m, ones) y = Add(x, s)"
    model = _graph(inputs, text)
    drawn = example_inputs(model, sizes=Sizes(2, 7, {"S": 1}))
    assert drawn["past"].shape == (2, 7, 4) and drawn["x"].shape == (2, 1, 4) and drawn["mask"].shape == (2, 8)
    message = NumericEqual().check(model, model).message
    assert "refuses" not in message and "not looked at" not in message


@pytest.mark.parametrize("seen", [128, 129])
def test_a_place_that_is_seen_too_early_in_a_long_row_is_told_where_scores_are_large(seen: int) -> None:
    """A softmax of large scores sees one place, and hardly ever the one that should be hidden."""

    def graph(visible: np.ndarray) -> onnx.ModelProto:
        text = (
            "t = Transpose<perm = [0, 2, 1]>(x) p = MatMul(x, t) n = Shape<start = 1, end = 2>(x) m = Slice(table, zeros, n, zeros, ones) "
        )
        text += "v = Slice(m, zeros, n, ones, ones) a = Add(p, v) w = Softmax(a) y = MatMul(w, x)"
        made = _graph("float[B, N, 16] x", text, "float[b, t, 16] y")
        made.graph.initializer.append(numpy_helper.from_array(np.where(visible, 0, -1e9).astype(np.float32), "table"))
        return made

    causal = np.tril(np.ones((200, 200), bool))
    wrong = causal.copy()
    wrong[seen, seen:] = True
    assert NumericEqual().check(graph(causal), graph(causal)).holds
    assert "on drawing" in NumericEqual().check(graph(causal), graph(wrong)).message


def test_a_length_that_stands_first_in_a_mask_and_second_elsewhere_is_a_length() -> None:
    """As in a mask of queries by keys that all rows share."""
    text = "j = Concat<axis = 1>(past, x) t = Transpose<perm = [0, 2, 1]>(j) p = MatMul(x, t) y = Mul(p, mask)"
    model = _graph(f"{PAST}, float[S, T] mask", text)
    assert first_sizes(Session(model, POLICIES["golden"]), model).sums == {"T": "P + S"}
    assert NumericEqual().check(model, model).holds


def test_a_length_that_is_taken_only_as_the_sum_of_two_follows_from_them() -> None:
    """As a mask over a past and new tokens where its size has a name of its own, beside pasts with names of their own that are equal."""
    inputs = "float[B, P, 4] past, float[B, S, 4] x, float[B, Q, 4] other, float[B, T] mask"
    text = "o = Add(past, other) z = ReduceSum(o, ones) j = Concat<axis = 1>(past, x) u = Unsqueeze(mask, twos) m = Mul(j, u) "
    text += "s = ReduceSum({0}, ones) a = Add(z, s) y = Add(x, a)"
    sound, blind = (_graph(inputs, text.format(one)) for one in ("m", "j"))
    found = first_sizes(_session(sound), sound)
    assert found.sums in ({"T": "P + S"}, {"T": "S + Q"})
    words = [words for words, _ in sizes_to_look_at(sound, found, lambda one: first_drawn(_session(sound), sound, [one]) is not None)]
    assert "P = Q of 0" in words and "S of 1 alone" in words and "unequal P = Q, S" in words
    message = NumericEqual().check(sound, sound).message
    assert "refuses" not in message and _violated(sound, blind)


@pytest.mark.parametrize(("window", "size"), [(40, 67), (400, 1031)])
def test_sizes_grow_until_the_graph_takes_them(window: int, size: int) -> None:
    """As of sound, which is asked for in windows of hundreds of samples."""
    text = f"k = ConstantOfShape<value = float[1] {{1.0}}>(shape) u = Unsqueeze(sound, ones) c = Conv<strides = [{window // 2}]>(u, k) y = "
    sound, cut = (_graph("float[B, T] sound", text + one, "float[b, c, t] y") for one in ("Identity(c)", "Clip(c, none)"))
    for model in (sound, cut):
        model.graph.initializer.append(numpy_helper.from_array(np.array([1, 1, window]), "shape"))
    assert first_sizes(_session(sound), sound).other == size
    assert _violated(sound, cut)
    message = NumericEqual().check(sound, sound).message
    assert "refuses open sizes, which were not looked at: a length of 1; one row of length 1" in message


def test_a_graph_that_takes_no_size_says_so_of_the_first() -> None:
    model = _graph("float[B, S, 4] x", "r = Reshape(x, zeros) y = Identity(r)")
    result = NumericEqual().check(model, model)
    assert result.holding is Holding.NOT_ANALYSED and "cannot run on x [2, 7, 4]" in result.message


def _session(model: onnx.ModelProto) -> Session:
    return Session(model, POLICIES["golden"])


def _looked_at(inputs: str, takes: Callable[[dict[str, tuple[int, ...]]], bool]) -> dict[str, Iterable[Sizes]]:
    model = _graph(inputs, "y = Identity(x)")
    shapes = lambda sizes: {name: one.shape for name, one in example_inputs(model, sizes=sizes).items()}  # noqa: E731
    return dict(sizes_to_look_at(model, Sizes(), lambda sizes: takes(shapes(sizes))))


def test_names_that_a_graph_takes_only_together_are_one_size() -> None:
    inputs = "float[b, t, 4] x, int64[b2, t2] mask, float[b, m, 4] other"
    found = _looked_at(inputs, lambda shapes: shapes["x"][:2] == shapes["mask"])
    assert "t = t2 of 1 alone" in found and "unequal t = t2, m" in found and "m of 1 alone" in found
    assert not any("b" in words.split() for words in found)


def test_sizes_that_are_refused_are_said() -> None:
    inputs, text = "float[B, N, 4] x, float[B, M, 4] other", "s = ReduceSum(other, ones) a = Add(other, s) z = Add(x, a) y = Identity(z)"
    message = NumericEqual().check(_graph(inputs, text), _graph(inputs, text)).message
    assert "refuses" not in message  # N and M are one size
    frozen = "r = Reshape(x, to) s = Softmax<axis = 1>(r) y = Reshape(s, back)"
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g (float[B, S, 16] x) => (float[b, t, 16] y) {{ {frozen} }}')
    model.graph.initializer.extend([numpy_helper.from_array(np.array([2, 7, 16]), name) for name in ("to", "back")])
    said = "refuses open sizes, which were not looked at: others than 2 and 7; a length of 19 or more; one row; a length of 1"
    assert said in NumericEqual().check(model, model).message


MASKED = "float[B, S, 4] x, int64[B, S] attention_mask"
HIDDEN = "n = Shape<end = 1>(x) l = Shape<start = 1, end = 2>(x) {0} f = Cast<to = 1>(m) u = Unsqueeze(f, twos) h = Mul(x, u)"
HIDDEN += " s = ReduceSum(h, ones) y = Add(h, s)"
OTHERS_MASK = "z = Squeeze(zeros) w = Squeeze(n) k = Range(z, w, one) {0} g = Gather(attention_mask, i) m = Identity(g)"


@pytest.mark.parametrize("rows", ["t = Min(k, one) i = Identity(t)", "t = Mod(k, two) i = Identity(t)", "i = Neg(k)"])
def test_a_row_that_takes_the_mask_of_another_is_seen(rows: str) -> None:
    sound = _graph(MASKED, HIDDEN.format("m = Identity(attention_mask)"))
    damaged = _graph(MASKED, HIDDEN.format(OTHERS_MASK.format(rows)))
    damaged.graph.initializer.append(numpy_helper.from_array(np.array(2), "two"))
    assert _violated(sound, damaged)


@pytest.mark.parametrize("where", ["e = Equal(n, ones)", "e = Less(sevens, l)", "q = Equal(l, sevens) e = Not(q)"])
def test_a_mask_that_is_ignored_at_some_sizes_is_seen(where: str) -> None:
    damaged = f"{where} i = Cast<to = 7>(e) m = Max(attention_mask, i)"
    assert _violated(_graph(MASKED, HIDDEN.format("m = Identity(attention_mask)")), _graph(MASKED, HIDDEN.format(damaged)))


@pytest.mark.parametrize("guard", ["n = Max(r, tiny)", "n = Add(r, tiny)"])
@pytest.mark.parametrize("sizes", ["B, S", "2, 7", "1, 7"])
def test_the_guard_of_a_norm_is_missed_where_a_row_is_silent(guard: str, sizes: str) -> None:
    text = "q = Mul(x, x) s = ReduceSum(q, twos) r = Sqrt(s) {0} d = Div(x, n) y = Add(d, d)"
    sound, damaged = (_graph(f"float[{sizes}, 4] x", text.format(one)) for one in (guard, "n = Identity(r)"))
    assert NumericEqual().check(damaged, damaged).holds
    assert "is zero" in _violated(sound, damaged)
    assert "the exported graph is not finite there" in NumericEqual().check(damaged, sound).message


def test_the_guard_of_a_logarithm_and_a_mask_made_of_silence_are_looked_at() -> None:
    inputs, text = "float[B, S, 4] x", "a = Abs(x) m = Max(a, {0}) y = Log(m)"
    assert "is zero" in _violated(_graph(inputs, text.format("tiny")), _graph(inputs, text.format("small")))
    hidden = "a = Abs(x) s = ReduceSum(a, twos) e = Equal(s, none) {0} y = Add(x, f)"
    sound, damaged = (_graph(inputs, hidden.format(one)) for one in ("f = Cast<to = 1>(e)", "o = Xor(e, e) f = Cast<to = 1>(o)"))
    assert "is zero" in _violated(sound, damaged)


def test_rows_and_halves_are_zeroed_and_what_is_no_float_stays() -> None:
    model = _graph("float[2, 2, 4] x, int64[2, 2] mask", "y = Identity(x)")
    first = example_inputs(model)
    rows, half = (one for _, one in zeroed_inputs(model, first))
    assert [bool(row.any()) for row in rows["x"].reshape(4, 4)] == [False, True, False, True]
    assert [bool(row.any()) for row in half["x"].reshape(4, 4)] == [False, False, True, True]
    assert rows["mask"] is first["mask"] and np.array_equal(half["x"][1], first["x"][1])


ADDED = "float[B, S, 4] x, float[B, S] attention_mask"


def _softmax(mask: str) -> str:
    return f"{mask} u = Unsqueeze(m, twos) a = Add(x, u) w = Softmax<axis = 1>(a) y = Mul(w, x)"


def test_a_mask_that_is_added_hides_by_the_least_number() -> None:
    sound, soft = (_graph(ADDED, _softmax(one)) for one in ("m = Identity(attention_mask)", "m = Clip(attention_mask, far)"))
    assert added_masks(sound) == {"attention_mask"}
    assert _violated(sound, soft)


@pytest.mark.parametrize(
    "mask", ["i = Sub(unit, attention_mask) m = Mul(i, far)", "m = Add(attention_mask, far)", "e = Not(b) m = Identity(attention_mask)"]
)
def test_a_mask_that_is_used_in_another_way_is_ones_and_zeros(mask: str) -> None:
    compared = "b = Equal(attention_mask, unit) " if "(b)" in mask else ""
    assert added_masks(_graph(ADDED, _softmax(f"{compared}{mask}"))) == set()


def test_every_value_of_sixteen_bits_is_drawn() -> None:
    inputs, text = "int16[B, 64] sound", "f = Cast<to = 1>(sound) y = {0}"
    sound, damaged = (_graph(inputs, text.format(one), "float[b, 64] y") for one in ("Identity(f)", "Min(f, most)"))
    assert _violated(sound, damaged)
