"""Each tier lets through what it says and nothing else, for every dtype; limits that measure nothing are found by decoys."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compressor.errors import UserInputError
from harness.modules import tensors as compared
from harness.tolerance import T0, T1, T2, T3, T4, Tier, TierMap, climb, compare, decoys_of, vacuous_decoys
from harness.tolerance.bits import FAR, dtype_name, from_bytes, to_bytes, ulp_distance, unit_of, widen
from harness.traceability import recording as recorded

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FP8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
OTHERS = [torch.bool, torch.complex64, torch.complex128, torch.float4_e2m1fn_x2, torch.int4]
EVERY_DTYPE = [*FLOATS, *FP8, *INTEGERS, *OTHERS]


def some_tensor(dtype: torch.dtype, count: int = 12) -> Tensor:
    """Bytes that count up, so that every dtype gets values; no NaN among the first ones of fp8."""
    size = torch.empty(0, dtype=dtype).element_size()
    if dtype == torch.bool:
        return torch.arange(count) % 3 == 0
    return from_bytes((torch.arange(count * size) % 100 + 1).to(torch.uint8), dtype, (count,))


def with_bit_flipped(tensor: Tensor, element: int, bit: int = 0) -> Tensor:
    raw = to_bytes(tensor).clone()
    raw[element, 0] ^= 1 << bit
    return from_bytes(raw, tensor.dtype, tuple(tensor.shape))


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=dtype_name)
def test_bitwise_sees_one_bit_of_one_element(dtype: torch.dtype) -> None:
    tensor = some_tensor(dtype)
    assert compare(from_bytes(to_bytes(tensor).clone(), dtype, (12,)), tensor).ok
    found = compare(with_bit_flipped(tensor, 7), tensor)
    assert not found.ok
    assert found.distance is not None
    assert (found.distance.num_changed, found.distance.first_index) == (1, (7,))


def test_bitwise_sees_element_2500_of_5000() -> None:
    expected = torch.zeros(50, 100)
    actual = expected.clone()
    actual.view(-1)[2500] = 1e-38
    found = compare(actual, expected)
    assert not found.ok
    assert found.distance is not None
    assert found.distance.first_index == (25, 0)
    assert "1 of 5,000" in found.summary


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.complex64, torch.bfloat16], ids=dtype_name)
def test_a_single_element_may_have_any_stride(dtype: torch.dtype) -> None:
    column = torch.ones(3, 5).to(dtype)[1:2, 4:5].t()
    strange = column.as_strided((1, 1), (7, 3))
    assert compare(strange, torch.ones(1, 1, dtype=dtype)).ok
    assert not compare(strange, torch.zeros(1, 1, dtype=dtype), T1(4)).ok


_ODD_VIEWS = {
    "one value of another stride": torch.arange(12.0).reshape(3, 4)[1:2, 1:2].squeeze(1),
    "expanded": torch.ones(1).expand(3),
    "conjugate": torch.complex(torch.ones(2), torch.ones(2)).conj(),
    "negative": torch.complex(torch.ones(2), torch.ones(2)).conj().imag,
}


@pytest.mark.parametrize("name", _ODD_VIEWS)
@pytest.mark.parametrize("same", [compared.same_bits, recorded.same_bits, lambda left, right: compare(left, right, T0()).ok])
def test_bits_are_those_of_the_values_whatever_the_view(same: Callable[[Tensor, Tensor], bool], name: str) -> None:
    view = _ODD_VIEWS[name]
    other = view.clone()
    other[0] = -other[0]
    assert same(view, view.clone()) and not same(view, other)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.tensor([-0.0]), torch.tensor([0.0])),
        (torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32), torch.tensor([math.nan])),
        (torch.ones(3, dtype=torch.int8), torch.ones(3, dtype=torch.float64)),
        (torch.ones(3, dtype=torch.int8), torch.ones(3, dtype=torch.uint8)),
        (torch.ones(3), torch.ones(3, 1)),
        (torch.ones(0, 3), torch.ones(3, 0)),
        (torch.tensor(1.0), torch.tensor([1.0])),
    ],
    ids=["sign of zero", "NaN payload", "int8 as float64", "int8 as uint8", "shape", "empty shapes", "0-d"],
)
def test_bitwise_does_not_forgive(actual: Tensor, expected: Tensor) -> None:
    assert not compare(actual, expected, T0()).ok


@pytest.mark.parametrize("tier", [T1(max_ulp=1000), T3(min_sqnr_db=-100.0), T4(margin=1e9)], ids=str)
def test_no_tier_forgives_dtype_or_shape(tier: Tier) -> None:
    assert not compare(torch.ones(3, dtype=torch.int8), torch.ones(3, dtype=torch.float64), tier).ok
    assert not compare(torch.ones(4), torch.ones(2, 2), tier).ok


@pytest.mark.parametrize("dtype", [*FLOATS, *FP8, torch.complex64], ids=dtype_name)
def test_equal_tensors_are_zero_ulp_apart_and_neighbours_one(dtype: torch.dtype) -> None:
    tensor = some_tensor(dtype)
    assert int(ulp_distance(tensor, tensor).max()) == 0
    assert int(ulp_distance(with_bit_flipped(tensor, 3), tensor).max()) == 1


def test_ulp_counts_across_zero_and_not_past_infinity() -> None:
    tiny = torch.tensor([5e-324], dtype=torch.float64)
    assert int(ulp_distance(tiny, -tiny)) == 2
    assert int(ulp_distance(torch.tensor([0.0]), torch.tensor([-0.0]))) == 0
    largest = torch.tensor([torch.finfo(torch.float32).max])
    assert not compare(torch.tensor([math.inf]), largest, T1(max_ulp=10**9)).ok
    assert not compare(torch.tensor([math.nan]), largest, T1(max_ulp=10**9)).ok
    assert compare(torch.tensor([math.nan]), torch.tensor([-math.nan]), T1(max_ulp=0)).ok


@pytest.mark.parametrize(
    ("one", "other"), [(-6.75, 0.0), (6.75, 0.0), (1.0, -1.0), (-1e308, 1e308), (math.inf, 1.0), (-math.inf, math.inf)]
)
def test_double_numbers_far_apart_are_counted_as_far_as_an_int64_goes(one: float, other: float) -> None:
    def place(value: float) -> int:
        bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
        return bits if bits >= 0 else -(bits + 2**63)

    due = abs(place(one) - place(other)) if math.isfinite(one) else FAR
    found = int(ulp_distance(torch.tensor([one], dtype=torch.float64), torch.tensor([other], dtype=torch.float64)))
    assert found == (min(due, FAR - 1) if math.isfinite(one) else FAR)


@pytest.mark.parametrize("steps", [3, 4, 5])
def test_t1_counts_exactly(steps: int) -> None:
    expected = torch.tensor([1.0, -3.5])
    actual = expected.clone()
    for _ in range(steps):
        actual = torch.nextafter(actual, torch.tensor(10.0))
    assert compare(actual, expected, T1(max_ulp=4)).ok is (steps <= 4)


def test_t1_at_tensor_forgives_cancellation_and_nothing_larger() -> None:
    expected = torch.tensor([1000.0, 1e-9])
    unit = unit_of(expected)
    assert unit == torch.finfo(torch.float32).eps * 512
    actual = torch.tensor([1000.0, 3 * unit])
    assert not compare(actual, expected, T1(max_ulp=4)).ok
    assert compare(actual, expected, T1(max_ulp=4, at="tensor")).ok
    assert not compare(torch.tensor([1000.0, 5 * unit]), expected, T1(max_ulp=4, at="tensor")).ok
    assert not compare(torch.tensor([1000.0, math.inf]), expected, T1(max_ulp=4, at="tensor")).ok
    of_nothing = compare(torch.ones(3), torch.zeros(3), T1(max_ulp=4, at="tensor"))
    assert not of_nothing.ok and of_nothing.summary.startswith("7.136e+44 ulp apart at [0]")


def test_t1_has_no_mercy_for_integers() -> None:
    assert not compare(torch.tensor([4], dtype=torch.int8), torch.tensor([5], dtype=torch.int8), T1(max_ulp=3)).ok


def _codes(quotient: list[float]) -> tuple[Tensor, dict[str, Tensor]]:
    before = torch.tensor([quotient])
    return before.round().to(torch.int8), {"before": before}


@pytest.mark.parametrize(
    ("quotient", "actual", "ok"),
    [
        ([2.5, 1.2, -3.5], [3, 1, -4], True),  # up at a planted tie
        ([2.5, 1.2, -3.5], [2, 1, -3], True),
        ([2.5, 1.2, -3.5], [2, 2, -4], False),  # away from a tie
        ([2.5, 1.2, -3.5], [4, 1, -4], False),  # two steps
        ([2.5, 1.2, -3.5], [1, 1, -4], False),  # the wrong side
        ([2.5 + 1e-3, 1.2, -3.5], [2, 1, -4], False),  # near a tie is no tie
        ([2.5 * (1 + 2e-7), 1.2, -3.5], [2, 1, -4], True),  # within 4 eps of it
    ],
)
def test_t2_forgives_one_step_at_a_tie_only(quotient: list[float], actual: list[int], ok: bool) -> None:
    codes, context = _codes(quotient)
    assert compare(torch.tensor([actual], dtype=torch.int8), codes, T2("before"), context=context).ok is ok


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_t2_knows_codes_that_wider_floats_hold(dtype: torch.dtype) -> None:
    """Whole numbers, or those of a grid, as FP4's."""
    whole, moved = (torch.tensor(codes, dtype=dtype) for codes in ([2.0, 1.0, 5.0], [3.0, 1.0, 5.0]))
    before = {"before": torch.tensor([2.5, 1.2, 5.0])}
    assert compare(moved, whole, T2("before"), context=before).ok
    assert not compare(moved + torch.tensor([1.0, 0.0, 0.0], dtype=dtype), whole, T2("before"), context=before).ok
    far = torch.tensor([4.0, 1.0, 5.0], dtype=dtype)  # two steps, though no code between them occurs
    assert not compare(far, whole, T2("before"), context={"before": torch.tensor([3.0, 1.2, 5.0])}).ok
    fp4, other = (torch.tensor(codes, dtype=dtype) for codes in ([1.5, 4.0, 3.0, 2.0], [1.0, 3.0, 3.0, 2.0]))
    assert compare(other, fp4, T2("before"), context={"before": torch.tensor([1.25, 3.5, 3.0, 2.0])}).ok
    assert not compare(other, fp4, T2("before"), context={"before": torch.tensor([1.25, 3.6, 3.0, 2.0])}).ok
    skipped = torch.tensor([1.5, 3.0, 3.0, 1.0], dtype=dtype)  # from 2 to 1 over 1.5, which occurs
    assert not compare(skipped, fp4, T2("before"), context={"before": torch.tensor([1.5, 3.5, 3.0, 1.5])}).ok


