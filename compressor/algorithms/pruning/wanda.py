"""Wanda: a weight matters by its size times the size of the input that it meets. And OWL: layers with more outliers keep more weights.

Source: Sun et al. 2023, arXiv:2306.11695 (Wanda); Yin et al. 2023, arXiv:2310.05175 (OWL). Shapes: R rows, C columns, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compressor.algorithms.pruning.magnitude import Pattern, num_zeros
from compressor.errors import NumericsError
from compressor.numerics.part_sums import check_mean_squares


def scores(weight_RC: Tensor, mean_square_C: Tensor, name: str = "weight") -> Tensor:
    """Return |w| times the root mean square of the input that it meets.

    Args:
        weight_RC: [R, C] float.
        mean_square_C: [C] float32, mean of x^2 over calibration tokens.
        name: dotted module name, for errors only.

    Returns:
        [R, C] float32.

    Raises:
        NumericsError: NaN or infinity in either, or in a product, or inputs too small to be squared in float32.
    """
    if mean_square_C.isfinite().all():
        check_mean_squares(mean_square_C, name)
    found = weight_RC.float().abs() * mean_square_C.sqrt()
    if not bool(torch.isfinite(found).all()):
        raise NumericsError(
            f"{name}: it or its inputs hold NaN or infinity, which have no place in an order, or values too large for float32; repair the "
            "model or the data"
        )
    return found


def prune_wanda(
    weight_RC: Tensor, mean_square_C: Tensor, sparsity: float, pattern: Pattern | None = None, *, name: str = "weight"
) -> Tensor:
    """Choose the weights that become zero: in every row, or every run of a pattern, those with the lowest scores.

    Rows of which no whole number of weights is to go lose one more here and there, so that all together have the share.

    Args:
        weight_RC: [R, C] float; not modified.
        mean_square_C: [C] float32, mean of x^2 over calibration tokens.
        sparsity: share of zeros, 0 to 1; in each row to less than a weight, in all rows together rounded down.
        pattern: of every run of neighbours in a row so many stay, whatever `sparsity` says; None: any may go.
        name: dotted module name, for errors only.

    Returns:
        Bool [R, C], True where a weight goes.
    """
    scores_RC = scores(weight_RC, mean_square_C, name)
    runs = scores_RC.unflatten(-1, (-1, scores_RC.shape[-1] if pattern is None else pattern.of))
    places = torch.arange(runs.shape[-1], device=runs.device)
    if pattern is None:
        rows, columns = scores_RC.shape
        until_R = torch.tensor([num_zeros(sparsity, row * columns) for row in range(rows + 1)], dtype=torch.int64, device=runs.device)
        is_low = places < until_R.diff()[:, None, None]
    else:
        is_low = (places < pattern.of - pattern.keep).expand(runs.shape)
    order = runs.sort(dim=-1, stable=True).indices
    return torch.zeros_like(runs, dtype=torch.bool).scatter_(-1, order, is_low).flatten(-2)


def outlier_share(scores_of_layer: Sequence[Tensor], multiple: float) -> float:
    """Say how many weights of a layer score far above its mean.

    Args:
        scores_of_layer: `scores` of all its weights.
        multiple: of the mean, from which on a score counts as an outlier.

    Returns:
        Share of all weights, 0 to 1.
    """
    total = sum(part.numel() for part in scores_of_layer)
    mean = sum(float(part.sum(dtype=torch.float64)) for part in scores_of_layer) / total
    return sum(int((part > multiple * mean).sum()) for part in scores_of_layer) / total


def layer_sparsities(shares_L: Sequence[float], sizes_L: Sequence[int], sparsity: float, spread: float) -> list[float]:
    """Give layers with more outliers a lower sparsity; all weights together keep the share that was asked for.

    Args:
        shares_L: of outliers.
        sizes_L: weights of each layer.
        sparsity: of all together, 0 to 1.
        spread: the lowest and the highest are twice this far apart (lambda of the paper).

    Returns:
        Sparsity of each layer, within 0 and 1.
    """
    low, high = min(shares_L), max(shares_L)
    if high == low:
        return [sparsity] * len(shares_L)
    above = [2 * spread * (share - low) / (high - low) for share in shares_L]

    def mean(values_L: Sequence[float]) -> float:
        return sum(one * size for one, size in zip(values_L, sizes_L, strict=True)) / sum(sizes_L)

    def shifted(by: float) -> list[float]:
        return [min(1.0, max(0.0, sparsity - one + by)) for one in above]

    by = mean(above)
    if max(above) - by > sparsity or by - min(above) > 1 - sparsity:  # what ends cut off is made good by the other layers
        none, all_go = -1.0, 2.0
        for _ in range(60):
            by = (none + all_go) / 2
            none, all_go = (by, all_go) if mean(shifted(by)) < sparsity else (none, by)
    return shifted(by)
