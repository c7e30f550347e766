"""Conditions two at a time: who is wrong only where a view has one token, or a square weight is float16, meets each such pair once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations, product
from typing import Any

from harness.checks.catalogue.registry import CheckFailed


def pairwise(factors: Mapping[str, Sequence[Any]], masking: Mapping[str, Sequence[Any]] | None = None) -> list[dict[str, Any]]:
    """Choose few cases among which every two values of two factors meet.

    Greedy: each case begins with a pair that is missing, and each further factor takes the value that adds most pairs to it. The result
    depends on the order of factors and values alone.

    Args:
        factors: what a case has, and the values of each; at least two factors.
        masking: by factor those values beside which other mistakes do not show, as none does in a tensor of zeros. In their cases no pair
            counts that they are not part of. One value at least of every factor must mask nothing.

    Returns:
        A value of every factor for each case.
    """
    names = list(factors)
    sizes = [range(len(factors[name])) for name in names]
    masks = {
        (place, value)
        for place, name in enumerate(names)
        for value in sizes[place]
        if factors[name][value] in (masking or {}).get(name, ())
    }
    missing = {((i, a), (j, b)) for i, j in combinations(range(len(names)), 2) for a, b in product(sizes[i], sizes[j])}
    plain = [[value for value in values if (place, value) not in masks] for place, values in enumerate(sizes)]
    cases = []
    while missing:
        first = min(missing)
        chosen, masked = dict(first), masks.intersection(first)
        for place in (place for place in range(len(names)) if place not in chosen):
            chosen[place] = max(plain[place], key=lambda value: len(missing & _pairs(chosen, (place, value), masked)))
        missing -= {two for two in combinations(sorted(chosen.items()), 2) if masked <= set(two)}
        cases.append({name: factors[name][chosen[place]] for place, name in enumerate(names)})
    return cases


def _pairs(chosen: Mapping[int, int], new: tuple[int, int], masked: set[tuple[int, int]]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    """The pairs that a value adds to a case, and that its masking values leave to be seen."""
    return {(min(one, new), max(one, new)) for one in chosen.items() if masked <= {one, new}}


def in_words(case: Mapping[str, Any]) -> str:
    """Return a case in one line."""
    return ", ".join(f"{name} {value}" for name, value in case.items())


@contextmanager
def told_of(what: str) -> Iterator[None]:
    """Say of what it is that a check fails.

    Args:
        what: in words.

    Raises:
        CheckFailed: as inside, with these words in front.
    """
    try:
        yield
    except CheckFailed as broken:
        raise CheckFailed(f"{what}: {broken}", broken.findings) from broken
