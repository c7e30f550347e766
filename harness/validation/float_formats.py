"""How fp4 codes and the scales of float formats lie in a file, by their definitions: part of the independent decoder.

fp4 (e2m1) is sign, two exponent bits, one mantissa bit; two to a byte, the first in the lower half. The MX formats store scales as
exponents plus 127; NVFP4 stores them as fp8, and divides them by one float32 scale for the whole tensor. Both are unpacked to bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

# The fp8 (e4m3) bytes of the eight magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6.
_MAGNITUDES = np.array([0x00, 0x30, 0x38, 0x3C, 0x40, 0x44, 0x48, 0x4C], dtype=np.uint8)
FP4_LARGEST, FP8_LARGEST = 0x4C, 0x7E
FP4_FORMATS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
MX_FORMATS = ("mxfp4-pack-quantized", "mxfp8-quantized")


@dataclass(frozen=True)
class Scales:
    """The scales of one weight as they act, and how a product with them is rounded.

    Attributes:
        values: float64, in the shape of the file.
        roundings: dtypes that a value passes, in order; the last is that of the unpacked weight.
    """

    values: np.ndarray
    roundings: tuple[torch.dtype, ...]


def fp4_as_fp8(packed: np.ndarray) -> np.ndarray:
    """Unpack fp4 codes.

    Args:
        packed: uint8 [rows, columns / 2].

    Returns:
        The fp8 bytes of the same values, uint8 [rows, columns].
    """
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    return _MAGNITUDES[nibbles & 7] | ((nibbles & 8) << 4).astype(np.uint8)


def fp8_steps(codes: np.ndarray) -> np.ndarray:
    """Return the distance between neighbouring fp8 (e4m3) values at each byte: three mantissa bits below its exponent.

    Args:
        codes: bytes, uint8.

    Returns:
        float64, in the shape of the codes.
    """
    return np.exp2(np.maximum((codes >> 3) & 15, 1) - 10.0)


def fp4_steps(codes: np.ndarray) -> np.ndarray:
    """Return the distance between neighbouring fp4 (e2m1) values at each value: one mantissa bit below its exponent.

    Args:
        codes: the fp8 bytes of the values, uint8.

    Returns:
        float64, in the shape of the codes.
    """
    return np.exp2(np.maximum((codes >> 3) & 15, 7) - 8.0)


def acting_scales(parts: Mapping[str, torch.Tensor], format_name: str) -> Scales:
    """Read the scales of a weight.

    Args:
        parts: tensors of the module by last name.
        format_name: of the quantization_config.

    Returns:
        The scales as they act.

    Raises:
        ValueError: a tensor has another dtype than the format.
    """
    stored = parts["weight_scale"]
    wanted = torch.uint8 if format_name in MX_FORMATS else torch.float8_e4m3fn if format_name in FP4_FORMATS else None
    if wanted is None:
        return Scales(stored.to(torch.float64).numpy(), (stored.dtype,))
    if stored.dtype != wanted:
        raise ValueError(f"weight_scale has the dtype {stored.dtype}, not {wanted}")
    if wanted is torch.uint8:
        return Scales(np.exp2(stored.numpy().astype(np.float64) - 127), (torch.bfloat16,))
    whole = parts["weight_global_scale"]
    if whole.dtype != torch.float32:
        raise ValueError(f"weight_global_scale has the dtype {whole.dtype}, not {torch.float32}")
    with np.errstate(all="ignore"):  # a broken scale is a finding of the audit, not a warning here
        acting = stored.to(torch.float32).numpy() / whole.numpy()
    return Scales(acting.astype(np.float64), (torch.float32, torch.bfloat16))
