"""Conditions two at a time: who is wrong only where a view has one token, or a square weight is float16, meets each such pair once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Choose few cases among which every two values of two factors meet.

    Greedy: each case begins with a pair that is missing, and each further factor takes the value that adds most pairs to it. The result
    depends on the order of factors and values alone.

    Args:
        factors: what a case has, and the values of each; at least two factors.

    Returns:
        A value of every factor for each case.
    """
    names = list(factors)
    sizes = [range(len(factors[name])) for name in names]
    missing = {((i, a), (j, b)) for i, j in combinations(range(len(names)), 2) for a, b in product(sizes[i], sizes[j])}
    cases = []
    while missing:
        chosen = dict(min(missing))
        for place in (place for place in range(len(names)) if place not in chosen):
            chosen[place] = max(sizes[place], key=lambda value: sum(_pair(one, (place, value)) in missing for one in chosen.items()))
        missing -= {_pair(*two) for two in combinations(chosen.items(), 2)}
        cases.append({name: factors[name][chosen[place]] for place, name in enumerate(names)})
    return cases


def _pair(one: tuple[int, int], other: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    return (one, other) if one < other else (other, one)
