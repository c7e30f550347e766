"""An independent reader of compressed checkpoints: tensors of a module in, its weight out.

It shares no code with what it checks: it imports neither our writer nor compressed-tensors, and reads bit streams and fp8 bytes by
their definitions (the files themselves are read by `container`). Dequantized values are computed in float64 and rounded once. That is
exact: an integer difference of at most 9 bits (or an fp8 value of 4) times a scale of at most 24 significant bits fits into 53, so one
rounding to the scale's dtype is what any correct implementation must produce, bit for bit.

Layout of a packed row: value i of b bits, offset by 2^(b-1) to be unsigned, occupies bits [i*b, (i+1)*b) of the row read as one
little-endian bit stream of 32-bit words; values may straddle words, the last word is filled up with zero bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from harness.validation.format.scheme import WeightScheme, acting_scales, fp4_as_fp8, fp4_steps, fp8_steps

_ELEMENTS_AT_ONCE = 1 << 22  # bounds the float64 working copies


def expected_parts(scheme: WeightScheme, shape: Sequence[int], *, has_g_idx: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a quantized module must have on disk, with their shapes; a bias is not among them.

    Args:
        scheme: the module's scheme.
        shape: [rows, columns] of the weight.
        has_g_idx: the module brings a column-to-group map.
    Returns:
        Shapes by last name.
    """
    rows, columns = shape
    scale = scheme.scale_shape(shape)
    parts: dict[str, tuple[int, ...]] = {"weight_scale": scale}
    if scheme.is_packed:
        parts["weight_packed"] = (rows, math.ceil(columns * scheme.num_bits / 32))
        parts["weight_shape"] = (2,)
    elif scheme.is_fp4:
        parts["weight_packed"] = (rows, columns // 2)
        parts |= {"weight_global_scale": (1,)} if scheme.strategy == "tensor_group" else {}
    else:
        parts["weight"] = (rows, columns)
    if not scheme.symmetric:
        is_packed = scheme.is_packed and scheme.strategy != "tensor"
        parts["weight_zero_point"] = (math.ceil(rows * scheme.num_bits / 32), scale[1]) if is_packed else scale
    if has_g_idx:
        parts["weight_g_idx"] = (columns,)
    if scheme.has_static_input:
        parts["input_scale"] = (1,)
        if not scheme.input_symmetric:
            parts["input_zero_point"] = (1,)
    if scheme.has_global_input:
        parts["input_global_scale"] = (1,)
    return parts


def unpack_bits(words: np.ndarray, num_bits: int, count: int) -> tuple[np.ndarray, bool]:
    """Unpack the rows of a dense little-endian bit stream.

    Args:
        words: int32 [rows, words].
        num_bits: bits of one value.
        count: values of one row.
    Returns:
        Signed values, int16 [rows, count], and whether all bits behind the last value are zero.
    Raises:
        ValueError: a row does not have the bits for `count` values.
    """
    stream = np.ascontiguousarray(words.astype("<i4")).view(np.uint8)
    bits = np.unpackbits(stream, axis=-1, bitorder="little")
    used = count * num_bits
    if bits.shape[1] < used:
        raise ValueError(f"{words.shape[1]} words a row cannot hold {count} values of {num_bits} bits")
    values = bits[:, :used].reshape(len(words), count, num_bits).astype(np.int16) @ (1 << np.arange(num_bits, dtype=np.int16))
    return values.astype(np.int16) - np.int16(1 << (num_bits - 1)), not bits[:, used:].any()


def float8_values() -> np.ndarray:
    """Return the 256 values of float8 e4m3fn by byte: sign, 4 exponent bits of bias 7, 3 mantissa bits, no infinity."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[(byte & 127) == 127] = np.nan
    return np.where(byte & 128, -magnitude, magnitude)


@dataclass(frozen=True)
class DecodedModule:
    """One quantized module in the clear.

    Attributes:
        weight: [rows, columns] in the dtype of the scale.
        codes: integer codes int16, or the raw fp8 bytes uint8; [rows, columns].
        scale: float64, in the shape of the file.
        zero_point: int16 in the shape of the scale; None where there is none.
        has_clean_padding: the bits behind the last packed value are zero.
        row_scale: float64, the scales that act on each row, [rows, groups]; [1] where one acts on all.
        groups: group of each column; None where a row has one scale.
        is_fp4: the codes are those of fp4, as fp8 bytes.
    """

    weight: torch.Tensor
    codes: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray | None
    has_clean_padding: bool
    row_scale: np.ndarray
    groups: np.ndarray | None
    is_fp4: bool

    def steps(self, rows: slice) -> np.ndarray:
        """Return the distance between neighbouring values of the format at each weight of some rows, float64."""
        spacing = np.ones(self.weight.shape[1])
        if self.codes.dtype == np.uint8:
            spacing = (fp4_steps if self.is_fp4 else fp8_steps)(self.codes[rows])
        return np.broadcast_to(_spread(self.row_scale, rows, self.groups) * spacing, self.weight[rows].shape)


def decode_module(parts: Mapping[str, torch.Tensor], scheme: WeightScheme) -> DecodedModule:
    """Decode the tensors of one quantized module.

    Args:
        parts: tensors by last name, as they lie in the file.
        scheme: what quantization_config says about the module.
    Returns:
        Codes, parameters and the weight.
    Raises:
        ValueError: a tensor is missing or its shape does not fit the others.
    """
    shape = _weight_shape(parts, scheme)
    has_g_idx = "weight_g_idx" in parts
    for name, expected in expected_parts(scheme, shape, has_g_idx=has_g_idx).items():
        if name not in parts:
            raise ValueError(f"{name} is missing")
        if tuple(parts[name].shape) != expected:
            asked = f", as weight_shape {list(shape)} asks for" if scheme.is_packed else ""  # either of the two may be the damaged one
            raise ValueError(f"{name} has the shape {list(parts[name].shape)}, not {list(expected)}{asked}")
    if scheme.has_groups and (not scheme.group_size or shape[1] % scheme.group_size):
        raise ValueError(f"{shape[1]} columns do not divide into groups of {scheme.group_size}")
    codes, is_clean = _codes(parts, scheme, shape)
    acting = acting_scales(parts, scheme.format)
    scale = acting.values
    zero_point, is_clean_zero = _zero_point(parts, scheme, shape)
    width = scheme.group_size or shape[1] if scheme.block is None else scheme.block[1]
    groups = parts["weight_g_idx"].numpy() if has_g_idx else np.arange(shape[1]) // width
    if has_g_idx and (groups.min() < 0 or groups.max() >= scale.shape[-1]):
        raise ValueError(f"weight_g_idx names groups outside 0..{scale.shape[-1] - 1}")
    spread = scale if scheme.block is None else np.repeat(scale, scheme.block[0], axis=0)[: shape[0]]
    grouped = groups if scheme.has_groups or scheme.block is not None else None
    weight = _dequantize(codes, spread, zero_point, grouped, acting.roundings)
    return DecodedModule(weight, codes, scale, zero_point, is_clean and is_clean_zero, spread, grouped, scheme.is_fp4)


def _weight_shape(parts: Mapping[str, torch.Tensor], scheme: WeightScheme) -> tuple[int, int]:
    source = "weight_shape" if scheme.is_packed else "weight_packed" if scheme.is_fp4 else "weight"
    if source not in parts:
        raise ValueError(f"{source} is missing")
    if scheme.is_fp4 and parts[source].ndim == 2:
        return parts[source].shape[0], 2 * parts[source].shape[1]
    shape = tuple(int(size) for size in parts[source].reshape(-1)) if scheme.is_packed else tuple(parts[source].shape)
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(f"{source} gives the shape {list(shape)}, which is no matrix")
    return shape[0], shape[1]


def _codes(parts: Mapping[str, torch.Tensor], scheme: WeightScheme, shape: tuple[int, int]) -> tuple[np.ndarray, bool]:
    if scheme.is_packed:
        _require_dtype("weight_packed", parts["weight_packed"], torch.int32)
        return unpack_bits(parts["weight_packed"].numpy(), scheme.num_bits, shape[1])
    if scheme.is_fp4:
        _require_dtype("weight_packed", parts["weight_packed"], torch.uint8)
        return fp4_as_fp8(parts["weight_packed"].numpy()), True
    if scheme.type == "float":
        _require_dtype("weight", parts["weight"], torch.float8_e4m3fn)
        return parts["weight"].view(torch.uint8).numpy(), True
    _require_dtype("weight", parts["weight"], torch.int8)
    return parts["weight"].numpy().astype(np.int16), True


def _require_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} has the dtype {tensor.dtype}, not {dtype}")


def _zero_point(parts: Mapping[str, torch.Tensor], scheme: WeightScheme, shape: tuple[int, int]) -> tuple[np.ndarray | None, bool]:
    if scheme.symmetric:
        return None, True
    stored = parts["weight_zero_point"]
    if not scheme.is_packed or scheme.strategy == "tensor":
        return stored.to(torch.int16).numpy(), True
    _require_dtype("weight_zero_point", stored, torch.int32)
    columns, is_clean = unpack_bits(np.ascontiguousarray(stored.numpy().T), scheme.num_bits, shape[0])
    return np.ascontiguousarray(columns.T), is_clean


def _dequantize(
    codes: np.ndarray, scale: np.ndarray, zero_point: np.ndarray | None, groups: np.ndarray | None, roundings: tuple[torch.dtype, ...]
) -> torch.Tensor:
    """Compute (code - zero point) * scale in float64 by blocks of rows, then round; `groups` is None where a row has one scale."""
    values = float8_values() if codes.dtype == np.uint8 else None
    step = max(1, _ELEMENTS_AT_ONCE // codes.shape[1])
    blocks = []
    for start in range(0, len(codes), step):
        rows = slice(start, start + step)
        block = values[codes[rows]] if values is not None else codes[rows].astype(np.float64)
        if zero_point is not None:
            block = block - _spread(zero_point, rows, groups)
        with np.errstate(all="ignore"):  # a broken scale is a finding of the audit, not a warning here
            product = torch.from_numpy(block * _spread(scale, rows, groups))
        for dtype in roundings:
            product = product.to(dtype)
        blocks.append(product)
    return torch.cat(blocks)


def _spread(values: np.ndarray, rows: slice, groups: np.ndarray | None) -> np.ndarray:
    """Give every column its group's value; a single value stays as it is."""
    if values.ndim == 1:
        return values
    return values[rows] if groups is None else values[rows][:, groups]
