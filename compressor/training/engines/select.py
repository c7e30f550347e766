"""The CPU's engine: a step is recorded on a tape while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compressor.errors import UserInputError
from compressor.training.capture.protocol import Captured, Engine
from compressor.training.capture.recorder import Recorder
from compressor.training.engines.cuda_graph import CudaGraphEngine
from compressor.training.engines.memory_plan import Arena
from compressor.training.engines.tape import Tape


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


# Which engine stands for which device.


def engine_for(device: torch.device, mode: str = "replay") -> Engine:
    """Choose the engine of a device.

    Args:
        device: where the model lies.
        mode: `eager` needs no engine of the device's own.

    Returns:
        A CUDA graph engine for CUDA, the tape for the CPU.

    Raises:
        UserInputError: the mode captures, and the device has no engine.
    """
    if device.type == "cuda":
        return CudaGraphEngine(device)
    if device.type == "cpu" or mode == "eager":
        return TapeEngine()
    raise UserInputError(
        f"Trainer: mode={mode!r} needs an engine that captures on {device.type}, and only cpu and cuda have one; "
        "use mode='eager', or move the model"
    )
