"""Which engine stands for which device."""

from __future__ import annotations

import torch

from compressor.errors import UserInputError
from compressor.training.cuda_graph import CudaGraphEngine
from compressor.training.engine import Engine
from compressor.training.tape_engine import TapeEngine


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