def test_t2_divides_by_group_scales_and_adds_zero_points() -> None:
    weight = torch.tensor([[0.5, 1.5, 5.0, 7.0], [1.0, 3.0, 2.0, 4.0]])
    scale = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
    zero = torch.tensor([[0, 1], [0, 0]], dtype=torch.int8)
    context = {"weight": weight, "scale": scale, "zero": zero}
    expected = torch.tensor([[0, 2, 4, 4], [0, 2, 0, 1]], dtype=torch.int8)  # quotients .5 1.5 3.5 4.5, .5 1.5 .5 1
    moved = torch.tensor([[1, 1, 3, 5], [1, 1, 1, 1]], dtype=torch.int8)
    tier = T2("weight", scale="scale", zero_point="zero")
    assert compare(moved, expected, tier, context=context).ok
    moved[1, 3] = 2
    assert not compare(moved, expected, tier, context=context).ok


def test_t2_knows_ties_between_fp8_codes_and_limits_their_share() -> None:
    before = torch.tensor([17.0, 18.0, 19.0, 20.0])  # e4m3: steps of 2 between 16 and 32
    expected = before.to(torch.float8_e4m3fn)
    moved = torch.tensor([18.0, 18.0, 18.0, 20.0]).to(torch.float8_e4m3fn)
    assert compare(moved, expected, T2("before"), context={"before": before}).ok
    assert not compare(moved, expected, T2("before", max_share=0.25), context={"before": before}).ok
    assert not compare(
        torch.tensor([16.0, 20.0, 20.0, 20.0]).to(torch.float8_e4m3fn), expected, T2("before"), context={"before": before}
    ).ok


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ({}, "no tensor 'before' beside"),
        ({"before": torch.ones(1, 2)}, "unpacked codes"),
        ({"before": torch.ones(1, 3, dtype=torch.int8)}, "ties lie between real values"),
    ],
)
def test_t2_says_what_it_needs(context: dict[str, Tensor], message: str) -> None:
    codes, _ = _codes([2.5, 1.2, -3.5])
    with pytest.raises(UserInputError, match=message):
        compare(codes + 1, codes, T2("before"), context=context)


