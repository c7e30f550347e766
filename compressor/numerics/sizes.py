"""How many bytes a weight takes on disk and in memory, by format; exact, so that a plan can promise it."""

from __future__ import annotations

import math

from compressor.numerics.scheme import QuantizationArgs

WORD_BITS = 32


def scale_shape(num_rows: int, num_columns: int, args: QuantizationArgs) -> tuple[int, ...]:
    """Return the shape of the scales of a weight.

    Args:
        num_rows: out features, R.
        num_columns: in features, C.
        args: number format of a weight.

    Returns:
        (1,) per tensor, (R, 1) per channel, (R, G) per group, one per block.
    """
    if args.strategy == "tensor":
        return (1,)
    if args.block_structure is not None:
        return -(-num_rows // args.block_structure[0]), -(-num_columns // args.block_structure[1])
    return num_rows, num_columns // args.group_size if args.is_grouped and args.group_size else 1


def quantized_weight_bytes(num_rows: int, num_columns: int, args: QuantizationArgs, *, packed: bool, scale_bytes: int = 2) -> int:
    """Return the bytes of codes, scales, zero points and shape of one weight.

    Args:
        num_rows: out features, R.
        num_columns: in features, C.
        args: number format.
        packed: codes are packed into int32 words along a row (pack-quantized); else one byte per code. fp4 always takes half a byte.
        scale_bytes: bytes of one scale.

    Returns:
        Bytes of all tensors that the format stores for this weight.
    """
    num_scales = math.prod(scale_shape(num_rows, num_columns, args))
    if args.type == "float":
        scale_bytes = 1 if args.scale_dtype else scale_bytes
        code_bytes = num_rows * num_columns * args.num_bits // 8
        return code_bytes + num_scales * scale_bytes + (4 if args.has_global_scale else 0)
    shape_bytes = 16 if packed else 0
    code_bytes = num_rows * _words(num_columns, args.num_bits) * 4 if packed else num_rows * num_columns
    if args.symmetric:
        zero_bytes = 0
    elif packed and args.strategy != "tensor":
        zero_bytes = _words(num_rows, args.num_bits) * (num_scales // num_rows) * 4
    else:
        zero_bytes = num_scales
    index_bytes = 4 * num_columns if args.actorder == "group" else 0
    return code_bytes + num_scales * scale_bytes + zero_bytes + index_bytes + shape_bytes


def _words(count: int, num_bits: int) -> int:
    return -(-count * num_bits // WORD_BITS)
