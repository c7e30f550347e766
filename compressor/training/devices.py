"""Which engine stands for which device."""

from __future__ import annotations

import torch

from compressor.training.cuda_graph import CudaGraphEngine
from compressor.training.engine import Engine
from compressor.training.tape_engine import TapeEngine


def engine_for(device: torch.device) -> Engine:
    """Choose the engine of a device.

    Args:
        device: where the model lies.

    Returns:
        A CUDA graph engine for CUDA, else the tape.
    """
    return CudaGraphEngine(device) if device.type == "cuda" else TapeEngine()
