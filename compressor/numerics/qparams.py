"""Scale and zero point: computed from a range, and checked before anybody relies on them.

    real value = (code - zero_point) * scale

The arithmetic of `calculate_qparams` is that of compressed-tensors 0.20, operation for operation and in the dtype of the range, because a
scale that differs in its last bit moves codes. It departs only where that library computes with infinities or casts NaN: see the comments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from compressor.errors import NumericsError
from compressor.numerics.formats import FP4_MAX, FP8_MAX, mx_scale
from compressor.numerics.scheme import QuantizationArgs

# What a scale of zero (a group of zeros, or underflow) becomes, by the dtype in which scales are stored; else the eps of its own dtype.
_ZERO_SCALE_BECOMES = {"torch.float8_e4m3fn": 0.125, "torch.uint8": 1.0}


class QParams(NamedTuple):
    """Scale and zero point of one tensor.

    Attributes:
        scale: in the dtype in which values are computed; [1] per tensor, [R, 1] per channel, [R, G] per group, [R / B, C / B] per block
            of B x B, [..., 1] per token.
        zero_point: int8, shaped like scale; None if and only if the scheme is symmetric.
        global_scale: float32 [1] by which every scale is divided (NVFP4); None elsewhere.
    """

    scale: Tensor
    zero_point: Tensor | None
    global_scale: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> QParams:
        """Apply one function to the scale and, where there is one, to the zero point.

        Args:
            function: for instance a reshape, a slice or a move to another device.

        Returns:
            The results; the global scale, which has one shape whatever the strategy, stays as it is.
        """
        return QParams(function(self.scale), None if self.zero_point is None else function(self.zero_point), self.global_scale)


def calculate_global_scale(min_vals: Tensor, max_vals: Tensor) -> Tensor:
    """Choose the scale that stands above the group scales of an NVFP4 tensor: the largest group gets the largest fp8 scale.

    Args:
        min_vals: smallest values of the tensor or of its parts, floating point.
        max_vals: largest values, same shape and dtype.

    Returns:
        float32 [1]: 448 * 6 / largest absolute value, at most the largest float32; 1 for a tensor of zeros, or where that is no number.
    """
    largest = torch.maximum(min_vals.abs().amax(), max_vals.abs().amax())
    scale = (FP8_MAX * FP4_MAX / largest.clamp(min=torch.finfo(largest.dtype).tiny)).to(torch.float32)
    # float16 ends at 65504: below 0.041 the quotient overflows, and compressed-tensors goes on without a global scale and its precision.
    wide = FP8_MAX * FP4_MAX / largest.to(torch.float32).clamp(min=torch.finfo(torch.float32).tiny)
    scale = torch.where(scale.isinf(), wide, scale)
    # Below 8e-36 that overflows, too: with 1 in its place, as in compressed-tensors, every weight would become zero.
    scale = torch.where(largest == 0, torch.ones_like(scale), scale.clamp(max=torch.finfo(torch.float32).max))
    return scale.nan_to_num(nan=1.0).reshape(1)


def calculate_qparams(min_vals: Tensor, max_vals: Tensor, args: QuantizationArgs, global_scale: Tensor | None = None) -> QParams:
    """Choose scale and zero point so that the codes cover [min, max] and zero is a code.

    Costs no device synchronisation: NaN or infinity in the range shows as such in the scale, which `check_qparams` refuses.

    Args:
        min_vals: smallest value of each group, floating point.
        max_vals: largest value of each group, same shape and dtype.
        args: the format.
        global_scale: float32 [1] for a format that has one (NVFP4), else None.

    Returns:
        Scale in the dtype of the range (float32 under a global scale) and, if asymmetric, zero point; a range without dimensions gives
        shape [1]. A scale that is stored in fewer bits is one that those bits hold.
    """
    # Tensors without dimensions rather than python numbers: for ranges without dimensions they promote the zero point to float32, as in
    # compressed-tensors. Filled, not copied from the host, which a CUDA graph could not repeat.
    low, high = (torch.full((), bound, dtype=torch.float32, device=min_vals.device) for bound in args.code_range)
    min_vals = torch.minimum(min_vals, torch.zeros_like(min_vals))
    max_vals = torch.maximum(max_vals, torch.zeros_like(max_vals))
    num_steps = (high - low).to(max_vals.dtype)
    if args.symmetric:
        scale = _symmetric_scale(torch.maximum(min_vals.abs(), max_vals.abs()), num_steps / 2, args, global_scale)
        zero_point = None
    else:
        # max - min can overflow where neither end does.
        span = max_vals - min_vals
        scale = torch.where(span.isinf(), max_vals / num_steps - min_vals / num_steps, span / num_steps)
        # 0 / 0, a group of zeros, is NaN: the zero point becomes 0 rather than whatever the platform casts NaN to.
        zero_point = torch.clamp(low - min_vals / scale, low, high).nan_to_num(nan=0.0).round().to(torch.int8)
    # Zeros, or values so small that the division underflowed: any scale serves, and compressed-tensors takes this one.
    scale = torch.where(scale == 0, _ZERO_SCALE_BECOMES.get(args.scale_dtype or "", torch.finfo(scale.dtype).eps), scale)
    qparams = QParams(scale, zero_point, global_scale)
    return qparams.map(lambda part: part.reshape(1)) if scale.ndim == 0 else qparams


def range_qparams(min_vals: Tensor, max_vals: Tensor, args: QuantizationArgs) -> QParams:
    """Choose scale and zero point, and the global scale where the format has one, from a range alone.

    Args:
        min_vals: smallest value of each group, floating point.
        max_vals: largest value of each group, same shape and dtype.
        args: the format.

    Returns:
        As `calculate_qparams`.
    """
    global_scale = calculate_global_scale(min_vals, max_vals) if args.has_global_scale else None
    return calculate_qparams(min_vals, max_vals, args, global_scale)


def _symmetric_scale(max_abs: Tensor, largest_code: Tensor, args: QuantizationArgs, global_scale: Tensor | None) -> Tensor:
    if args.is_mx:
        return mx_scale(max_abs, args.num_bits)
    scale = max_abs / largest_code
    if global_scale is None:
        return scale
    scale = global_scale * scale
    # Saturating, as everywhere: rounding may have carried the largest scale past 448.
    return scale.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(scale.dtype)


def check_qparams(qparams: QParams, name: str, args: QuantizationArgs | None = None) -> None:
    """Refuse scales and zero points that cannot have been computed properly.

    Args:
        qparams: what to check.
        name: what it belongs to, for the message.
        args: the format; where given, the zero point must be one of its codes and present exactly when the format is asymmetric.

    Raises:
        NumericsError: a scale is NaN, infinite, zero or negative, or the zero point has another dtype, shape or range than it must have.
    """
    scale, zero_point, global_scale = qparams
    if global_scale is not None:
        _check_global_scale(global_scale, name)
    good = scale.isfinite() & (scale > 0)
    if scale.numel() == 0 or not good.all():
        examples = scale[~good].flatten()[:3].tolist()
        raise NumericsError(
            f"{name}: {int((~good).sum())} of {scale.numel()} scales are not finite and positive, for instance {examples}; "
            "look for NaN or infinity in the weights or activations"
        )
    if args is not None and args.symmetric != (zero_point is None):
        raise NumericsError(f"{name}: symmetric={args.symmetric} with zero_point={zero_point}; only asymmetric formats have a zero point")
    if zero_point is None:
        return
    if zero_point.dtype != torch.int8 or zero_point.shape != scale.shape:
        raise NumericsError(
            f"{name}: zero point is {zero_point.dtype} {tuple(zero_point.shape)}, not torch.int8 {tuple(scale.shape)} as its scale asks; "
            "compute it with calculate_qparams"
        )
    if args is not None:
        low, high = args.code_range
        if bool(((zero_point < low) | (zero_point > high)).any()):
            raise NumericsError(
                f"{name}: a zero point lies outside of the codes {low:.0f} to {high:.0f}; compute it with calculate_qparams"
            )


def _check_global_scale(global_scale: Tensor, name: str) -> None:
    fits = global_scale.dtype == torch.float32 and global_scale.shape == (1,)
    if not fits or not bool((global_scale.isfinite() & (global_scale > 0)).all()):
        raise NumericsError(
            f"{name}: global scale {global_scale.dtype} {tuple(global_scale.shape)} is not one finite and positive float32; "
            "compute it with calculate_global_scale"
        )
