"""Which samples stop at which stage: the orders of all recorded graphs, merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from compressor.tracing.graph.program import Program
from compressor.tracing.graph.refusal import Unrepeatable


class Stop(NamedTuple):
    """One stage of a run.

    Attributes:
        targets: dotted names, in the order of first calls.
        samples: sample to the segment of its program that begins here.
    """

    targets: tuple[str, ...]
    samples: dict[int, int]


def schedule(programs: Sequence[Program], groups: Mapping[str, int]) -> list[Stop]:
    """Put the stages of all samples into one order.

    Args:
        programs: one for each sample.
        groups: target to the number of the stage it shares.

    Returns:
        The stages; each group of targets has exactly one.

    Raises:
        Unrepeatable: two samples reach the targets in contradicting orders.
    """
    routes = [[groups[segment.targets[0]] for segment in program.segments[1:]] for program in programs]
    at = dict.fromkeys(range(len(programs)), 0)
    stops: list[Stop] = []
    closed: set[int] = set()
    while waiting := [sample for sample in at if at[sample] < len(routes[sample])]:
        group = _next_group(routes, at, waiting)
        here = {sample: at[sample] + 1 for sample in waiting if routes[sample][at[sample]] == group}
        targets = tuple(dict.fromkeys(name for sample, segment in here.items() for name in programs[sample].segments[segment].targets))
        if group in closed:
            raise Unrepeatable(
                f"{', '.join(targets)}: batch {min(here)} reaches this sequential target after its stage, because batches call the targets "
                'in different orders; use pipeline="basic" or other sequential targets'
            )
        closed.add(group)
        stops.append(Stop(targets, here))
        for sample in here:
            at[sample] += 1
    return stops


def _next_group(routes: Sequence[Sequence[int]], at: Mapping[int, int], waiting: Sequence[int]) -> int:
    """Choose a stage that no sample will reach later; the first in the order of the model where there are several, or none."""
    heads = sorted({routes[sample][at[sample]] for sample in waiting})
    later = {group for sample in waiting for group in routes[sample][at[sample] + 1 :]}
    return next((group for group in heads if group not in later), heads[0])
