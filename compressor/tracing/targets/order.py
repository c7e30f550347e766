"""In which order targets become stages, learnt from the order in which forwards call them.

Batches of different kinds call different targets: one with an image runs the vision layers first, one without goes straight to the
language model. A target may become a stage only when every forward that will call it has arrived there, so the orders are merged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from compressor.errors import CalibrationError, TracingError


class OutsideCall(NamedTuple):
    """A module that lies in one target, called elsewhere.

    Attributes:
        name: of the module.
        home: the target that it lies in.
        inside: the target in which it was called; None for the code between targets.
        after: the target that was called last before; None before the first one.
    """

    name: str
    home: str
    inside: str | None
    after: str | None


@dataclass(frozen=True)
class Trail:
    """What one forward was seen to do.

    Attributes:
        calls: the targets that it calls, a name for each call, in order.
        foreign_random: it draws random numbers from Python or numpy.
        replaced: names of the modules in whose place it has put others.
        outside: calls of modules outside of the target that they lie in.
        reads: what it may hand on unseen: a Python value that it reads off its data, or what it leaves on the model; empty where nothing.
        reassigned: dotted names of attributes and buffers that it sets on modules.
        borrowed: targets that it does not call, and the weight of theirs that it uses.
        lent: targets whose weight another target has used, after they had been called.
    """

    calls: tuple[str, ...]
    foreign_random: bool = False
    replaced: tuple[str, ...] = ()
    outside: tuple[OutsideCall, ...] = ()
    reads: str = ""
    reassigned: frozenset[str] = frozenset()
    borrowed: tuple[tuple[str, str], ...] = ()
    lent: frozenset[str] = frozenset()


def merged_rank(trails: Sequence[Trail], rank: Mapping[str, int]) -> dict[str, int]:
    """Rank the targets so that each trail, taken at its first calls, goes upwards, as far as the trails agree.

    Args:
        trails: of the forwards.
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
        # Where trails contradict each other the order of the model goes on; `check_orders` tells whether that can be run.
        name = next((name for name in left if before[name] <= set(merged)), left[0])
        left.remove(name)
        merged.append(name)
    return {name: place for place, name in enumerate(merged)}


def check_orders(trails: Sequence[Trail], rank: Mapping[str, int]) -> None:
    """Refuse batches that reach a target after its stage, which is over when every batch that waits for it has passed.

    Args:
        trails: of each batch.
        rank: every target to its place among the stages.

    Raises:
        TracingError: there is such a batch.
    """
    # The stages, played through: of each batch the targets that are still to come, the next one last.
    routes = [list(reversed(dict.fromkeys(trail.calls))) for trail in trails]
    closed: set[str] = set()
    while waiting := [route for route in routes if route]:
        name = min((route[-1] for route in waiting), key=rank.__getitem__)
        if name in closed:
            batch = next(place for place, route in enumerate(routes) if route and route[-1] == name)
            raise TracingError(
                f"{name}: batch {batch} reaches this sequential target after its stage, because batches call the targets in different "
                'orders; use pipeline="basic" or other sequential targets'
            )
        closed.add(name)
        for route in waiting:
            if route[-1] == name:
                route.pop()


def check_replaced(trails: Sequence[Trail]) -> None:
    """Refuse batches of which some put other modules into the model than others: forwards that take turns would run with each other's.

    Args:
        trails: of each batch.

    Raises:
        TracingError: there are such batches.
    """
    first = set(trails[0].replaced)
    for batch, trail in enumerate(trails):
        if odd := sorted(first ^ set(trail.replaced)):
            does, does_not = (batch, 0) if odd[0] in trail.replaced else (0, batch)
            raise TracingError(
                f"{odd[0]}: batch {does} puts another module in its place and batch {does_not} does not, and forwards that take turns "
                "would run with each other's; give batches that do the same (of similar lengths, where the model decides by length)"
            )


def check_outside(trails: Sequence[Trail], rank: Mapping[str, int], watched: Collection[str]) -> None:
    """Refuse watched modules that are called after the stage of the target that they lie in: their statistics would miss that.

    Args:
        trails: of each batch.
        rank: every target to its place among the stages.
        watched: names of the modules that carry calibration hooks.

    Raises:
        CalibrationError: there is one.
    """
    for batch, trail in enumerate(trails):
        for name, home, inside, after in trail.outside:
            is_late = (
                rank[after] >= rank[home] if inside is None and after is not None else inside is not None and rank[inside] > rank[home]
            )
            if name in watched and is_late:
                raise CalibrationError(missed_call(name, home, batch))


def missed_call(name: str, home: str, batch: int) -> str:
    """Word a call that no statistics will see.

    Args:
        name: of the module.
        home: the target that it lies in.
        batch: number of the batch.

    Returns:
        A message.
    """
    return (
        f"{name}: batch {batch} calls it outside {home or 'the model'}, the sequential target that it lies in, and after that, "
        'so its statistics miss this call; paused forwards cannot go back; use pipeline="basic" or other sequential targets'
    )


def repeated(trails: Sequence[Trail]) -> frozenset[str]:
    """Find the targets that some forward calls more than once.

    Args:
        trails: of the forwards.

    Returns:
        Dotted names.
    """
    return frozenset(name for trail in trails for name in set(trail.calls) if trail.calls.count(name) > 1)


def run_late(trails: Sequence[Trail], rank: Mapping[str, int], learning: Collection[str]) -> tuple[str, ...]:
    """Find the targets that paused forwards run after their stage, on the way to a call of a repeated target.

    Args:
        trails: of the forwards.
        rank: every target to its place among the stages.
        learning: targets that are calibrated: of those that are repeated each call is, by forwards that begin anew.

    Returns:
        Their names, in the order of their stages.
    """
    late: set[str] = set()
    for calls in {trail.calls for trail in trails}:
        for name in repeated([Trail(calls)]):
            end = len(calls) - 1 - calls[::-1].index(name)
            if name in learning:
                late |= {other for other in calls[:end] if rank[other] < rank[name]}
            if any(rank[other] > rank[name] for other in calls[calls.index(name) : end]):
                late.add(name)
    return tuple(sorted(late, key=rank.__getitem__))
