"""What a quantization_config says about weights, as the independent decoder reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# How fp4 codes and the scales of float formats lie in a file, by their definitions: part of the independent decoder.
#
# fp4 (e2m1) is sign, two exponent bits, one mantissa bit; two to a byte, the first in the lower half. The MX formats store scales as
# exponents plus 127; NVFP4 stores them as fp8, and divides them by one float32 scale for the whole tensor. Both are unpacked to bfloat16.

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


@dataclass(frozen=True)
class WeightScheme:
    """What quantization_config says about the weights of one config group."""

    format: str
    num_bits: int
    type: str
    symmetric: bool
    strategy: str
    group_size: int | None
    has_static_input: bool
    input_symmetric: bool = True
    block: tuple[int, int] | None = None
    has_global_input: bool = False

    @property
    def label(self) -> str:
        """The scheme in a few words."""
        group = f" of {self.group_size}" if self.has_groups else ""
        symmetry = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.type}{self.num_bits}, {symmetry}, per {self.strategy}{group}, {self.format}"

    @property
    def is_packed(self) -> bool:
        """Whether the codes lie in a bit stream."""
        return self.format == "pack-quantized"

    @property
    def code_range(self) -> tuple[int, int]:
        """The least and the greatest integer code."""
        return -(1 << (self.num_bits - 1)), (1 << (self.num_bits - 1)) - 1

    @property
    def has_groups(self) -> bool:
        """Whether runs of columns share a scale."""
        return self.strategy in ("group", "tensor_group")

    @property
    def is_unpacked_to_bfloat16(self) -> bool:
        """Whether the weight is bfloat16 before it takes the dtype of the model."""
        return self.format in (*FP4_FORMATS, *MX_FORMATS)

    @property
    def is_fp4(self) -> bool:
        """Whether codes lie two to a byte."""
        return self.format in FP4_FORMATS

    @property
    def largest_float(self) -> int:
        """The fp8 byte of the greatest value of a float format."""
        return FP4_LARGEST if self.is_fp4 else FP8_LARGEST

    def num_groups(self, num_columns: int) -> int:
        """Return how many scales a row has."""
        if self.block is not None:
            return math.ceil(num_columns / self.block[1])
        return num_columns // self.group_size if self.has_groups and self.group_size else 1

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape that the scale of a weight of `shape` must have."""
        rows = shape[0] if self.block is None else math.ceil(shape[0] / self.block[0])
        return (1,) if self.strategy == "tensor" else (rows, self.num_groups(shape[1]))


@dataclass(frozen=True)
class ConfigGroup:
    """One entry of config_groups; `reason` says why this decoder does not read it, None where it does."""

    name: str
    targets: tuple[str, ...]
    scheme: WeightScheme | None
    reason: str | None


_FORMATS = {"pack-quantized": "int", "int-quantized": "int", "float-quantized": "float"} | dict.fromkeys(
    (*FP4_FORMATS, *MX_FORMATS), "float"
)


def attention_scheme(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return how queries, keys and values are quantized where attention itself is a target.

    Args:
        config: the value of quantization_config in config.json.
    Returns:
        The arguments of the group for inputs alone; None where there is none.
    """
    groups = config.get("config_groups")
    found = [group for group in groups.values() if _is_of_attention(group)] if isinstance(groups, Mapping) else []
    return found[0]["input_activations"] if found else None


def _is_of_attention(group: Any) -> bool:
    return isinstance(group, Mapping) and group.get("weights") is None and isinstance(group.get("input_activations"), Mapping)


def read_config_groups(config: Mapping[str, Any]) -> list[ConfigGroup]:
    """Read the config groups of a quantization_config that quantize weights.

    Args:
        config: the value of quantization_config in config.json.
    Returns:
        The groups in the order of the file.
    Raises:
        ValueError: there are none, or one is not a mapping with targets and weights.
    """
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError("quantization_config holds no config_groups")
    return [_config_group(name, group, str(config.get("format"))) for name, group in groups.items() if not _is_of_attention(group)]


def block_sizes(value: Any) -> tuple[int, int]:
    """Read the rows and columns of a block.

    Args:
        value: of block_structure: two numbers, or `128x128`, which compressed-tensors takes as well.
    Returns:
        Both.
    Raises:
        ValueError: there are others than two.
    """
    rows, columns = (int(size) for size in value.split("x")) if isinstance(value, str) else value
    return rows, columns


def _config_group(name: str, group: Any, default_format: str) -> ConfigGroup:
    if not isinstance(group, Mapping) or not group.get("targets") or not isinstance(group.get("weights"), Mapping):
        raise ValueError(f"config_groups.{name}: needs targets and weights")
    weights, inputs = group["weights"], group.get("input_activations")
    group_size = weights.get("group_size")
    inferred = "group" if (group_size or 0) > 0 else "channel" if group_size == -1 else "tensor"
    scheme = WeightScheme(
        format=str(group.get("format") or default_format),
        num_bits=int(weights.get("num_bits", 8)),
        type=str(weights.get("type", "int")),
        symmetric=bool(weights.get("symmetric", True)),
        strategy=str(weights.get("strategy") or inferred),
        group_size=group_size,
        has_static_input=inputs is not None and not inputs.get("dynamic", False),
        input_symmetric=inputs is None or bool(inputs.get("symmetric", True)),
        block=block_sizes(weights["block_structure"]) if weights.get("block_structure") else None,
        has_global_input=inputs is not None and inputs.get("dynamic") == "local",
    )
    reason = _unread(scheme)
    return ConfigGroup(name, tuple(group["targets"]), None if reason else scheme, reason and f"this decoder does not read {reason}")


def _unread(scheme: WeightScheme) -> str | None:
    """What of a scheme this decoder does not read; None where it reads all."""
    strategies = {"nvfp4-pack-quantized": ("tensor_group",), "mxfp4-pack-quantized": ("group",), "mxfp8-quantized": ("group",)}
    usual = ("tensor", "channel", "group", "block") if scheme.block is not None else ("tensor", "channel", "group")
    if scheme.strategy not in strategies.get(scheme.format, usual) or (scheme.strategy == "block" and scheme.format != "float-quantized"):
        return f"strategy {scheme.strategy}"
    if _FORMATS.get(scheme.format) != scheme.type:
        return f"format {scheme.format} with {scheme.type} weights"
    if not (2 <= scheme.num_bits <= 8 if scheme.type == "int" else scheme.num_bits == (4 if scheme.is_fp4 else 8)):
        return f"{scheme.type} weights of {scheme.num_bits} bits"
    return None