def test_t3_limits_hold_each_on_its_own() -> None:
    expected = torch.rand(8, 16, generator=torch.Generator().manual_seed(0)) + 0.5
    near = expected * 1.01  # 40 dB, relative error 1 %
    assert compare(near, expected, T3(min_sqnr_db=39.9)).ok
    assert not compare(near, expected, T3(min_sqnr_db=40.1)).ok
    assert compare(near, expected, T3(max_relative_error=0.0101)).ok
    assert not compare(near, expected, T3(max_relative_error=0.0099)).ok
    assert compare(near, expected, T3(max_loss_ratio=1.02)).ok
    assert not compare(near, expected, T3(max_loss_ratio=1.005)).ok
    assert not compare(expected / 1.01, expected, T3(max_loss_ratio=1.005)).ok, "a loss that falls by itself is a change, too"
    assert not compare(near, expected, T3(min_sqnr_db=10.0, max_relative_error=0.001)).ok
    assert not compare(expected.clone().fill_(math.nan), expected, T3(min_sqnr_db=-1e9)).ok


def test_t3_kl_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(1)
    expected, actual = torch.rand(4, 9, generator=generator), torch.rand(4, 9, generator=generator)
    wanted = torch.nn.functional.kl_div(
        actual.double().log_softmax(-1), expected.double().log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert compare(actual, expected, T3(max_kl=float(wanted) * 1.0001)).ok
    assert not compare(actual, expected, T3(max_kl=float(wanted) * 0.9999)).ok


LOOSE = [T1(1 << 61), T1(1 << 61, at="tensor"), T3(min_sqnr_db=-1e9), T3(max_relative_error=1e300), T3(max_kl=1e300)]
LOOSE += [T3(max_loss_ratio=1e300), T4(1e300)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e5m2, torch.complex64], ids=dtype_name)
@pytest.mark.parametrize("tier", LOOSE, ids=str)
def test_nan_and_infinity_at_other_places_pass_no_tier(tier: Tier, dtype: torch.dtype) -> None:
    rows = torch.arange(1.0, 13.0).reshape(3, 4)
    odd = (math.nan, math.inf, -math.inf)
    for one, two in itertools.permutations([rows, *(_with(rows, 1, value) for value in odd)], 2):
        assert not compare(one.to(dtype), two.to(dtype), tier).ok
    for value in odd:
        assert not compare(_with(rows, 0, value).to(dtype), _with(rows, 1, value).to(dtype), tier).ok
        assert not compare(rows.to(dtype), _with(rows, slice(None), value).to(dtype), tier).ok


