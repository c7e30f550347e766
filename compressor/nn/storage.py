"""How a quantized weight lies in memory and in the file: one class per family of formats, mixed into the layers.

PackedWeight   pack-quantized                                integers of 2 to 8 bits, dense in int32 words
PlainWeight    int-quantized, float-quantized, mxfp8-quantized   one byte per code
Fp4Weight      nvfp4-pack-quantized, mxfp4-pack-quantized    two codes per byte
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compressor.nn.layer import BufferSpecs, QuantizedLayer
from compressor.numerics.formats import decode_mx_scale, encode_mx_scale
from compressor.numerics.packing import WORD_BITS, pack_fp4, pack_int32, scale_shape, unpack_fp4, unpack_int32
from compressor.numerics.qparams import QParams


class PackedWeight(QuantizedLayer):
    """Integer codes, packed densely into int32 (format `pack-quantized`)."""

    weight_packed: Tensor
    weight_scale: Tensor
    weight_shape: Tensor

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, see `lend_weight`."""
        return self.lend_weight()

    def weight_specs(self) -> BufferSpecs:
        """Codes in int32 words, scales and the unpacked shape; zero points and an order of columns where there are any."""
        rows, columns, args = self._num_rows, self._num_columns, self.weight_args
        scales = scale_shape(rows, columns, args)
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "weight_packed": ((rows, _words(columns, args.num_bits)), torch.int32),
            "weight_scale": (scales, self.dtype),
            "weight_shape": ((2,), torch.int64),
        }
        if not args.symmetric:
            packed = ((_words(rows, args.num_bits), scales[-1]), torch.int32)
            specs["weight_zero_point"] = ((1,), torch.int8) if args.strategy == "tensor" else packed
        if args.actorder == "group":
            specs["weight_g_idx"] = ((columns,), torch.int32)
        return specs

    def codes(self) -> Tensor:
        """Unpack the codes, [R, C] int8."""
        return unpack_int32(self.weight_packed, self.weight_args.num_bits, (self._num_rows, self._num_columns))

    def weight_qparams(self) -> QParams:
        """Return scale [R, G] and unpacked zero point [R, G]; [1] each where the whole tensor has one scale."""
        packed = getattr(self, "weight_zero_point", None)
        if packed is None or self.weight_args.strategy == "tensor":  # a single zero point is stored as it is
            return QParams(self.weight_scale, packed)
        shape = (self._num_rows, self.weight_scale.shape[-1])
        return QParams(self.weight_scale, unpack_int32(packed, self.weight_args.num_bits, shape, dim=0))

    def codes_of_rows(self, rows_N: Tensor) -> Tensor:
        """Unpack the codes of some rows, [N, C] int8."""
        return unpack_int32(self.weight_packed.index_select(0, rows_N), self.weight_args.num_bits, (len(rows_N), self._num_columns))

    def _weight_buffers(self, codes_RC: Tensor, qparams: QParams, g_idx_C: Tensor | None) -> dict[str, Tensor]:
        bits = self.weight_args.num_bits
        buffers = {
            "weight_packed": pack_int32(codes_RC, bits),
            "weight_scale": qparams.scale.clone(),
            "weight_shape": torch.tensor([self._num_rows, self._num_columns], dtype=torch.int64, device=codes_RC.device),
        }
        if qparams.zero_point is not None:
            single = self.weight_args.strategy == "tensor"
            buffers["weight_zero_point"] = qparams.zero_point.clone() if single else pack_int32(qparams.zero_point, bits, dim=0)
        if g_idx_C is not None:
            buffers["weight_g_idx"] = g_idx_C.to(torch.int32)
        return buffers


