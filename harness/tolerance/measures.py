"""How far two tensors of one dtype and shape are apart, in every measure that a report shows. All sums run in float64.

NaN on both sides is no difference; NaN or infinity on one side is an infinite one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.tolerance.bits import differs, is_floating, ulp_distance, widen


@dataclass(frozen=True)
class Distance:
    """What was measured.

    Attributes:
        max_abs: largest absolute difference, of complex numbers of either part; None for an empty tensor.
        max_ulp: representable numbers between the two, at most; None for integers.
        sqnr_db: 10 log10(|expected|^2 / |difference|^2); infinite where nothing differs.
        relative_error: |difference| / |expected|.
        num_changed: elements of which any bit differs.
        num_elements: elements there are.
        first_index: of the first one that differs.
        worst_index: of the one that differs most.
    """

    max_abs: float | None
    max_ulp: int | None
    sqnr_db: float
    relative_error: float
    num_changed: int
    num_elements: int
    first_index: tuple[int, ...] | None
    worst_index: tuple[int, ...] | None

    @property
    def share(self) -> float:
        """Share of the elements that differ."""
        return self.num_changed / self.num_elements if self.num_elements else 0.0


def measure(actual: Tensor, expected: Tensor) -> Distance:
    """Measure two tensors of one dtype and shape.

    Args:
        actual: what came out.
        expected: what should have.

    Returns:
        The distance.
    """
    changed = differs(actual, expected)
    count = int(changed.sum())
    if count == 0:
        ulp = 0 if is_floating(expected.dtype) and changed.numel() else None
        return Distance(0.0 if changed.numel() else None, ulp, math.inf, 0.0, 0, changed.numel(), None, None)
    error_N = absolute_error(actual, expected).amax(dim=1)
    ulp = int(ulp_distance(actual, expected).max()) if is_floating(expected.dtype) else None
    noise, signal = noise_and_signal(actual, expected)
    shape = tuple(expected.shape)
    return Distance(
        max_abs=float(error_N.max()),
        max_ulp=ulp,
        sqnr_db=decibels(noise, signal),
        relative_error=0.0 if noise == 0 else math.inf if signal == 0 else noise / signal,
        num_changed=count,
        num_elements=changed.numel(),
        first_index=index_of(int(changed.int().argmax()), shape),
        worst_index=index_of(int(error_N.argmax() if error_N.max() > 0 else changed.int().argmax()), shape),
    )


def absolute_error(actual: Tensor, expected: Tensor) -> Tensor:
    """Return |actual - expected|, float64 [N, K]; 0 for NaN against NaN and for equal infinities, infinite for NaN against a number."""
    one, two = widen(actual), widen(expected)
    error = (one - two).abs()
    error = torch.where((one == two) | (one.isnan() & two.isnan()), torch.zeros_like(error), error)
    return torch.where(error.isnan(), torch.full_like(error, math.inf), error)


def noise_and_signal(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the Euclidean norms of the difference and of what was expected, the latter without its NaN and infinities."""
    values = widen(expected)
    return _norm(absolute_error(actual, expected)), _norm(torch.where(values.isfinite(), values, torch.zeros_like(values)))


def decibels(noise: float, signal: float) -> float:
    """Return the SQNR of two norms."""
    if noise == 0:
        return math.inf
    return -math.inf if signal == 0 or math.isinf(noise) else 20 * math.log10(signal / noise)


def index_of(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of an element from its position in memory; () for a tensor without dimensions."""
    index: list[int] = []
    for size in reversed(shape):
        index.append(position % size)
        position //= size
    return tuple(reversed(index))


def mean_kl(actual: Tensor, expected: Tensor) -> float:
    """Return the mean KL(softmax(expected) || softmax(actual)) over the last dimension, nats; infinite where one cannot be computed."""
    width = expected.shape[-1] if expected.ndim else 1
    wanted, found, error = (part.T.reshape(-1, width) for part in (widen(expected), widen(actual), absolute_error(actual, expected)))
    wanted, found = wanted.log_softmax(dim=-1), found.log_softmax(dim=-1)
    weights = wanted.exp()
    terms = torch.where(weights == 0, torch.zeros_like(weights), weights * (wanted - found)).sum(dim=-1)
    kl = float(torch.where((error == 0).all(dim=-1), torch.zeros_like(terms), terms).mean())  # equal rows may hold NaN
    return math.inf if math.isnan(kl) else max(0.0, kl)


def _norm(values: Tensor) -> float:
    """The Euclidean norm, without overflow for values near the end of float64."""
    largest = float(values.max() if values.numel() else 0.0)
    largest = max(largest, -float(values.min())) if values.numel() else 0.0
    if largest == 0.0 or math.isinf(largest):
        return largest
    return largest * math.sqrt(float((values / largest).square().sum()))
