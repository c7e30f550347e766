"""In which order targets become stages, learnt from the order in which forwards call them.

Batches of different kinds call different targets: one with an image runs the vision layers first, one without goes straight to the
language model. A target may become a stage only when every forward that will call it has arrived there, so the orders are merged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Trail:
    """What one forward was seen to do.

    Attributes:
        calls: the targets that it calls, a name for each call, in order.
        foreign_random: it draws random numbers from Python or numpy.
    """

    calls: tuple[str, ...]
    foreign_random: bool = False


def merged_rank(trails: Sequence[Trail], rank: Mapping[str, int]) -> dict[str, int]:
    """Rank the targets so that each trail, taken at its first calls, goes upwards, as far as the trails agree.

    Args:
        trails: of one forward of each kind.
        rank: the order of the model, which decides where the trails say nothing or contradict each other.

    Returns:
        Every target of `rank` to its place among the stages.
    """
    before: dict[str, set[str]] = {name: set() for name in rank}
    for trail in trails:
        firsts = list(dict.fromkeys(trail.calls))
        for earlier, later in pairwise(firsts):
            before[later].add(earlier)
    left = sorted(rank, key=rank.__getitem__)
    merged: list[str] = []
    while left:
        name = next((name for name in left if before[name] <= set(merged)), left[0])
        left.remove(name)
        merged.append(name)
    return {name: place for place, name in enumerate(merged)}


def repeated(trails: Sequence[Trail]) -> frozenset[str]:
    """Find the targets that some forward calls more than once.

    Args:
        trails: of one forward of each kind.

    Returns:
        Dotted names.
    """
    return frozenset(name for trail in trails for name in set(trail.calls) if trail.calls.count(name) > 1)