class PlainWeight(QuantizedLayer):
    """One byte per code, int8 or float8_e4m3fn; the buffer `weight` holds the codes, as its format calls them."""

    weight_scale: Tensor

    def __getattr__(self, name: str) -> Any:
        """Give the dequantized weight for `layer.weight`: code that reads it multiplies with it."""
        if name == "weight" and "weight" in self._buffers:
            return self.lend_weight()
        return super().__getattr__(name)

    def weight_specs(self) -> BufferSpecs:
        """Codes of a byte each and scales; zero points where there are any."""
        args = self.weight_args
        shape = (self._num_rows, self._num_columns)
        scales = scale_shape(*shape, args)
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "weight": (shape, args.storage_dtype),
            "weight_scale": (scales, torch.uint8 if args.is_mx else self.dtype),
        }
        return specs if args.symmetric else specs | {"weight_zero_point": (scales, torch.int8)}

    def codes(self) -> Tensor:
        """Return the codes, [R, C]; the buffer itself."""
        codes = self._buffers["weight"]
        assert codes is not None
        return codes

    def codes_of_rows(self, rows_N: Tensor) -> Tensor:
        """Return the codes of some rows, [N, C]."""
        codes = self.codes()
        return codes.view(torch.uint8).index_select(0, rows_N).view(codes.dtype)

    def weight_qparams(self) -> QParams:
        """Return scale and zero point."""
        scale = decode_mx_scale(self.weight_scale) if self.weight_args.is_mx else self.weight_scale
        return QParams(scale, getattr(self, "weight_zero_point", None))

    def _weight_buffers(self, codes_RC: Tensor, qparams: QParams, g_idx_C: Tensor | None) -> dict[str, Tensor]:
        del g_idx_C
        scale = encode_mx_scale(qparams.scale) if self.weight_args.is_mx else qparams.scale.clone()
        buffers = {"weight": codes_RC.clone(), "weight_scale": scale}
        return buffers if qparams.zero_point is None else buffers | {"weight_zero_point": qparams.zero_point.clone()}


class Fp4Weight(QuantizedLayer):
    """fp4 codes, two to a byte, under scales of one byte each: fp8 below a global scale (NVFP4), or exponents (MXFP4)."""

    weight_packed: Tensor
    weight_scale: Tensor

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, see `lend_weight`."""
        return self.lend_weight()

    def weight_specs(self) -> BufferSpecs:
        """Two codes a byte and scales of groups; a global scale where the format has one."""
        rows, columns, args = self._num_rows, self._num_columns, self.weight_args
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "weight_packed": ((rows, columns // 2), torch.uint8),
            "weight_scale": (scale_shape(rows, columns, args), torch.uint8 if args.is_mx else torch.float8_e4m3fn),
        }
        return specs | {"weight_global_scale": ((1,), torch.float32)} if args.has_global_scale else specs

    def codes(self) -> Tensor:
        """Unpack the codes, [R, C] float8_e4m3fn."""
        return unpack_fp4(self.weight_packed)

    def codes_of_rows(self, rows_N: Tensor) -> Tensor:
        """Unpack the codes of some rows, [N, C] float8_e4m3fn."""
        return unpack_fp4(self.weight_packed.index_select(0, rows_N))

    def weight_qparams(self) -> QParams:
        """Return the scales in bfloat16, in which compressed-tensors unpacks fp4, and the global scale."""
        scale = decode_mx_scale(self.weight_scale) if self.weight_args.is_mx else self.weight_scale.to(torch.bfloat16)
        return QParams(scale, None, getattr(self, "weight_global_scale", None))

    def _weight_buffers(self, codes_RC: Tensor, qparams: QParams, g_idx_C: Tensor | None) -> dict[str, Tensor]:
        del g_idx_C
        scale = encode_mx_scale(qparams.scale) if self.weight_args.is_mx else qparams.scale.to(torch.float8_e4m3fn)
        buffers = {"weight_packed": pack_fp4(codes_RC), "weight_scale": scale}
        return buffers if qparams.global_scale is None else buffers | {"weight_global_scale": qparams.global_scale.clone()}


def _words(count: int, num_bits: int) -> int:
    return -(-count * num_bits // WORD_BITS)
