"""fp4 codes, two to a byte: the layout of NVFP4 and MXFP4 in compressed-tensors 0.20.

A nibble is sign, two bits of exponent and one of significand; its lower three bits count through 0, 0.5, 1, 1.5, 2, 3, 4, 6. The first code
of a pair takes the lower nibble. Unpacked, codes are kept in float8_e4m3fn, which holds each of the sixteen (minus zero included) exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.errors import NumericsError, SchemeError
from compressor.numerics.formats import FP4_VALUES

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
