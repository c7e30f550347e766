"""How far to move the scale of each channel from activations into weights, before anything is rounded.

Inputs are divided by s, the columns of the weights that read them multiplied: products stay what they are. `smooth_scales` and
`equalizing_scales` say s from ranges alone; `search_awq` chooses it by the error of the rounded weights.

Shapes: R rows (out features), C channels of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compressor.numerics.observers import weight_qparams
from compressor.numerics.quantize import fake_quantize
from compressor.numerics.scheme import QuantizationArgs

DuoScaling = bool | Literal["both"]

_SMALLEST = 1e-5  # of a range, relative to the largest: what is smaller counts as dead
_FLOOR = 1e-4


def smooth_scales(act_max_C: Tensor, weight_max_C: Tensor, strength: float) -> Tensor:
    """Share the range of each channel between activations and weights.

    Args:
        act_max_C: [C], max |x| over tokens.
        weight_max_C: [C], max |w| over the rows of all weights that read it.
        strength: alpha, 0 leaves all of the range to the activations, 1 gives all of it to the weights.

    Returns:
        s, [C] float32: max|x|^alpha / max|w|^(1 - alpha); the centre of the others for channels without activations or weights.

    Source: Xiao et al. 2022, arXiv:2211.10438, equation 4.
    """
    return _alive(act_max_C.float().pow(strength) / weight_max_C.float().pow(1 - strength), act_max_C, weight_max_C)


def equalizing_scales(act_max_C: Tensor, weight_max_C: Tensor) -> Tensor:
    """Divide each channel by its range over the logarithm of it.

    Args:
        act_max_C: [C], max |x| over tokens.
        weight_max_C: [C], max |w| over rows; only whether it is zero counts.

    Returns:
        s, [C] float32: max|x| / log2(2 + max|x|); the centre of the others for channels without activations or weights.

    Source: Li et al. 2023 (FPTQ), arXiv:2308.15987, section 3.2.
    """
    largest_C = act_max_C.float()
    return _alive(largest_C / torch.log2(2 + largest_C), act_max_C, weight_max_C)


@dataclass(frozen=True)
class AwqChoice:
    """What a search found.

    Attributes:
        scales_C: s, [C] float32; all ones where nothing was better.
        error: of the rounded weights' outputs, relative to the outputs' squares.
        error_before: the same with s = 1.
    """

    scales_C: Tensor
    error: float
    error_before: float


def search_awq(
    weights: Sequence[Tensor],
    formats: Sequence[QuantizationArgs],
    hessian_CC: Tensor,
    act_mean_C: Tensor,
    *,
    n_grid: int = 20,
    duo_scaling: DuoScaling = True,
    names: Sequence[str] | None = None,
    tie: Callable[[Tensor], Tensor] = lambda scales_C: scales_C,
) -> AwqChoice:
    """Choose scales by the squared error of the outputs of rounded weights.

    With D = W - Q(W s) / s the error over all tokens is tr(D H D^T), so that no candidate needs a forward: the inputs are in H.

    Args:
        weights: [R_i, C] float each, that read one input; not modified.
        formats: of each weight.
        hessian_CC: [C, C] float32, 2 * mean(x x^T).
        act_mean_C: [C], mean |x| over tokens.
        n_grid: ratios tried, evenly between 0 and 1.
        duo_scaling: divide by what weights are on average, too; `both` tries with and without.
        names: dotted module names, for errors only.
        tie: makes scales equal where columns carry one channel.

    Returns:
        The best candidate; none at all is one of them.

    Raises:
        NumericsError: NaN or infinity in a weight.

    Source: Lin et al. 2023, arXiv:2306.00978, equations 4 and 5; candidates and their normalization as in the authors' code, the error by
    H instead of forwards.
    """
    stacked = [weight.detach().float() for weight in weights]
    energy = sum(float(((one @ hessian_CC) * one).sum(dtype=torch.float64)) for one in stacked)
    if energy <= 0:
        return AwqChoice(torch.ones_like(act_mean_C, dtype=torch.float32), 0.0, 0.0)

    def error(scales_C: Tensor) -> float:
        total = 0.0
        for weight_RC, args, name in zip(stacked, formats, names or ["weight"] * len(stacked), strict=True):
            scaled_RC = weight_RC * scales_C
            importance_C = hessian_CC.diagonal() / scales_C.square()
            rounded_RC = fake_quantize(scaled_RC, weight_qparams(scaled_RC, args, name, importance_C=importance_C), args) / scales_C
            off_RC = rounded_RC.float() - weight_RC
            total += float(((off_RC @ hessian_CC) * off_RC).sum(dtype=torch.float64))
        return total / energy

    best_C = torch.ones_like(act_mean_C, dtype=torch.float32)
    before = best = error(best_C)
    for candidate_C in _candidates(stacked, formats, act_mean_C.float(), n_grid, duo_scaling):
        candidate_C = tie(candidate_C)
        now = error(candidate_C)
        if now < best:
            best, best_C = now, candidate_C
    return AwqChoice(best_C, best, before)


def _candidates(
    weights: Sequence[Tensor], formats: Sequence[QuantizationArgs], act_mean_C: Tensor, n_grid: int, duo_scaling: DuoScaling
) -> list[Tensor]:
    weight_mean_C = _relative_size(weights, formats)
    made = []
    for duo in (True, False) if duo_scaling == "both" else (bool(duo_scaling),):
        for ratio in (step / n_grid for step in range(n_grid)):
            scales_C = act_mean_C.pow(ratio)
            if duo:
                scales_C = scales_C / (weight_mean_C.pow(1 - ratio) + _FLOOR)
            scales_C = _alive(scales_C.clamp(min=_FLOOR), act_mean_C, weight_mean_C)
            made.append(scales_C / (scales_C.max() * scales_C.min()).sqrt())
    return made


def _relative_size(weights: Sequence[Tensor], formats: Sequence[QuantizationArgs]) -> Tensor:
    """Mean over rows of |w| relative to the largest in its group, [C]."""
    total_C, rows = torch.zeros(weights[0].shape[1], dtype=torch.float32, device=weights[0].device), 0
    for weight_RC, args in zip(weights, formats, strict=True):
        size = args.group_size if args.is_grouped and args.group_size else weight_RC.shape[1]
        groups = weight_RC.abs().view(len(weight_RC), -1, size)
        relative = groups / groups.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        total_C += relative.view_as(weight_RC).sum(0)
        rows += len(weight_RC)
    return total_C / rows


def _alive(scales_C: Tensor, act_C: Tensor, weight_C: Tensor) -> Tensor:
    """Where either side says nothing, or the quotient is no usable number: the centre of the others.

    Any number would be far from theirs in some unit of the activations, and then rounding would go by what is dead.
    """
    is_dead_C = (act_C <= _SMALLEST * act_C.max()) | (weight_C <= _SMALLEST * weight_C.max())
    usable_C = torch.isfinite(scales_C) & (scales_C > 0) & ~is_dead_C
    own = scales_C[usable_C]
    return torch.where(usable_C, scales_C, (own.max() * own.min()).sqrt() if len(own) else 1.0).float()
