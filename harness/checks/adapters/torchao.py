"""torchao's affine quantizer as a subject of the catalogue: integers in groups of columns, symmetric or not."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from compressor.errors import UserInputError
from harness.checks.oracles import int_grid
from harness.checks.protocols import Quantized


class TorchaoQuantizer:
    """choose_qparams_affine -> quantize_affine -> dequantize_affine, with float32 scales."""

    kind: ClassVar[str] = "quantizer"
    dtypes: Sequence[torch.dtype] = (torch.float32,)
    stored_scale: ClassVar[torch.dtype | None] = None
    # Scales are raised to eps of float32, so that small weights follow no rule; `covers` says that the others are as they must be.
    scale_rule: ClassVar[str | None] = None

    def __init__(self, num_bits: int = 4, group_size: int = 32, symmetric: bool = True) -> None:
        """Name the format; torchao is imported here, since it need not be installed."""
        self._affine = _primitives()
        self.name = f"torchao-int{num_bits}{'' if symmetric else '-asym'}-group{group_size}"
        self.tags = frozenset({"zero", "half_even", "local", *(["odd"] if symmetric else [])})
        self.code_values = int_grid(num_bits)
        self.column_multiple = group_size
        self._mapping = self._affine.MappingType.SYMMETRIC if symmetric else self._affine.MappingType.ASYMMETRIC
        self._low, self._high = int(self.code_values[0]), int(self.code_values[-1])

    def unit(self, shape: tuple[int, int]) -> tuple[int, int]:
        """See Quantizer."""
        return 1, self.column_multiple

    def quantize(self, weight: Tensor) -> Quantized:
        """See Quantizer."""
        scale, zero_point = self._affine.choose_qparams_affine(
            weight, self._mapping, (1, self.column_multiple), torch.int8, self._low, self._high, zero_point_dtype=torch.int32
        )
        found = Quantized(weight, scale, zero_point)
        return Quantized(self.encode(weight, found), scale, zero_point)

    def encode(self, values: Tensor, like: Quantized) -> Tensor:
        """See Quantizer."""
        block = (1, self.column_multiple)
        codes: Tensor = self._affine.quantize_affine(values, block, like.scale, like.zero_point, torch.int8, self._low, self._high)
        return codes

    def dequantize(self, quantized: Quantized) -> Tensor:
        """See Quantizer."""
        block = (1, self.column_multiple)
        scale, zero = quantized.scale, quantized.zero_point
        values: Tensor = self._affine.dequantize_affine(
            quantized.codes, block, scale, zero, torch.int8, self._low, self._high, output_dtype=scale.dtype
        )
        return values


def _primitives() -> Any:
    try:
        return importlib.import_module("torchao.quantization.quant_primitives")
    except ImportError as error:
        raise UserInputError("TorchaoQuantizer: torchao is not installed; install it to check its quantizer") from error
