"""What a run looks like from outside, whichever engine runs it, and the store where values of a sample wait between two stages."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Protocol, Self, runtime_checkable

from torch import Tensor, nn

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

    @property
    def passed(self) -> frozenset[str]:
        """Dotted names of the modules and tensors that samples have used on their way here, as far as that is known."""

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


# A store holds, for each sample, what is live between the stage it has passed and the stage to come: hidden states, masks, rotary tables,
# caches. Stores that move tensors to host memory or disk implement the same interface (`compressor.pipelines.offload.activation_store`).

# What may wait of a sample, in what it takes where it takes little (a quarter of the stages have no more): the stream between layers, and
# inputs of modules twice as wide. Wider inputs wait for as many samples as all together stay within it, and for none where the
# uncompressed model waits, too: the others wait before the stage that makes these inputs.
WAITING_STREAMS = 3


@runtime_checkable
class ValueStore(Protocol):
    """Keeps the live values of every sample between two stages.

    What `get` gives is bitwise what was put: values, dtypes, strides, tensors that share memory, objects that stand in several places.
    It is lent: whoever lets a forward write into it must either copy first or `put` the outcome.
    """

    def put(self, sample: int, values: dict[str, Any]) -> None:
        """Keep what is live for a sample; replaces what was kept for it.

        Args:
            sample: number of the sample (a batch).
            values: name to any object; tensors inside, at whatever depth, are what may be moved away.
        """

    def get(self, sample: int) -> dict[str, Any]:
        """Return what is live for a sample, on the device that computes.

        Args:
            sample: number of a sample that has been put.

        Returns:
            The values by name.
        """

    def prefetch(self, sample: int) -> None:
        """Start to bring back what `get` will soon be asked for; returns at once, and unknown samples are ignored.

        Args:
            sample: number of the sample.
        """

    def drop(self, sample: int) -> None:
        """Forget a sample and free what only it used; unknown samples are ignored.

        Args:
            sample: number of the sample.
        """

    def close(self) -> None:
        """Forget everything and remove every file; may be called again."""


class MemoryStore:
    """Keeps every value as it is, where it is."""

    def __init__(self) -> None:
        """Start empty."""
        self._values: dict[int, dict[str, Any]] = {}

    def put(self, sample: int, values: dict[str, Any]) -> None:
        """Keep what is live for a sample.

        Args:
            sample: number of the sample.
            values: by name; the objects themselves are kept.
        """
        self._values[sample] = dict(values)

    def get(self, sample: int) -> dict[str, Any]:
        """Return what is live for a sample.

        Args:
            sample: number of a sample that has been put.

        Returns:
            The very objects that were put.

        Raises:
            KeyError: nothing was put for this sample.
        """
        return dict(self._values[sample])

    def prefetch(self, sample: int) -> None:
        """Do nothing: everything is here.

        Args:
            sample: number of the sample.
        """

    def drop(self, sample: int) -> None:
        """Forget a sample.

        Args:
            sample: number of the sample.
        """
        self._values.pop(sample, None)

    def close(self) -> None:
        """Forget everything."""
        self._values.clear()


class RenewingStore(MemoryStore):
    """Gives every tensor as a new object over the same memory, as stores do that move tensors: for the proof, whether a model notices."""

    def get(self, sample: int) -> dict[str, Any]:
        """Return what is live for a sample.

        Args:
            sample: number of a sample that has been put.

        Returns:
            The values that were put, tensors among them as new objects.
        """
        # By identity, so that what was one tensor in two places stays one.
        renewed: dict[int, Any] = {}
        values = super().get(sample)
        for value in values.values():
            if type(value) is Tensor and id(value) not in renewed:
                renewed[id(value)] = value.detach()
                renewed[id(value)].__dict__.update(value.__dict__)
        return {name: renewed.get(id(value), value) for name, value in values.items()}
