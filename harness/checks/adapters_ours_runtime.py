"""Our packers, observers and runtime layers as subjects of the catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from compressor.algorithms.rtn import round_to_nearest
from compressor.nn import QuantizedLinear, quantized, replacement
from compressor.numerics.observers import make_observer, weight_qparams
from compressor.numerics.packing import pack_int32, unpack_int32
from compressor.numerics.packing_fp4 import pack_fp4, unpack_fp4
from compressor.numerics.qparams import QParams
from compressor.numerics.quantize import dequantize, dynamic_qparams, fake_quantize, quantize
from compressor.numerics.scheme import QuantizationArgs, QuantizationScheme
from harness.checks.adapters_ours import FLOATS, grid_of, label_of, rule_of
from harness.checks.nearest import e2m1_grid, int_grid
from harness.checks.protocols import Quantized


@dataclass
class OurPacker:
    """Integer codes in int32 words, along the columns (dim=1) or the rows (dim=0)."""

    bits: int
    dim: int = 1
    kind: ClassVar[str] = "packer"
    tags: ClassVar[frozenset[str]] = frozenset({"refuses_unfit"})
    code_dtype: ClassVar[torch.dtype] = torch.int8
    column_multiple: ClassVar[int] = 1
    layout: ClassVar[str | None] = "offset_stream"

    def __post_init__(self) -> None:
        """Read what the width says."""
        self.name = f"pack_int32-{self.bits}bit-dim{self.dim}"
        self.code_values = int_grid(self.bits)
        self.ranks: Sequence[int] = (1, 2, 3) if self.dim else (2, 3)
        self.packed_dim = self.dim - 2

    def pack(self, codes: Tensor) -> Tensor:
        """See Packer."""
        return pack_int32(codes, self.bits, self.dim)

    def unpack(self, packed: Tensor, shape: tuple[int, ...]) -> Tensor:
        """See Packer."""
        return unpack_int32(packed, self.bits, shape, self.dim)


@dataclass
class OurFp4Packer:
    """fp4 codes, two to a byte."""

    name: str = "pack_fp4"
    kind: ClassVar[str] = "packer"
    tags: ClassVar[frozenset[str]] = frozenset({"refuses_unfit"})
    code_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    column_multiple: ClassVar[int] = 2
    layout: ClassVar[str | None] = "e2m1_nibbles"
    ranks: ClassVar[Sequence[int]] = (1, 2, 3)
    packed_dim: ClassVar[int] = -1
    bits: ClassVar[int] = 4

    def __post_init__(self) -> None:
        """Name the codes."""
        self.code_values = e2m1_grid()

    def pack(self, codes: Tensor) -> Tensor:
        """See Packer."""
        return pack_fp4(codes)

    def unpack(self, packed: Tensor, shape: tuple[int, ...]) -> Tensor:
        """See Packer."""
        return unpack_fp4(packed)


@dataclass
class OurObserver:
    """The observer of a static activation."""

    args: QuantizationArgs
    resumes: bool = False
    kind: ClassVar[str] = "observer"

    def __post_init__(self) -> None:
        """Read what the format says."""
        self.name = f"observer-{label_of(self.args)}{'-resumed' if self.resumes else ''}"
        self.tags = frozenset({"refuses_nonfinite", "covers"} if self.args.observer_kind == "minmax" else {"refuses_nonfinite"})
        self.code_values = grid_of(self.args)
        self.scale_rule = rule_of(self.args)

    def observe(self, batches: Sequence[Tensor]) -> Quantized:
        """See Observer; where it resumes, every batch meets an observer that knows the others from a saved state."""
        observer = make_observer(self.args, self.name)
        for x in batches:
            if self.resumes:
                state = {key: value.clone() for key, value in observer.state().items()}
                observer = make_observer(self.args, self.name)
                observer.restore(state)
            observer.update(x)
        qparams = observer.qparams()
        return Quantized(torch.empty(0), qparams.scale, qparams.zero_point, qparams.global_scale)


@dataclass
class OurLayer:
    """QuantizedLinear of a scheme, its weight rounded to nearest; with groups out of order where the scheme says actorder=group."""

    scheme: QuantizationScheme
    matmul: str = "reference"
    kind: ClassVar[str] = "layer"
    tags: ClassVar[frozenset[str]] = frozenset()
    dtypes: ClassVar[Sequence[torch.dtype]] = FLOATS

    def __post_init__(self) -> None:
        """Read what the scheme says."""
        assert self.scheme.weights is not None
        self.args = self.scheme.weights
        inputs = self.scheme.input_activations
        self.name = f"layer-{label_of(self.args)}{f'-{label_of(inputs)}' if inputs else ''}-{self.scheme.compression_format}"
        self.name += {"reference": "", "native": "-native"}[self.matmul] + ("-g_idx" if self.args.actorder == "group" else "")
        self.column_multiple = self.args.group_size if self.args.is_grouped and self.args.group_size else 1

    def build(self, linear: nn.Linear) -> nn.Module:
        """See Layer."""
        layer: nn.Module
        if self.args.actorder == "group":
            codes, qparams, g_idx = self._regrouped(linear.weight.detach())
            layer = replacement(linear, self.scheme, codes, qparams, g_idx_C=g_idx, name=self.name)
        else:
            layer = quantized(linear, self.scheme, input_qparams=self._input_qparams(linear.weight.dtype), name=self.name)
        assert isinstance(layer, QuantizedLinear)
        layer.matmul = "native" if self.matmul == "native" else "reference"
        return layer

    def weight(self, layer: nn.Module) -> Tensor:
        """See Layer."""
        assert isinstance(layer, QuantizedLinear)
        return layer.dequantized_weight()

    def expected_weight(self, linear: nn.Linear) -> Tensor:
        """See Layer; fp4 is unpacked in bfloat16, as compressed-tensors does."""
        weight = linear.weight.detach()
        if self.args.actorder == "group":
            codes, qparams, g_idx = self._regrouped(weight)
            return dequantize(codes, qparams, self.args, g_idx)
        qparams = weight_qparams(weight, self.args, self.name)
        codes = round_to_nearest(weight, qparams, self.args).codes_RC
        narrow = self.args.is_mx or self.args.has_global_scale
        stored = qparams._replace(scale=qparams.scale.to(torch.bfloat16)) if narrow else qparams
        return dequantize(codes, stored, self.args).to(weight.dtype)

    def expected_input(self, layer: nn.Module, x: Tensor) -> Tensor:
        """See Layer."""
        args = self.scheme.input_activations
        if args is None or not x.numel():
            return x
        static = self._input_qparams(x.dtype)
        if args.dynamic:
            return fake_quantize(x, dynamic_qparams(x, args, None if static is None else static.global_scale), args)
        assert static is not None
        return fake_quantize(x, static, args)

    def _regrouped(self, weight: Tensor) -> tuple[Tensor, QParams, Tensor]:
        """Columns in steps of three, and groups of what comes together."""
        columns = weight.shape[1]
        order = torch.cat([torch.arange(start, columns, 3) for start in range(3)])
        g_idx = torch.empty(columns, dtype=torch.int32)
        g_idx[order] = (torch.arange(columns) // self.column_multiple).to(torch.int32)
        qparams = weight_qparams(weight[:, order], self.args, self.name)
        wide = qparams._replace(scale=qparams.scale.float())
        return quantize(weight.float(), wide, self.args, g_idx), qparams, g_idx

    def _input_qparams(self, dtype: torch.dtype) -> QParams | None:
        args = self.scheme.input_activations
        if args is None or args.dynamic is True:
            return None
        zero = None if args.symmetric else torch.tensor([3], dtype=torch.int8)
        largest = 10.0
        global_scale = torch.tensor([448 * 6 / largest]) if args.has_global_scale else None
        return QParams(torch.tensor([largest / args.code_range[1]], dtype=dtype), zero, global_scale)
