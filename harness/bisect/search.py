"""Binary search for the parts that cause a difference. Knows names and numbers only, so that it can be tested without a model.

`measure(parts)` is the difference when exactly these parts are compressed; with none it is 0. Where every part only adds to it, the first
k parts cross the limit at one k, and log2(n) measurements find it. That is checked, not assumed: a part is named only if it alone makes
more than the limit. If no part does, the difference is spread, or parts act together, and each is measured alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

MAX_CULPRITS = 3
"""How many guilty parts are named; behind that the difference counts as spread."""
_NOISE = 0.9

Measure = Callable[[frozenset[str]], float]


@dataclass(frozen=True)
class Culprit:
    """One part that makes more than the limit by itself.

    Attributes:
        name: of the part.
        alone: difference with nothing else compressed.
        rest: difference with all compressed but this part and the culprits before it.
    """

    name: str
    alone: float
    rest: float


@dataclass(frozen=True)
class Search:
    """What a search found.

    Attributes:
        total: difference with every part compressed.
        limit: above which a difference counts.
        culprits: guilty parts in the order in which they were found, that is in which they run; none where more than MAX_CULPRITS are.
        alone: difference of each part by itself; only measured where the difference is spread.
        is_monotone: False where compressing more parts was seen to make the difference smaller.
    """

    total: float
    limit: float
    culprits: tuple[Culprit, ...] = ()
    alone: Mapping[str, float] = field(default_factory=dict)
    is_monotone: bool = True

    @property
    def differs(self) -> bool:
        """True where the whole is beyond the limit."""
        return self.total > self.limit

    @property
    def is_spread(self) -> bool:
        """True where the culprits do not explain the difference."""
        return self.differs and bool(self.alone)


def half_of(total: float) -> float:
    """Return half of a difference; the largest number for an infinite one, so that whatever is infinite is beyond it."""
    return sys.float_info.max if math.isinf(total) else total / 2


class _Prefixes:
    """Measures what the first parts do, and remembers whether it ever fell."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._seen: dict[tuple[str, ...], dict[int, float]] = {}

    def crossing(self, names: Sequence[str], limit: float, total: float) -> str:
        """Return the part with which the difference of the parts so far goes beyond the limit."""
        seen = self._seen.setdefault(tuple(names), {0: 0.0, len(names): total})
        below, beyond = 0, len(names)
        while beyond - below > 1:
            middle = (below + beyond) // 2
            seen[middle] = self._measure(frozenset(names[:middle]))
            below, beyond = (below, middle) if seen[middle] > limit else (middle, beyond)
        return names[below]

    @property
    def is_monotone(self) -> bool:
        series = ([seen[size] for size in sorted(seen)] for seen in self._seen.values())
        return all(later >= earlier * _NOISE for values in series for earlier, later in pairwise(values))


def search(names: Sequence[str], measure: Measure, limit: float | None = None) -> Search:
    """Find the parts that cause a difference.

    Args:
        names: of the parts, in the order in which they run.
        measure: difference with these parts compressed; asking twice must be cheap.
        limit: above which a difference counts; None: half of the whole difference, so that a part is guilty that makes most of it.

    Returns:
        What was found; nothing where the whole is within the limit.
    """
    total = measure(frozenset(names)) if names else 0.0
    bound = half_of(total) if limit is None else limit
    if not total > bound:
        return Search(total, bound)
    prefixes, left, rest = _Prefixes(measure), list(names), total
    culprits: list[Culprit] = []
    while left and rest > bound and len(culprits) < MAX_CULPRITS:
        name = _guilty(left, measure, prefixes, bound, rest)
        if name is None:
            break
        left.remove(name)
        rest = measure(frozenset(left)) if left else 0.0
        culprits.append(Culprit(name, measure(frozenset([name])), rest))
    alone = {name: measure(frozenset([name])) for name in names} if rest > bound else {}
    if alone:
        culprits = _guilty_of_all(names, measure, alone, bound, culprits)
    return Search(total, bound, tuple(culprits), alone, prefixes.is_monotone)


def _guilty(names: Sequence[str], measure: Measure, prefixes: _Prefixes, limit: float, total: float) -> str | None:
    """Return the first part that goes beyond the limit by itself; if what crosses it does not, the one that makes half of the whole."""
    for bound in dict.fromkeys([limit, max(limit, half_of(total))]):
        name = prefixes.crossing(names, bound, total)
        if measure(frozenset([name])) > bound:
            return name
    return None


def _guilty_of_all(names: Sequence[str], measure: Measure, alone: Mapping[str, float], limit: float, known: list[Culprit]) -> list[Culprit]:
    """Return the parts that are guilty by themselves, with those that others hid from the search; none where there are too many."""
    found = [name for name in names if alone[name] > limit]
    if len(found) > MAX_CULPRITS:
        return []
    hidden = [name for name in found if name not in {one.name for one in known}]
    return known + [Culprit(name, alone[name], measure(frozenset(names) - {name})) for name in hidden]
