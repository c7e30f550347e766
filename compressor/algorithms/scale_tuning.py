"""Training of scales under fixed codes: the weight as a function of its scales, and how far two predictions are apart.

    weight = (code - zero point) * scale,   scale = start * exp(move)

A move is relative and dimensionless, so that one learning rate serves the scales of all layers, and a scale stays positive. The forward
rounds a scale to the dtype in which it is stored; the gradient goes straight through that rounding.

Source: the end-to-end half of EfficientQAT, Chen et al. 2024, arXiv:2407.11062; differs in the relative step and in the loss, which is the
divergence from the uncompressed model and not the next token.

Shapes: R rows (out features), C columns (in features), G groups, S group size, N tokens, V vocabulary.
"""

from __future__ import annotations

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
    """

    codes_RC: Tensor
    qparams: QParams
    args: QuantizationArgs
    g_idx_C: Tensor | None
    stored: torch.dtype
    dtype: torch.dtype


def moved_scale(move: Tensor, fixed: FixedCodes) -> Tensor:
    """Return the scale after a move, as it would be stored.

    Args:
        move: float32, shaped like the scale.
        fixed: what does not move.

    Returns:
        The scale, rounded to its stored dtype, in the dtype in which values are computed; the one it was where nothing moved.
    """
    start = fixed.qparams.scale
    moved = (start.float() * move.exp()).to(fixed.stored).to(start.dtype)
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
    """Turn the gradient of a weight into that of the move: dL/dmove = scale * sum over a group of dL/dweight * (code - zero point).

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
    return sum_by_scale(steps_RC.mul_(gradient_RC), tuple(scale.shape), fixed.args, fixed.g_idx_C) * scale


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
