"""How much of its range a group of weights should keep before it is rounded: a few cut off can buy finer steps for all others.

Shapes: R rows (out features), C columns, G groups in a row, S columns in each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.numerics.observers import weight_qparams
from compressor.numerics.quantize import fake_quantize
from compressor.numerics.scheme import QuantizationArgs

_MAX_SHRINK = 0.5
_NUM_STEPS = 20  # of the whole range
_CHUNK = 1 << 22  # values that are looked at in one piece; bounds the memory, not the result


@dataclass(frozen=True)
class Clipping:
    """What a search found.

    Attributes:
        kept_RG: share of its range that each group keeps, [R, G] float32, above 0.5 and at most 1.
        error: of the rounded groups' outputs, each by itself, summed.
        error_before: the same with whole ranges.
    """

    kept_RG: Tensor
    error: float
    error_before: float


@torch.no_grad()
def search_clipping(weight_RC: Tensor, args: QuantizationArgs, hessian_CC: Tensor, name: str = "weight") -> Clipping:
    """Choose the range of each group by the squared error of what the group adds to the output.

    With d = w - Q(w) in one group that error over all tokens is d^T H_gg d, with the block of H of its columns: no forward is needed.

    Args:
        weight_RC: [R, C] float; not modified.
        args: integers with strategy "group" or "channel".
        hessian_CC: [C, C] float32, any multiple of mean(x x^T).
        name: dotted module name, for errors only.

    Returns:
        The best of 10 shares for each group; of equals the largest.

    Raises:
        NumericsError: NaN or infinity in the weight.

    Source: Lin et al. 2023, arXiv:2306.00978, and the authors' code for the candidates; the error by H in place of forwards.
    """
    size = args.group_size if args.is_grouped and args.group_size else weight_RC.shape[1]
    blocks_GSS = torch.stack([hessian_CC[start : start + size, start : start + size] for start in range(0, weight_RC.shape[1], size)])
    rows = max(1, _CHUNK // weight_RC.shape[1])
    parts = [_search_rows(part_RC, args, blocks_GSS, name) for part_RC in weight_RC.detach().float().split(rows)]
    kept, best, whole = (torch.cat(of_all) for of_all in zip(*parts, strict=True))
    return Clipping(kept, float(best.sum(dtype=torch.float64)), float(whole.sum(dtype=torch.float64)))


def _search_rows(weight_RC: Tensor, args: QuantizationArgs, blocks_GSS: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    kept_RG = weight_RC.new_ones(len(weight_RC), len(blocks_GSS))
    best_RG = whole_RG = _errors(weight_RC, args, kept_RG, blocks_GSS, name)
    for step in range(1, int(_MAX_SHRINK * _NUM_STEPS)):
        tried_RG = torch.full_like(kept_RG, 1 - step / _NUM_STEPS)
        error_RG = _errors(weight_RC, args, tried_RG, blocks_GSS, name)
        better_RG = error_RG < best_RG
        kept_RG, best_RG = torch.where(better_RG, tried_RG, kept_RG), torch.where(better_RG, error_RG, best_RG)
    return kept_RG, best_RG, whole_RG


def _errors(weight_RC: Tensor, args: QuantizationArgs, kept_RG: Tensor, blocks_GSS: Tensor, name: str) -> Tensor:
    qparams = weight_qparams(weight_RC, args, name, kept_RG=kept_RG)
    off_GRS = (fake_quantize(weight_RC, qparams, args) - weight_RC).unflatten(-1, (len(blocks_GSS), -1)).transpose(0, 1)
    return ((off_GRS @ blocks_GSS) * off_GRS).sum(-1).t()
