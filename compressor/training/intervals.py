"""Ranges of memory, which may overlap, as few that do not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Interval:
    """A range of addresses.

    Attributes:
        begin: the first byte.
        end: the byte after the last one.
    """

    begin: int
    end: int

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.end - self.begin


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Unite ranges that overlap.

    Args:
        intervals: in any order; empty ones are left out, and those that only touch stay apart, since they may be of different blocks.

    Returns:
        Disjoint ranges in ascending order.
    """
    found: list[Interval] = []
    for interval in sorted(interval for interval in intervals if interval.size > 0):
        if found and interval.begin < found[-1].end:
            found[-1] = Interval(found[-1].begin, max(found[-1].end, interval.end))
        else:
            found.append(interval)
    return found
