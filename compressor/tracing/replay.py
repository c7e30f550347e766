"""Forwards that run again from the start, so that a target that they call repeatedly is calibrated with all its calls.

Such a call depends on targets in between, so no paused forward can reach it without passing stages that are not finished. A forward of
its own can: it runs on the weights of this moment, which is what the statistics of the target are defined by, with hooks awake inside
the target only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from compressor.data.collate import Batch
from compressor.tracing.calls import CallRouter
from compressor.tracing.isolation import TorchState
from compressor.tracing.sample import Sample


class Replays:
    """Keeps the batches, and runs them again on demand."""

    def __init__(
        self,
        router: CallRouter,
        batches: Sequence[Batch],
        device: torch.device | None,
        quiet: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Keep the batches.

        Args:
            router: of the run.
            batches: not modified.
            device: of the model; None leaves batches where they are.
            quiet: context in which hooks sleep.
        """
        self._router, self._device, self._quiet = router, device, quiet
        self._batches = list(batches)
        self._start = TorchState.current(foreign=router.foreign)

    def begin(self) -> None:
        """Remember the state that the forwards begin in."""
        self._start = TorchState.current(foreign=self._router.foreign)

    def run(self, model: nn.Module, target: str, index: int) -> None:
        """Run one forward from its start to its end, for the hooks inside a target.

        Args:
            model: as it is now.
            target: dotted name.
            index: of the batch.

        Raises:
            TracingError: the weights of an earlier target are not those that the samples met.
        """
        self._router.weights.check(model, self._router.values.noted())
        values = self._router.values
        before = values.view()
        values.undo({})
        foreign = self._router.foreign
        sample = Sample(model, self._batches[index], index, self._device, values, foreign, replays=target, start=self._start)
        try:
            with sample.hush:
                sample.hush.enter_context(self._quiet())
                self._router.advance(sample, propagate=True)
        finally:
            sample.kill()
            values.restore(before)
        self._router.covered.setdefault(target, set()).add(index)
