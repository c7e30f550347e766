"""Training of scales under fixed codes: the weight as a function of its scales, and how far two predictions are apart.

    weight = (code - zero point) * scale,   scale = start * exp(unit * move)

The unit is the relative distance of neighbouring values of the format at a code of typical size: a move of 1 shifts a typical weight by one
step of its grid. So one learning rate serves all layers and formats (a relative step that is right for 3 bits is far too wide for 8), and a
scale stays positive. The forward rounds a scale to the dtype in which it is stored; the gradient goes straight through that rounding.

Source: the end-to-end half of EfficientQAT, Chen et al. 2024, arXiv:2407.11062; differs in the relative step and in the loss, which is the
divergence from the uncompressed model and not the next token.

Shapes: R rows (out features), C columns (in features), G groups, S group size, N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from compressor.numerics import QParams, QuantizationArgs, dequantize


class FixedCodes(NamedTuple):
    """What of a quantized weight does not change.

    Attributes:
        codes_RC: [R, C] int8 or float8_e4m3fn.
        qparams: the scale gives shape and dtype in which values are computed; zero point and global scale are used as they are.
        args: the format.
        g_idx_C: [C] group of each column, where groups are not runs of columns.
        stored: dtype of a scale in the file.
        dtype: of the weight.
        unit: by how much a move of 1 changes a scale, relatively.
    """

    codes_RC: Tensor
    qparams: QParams
    args: QuantizationArgs
    g_idx_C: Tensor | None
    stored: torch.dtype
    dtype: torch.dtype
    unit: float


# Relative distance of neighbours of a float format between two powers of two, 2^-mantissa / ln 4 on average: by bits.
_FLOAT_UNITS: Mapping[int, float] = MappingProxyType({8: 2**-3 / 1.386, 4: 2**-1 / 1.386})


def unit_of(codes_RC: Tensor, zero_point: Tensor | None, args: QuantizationArgs) -> float:
    """Say how far neighbouring values of a weight are apart, relative to a value of typical size.

    Args:
        codes_RC: [R, C] codes.
        zero_point: of them, or None.
        args: the format.

    Returns:
        Dimensionless; 1 / root mean square of the code for integers.
    """
    if args.type == "float":
        return _FLOAT_UNITS[args.num_bits]
    center = 0.0 if zero_point is None else float(zero_point.float().mean())
    return 1.0 / max(1.0, float((codes_RC.float() - center).square().mean().sqrt()))


def moved_scale(move: Tensor, fixed: FixedCodes) -> Tensor:
    """Return the scale after a move, as it would be stored.

    Args:
        move: float32, shaped like the scale.
        fixed: what does not move.

    Returns:
        The scale, rounded to its stored dtype, in the dtype in which values are computed; the one it was where nothing moved.
    """
    start = fixed.qparams.scale
    moved = (start.float() * (move * fixed.unit).exp()).to(fixed.stored).to(start.dtype)
    return torch.where((move == 0) | (moved <= 0), start, moved)


@torch.no_grad()
def scaled_weight(move: Tensor, fixed: FixedCodes) -> Tensor:
    """Compute a weight from its codes and moved scales.

    Args:
        move: float32, shaped like the scale.
        fixed: what does not move.

    Returns:
        [R, C], bit for bit what a layer with these scales computes with.
    """
    qparams = fixed.qparams._replace(scale=moved_scale(move, fixed))
    return dequantize(fixed.codes_RC, qparams, fixed.args, g_idx=fixed.g_idx_C).to(fixed.dtype)


@torch.no_grad()
def move_gradient(gradient_RC: Tensor, move: Tensor, fixed: FixedCodes) -> Tensor:
    """Turn the gradient of a weight into that of the move: scale * unit * sum over a group of dL/dweight * (code - zero point).

    Args:
        gradient_RC: [R, C] of the weight.
        move: float32, shaped like the scale.
        fixed: what does not move.

    Returns:
        float32, shaped like the move.
    """
    scale = moved_scale(move, fixed).float()
    one = fixed.qparams._replace(scale=torch.ones_like(scale))
    steps_RC = dequantize(fixed.codes_RC, one, fixed.args, g_idx=fixed.g_idx_C)
    return sum_by_scale(steps_RC.mul_(gradient_RC), tuple(scale.shape), fixed.args, fixed.g_idx_C) * scale * fixed.unit


def sum_by_scale(values_RC: Tensor, shape: tuple[int, ...], args: QuantizationArgs, g_idx_C: Tensor | None = None) -> Tensor:
    """Sum the values of a weight that share a scale.

    Args:
        values_RC: [R, C].
        shape: of the scale.
        args: the format.
        g_idx_C: [C] group of each column, where groups are not runs of columns.

    Returns:
        The sums, in the shape of the scale.
    """
    if args.strategy == "tensor":
        return values_RC.sum().reshape(shape)
    if g_idx_C is not None:
        return values_RC.new_zeros(shape).index_add_(-1, g_idx_C.long(), values_RC)
    if args.strategy == "block":
        assert args.block_structure is not None
        height, width = args.block_structure
        rows, columns = values_RC.shape
        padded = torch.nn.functional.pad(values_RC, (0, -columns % width, 0, -rows % height))
        return padded.reshape(shape[0], height, shape[1], width).sum((1, 3))
    return values_RC.unflatten(-1, (shape[-1], -1)).sum(-1)


def divergence(base_NV: Tensor, own_NV: Tensor) -> Tensor:
    """Compute KL(base || own) of each token.

    Args:
        base_NV: logits of the uncompressed model.
        own_NV: logits of the compressed model.

    Returns:
        [N] nats, float32.
    """
    base, own = base_NV.float().log_softmax(-1), own_NV.float().log_softmax(-1)
    return (base.exp() * (base - own)).sum(-1)
