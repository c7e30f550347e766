"""Did an exporter freeze what the inputs decide, a branch or the rows of an expert? The graph is asked on inputs it has not seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
import torch

from compressor.errors import HarnessError
from harness.onnx_graph.running import POLICIES, run_graph
from harness.onnx_graph.similarity import sqnr_db

_MIN_SQNR_DB = 20.0
"""Far below what rounding of codes costs (33 dB were seen), far above another branch."""


def difference(model: onnx.ModelProto, forward: Callable[..., torch.Tensor], inputs: Mapping[str, torch.Tensor], num_draws: int = 3) -> str:
    """Compare a graph with the module on other inputs of the same sizes.

    Args:
        model: not modified.
        forward: the module, called with the inputs in order.
        inputs: that the graph was recorded with; integers are drawn anew from the range that they cover.
        num_draws: of other inputs.

    Returns:
        What differs, or that the graph does not run; empty where nothing does, and where the module does not take such inputs or does
        not repeat itself.
    """
    for seed in range(num_draws):
        other = {name: _another(tensor, seed) for name, tensor in inputs.items()}
        try:
            expected, again = (forward(*other.values()).detach().cpu().numpy() for _ in range(2))
        except (ValueError, IndexError, RuntimeError, AssertionError):
            return ""  # counts of image tokens, for example, that drawn ids do not keep
        if not np.array_equal(expected, again) or not np.isfinite(expected).all():
            return ""
        try:
            found = run_graph(model, {name: tensor.detach().cpu().numpy() for name, tensor in other.items()}, POLICIES["golden"])[0]
        except HarnessError as error:
            return f"no output ({error})"
        if found.shape != expected.shape:
            return f"shape {list(found.shape)}, not {list(expected.shape)}"
        if (noise := sqnr_db(expected, found)) < _MIN_SQNR_DB:
            return f"{noise:.1f} dB from what it computes"
    return ""


def _another(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    if tensor.dtype is torch.bool or tensor.numel() == 0:
        return tensor
    if tensor.is_floating_point():
        return (-tensor if seed % 2 == 0 else tensor).flip(-1)
    low, high = int(tensor.min()), int(tensor.max())
    drawn = np.random.default_rng(seed).integers(low, high + 1, tuple(tensor.shape))
    return torch.from_numpy(drawn).to(tensor.dtype)