def _with(rows: Tensor, place: int | slice, value: float) -> Tensor:
    """A row of nothing else, or a value in a row."""
    rows = rows.clone()
    rows[1, place] = value
    return rows


def test_t3_kl_of_a_row_that_is_no_distribution_is_known_only_where_it_is_equal() -> None:
    rows = torch.arange(12.0).reshape(3, 4)
    for value in (math.nan, math.inf):
        masked = _with(rows, 1, value)
        moved = masked + torch.tensor([[1e-4], [0.0], [0.0]]) * torch.arange(4.0)
        assert compare(moved, masked, T3(max_kl=1e-3)).ok
        moved[1, 3] += 1
        assert not compare(moved, masked, T3(max_kl=1e-3)).ok


@pytest.mark.parametrize("tier", [T1(4), T3(max_kl=1e-3), T3(min_sqnr_db=20.0), T3(max_loss_ratio=1.1), T4(0.1)], ids=str)
@pytest.mark.parametrize("part", [0, 1])
def test_both_parts_of_complex_numbers_and_of_packed_codes_are_held(tier: Tier, part: int) -> None:
    parts = torch.rand(64, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    wrong = parts.clone()
    wrong[:, part] *= -3
    assert not compare(torch.view_as_complex(wrong), torch.view_as_complex(parts), tier).ok
    codes = torch.arange(64, dtype=torch.uint8) & 0x33
    moved = codes ^ (0x04 << 4 * part)
    if not isinstance(tier, T1):
        assert not compare(*(one.view(torch.float4_e2m1fn_x2) for one in (moved, codes)), tier).ok


def test_t2_takes_no_elements_of_two_values() -> None:
    codes = torch.arange(8, dtype=torch.uint8)
    with pytest.raises(UserInputError, match="float4_e2m1fn_x2 holds two values an element; give unpacked codes"):
        compare(
            (codes + 0x11).view(torch.float4_e2m1fn_x2), codes.view(torch.float4_e2m1fn_x2), T2("before"), context={"before": codes / 2}
        )


def test_t4_judges_the_paired_mean_with_its_interval_and_prints_the_power() -> None:
    generator = torch.Generator().manual_seed(2)
    expected = torch.rand(200, generator=generator) * 4
    actual = expected + 0.01 * (torch.rand(200, generator=generator) - 0.5)
    found = compare(actual, expected, T4(margin=0.002))
    assert found.ok
    assert "power" in found.summary
    assert not compare(actual + 0.003, expected, T4(margin=0.002)).ok
    assert not compare(actual - 0.003, expected, T4(margin=0.002)).ok
    noisy = expected + 4 * (torch.rand(200, generator=generator) - 0.5)
    assert not compare(noisy, expected, T4(margin=0.002)).ok, "too little data to tell is no pass"
    right = torch.arange(100) % 4 > 0
    flipped = right.clone()
    flipped[:2] = ~flipped[:2]
    found = compare(flipped, right, T4(margin=0.2))
    assert found.ok
    assert "McNemar" in found.summary


@pytest.mark.parametrize(
    ("new", "old", "loosens"),
    [
        (T0(), T3(min_sqnr_db=20.0), False),
        (T1(4), T0(), True),
        (T1(4), T1(4), False),
        (T1(5), T1(4), True),
        (T1(3), T1(4), False),
        (T1(3, at="tensor"), T1(4), True),
        (T1(4), T3(min_sqnr_db=90.0), True),
        (T3(min_sqnr_db=30.0), T3(min_sqnr_db=40.0), True),
        (T3(min_sqnr_db=40.0), T3(min_sqnr_db=40.0, max_kl=0.1), True),
        (T3(min_sqnr_db=40.0, max_kl=0.1), T3(min_sqnr_db=40.0), False),
        (T2("a", max_share=0.5), T2("a", max_share=0.1), True),
        (T2("b"), T2("a"), True),
        (T4(0.1, confidence=0.9), T4(0.1), True),
    ],
    ids=str,
)
def test_a_loosening_is_seen(new: Tier, old: Tier, loosens: bool) -> None:
    assert new.loosens(old) is loosens
    assert bool(TierMap.of(new).loosened(TierMap.of(old), ["x"])) is loosens


@pytest.mark.parametrize("tier", [T0(), T1(3, at="tensor"), T2("w", scale="s", max_share=0.5), T3(max_kl=0.5), T4(0.25, seed=3)], ids=str)
def test_a_tier_survives_json(tier: Tier) -> None:
    assert TierMap.from_dict(TierMap.of({"a": tier}).to_dict()).tier_of("a") == tier


@pytest.mark.parametrize(
    "make",
    [
        lambda: T1(-1),
        lambda: T1(1.5),  # type: ignore[arg-type]
        lambda: T1(2, at="row"),  # type: ignore[arg-type]
        lambda: T2(""),
        lambda: T2("a", zero_point="z"),
        lambda: T3(),
        lambda: T3(min_sqnr_db=math.nan),
        lambda: T3(max_loss_ratio=0.5),
        lambda: T4(margin=0.0),
        lambda: T4(margin=1.0, confidence=1.0),
        lambda: TierMap.of("T0"),  # type: ignore[arg-type]
        lambda: TierMap.from_dict({"*": {"tier": "T9"}}),
        lambda: TierMap.from_dict({"*": {"tier": "T1", "new_limit": 3}}),
    ],
)
def test_a_limit_that_is_none_is_refused(make) -> None:
    with pytest.raises(UserInputError):
        make()


DECOYS = ("all zeros", "halved", "rolled by one")


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool, torch.complex64], ids=dtype_name)
def test_decoys_are_what_they_are_called(dtype: torch.dtype) -> None:
    tensor = some_tensor(dtype)
    decoys = decoys_of(tensor, {"other": some_tensor(dtype, 24)[10:22], "another form": torch.ones(3)})
    assert set(decoys) == {*DECOYS, "the tensor 'other'"}
    assert float(widen(decoys["all zeros"]).abs().max()) == 0
    assert torch.equal(widen(decoys["rolled by one"]), widen(tensor).roll(1, 0))
    assert all(decoy.dtype == dtype and decoy.shape == tensor.shape for decoy in decoys.values())


