"""Our own quantizers, packers, solvers, observers and layers as subjects of the catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compressor.algorithms.rtn import round_to_nearest
from compressor.numerics.observers import weight_qparams
from compressor.numerics.qparams import QParams
from compressor.numerics.quantize import dequantize, dynamic_qparams, quantize
from compressor.numerics.scheme import QuantizationArgs
from harness.checks.nearest import e2m1_grid, e4m3_grid, int_grid
from harness.checks.protocols import Quantized

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def grid_of(args: QuantizationArgs) -> Tensor:
    """Return the values of the codes of a format.

    Args:
        args: the format.

    Returns:
        float64, in rising order.
    """
    if args.type == "int":
        return int_grid(args.num_bits)
    return e2m1_grid() if args.num_bits == 4 else e4m3_grid()


def label_of(args: QuantizationArgs) -> str:
    """Return a format in a few words, such as int4-asym-group32."""
    size = f"{args.group_size or ''}" if args.is_grouped else "x".join(map(str, args.block_structure or ()))
    parts = [f"{'fp' if args.type == 'float' else 'int'}{args.num_bits}", *([] if args.symmetric else ["asym"]), f"{args.strategy}{size}"]
    parts += [*(["mx"] if args.is_mx else []), *(["dynamic"] if args.dynamic else []), *([args.observer] if args.observer else [])]
    return "-".join(parts)


def rule_of(args: QuantizationArgs) -> str | None:
    """Return how scales follow from the range; None where they are searched."""
    if args.observer_kind == "mse":
        return None
    if args.is_mx:
        return "mx"
    if args.has_global_scale:
        return "nvfp4"
    return "half_range" if args.symmetric else "range"


def tags_of(args: QuantizationArgs) -> frozenset[str]:
    """Return what a format of ours promises."""
    tags = {"zero", "half_even", "refuses_nonfinite", "homogeneous"}
    # A search may prefer to cut off on the side of the longer half of the integers.
    if args.symmetric and (args.type == "float" or args.observer_kind == "minmax"):
        tags.add("odd")
    if not args.has_global_scale and args.strategy != "tensor":
        tags.add("local")
    if args.observer_kind == "minmax":
        tags.add("covers")
    return frozenset(tags)


@dataclass
class OurQuantizer:
    """Rounding to nearest with the scales of an observer, as QuantizationModifier does; or an activation, where the args are dynamic."""

    args: QuantizationArgs
    kind: ClassVar[str] = "quantizer"
    dtypes: Sequence[torch.dtype] = FLOATS

    def __post_init__(self) -> None:
        """Read what the format says."""
        self.name = label_of(self.args)
        self.tags = tags_of(self.args)
        self.code_values = grid_of(self.args)
        self.scale_rule = rule_of(self.args)
        self.stored_scale = torch.float8_e4m3fn if self.args.has_global_scale else None
        self.column_multiple = self.args.group_size if self.args.is_grouped and self.args.group_size else 1
        if self.args.dynamic:
            self.tags = self.tags - {"refuses_nonfinite"} | ({"per_token"} if self.args.strategy == "token" else set())

    def unit(self, shape: tuple[int, int]) -> tuple[int, int]:
        """See Quantizer."""
        if self.args.block_structure is not None:
            return self.args.block_structure
        if self.args.is_grouped:
            return 1, self.column_multiple
        return shape if self.args.strategy == "tensor" else (1, shape[1])

    def quantize(self, weight: Tensor) -> Quantized:
        """See Quantizer."""
        if self.args.dynamic:
            qparams = dynamic_qparams(weight[None], self.args).map(lambda part: part.reshape(-1, part.shape[-1]) if part.ndim > 1 else part)
            return self._quantized(quantize(weight.float(), qparams._replace(scale=qparams.scale.float()), self.args), qparams)
        qparams = weight_qparams(weight, self.args, self.name)
        return self._quantized(round_to_nearest(weight, qparams, self.args).codes_RC, qparams)

    def encode(self, values: Tensor, like: Quantized) -> Tensor:
        """See Quantizer."""
        qparams = QParams(like.scale.float(), like.zero_point, like.global_scale)
        return quantize(values.float(), qparams, self.args)

    def dequantize(self, quantized: Quantized) -> Tensor:
        """See Quantizer."""
        return dequantize(quantized.codes, QParams(quantized.scale, quantized.zero_point, quantized.global_scale), self.args)

    @staticmethod
    def _quantized(codes: Tensor, qparams: QParams) -> Quantized:
        return Quantized(codes, qparams.scale, qparams.zero_point, qparams.global_scale)
