"""Magnitude pruning: which weights become zero, exactly as many as asked, the same ones on every machine.

Weights are compared by absolute value in float32 (float64 stays). Among equals the one that comes first, row by row, goes first. So counts
are exact where a threshold alone would take all equals or none, and weights that are zero already always go before the others.

Under a pattern N:M, of every M neighbours in a row (along the input columns) at least N stay: only the M - N smallest of each run may go.
The smallest of those go first, so that any share up to 1 - N/M is met exactly, and at that share every run has exactly N left.

In blocks (rows and columns among them) weights go together: those with the smallest sum of absolute values, summed in float64.

Source: Han et al. 2015, arXiv:1506.02626 (magnitude); Li et al. 2016, arXiv:1608.08710 (sums of whole filters);
Zhou et al. 2021, arXiv:2102.04010 (N:M). Shapes: R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compressor.algorithms.hessian import near_one
from compressor.errors import NumericsError


class Pattern(NamedTuple):
    """At least `keep` of every `of` neighbours in a row stay."""

    keep: int
    of: int

    @property
    def sparsity(self) -> float:
        """The share of zeros that the pattern leaves room for."""
        return 1 - self.keep / self.of

    def stands_in(self, weight_RC: Tensor) -> bool:
        """Say whether no run of a weight keeps more than it may.

        Args:
            weight_RC: [R, C], of whole runs.

        Returns:
            True where it does not.
        """
        return bool((weight_RC.unflatten(-1, (-1, self.of)).ne(0).sum(-1) <= self.keep).all())


class Blocks(NamedTuple):
    """Weights go in blocks of `rows` times `columns`; None: all there are, so that one of (1, None) is a row, of (None, 1) a column.

    Where a weight has further dimensions, as that of a convolution, each of its columns has them whole.
    """

    rows: int | None
    columns: int | None

    def fit(self, shape: Sequence[int]) -> bool:
        """Say whether a weight divides into whole blocks.

        Args:
            shape: of the weight.

        Returns:
            True where it does.
        """
        return len(shape) >= 2 and not any(size % (part or size) for size, part in zip(shape, self, strict=False))

    def view(self, weight: Tensor) -> Tensor:
        """Lay a weight out by blocks.

        Args:
            weight: [R, C, ...], of which `fit` is true.

        Returns:
            View [R / rows, rows, C / columns, columns, rest].
        """
        high, wide = (part or size for size, part in zip(weight.shape, self, strict=False))
        return weight.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).flatten(4) if weight.dim() > 2 else self.view(weight.unsqueeze(-1))

    def count(self, shape: Sequence[int]) -> int:
        """Say how many blocks a weight has.

        Args:
            shape: of the weight.

        Returns:
            Their number.
        """
        high, wide = (part or size for size, part in zip(shape, self, strict=False))
        return (shape[0] // high) * (shape[1] // wide)

    def num_zero(self, weight: Tensor) -> int:
        """Say how many blocks of a weight are nothing but zeros.

        Args:
            weight: [R, C, ...], of which `fit` is true.

        Returns:
            Their number.
        """
        return int((self.view(weight) == 0).all(4).all(3).all(1).sum())


def num_zeros(sparsity: float, total: int) -> int:
    """Say how many of some weights are to be zero.

    Args:
        sparsity: share of zeros, 0 to 1.
        total: number of weights.

    Returns:
        The whole number below sparsity * total; what is a hair's breadth below one counts as that one.

    Example:
        >>> num_zeros(0.29, 100), 0.29 * 100
        (29, 28.999999999999996)
    """
    return math.floor(sparsity * total + 1e-9 * max(1, total))


@torch.no_grad()
def pruned_weights(
    weights: Sequence[Tensor],
    sparsity: float,
    pattern: Pattern | Blocks | None = None,
    *,
    together: bool = False,
    names: Sequence[str] | None = None,
) -> list[Tensor]:
    """Choose the weights that become zero.

    Args:
        weights: floating point, [R, C] where there is a pattern; not modified.
        sparsity: share of zeros, 0 to 1; at most that of the pattern. Of blocks, the whole number below that share of all goes.
        pattern: which ones may go; None: any.
        together: one share for all of them together, in place of the same share for each; not in blocks, which differ in size.
        names: dotted module names, for errors only.

    Returns:
        Bool masks, shaped like the weights: True where a weight goes.

    Raises:
        NumericsError: NaN or infinity in a weight.
    """
    named = zip(names or [f"weight {tuple(weight.shape)}" for weight in weights], weights, strict=True)
    if isinstance(pattern, Blocks):
        return [_smallest_blocks(_scores(weight, None, name), sparsity, pattern) for name, weight in named]
    scores = [_scores(weight, pattern, name) for name, weight in named]
    if not together:
        return [smallest(score, num_zeros(sparsity, score.numel())) for score in scores]
    flat = torch.cat([score.reshape(-1).to(scores[0].device) for score in scores])
    parts = smallest(flat, num_zeros(sparsity, flat.numel())).split([score.numel() for score in scores])
    return [part.reshape(score.shape).to(score.device) for part, score in zip(parts, scores, strict=True)]


def smallest(scores: Tensor, count: int) -> Tensor:
    """Find the smallest scores.

    Args:
        scores: any shape, without NaN.
        count: how many, 0 to their number.

    Returns:
        Bool, shaped like the scores, True at exactly `count` places; among equals those that come first.
    """
    if count in (0, scores.numel()):
        return torch.full_like(scores, bool(count), dtype=torch.bool)
    flat = scores.reshape(-1)
    threshold = flat.kthvalue(count).values
    below, equal = flat < threshold, flat == threshold
    return (below | (equal & (equal.cumsum(0) <= count - below.sum()))).reshape(scores.shape)


def removed_share(weight: Tensor, gone: Tensor, mean_square_C: Tensor | None = None) -> Tensor:
    """Measure how much of a weight goes, of any size.

    Args:
        weight: floating point, [R, C] where inputs count.
        gone: bool, shaped like the weight.
        mean_square_C: [C] float32, mean of x^2 over the input, by which columns count; None: all alike.

    Returns:
        The share of the squared sizes, float32 without dimensions; 0 of zeros.
    """
    wide = weight.detach().float()
    energy = near_one(wide, wide).square()
    if mean_square_C is not None:
        energy = energy * near_one(mean_square_C, mean_square_C)
    return (energy * gone).sum() / energy.sum().clamp_min(torch.finfo(energy.dtype).tiny)


def _smallest_blocks(scores: Tensor, sparsity: float, blocks: Blocks) -> Tensor:
    laid_out = blocks.view(scores)
    sums = laid_out.sum((1, 3, 4), dtype=torch.float64)
    gone = smallest(sums, num_zeros(sparsity, sums.numel()))
    return gone[:, None, :, None, None].expand_as(laid_out).reshape(scores.shape)


def _scores(weight: Tensor, pattern: Pattern | None, name: str) -> Tensor:
    scores = weight.detach().to(torch.promote_types(weight.dtype, torch.float32)).abs()
    if not bool(scores.isfinite().all()):
        raise NumericsError(f"{name}: holds NaN or infinity, which have no place in an order; repair the model")
    return scores if pattern is None else scores.masked_fill(~_candidates(scores, pattern), torch.inf)


def _candidates(scores_RC: Tensor, pattern: Pattern) -> Tensor:
    """True at the `of - keep` smallest of each run."""
    runs = scores_RC.unflatten(-1, (-1, pattern.of))
    order = runs.sort(dim=-1, stable=True).indices[..., : pattern.of - pattern.keep]
    return torch.zeros_like(runs, dtype=torch.bool).scatter_(-1, order, True).flatten(-2)
