"""The search, without a model: it finds what was planted, in logarithmic time, and says when there is nothing to find."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.bisect.search import MAX_CULPRITS, search


def counted(effect):
    seen = {}

    def measure(parts):
        if parts not in seen:
            seen[parts] = effect(parts)
        return seen[parts]

    return measure, seen


def sums(weights):
    return counted(lambda parts: sum(weights[name] for name in parts))


@given(st.integers(1, 200), st.data())
def test_one_bad_part_is_found_in_logarithmic_time(size, data):
    bad = data.draw(st.integers(0, size - 1))
    measure, seen = sums({f"p{i}": 100.0 if i == bad else 0.1 for i in range(size)})
    found = search([f"p{i}" for i in range(size)], measure)
    assert [one.name for one in found.culprits] == [f"p{bad}"]
    assert not found.is_spread
    assert found.is_monotone
    assert len(seen) <= math.ceil(math.log2(size)) + 3


@given(st.sets(st.integers(0, 39), min_size=1, max_size=MAX_CULPRITS))
def test_every_bad_part_is_found_in_the_order_in_which_they_run(bad):
    measure, _ = sums({f"p{i}": 1.0 if i in bad else 0.0001 for i in range(40)})
    found = search([f"p{i}" for i in range(40)], measure, limit=0.1)
    assert [one.name for one in found.culprits] == [f"p{i}" for i in sorted(bad)]
    assert found.culprits[-1].rest == pytest.approx(0.0001 * (40 - len(bad)))


def test_a_spread_difference_names_no_part_but_the_share_of_each():
    weights = {f"p{i}": float(i + 1) for i in range(8)}
    found = search(list(weights), sums(weights)[0])
    assert found.is_spread
    assert not found.culprits
    assert dict(found.alone) == weights


def test_a_part_whose_effect_another_takes_back_is_found_by_looking_at_each():
    def effect(parts):
        return (50.0 if "p1" in parts and "p2" not in parts else 0.0) + 6.0 * ("p3" in parts) + 5.0 * ("p4" in parts)

    found = search([f"p{i}" for i in range(6)], counted(effect)[0], limit=10)
    assert found.differs
    assert [one.name for one in found.culprits] == ["p1"]
    assert found.alone["p3"] == 6.0


def test_many_bad_parts_are_a_spread_difference():
    found = search([f"p{i}" for i in range(9)], sums({f"p{i}": 1.0 for i in range(9)})[0], limit=0.5)
    assert found.is_spread
    assert not found.culprits
    assert len(found.alone) == 9


def test_two_parts_that_only_differ_together_are_not_told_apart():
    found = search(["a", "b", "c", "d"], counted(lambda parts: 9.0 * ({"b", "d"} <= parts))[0])
    assert found.is_spread
    assert not found.culprits
    assert set(found.alone.values()) == {0.0}


def test_a_difference_that_falls_as_more_is_compressed_is_said():
    def effect(parts):
        return {0: 0.0, 1: 9.0, 2: 1.0}.get(len(parts), 8.0)

    found = search(["a", "b", "c", "d", "e", "f"], counted(effect)[0], limit=4)
    assert found.is_spread  # each of the six is beyond the limit by itself
    assert search(["a", "b", "c", "d"], counted(lambda parts: {0: 0, 1: 9, 2: 1, 3: 5, 4: 3}[len(parts)])[0], limit=2).is_monotone is False


@pytest.mark.parametrize("limit", [None, 0.5])
def test_no_difference_is_no_finding(limit):
    found = search(["a", "b"], sums({"a": 0.0, "b": 0.0})[0], limit)
    assert not found.differs
    assert not found.culprits
    assert not search([], lambda parts: 1 / 0, limit).differs


def test_a_part_that_gives_no_number_is_found():
    weights = {"a": 0.1, "b": math.inf, "c": 0.1}
    assert [one.name for one in search(list(weights), sums(weights)[0]).culprits] == ["b"]
