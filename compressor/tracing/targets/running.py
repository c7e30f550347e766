"""What a run looks like from outside, whichever engine runs it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Protocol, Self

from torch import nn

Watched = Collection[str]  # dotted names of the modules that carry calibration hooks


def hooks_around(module: nn.Module) -> frozenset[int]:
    """List the hooks around a module's forward.

    Args:
        module: the module.

    Returns:
        Their numbers; torch gives each number once in a process.
    """
    return frozenset((*module._forward_pre_hooks, *module._forward_hooks))


def hooked(model: nn.Module, but: Collection[int] = ()) -> list[str]:
    """Name the modules that carry hooks: where nobody says which, those are who look.

    Args:
        model: the model.
        but: numbers of hooks that do not count.

    Returns:
        Dotted names.
    """
    return [name for name, module in model.named_modules() if not hooks_around(module) <= frozenset(but)]


class RunningStage(Protocol):
    """One stop of a run; both engines give it: `calibrate`, then compress what lies inside, then `propagate`."""

    index: int
    name: str
    num_samples: int

    @property
    def module(self) -> nn.Module:
        """The target as it is now."""

    @property
    def module_names(self) -> tuple[str, ...]:
        """Dotted names of the targets and of all modules inside them, as they are now."""

    @property
    def put_off(self) -> tuple[str, ...]:
        """Dotted names of modules of an earlier stage that samples run through in this one, for less was live before them."""

    def calibrate(self) -> None:
        """Call the targets for every sample without consequences."""

    def rehearse(self) -> None:
        """Call the targets for every sample without consequences, whether or not something is watched; for the proof."""

    def skip_calibration(self) -> None:
        """Take the statistics of the targets for complete, though nothing is called: an earlier run has compressed what lies inside."""

    def propagate(self, only_first: bool = False) -> None:
        """Let every sample run on to its next stage, or to its end."""


class Run(Protocol):
    """Batches on their way through the stages. A context manager; iterating over it without entering it enters it."""

    outputs: list[Any]

    @property
    def uncalled(self) -> tuple[str, ...]:
        """Targets that no sample has called so far."""

    def give_back(self, names: Collection[str]) -> None:
        """Put back what forwards have rewritten in some modules, before these are compressed."""

    def __enter__(self) -> Self:
        """Patch what must be patched."""

    def __exit__(self, *exc_info: object) -> None:
        """Undo every patch."""

    def __iter__(self) -> Iterator[RunningStage]:
        """Give one stage after another."""
