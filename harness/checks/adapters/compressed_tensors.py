"""compressed-tensors' quantizer as a subject of the catalogue: give `harness.check` its QuantizationArgs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationArgs as ForeignArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor

from compressor.numerics.scheme import QuantizationArgs
from harness.checks.adapters.ours import FLOATS, grid_of, label_of, rule_of
from harness.checks.protocols import Quantized


class ForeignQuantizer:
    """Range -> calculate_qparams -> quantize, as an observer of llm-compressor and a compressor of compressed-tensors call them."""

    kind: ClassVar[str] = "quantizer"
    dtypes: Sequence[torch.dtype] = FLOATS

    def __init__(self, args: ForeignArgs) -> None:
        """Read what the format says; weights in groups, channels or one piece."""
        self.args: Any = args
        group_size = args.group_size if _word(args.strategy) in ("group", "tensor_group") else None
        own = QuantizationArgs(
            num_bits=args.num_bits, type=_word(args.type), symmetric=args.symmetric, strategy=_word(args.strategy), group_size=group_size
        )
        self.name = f"compressed-tensors-{label_of(own)}"
        self.tags = frozenset({"zero", "half_even", "homogeneous", "covers", *(["odd"] if args.symmetric else [])})
        if group_size and not own.has_global_scale:
            self.tags |= {"local"}
        self.code_values = grid_of(own)
        self.scale_rule = rule_of(own)
        self.stored_scale = torch.float8_e4m3fn if own.has_global_scale else None
        self.column_multiple = group_size or 1
        self._has_global_scale = own.has_global_scale

    def unit(self, shape: tuple[int, int]) -> tuple[int, int]:
        """See Quantizer."""
        if self.args.group_size and self.column_multiple > 1:
            return 1, self.column_multiple
        return shape if _word(self.args.strategy) == "tensor" else (1, shape[1])

    def quantize(self, weight: Tensor) -> Quantized:
        """See Quantizer."""
        unit = self.unit((weight.shape[0], weight.shape[1]))
        groups = weight.reshape(1, -1) if unit[0] > 1 else weight.reshape(weight.shape[0], -1, unit[1])
        low, high = groups.amin(-1), groups.amax(-1)
        global_scale = generate_gparam(low.min(), high.max()) if self._has_global_scale else None
        scale, zero = calculate_qparams(low, high, self.args, global_scale=global_scale)
        found = Quantized(weight, scale, None if self.args.symmetric else zero, global_scale)
        return Quantized(self.encode(weight, found), found.scale, found.zero_point, global_scale)

    def encode(self, values: Tensor, like: Quantized) -> Tensor:
        """See Quantizer."""
        dtype = torch.int8 if _word(self.args.type) == "int" else torch.float8_e4m3fn
        codes: Tensor = quantize(values, like.scale, like.zero_point, self.args, dtype=dtype, global_scale=like.global_scale)
        return codes

    def dequantize(self, quantized: Quantized) -> Tensor:
        """See Quantizer."""
        values: Tensor = dequantize(quantized.codes, quantized.scale, quantized.zero_point, self.args, global_scale=quantized.global_scale)
        return values


def _word(value: Any) -> Any:
    """A member of one of its enumerations, or its plain text."""
    return getattr(value, "value", value)
