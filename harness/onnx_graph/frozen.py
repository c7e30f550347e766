"""Did an exporter freeze what the inputs decide, a branch or the rows of an expert? The graph is asked on inputs it has not seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import torch

from compressor.errors import HarnessError
from harness.onnx_graph.running import POLICIES, run_graph
from harness.onnx_graph.similarity import sqnr_db

_MIN_SQNR_DB = 20.0
"""Far below what rounding of codes costs (33 dB were seen), far above another branch."""


# Of the user's forward: drawn ids do not keep counts of image tokens, for example.
_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Tried:
    """What a graph gave on other inputs.

    Attributes:
        differs: how it is not what the module computes; empty where nothing differs.
        unseen: what kept the comparison from seeing, and which inputs never changed; empty where it saw all.
    """

    differs: str = ""
    unseen: str = ""


def try_other_inputs(
    model: onnx.ModelProto, forward: Callable[..., torch.Tensor], inputs: Mapping[str, torch.Tensor], num_draws: int = 3
) -> Tried:
    """Compare a graph with the module on other inputs of the same sizes.

    Args:
        model: not modified.
        forward: the module, called with the inputs in order.
        inputs: that the graph was recorded with; integers are drawn anew from the range that they cover.
        num_draws: of other inputs.

    Returns:
        What differs, or that the graph does not run; and what was not seen, because the module does not take such inputs, does not repeat
        itself, or because the example leaves nothing to draw.
    """
    draws = [{name: _another(tensor, seed) for name, tensor in inputs.items()} for seed in range(num_draws)]
    held = [name for name, tensor in inputs.items() if all(torch.equal(tensor, one[name]) for one in draws)]
    if len(held) == len(inputs):
        return Tried(unseen=f"the example leaves no other values to draw for {', '.join(held)}; give one that holds several")
    results = [_compare(model, forward, other) for other in draws]
    differs = next((one.differs for one in results if one.differs), "")
    if differs or all(one.unseen for one in results):
        return Tried(differs, results[0].unseen)
    return Tried(unseen=f"{', '.join(held)} had the example's values throughout" if held else "")


def _compare(model: onnx.ModelProto, forward: Callable[..., torch.Tensor], other: Mapping[str, torch.Tensor]) -> Tried:
    try:
        expected, again = (forward(*other.values()).detach().cpu().numpy() for _ in range(2))
    except _REFUSALS as error:
        return Tried(unseen=f"the model fails on drawn inputs ({type(error).__name__})")
    if not np.isfinite(expected).all():
        return Tried(unseen="the model's output on drawn inputs is not finite")
    if not np.array_equal(expected, again):
        return Tried(unseen="the model gives other outputs for the same inputs")
    try:
        found = run_graph(model, {name: tensor.detach().cpu().numpy() for name, tensor in other.items()}, POLICIES["golden"])[0]
    except HarnessError as error:
        return Tried(f"no output ({error})")
    if found.shape != expected.shape:
        return Tried(f"shape {list(found.shape)}, not {list(expected.shape)}")
    noise = sqnr_db(expected, found)
    return Tried(f"{noise:.1f} dB from what it computes" if noise < _MIN_SQNR_DB else "")


def _another(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Other values: floats reversed with either sign, and shuffled with 1.7 of their size, as branches ask for sign, place or size."""
    if tensor.dtype is torch.bool or tensor.is_complex() or tensor.numel() == 0:
        return tensor
    random = np.random.default_rng(seed)
    if tensor.is_floating_point():
        shuffled = tensor.flatten()[torch.from_numpy(random.permutation(tensor.numel()))].reshape(tensor.shape)
        return (-tensor.flip(-1), tensor.flip(-1), 1.7 * shuffled)[seed % 3] if tensor.dim() else tensor * (-1.0, 0.6, 1.7)[seed % 3]
    low, high = int(tensor.min()), int(tensor.max())
    return torch.from_numpy(random.integers(low, high + 1, tuple(tensor.shape))).to(tensor.dtype)
