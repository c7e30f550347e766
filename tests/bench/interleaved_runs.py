"""What equal runs need that take turns in one process: random generators of their own, guards on or off, and a clock in the guards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from compressor.training import Plan, Trainer


UNGUARDED = "unguarded"
_NEVER = 10**9


class Turns:
    """Gives every trainer random generators of its own, although torch has but one that all draw from.

    Args:
        trainers: by the names of the runs; each starts where the generators stand now.
        device: whose generators they are.
    """

    def __init__(self, trainers: Mapping[str, Trainer], device: torch.device) -> None:
        from compressor.random_state import RandomState

        self._trainers, self._device, self._running = trainers, device, 0
        self._states = {id(trainer): RandomState.current(foreign=False, devices=device) for trainer in trainers.values()}

    def begin(self, name: str) -> None:
        """Let a run go on. Changes torch's generators, and whether the run's trainer looks at its guards.

        Args:
            name: of the run; that of another trainer ends with it.
        """
        from compressor.random_state import RandomState

        trainer = self._trainers[name]
        trainer.check_every = _NEVER if name == UNGUARDED else 1
        if self._running:
            self._states[self._running] = RandomState.current(foreign=False, devices=self._device)
        self._running = id(trainer)
        self._states[self._running].restore()


@contextmanager
def timed_guards(plan: Plan, clock: Callable[[], float]) -> Iterator[list[float]]:
    """Time the guards where they run, within a step. Changes the plan within the block.

    Args:
        plan: the plan.
        clock: gives seconds.

    Yields:
        A list that gets the seconds of every look.
    """
    guard, spent = plan.guard, []

    def timed() -> None:
        begin = clock()
        guard()
        spent.append(clock() - begin)

    plan.guard = timed  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        del plan.__dict__["guard"]
