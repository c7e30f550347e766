"""The precision ladder: where a statement is exact in real arithmetic, its error must fall from bf16 to fp32 to fp64.

A tolerance that fits one dtype hides real bugs: a wrong constant gives the same error at every dtype, rounding does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from compressor.errors import UserInputError
from harness.tolerance.bits import dtype_name
from harness.tolerance.measures import noise_and_signal

RUNGS = (torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Ladder:
    """The relative error at each dtype.

    Attributes:
        errors: |actual - exact| / |exact| by dtype name, coarsest first.
        bad: the dtypes whose error did not fall as their precision rose, or is beyond what rounding explains.
    """

    errors: Mapping[str, float]
    bad: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True when the error falls all the way."""
        return not self.bad

    def __str__(self) -> str:
        """The errors in one line."""
        listed = ", ".join(f"{name} {error:.3g}" for name, error in self.errors.items())
        return f"relative error {listed}" + (f"; does not fall at {', '.join(self.bad)}" if self.bad else "")


def climb(
    compute: Callable[[torch.dtype], tuple[Tensor, Tensor]],
    *,
    rungs: Sequence[torch.dtype] = RUNGS,
    max_units: float | Sequence[float] = 32.0,
) -> Ladder:
    """Compute both sides of an identity at each dtype, and see whether their difference is only rounding.

    Args:
        compute: dtype -> the two sides, which are equal in real arithmetic.
        rungs: dtypes, coarsest first, two or more.
        max_units: relative error in units of the dtype's eps, at most, of all rungs or of each; of a sum of n terms give about 32 sqrt(n).

    Returns:
        The errors; a rung is bad when its error exceeds max_units * eps.

    Raises:
        UserInputError: fewer than two rungs, or rungs that do not become finer.
    """
    eps = [torch.finfo(dtype).eps for dtype in rungs]
    if len(rungs) < 2 or any(fine >= coarse for coarse, fine in pairwise(eps)):
        raise UserInputError(
            f"ladder: {[dtype_name(dtype) for dtype in rungs]} does not become finer; give two or more dtypes, coarsest first"
        )
    errors: dict[str, float] = {}
    bad = []
    limits = [max_units] * len(rungs) if isinstance(max_units, int | float) else max_units
    for dtype, unit, limit in zip(rungs, eps, limits, strict=True):
        actual, exact = compute(dtype)
        noise, signal = noise_and_signal(actual, exact) if actual.shape == exact.shape else (math.inf, 1.0)
        error = 0.0 if noise == 0 else noise / signal if signal else math.inf
        errors[dtype_name(dtype)] = error
        if not error <= limit * unit:
            bad.append(dtype_name(dtype))
    return Ladder(errors, tuple(bad))
