"""Codes of fewer than 8 bits, packed densely into int32 words ("pack-quantized" of compressed-tensors 0.20); and bytes by format.

Code i of a row, made unsigned by adding 2^(b-1), takes the bits [i * b, (i + 1) * b) of the row, counted from the least significant bit of
the first word. Nothing is padded between codes, so that for 3, 5, 6 and 7 bits some straddle two words; a row ends with zero bits up to a
whole word. The pattern repeats after lcm(b, 32) bits, and both directions loop over the codes of one repeat: a few long strided operations
that need no wide copy of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from compressor.errors import NumericsError, SchemeError
from compressor.numerics.formats import FP4_VALUES
from compressor.numerics.scheme import QuantizationArgs, QuantizationScheme

WORD_BITS = 32


def pack_int32(codes: Tensor, num_bits: int, dim: int = 1) -> Tensor:
    """Pack codes into words along the columns (dim=1) or the rows (dim=0).

    Args:
        codes: int8 [R, C], or of any other rank: the last two dimensions are R and C.
        num_bits: bits of a code, 1 to 8.
        dim: which of R (0) and C (1) becomes words.

    Returns:
        int32 [R, ceil(C * num_bits / 32)] or [ceil(R * num_bits / 32), C], contiguous.

    Raises:
        SchemeError: not int8, or num_bits or dim out of range.
        NumericsError: a code does not fit into num_bits.
    """
    _check_arguments(codes, torch.int8, num_bits, dim)
    if dim == 0:
        return pack_int32(codes.transpose(-1, -2), num_bits).transpose(-1, -2).contiguous()
    offset = 1 << (num_bits - 1)
    if codes.numel():
        lowest, highest = (int(bound) for bound in torch.aminmax(codes))
        if lowest < -offset or highest >= offset:
            raise NumericsError(f"codes from {lowest} to {highest} do not fit into num_bits={num_bits}; quantize for this width")
    num_words = math.ceil(codes.shape[-1] * num_bits / WORD_BITS)
    per_repeat, words_per_repeat = _repeat(num_bits)
    # uint8 addition wraps, which is just what 8 bits need: -128 + 128 = 0.
    unsigned = functional.pad(codes.contiguous().view(torch.uint8) + offset, (0, -codes.shape[-1] % per_repeat))
    unsigned = unsigned.reshape(*unsigned.shape[:-1], unsigned.shape[-1] // per_repeat, per_repeat)
    words = torch.zeros(*unsigned.shape[:-1], words_per_repeat, dtype=torch.int32, device=codes.device)
    for i in range(per_repeat):
        word, shift = divmod(i * num_bits, WORD_BITS)
        code = unsigned[..., i].to(torch.int32)
        words[..., word] |= code << shift
        if shift + num_bits > WORD_BITS:
            words[..., word + 1] |= code >> (WORD_BITS - shift)
    return words.flatten(-2)[..., :num_words].contiguous()


def unpack_int32(packed: Tensor, num_bits: int, shape: Sequence[int] | Tensor, dim: int = 1) -> Tensor:
    """Undo `pack_int32`.

    Args:
        packed: int32, as packed.
        num_bits: bits of a code, 1 to 8.
        shape: the shape of the codes before packing, as numbers or as the checkpoint's `weight_shape`.
        dim: which of R (0) and C (1) became words.

    Returns:
        int8 codes of this shape, contiguous.

    Raises:
        SchemeError: not int32, num_bits or dim out of range, or words that do not fit the shape.
    """
    _check_arguments(packed, torch.int32, num_bits, dim)
    sizes = [int(size) for size in shape]
    if dim == 0:
        sizes[-2:] = sizes[:-3:-1]
        return unpack_int32(packed.transpose(-1, -2), num_bits, sizes).transpose(-1, -2).contiguous()
    num_words = math.ceil(sizes[-1] * num_bits / WORD_BITS)
    if list(packed.shape) != [*sizes[:-1], num_words]:
        raise SchemeError(
            f"packed words {tuple(packed.shape)} do not hold codes {tuple(sizes)} of num_bits={num_bits}; check the shape and the bits"
        )
    per_repeat, words_per_repeat = _repeat(num_bits)
    words = functional.pad(packed, (0, -num_words % words_per_repeat))
    words = words.reshape(*words.shape[:-1], words.shape[-1] // words_per_repeat, words_per_repeat)
    codes = torch.empty(*words.shape[:-1], per_repeat, dtype=torch.int8, device=packed.device)
    for i in range(per_repeat):
        word, shift = divmod(i * num_bits, WORD_BITS)
        code = (words[..., word] >> shift) & ((1 << min(num_bits, WORD_BITS - shift)) - 1)
        num_high = shift + num_bits - WORD_BITS
        if num_high > 0:
            code |= (words[..., word + 1] & ((1 << num_high) - 1)) << (WORD_BITS - shift)
        codes[..., i] = code - (1 << (num_bits - 1))
    return codes.flatten(-2)[..., : sizes[-1]].contiguous()


def _repeat(num_bits: int) -> tuple[int, int]:
    """How many codes, and how many words, until codes begin at a word's first bit again."""
    common = math.gcd(num_bits, WORD_BITS)
    return WORD_BITS // common, num_bits // common


