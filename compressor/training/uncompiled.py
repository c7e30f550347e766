"""Functions of torch.compile while a step is watched: one that it meets under a dispatch mode it would leave uncompiled for good."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch


def uncompiled() -> AbstractContextManager[None]:
    """Let compiled functions run as they were written while the block runs; afterwards they are compiled as before.

    Returns:
        A context manager.
    """
    # Whoever has compiled anything has imported it; it takes a second.
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    return stance
