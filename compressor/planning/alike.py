"""Many modules in few words: names that differ in numbers only, and get the same, stand as one: `layers.0-31.mlp.up_proj`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Sequence

from compressor.lifecycle import PlannedModule


def join_alike(modules: Sequence[PlannedModule], what: Callable[[PlannedModule], Hashable]) -> list[tuple[str, list[PlannedModule]]]:
    """Put modules together whose names run through all combinations of some numbers.

    Args:
        modules: of a plan.
        what: what modules must have in common.

    Returns:
        A name with ranges in the place of numbers, and the modules that it stands for; in the order of their first modules. A module that
        fits with none is alone.
    """
    groups: dict[Hashable, list[PlannedModule]] = {}
    for module in modules:
        groups.setdefault((re.sub(r"\d+", "#", module.name), what(module)), []).append(module)
    joined: list[tuple[str, list[PlannedModule]]] = []
    for members in groups.values():
        columns = zip(*(map(int, re.findall(r"\d+", module.name)) for module in members), strict=True)
        ranges = [sorted(set(column)) for column in columns]
        if math.prod(map(len, ranges)) == len(members):
            joined.append((_with_ranges(members[0].name, ranges), members))
        else:
            joined += [(module.name, [module]) for module in members]
    return joined


def _with_ranges(name: str, ranges: Sequence[list[int]]) -> str:
    texts = map(_range_text, ranges)
    return re.sub(r"\d+", lambda number: next(texts), name)


def _range_text(numbers: list[int]) -> str:
    """Write sorted numbers as `0-3,5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
