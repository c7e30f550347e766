"""The CPU's engine: a step is recorded on a tape while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compressor.training.arena import Arena
from compressor.training.engine import Captured
from compressor.training.recorder import Recorder
from compressor.training.tape import Tape


class TapeEngine:
    """Records on a tape; for CPU tensors.

    Attributes:
        arena: the memory that all its tapes replay on.
    """

    runs_while_capturing = True

    def __init__(self) -> None:
        self.arena = Arena()

    def eager(self, run: Callable[[], Tensor]) -> Tensor:
        """Run a step as it is.

        Args:
            run: the step on its fixed inputs.

        Returns:
            What it returned.
        """
        return run()

    def capture(self, run: Callable[[], Tensor], recorder: Recorder, generators: Sequence[torch.Generator]) -> Captured:
        """Record a step while it runs.

        Args:
            run: the step on its fixed inputs.
            recorder: has the roles of the step's tensors.
            generators: of no concern here, since the recorded operators hold theirs.

        Returns:
            The tape.
        """
        with recorder:
            loss = run()
        return Tape(recorder.ops, recorder.alias(loss), loss, recorder.storages, self.arena)