@pytest.mark.parametrize(
    ("tier", "passed"),
    [
        (T0(), ()),
        (T1(4), ()),
        (T1(1 << 23), ("halved",)),
        (T1(1 << 33), DECOYS),
        (T3(min_sqnr_db=20.0), ()),
        (T3(min_sqnr_db=6.0), ("halved",)),
        (T3(min_sqnr_db=-100.0), DECOYS),
        (T3(max_relative_error=1.0), ("all zeros", "halved")),
        (T3(max_loss_ratio=2.5), ("halved",)),
        (T4(margin=0.01), ()),
        (T4(margin=100.0), ("all zeros", "halved")),
    ],
    ids=str,
)
def test_a_limit_that_lets_decoys_through_is_named(tier: Tier, passed: tuple[str, ...]) -> None:
    tensor = torch.tensor([1.0, -2.0, 3.0, 7.0, 5.0, -1.5]).abs() if isinstance(tier, T4) or tier == T3(max_loss_ratio=2.5) else None
    expected = tensor if tensor is not None else torch.tensor([1.0, -2.0, 3.0, -7.0, 5.0, -1.5])
    assert vacuous_decoys(expected, tier) == passed


def test_another_layers_tensor_is_a_decoy() -> None:
    layer, other = torch.full((4, 4), 1.0), torch.full((4, 4), 1.05)
    assert "the tensor 'other'" in vacuous_decoys(layer, T3(min_sqnr_db=20.0), others={"other": other})
    assert not vacuous_decoys(layer, T3(min_sqnr_db=30.0), others={"other": other})