def _check_arguments(tensor: Tensor, dtype: torch.dtype, num_bits: int, dim: int) -> None:
    if tensor.dtype != dtype:
        raise SchemeError(f"packing: a tensor of {tensor.dtype} is not {dtype}; quantize before packing, unpack packed words")
    if not 1 <= num_bits <= 8:
        raise SchemeError(f"packing: num_bits={num_bits} is not between 1 and 8; int8 codes have at most 8 bits")
    if dim not in (0, 1) or tensor.ndim < 2 - dim:
        raise SchemeError(f"packing: dim={dim} does not exist in a tensor of {tensor.ndim} dimensions; use 1 for columns, 0 for rows")


# fp4 codes, two to a byte: the layout of NVFP4 and MXFP4 in compressed-tensors 0.20.
#
# A nibble is sign, two bits of exponent and one of significand; its lower three bits count through 0, 0.5, 1, 1.5, 2, 3, 4, 6. The first
# code of a pair takes the lower nibble. Unpacked, codes are kept in float8_e4m3fn, which holds each of the sixteen exactly, minus zero too.

_NO_CODE = 255


def pack_fp4(codes: Tensor) -> Tensor:
    """Pack codes along the columns.

    Args:
        codes: float8_e4m3fn [..., C] that holds fp4 values only; C even.

    Returns:
        uint8 [..., C / 2], contiguous.

    Raises:
        SchemeError: another dtype, or an odd number of columns.
        NumericsError: a code is no fp4 value.
    """
    if codes.dtype != torch.float8_e4m3fn or codes.ndim == 0 or codes.shape[-1] % 2:
        raise SchemeError(
            f"packing: fp4 codes {codes.dtype} {tuple(codes.shape)} are not float8_e4m3fn with an even number of columns; quantize first"
        )
    nibbles = _encoding(codes.device)[codes.contiguous().view(torch.uint8).to(torch.int32)]
    if bool((nibbles == _NO_CODE).any()):
        raise NumericsError("packing: a code is no fp4 value (0, 0.5, 1, 1.5, 2, 3, 4, 6 or one of their negatives); quantize to fp4 first")
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """Undo `pack_fp4`.

    Args:
        packed: uint8 [..., C / 2].

    Returns:
        float8_e4m3fn [..., C], contiguous.

    Raises:
        SchemeError: another dtype.
    """
    if packed.dtype != torch.uint8:
        raise SchemeError(f"packing: packed fp4 codes of {packed.dtype} are not torch.uint8; read weight_packed as it is stored")
    nibbles = torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(-2)
    return _decoding(packed.device).view(torch.uint8)[nibbles.to(torch.int32)].view(torch.float8_e4m3fn)


def _decoding(device: torch.device) -> Tensor:
    """Return the sixteen values by their nibble."""
    positive = torch.tensor(FP4_VALUES, dtype=torch.float32, device=device)
    return torch.cat((positive, -positive)).to(torch.float8_e4m3fn)


def _encoding(device: torch.device) -> Tensor:
    """Return the nibble of each of the 256 fp8 bytes, 255 where there is none."""
    table = torch.full((256,), _NO_CODE, dtype=torch.uint8, device=device)
    table[_decoding(device).view(torch.uint8).to(torch.int64)] = torch.arange(16, dtype=torch.uint8, device=device)
    return table


# How many bytes a weight takes on disk and in memory, by format; exact, so that a plan can promise it.


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


def quantized_bytes(num_rows: int, num_columns: int, scheme: QuantizationScheme, *, scale_bytes: int = 2) -> int:
    """Return the bytes of codes, scales, zero points and shape of one weight, and of the static scale of its input.

    Args:
        num_rows: out features, R.
        num_columns: in features, C.
        scheme: formats of weight and input. Pack-quantized codes lie in int32 words along a row, of fp4 two in a byte, others in one.
        scale_bytes: bytes of one scale.

    Returns:
        Bytes of all tensors that the format stores.
    """
    assert scheme.weights is not None
    packed = scheme.compression_format == "pack-quantized"
    return _weight_bytes(num_rows, num_columns, scheme.weights, packed, scale_bytes) + _input_bytes(scheme.input_activations, scale_bytes)


def _input_bytes(args: QuantizationArgs | None, scale_bytes: int) -> int:
    if args is None or args.dynamic is True:
        return 0
    return 4 if args.has_global_scale else scale_bytes + (0 if args.symmetric else 1)


def _weight_bytes(num_rows: int, num_columns: int, args: QuantizationArgs, packed: bool, scale_bytes: int) -> int:
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
