"""Real values to codes and back. Every other part of the project that needs this arithmetic calls it here.

`dequantize` and `fake_quantize` do the operations of compressed-tensors 0.20 in its order and dtypes, since that library runs when
transformers loads one of our checkpoints: the logits must agree to the last bit.

Shapes: R rows (out features), C columns (in features), G groups, S = C / G group size. Weights are [R, C]; scale and zero point are [1] per
tensor, [R, 1] per channel, [R, G] per group, [ceil(R / H), ceil(C / W)] per block of H x W; g_idx int32 [C] gives each column's group
where groups are not runs of columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.errors import NumericsError, SchemeError
from compressor.numerics.formats import encode_, last_step, snap_
from compressor.numerics.qparams import QParams, calculate_qparams
from compressor.numerics.scheme import QuantizationArgs


@torch.no_grad()
def quantize(x: Tensor, qparams: QParams, args: QuantizationArgs, g_idx: Tensor | None = None, *, checked: bool = True) -> Tensor:
    """Turn real values into codes.

    Args:
        x: [R, C] weight (or an activation with scales that broadcast); not modified.
        qparams: scale and zero point, as the strategy shapes them.
        args: the format.
        g_idx: int32 [C], the group of each column; strategy "group" only.
        checked: False reads nothing on the host: NaN then becomes some code.

    Returns:
        Codes shaped like x, int8 or float8_e4m3fn.

    Raises:
        NumericsError: x or the scale has NaN, for which there is no code.
        SchemeError: the columns do not divide into groups.
    """
    scaled = _divide(*_align(x, qparams, args, g_idx))
    if checked and scaled.numel() and bool(torch.aminmax(scaled).min.isnan()):
        raise NumericsError(
            f"tensor {tuple(x.shape)}: a value or its scale is NaN, which no code stands for; look for NaN in weights or data"
        )
    return encode_(scaled, args.type, args.num_bits).reshape(x.shape)


@torch.no_grad()
def dequantize(codes: Tensor, qparams: QParams, args: QuantizationArgs, g_idx: Tensor | None = None) -> Tensor:
    """Turn codes back into real values, as compressed-tensors' `dequantize` does.

    Args:
        codes: [R, C], int8 or float8_e4m3fn; not modified.
        qparams: scale and zero point, as the strategy shapes them.
        args: the format.
        g_idx: int32 [C], the group of each column; strategy "group" only.

    Returns:
        (codes - zero_point) * scale / global_scale, shaped like codes, in the dtype of the scale.

    Raises:
        SchemeError: the columns do not divide into groups.
    """
    codes_grouped, aligned = _align(codes, qparams, args, g_idx)
    values = _multiply_(codes_grouped.to(aligned.scale.dtype, copy=True), aligned).reshape(codes.shape)
    return values.to(qparams.scale.dtype)


def values_as_read(codes: Tensor, qparams: QParams, args: QuantizationArgs, dtype: torch.dtype, g_idx: Tensor | None = None) -> Tensor:
    """Turn the codes of a weight into what a layer that is read from a file multiplies with.

    Scales that are stored in one byte are unpacked to bfloat16 by compressed-tensors, and the values with them, whatever the model's dtype.

    Args:
        codes: [R, C], int8 or float8_e4m3fn; not modified.
        qparams: scale and zero point, as the strategy shapes them.
        args: the format.
        dtype: of the model.
        g_idx: int32 [C], the group of each column; strategy "group" only.

    Returns:
        Shaped like codes, in `dtype`.

    Raises:
        SchemeError: the columns do not divide into groups.
    """
    read = qparams if args.scale_dtype is None else qparams._replace(scale=qparams.scale.to(torch.bfloat16))
    return dequantize(codes, read, args, g_idx).to(dtype)


@torch.no_grad()
def fake_quantize(x: Tensor, qparams: QParams, args: QuantizationArgs) -> Tensor:
    """Quantize and dequantize in one go, as compressed-tensors' `fake_quantize` does.

    Args:
        x: [R, C] weight, or an activation [..., C]; not modified.
        qparams: scale and zero point, as the strategy shapes them.
        args: the format.

    Returns:
        The values that the codes stand for, shaped like x. As in compressed-tensors the dtype is that of x for strategies "group" and
        "tensor_group" and that of the scale else (mostly one and the same). NaN stays NaN.

    Raises:
        SchemeError: the columns do not divide into groups.
    """
    x_grouped, aligned = _align(x, qparams, args, None)
    scaled = _divide(x_grouped, aligned)
    if args.dynamic and aligned.zero_point is None:
        scaled += 0.0  # compressed-tensors adds a zero point of zeros here, which makes +0.0 of -0.0
    codes = snap_(scaled, args.type, args.num_bits).to(aligned.scale.dtype)
    values = _multiply_(codes, aligned).reshape(x.shape)
    return values.to(x.dtype) if args.is_grouped else values


@torch.no_grad()
def inside_range(x: Tensor, qparams: QParams, args: QuantizationArgs) -> Tensor:
    """Tell which values are rounded and which are cut off, for gradients that go straight through rounding but not through cutting off.

    A value counts as inside as long as it lies less than one step beyond the last code: symmetric scales of compressed-tensors put the
    largest value of a group half a step beyond it, and a weight without a gradient would remain the largest.

    Args:
        x: [R, C] weight, or an activation [..., C]; not modified.
        qparams: scale and zero point, as the strategy shapes them.
        args: the format.

    Returns:
        Bool, shaped like x.

    Raises:
        SchemeError: the columns do not divide into groups.
    """
    scaled = _divide(*_align(x, qparams, args, None))
    (low, high), step = args.code_range, last_step(args.type, args.num_bits)
    return ((scaled > low - step) & (scaled < high + step)).reshape(x.shape)


@torch.no_grad()
def dynamic_qparams(x: Tensor, args: QuantizationArgs, global_scale: Tensor | None = None, *, by_row: bool = False) -> QParams:
    """Compute the scales of one activation from its own values, as compressed-tensors does in every forward pass.

    Args:
        x: the activation, usually [batch, sequence, C].
        args: the format; dynamic, strategy "token", "tensor", "group" or "tensor_group".
        global_scale: float32 [1], calibrated, for strategy "tensor_group".
        by_row: a token is a row [C] of an activation of any rank.

    Returns:
        Scale [1] per tensor; per group [..., G]; per token [batch, sequence, 1], by row [..., 1]. Otherwise a token's values are all but
        the first two dimensions, so an activation [N, C] without a batch dimension gets one scale for all of it: that is what
        compressed-tensors computes, and its logits must be ours.

    Raises:
        SchemeError: args are not for a dynamic activation, or the columns do not divide into groups.
    """
    if not args.dynamic:
        raise SchemeError("dynamic_qparams: args with dynamic=False have stored scales; use those, or give dynamic=True")
    if args.is_grouped:
        check_groups(x.shape[-1], args)
        groups = x.unflatten(-1, (-1, args.group_size or 1))
        return calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale)
    if x.numel() == 0:
        x = x.new_zeros(1)  # an expert that no token reached; any scale does
    if args.strategy == "tensor" or (x.ndim <= 2 and not by_row):
        min_vals, max_vals = x.amin(tuple(range(x.ndim))), x.amax(tuple(range(x.ndim)))  # aminmax does not export to ONNX
    else:
        token_dims = (x.ndim - 1,) if by_row else tuple(range(2, x.ndim))
        min_vals, max_vals = x.amin(dim=token_dims, keepdim=True), x.amax(dim=token_dims, keepdim=True)
    return calculate_qparams(min_vals, max_vals, args)


def check_groups(num_columns: int, args: QuantizationArgs) -> None:
    """Refuse a group size that leaves a remainder.

    Args:
        num_columns: columns (in features) of the weight.
        args: the format; only strategies with groups can fail.

    Raises:
        SchemeError: group_size does not divide the columns.
    """
    if args.is_grouped and args.group_size is not None and num_columns % args.group_size:
        raise SchemeError(
            f"{num_columns} columns do not divide into groups of group_size={args.group_size}; ignore this module or choose a divisor"
        )


def _align(x: Tensor, qparams: QParams, args: QuantizationArgs, g_idx: Tensor | None) -> tuple[Tensor, QParams]:
    """View x and its qparams so that they broadcast: [R, G, S] against [R, G, 1] for groups, as they are else."""
    if qparams.global_scale is not None:
        qparams = QParams(qparams.scale / qparams.global_scale, qparams.zero_point)
    if not args.is_grouped:
        if g_idx is not None:
            raise SchemeError(f"g_idx does not go with strategy={args.strategy!r}; only groups have one")
        return x, _spread_blocks(qparams, x, args) if args.strategy == "block" else qparams
    assert args.group_size is not None, "the scheme checked it"
    check_groups(x.shape[-1], args)
    num_groups = x.shape[-1] // args.group_size
    if qparams.scale.shape[-1] != num_groups:
        raise SchemeError(
            f"scale {tuple(qparams.scale.shape)} does not fit {x.shape[-1]} columns in {num_groups} groups; compute it for this tensor"
        )
    if g_idx is None:
        grouped = x.reshape(*x.shape[:-1], num_groups, args.group_size)
        return grouped, qparams.map(lambda part: part.unsqueeze(-1))
    if g_idx.shape != x.shape[-1:]:
        raise SchemeError(f"g_idx {tuple(g_idx.shape)} does not name a group for each of {x.shape[-1]} columns; give one entry per column")
    return x, qparams.map(lambda part: part.index_select(-1, g_idx))


def _spread_blocks(qparams: QParams, x: Tensor, args: QuantizationArgs) -> QParams:
    """Repeat the scale of each block over its rows and columns; the last blocks may be cut short."""
    assert args.block_structure is not None, "the scheme checked it"
    rows, columns = x.shape[-2:]
    height, width = args.block_structure
    if qparams.scale.shape != (-(-rows // height), -(-columns // width)):
        raise SchemeError(
            f"scale {tuple(qparams.scale.shape)} does not fit {rows} rows and {columns} columns in blocks of {height} x {width}; "
            "compute it for this tensor"
        )
    return qparams.map(lambda part: part.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns])


def _divide(x: Tensor, qparams: QParams) -> Tensor:
    scaled = x / qparams.scale
    if qparams.zero_point is not None:
        scaled += qparams.zero_point.to(x.dtype)
    return scaled


def _multiply_(codes: Tensor, qparams: QParams) -> Tensor:
    if qparams.zero_point is not None:
        codes -= qparams.zero_point.to(codes.dtype)
    codes *= qparams.scale
    return codes