def test_the_ladder_tells_rounding_from_a_wrong_constant() -> None:
    generator = torch.Generator().manual_seed(3)
    x64, y64 = torch.rand(64, 64, generator=generator, dtype=torch.float64), torch.rand(64, 64, generator=generator, dtype=torch.float64)

    def product(wrong: float):
        def compute(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            x, y = x64.to(dtype), y64.to(dtype)
            return ((x + y) * (x - y)) * (1 + wrong), (x.double() ** 2 - y.double() ** 2)

        return compute

    right = climb(product(0.0))
    assert right.ok, str(right)
    assert list(right.errors.values()) == sorted(right.errors.values(), reverse=True)
    assert "bfloat16" in climb(product(0.0), max_units=(1e-3, 32.0, 32.0)).bad
    wrong = climb(product(1e-4))  # hidden below the rounding of bf16
    assert wrong.bad == ("float32", "float64")
    assert "does not fall at float32" in str(wrong)
    with pytest.raises(UserInputError, match="coarsest first"):
        climb(product(0.0), rungs=(torch.float64, torch.float32))


WITHOUT_BYTES: dict[str, Callable[[], Tensor]] = {
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "nested": lambda: torch.nested.as_nested_tensor([torch.ones(2), torch.ones(2)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8),  # comparing its bytes ends the process
    "meta": lambda: torch.ones(3, device="meta"),
}


@pytest.mark.filterwarnings("ignore")  # torch warns that quantized and nested tensors are old, or new
@pytest.mark.parametrize("kind", WITHOUT_BYTES)
@pytest.mark.parametrize("tier", [T0(), T3(max_loss_ratio=1.1)], ids=str)
def test_a_tensor_without_bytes_of_its_own_is_refused(kind: str, tier: Tier) -> None:
    tensor = WITHOUT_BYTES[kind]()
    for pair in ((tensor, tensor), (torch.ones(3), tensor), (tensor, torch.ones(3))):
        with pytest.raises(UserInputError, match=f"^weight: a {kind} tensor"):
            compare(*pair, tier, name="weight")


def test_zeros_of_either_sign_are_no_loss() -> None:
    assert compare(-torch.zeros(3), torch.zeros(3), T3(max_loss_ratio=1.1)).ok
    assert not compare(torch.tensor([1.0, -1.0]), torch.tensor([-1.0, 1.0]), T3(max_loss_ratio=1.1)).ok


def test_bits_that_differ_in_the_sign_of_zero_only_are_called_so() -> None:
    summary = compare(torch.tensor([-0.0, 1.0]), torch.tensor([0.0, 1.0]), T0()).summary
    assert summary == "1 of 2 differ, the first at [0], all of them in the sign of 0 or the bits of NaN only"
