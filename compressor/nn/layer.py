"""QuantizedLayer: what all layers with a quantized weight share, whatever their format and whatever they compute.

The buffers carry the names and bytes of the compressed-tensors formats, so `model.state_dict()` already is the checkpoint, memory falls
as soon as a module is compressed, and what is measured in memory is what a loader will read. A storage (below) says which
buffers a format has and how they become a weight; a layer says what is computed with it.

Shapes: R rows (out features), C columns (in features), G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from compressor.errors import SchemeError
from compressor.numerics.formats import decode_mx_scale, encode_mx_scale
from compressor.numerics.packing import WORD_BITS, pack_fp4, pack_int32, scale_shape, unpack_fp4, unpack_int32
from compressor.numerics.qparams import QParams
from compressor.numerics.quantize import check_groups, values_as_read
from compressor.numerics.scheme import QuantizationArgs, QuantizationScheme
from compressor.settings.kinds import NAME, TENSOR, object_of
from compressor.settings.options import checked

# Shape and dtype of each buffer that a layer keeps.
BufferSpecs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
SCHEME = object_of(QuantizationScheme, words="a QuantizationScheme, such as preset_scheme('W4A16')")
_QPARAMS = object_of(QParams, words="QParams")
STORED = {"scheme": SCHEME, "codes_RC": TENSOR, "qparams": _QPARAMS, "g_idx_C": TENSOR, "input_qparams": _QPARAMS, "name": NAME}
"""Kinds of what a layer is made of, by the names of arguments."""


class QuantizedLayer(nn.Module):
    """A module whose weight [R, C] is kept in the format of the file.

    Attributes:
        scheme: formats of weight and input.
        name: dotted name of the layer in its model, for errors; empty where nobody said it.
        dtype: in which the layer computes; follows `.to(dtype)`.
    """

    def __init__(self, num_rows: int, num_columns: int, scheme: QuantizationScheme, dtype: torch.dtype, name: str = "") -> None:
        """Set shape and scheme; the buffers come with `register_empty` or `store`."""
        super().__init__()
        self.name = name
        where = self.where
        if scheme.weights is None:
            raise SchemeError(f"{where}: a scheme without weights was given; it needs weight arguments")
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise SchemeError(f"{where}: {dtype} was given to compute in; give bfloat16, float16 or float32")
        try:
            check_groups(num_columns, scheme.weights)
        except SchemeError as error:
            raise SchemeError(f"{where}: {error}") from None
        self._num_rows, self._num_columns = num_rows, num_columns
        self.scheme = scheme
        self.dtype = dtype
        self._materialized: Tensor | None = None
        self._lent: list[Tensor] | None = None

    @property
    def where(self) -> str:
        """What errors call this layer: its name, or its class."""
        return self.name or type(self).__name__

    @property
    def weight_args(self) -> QuantizationArgs:
        """Number format of the weight."""
        assert self.scheme.weights is not None
        return self.scheme.weights

    @property
    def weight_size(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        return self._num_rows, self._num_columns

    def weight_specs(self) -> BufferSpecs:
        """Return shape and dtype of each buffer of the weight."""
        raise NotImplementedError

    def input_specs(self) -> BufferSpecs:
        """Return shape and dtype of each buffer of the input's format; none here."""
        return {}

    def specs(self) -> BufferSpecs:
        """Return shape and dtype of each buffer."""
        return {**self.weight_specs(), **self.input_specs()}

    @property
    def kept_dtypes(self) -> frozenset[str]:
        """Names of the buffers whose dtype is part of the format, which may happen to be the model's: `.to(dtype)` leaves it."""
        named = {key for key, (_, dtype) in self.specs().items() if dtype != self.dtype or key.endswith("_global_scale")}
        return frozenset(named & self._buffers.keys())

    def codes(self) -> Tensor:
        """Return the weight's codes, [R, C] int8 or float8_e4m3fn."""
        raise NotImplementedError

    def weight_qparams(self) -> QParams:
        """Return scale, (unpacked, int8) zero point and global scale of the weight."""
        raise NotImplementedError

    def dequantized_weight(self) -> Tensor:
        """Return the weight that the forward computes with, [R, C] in the layer's dtype."""
        if self._materialized is not None:
            return self._materialized
        return values_as_read(self.codes(), self.weight_qparams(), self.weight_args, self.dtype, g_idx=getattr(self, "weight_g_idx", None))

    def lend_weight(self) -> Tensor:
        """Return the dequantized weight, [R, C], for code that reads `layer.weight`; computed at each access, so that writes are lost."""
        weight = self.dequantized_weight()
        if self._lent is not None:
            self._lent.append(weight)
        return weight

    @contextmanager
    def lent_weights(self) -> Iterator[list[Tensor]]:
        """Keep what is read as `layer.weight` for the duration, to see whether somebody writes to it.

        Yields:
            All of it so far; who looks at it may empty it.
        """
        self._lent = []
        try:
            yield self._lent
        finally:
            self._lent = None

    @contextmanager
    def materialize(self, weight_RC: Tensor | None = None) -> Iterator[None]:
        """Compute with a float weight for the duration: the dequantized one, for many forwards in a row, or another that is being tried.

        Args:
            weight_RC: [R, C] in the layer's dtype; gradients of it go back to wherever it comes from. None for the weight of the codes.

        Yields:
            Nothing.
        """
        before = self._materialized
        self._materialized = self.dequantized_weight() if weight_RC is None else weight_RC
        try:
            yield
        finally:
            self._materialized = before

    def register_empty(self, device: torch.device | str) -> None:
        """Register every buffer of the format without values, for a loader to fill."""
        for key, (shape, dtype) in self.specs().items():
            self.register_buffer(key, torch.empty(shape, dtype=dtype, device=device))

    @checked(**STORED)
    def store(self, codes_RC: Tensor, qparams: QParams, g_idx_C: Tensor | None = None) -> None:
        """Register the buffers of a weight.

        Args:
            codes_RC: [R, C] int8 or float8_e4m3fn.
            qparams: scale, zero point and global scale of the weight.
            g_idx_C: [C] int32 group of each column, for activation-ordered groups; None for groups in order.

        Raises:
            SchemeError: the codes have another shape or dtype than the format, or there is no room for what was given.
        """
        wanted = (self._num_rows, self._num_columns), self.weight_args.storage_dtype
        if (tuple(codes_RC.shape), codes_RC.dtype) != wanted:
            raise SchemeError(
                f"{self.where}: codes {codes_RC.dtype} {tuple(codes_RC.shape)} are not {wanted[1]} {wanted[0]}; quantize its weight"
            )
        specs = self.weight_specs()
        given = self._weight_buffers(codes_RC, qparams, g_idx_C)
        if g_idx_C is not None and "weight_g_idx" not in given:
            raise SchemeError(f"{self.where}: actorder=group was given, but this format stores no g_idx; use actorder=static")
        for key, value in given.items():
            if key in specs and value.shape != specs[key][0]:
                raise SchemeError(f"{self.where}.{key}: shape {tuple(value.shape)} is not {specs[key][0]}; compute it for this weight")
            # What is loaded later is contiguous, and strides may change the bits of a product.
            self.register_buffer(key, value.contiguous())

    def extra_repr(self) -> str:
        """Format and bits, after what the float layer shows."""
        weights = self.weight_args
        text = f"format={self.scheme.compression_format}, type={weights.type}, bits={weights.num_bits}, strategy={weights.strategy}"
        return text + (f", group_size={weights.group_size}" if weights.group_size else "")

    def _weight_buffers(self, codes_RC: Tensor, qparams: QParams, g_idx_C: Tensor | None) -> dict[str, Tensor]:
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `layer.to(torch.bfloat16)` would widen fp8 codes and scales, and cut float32 global scales down, which torch takes for ordinary
        # floats. What the format stores in a dtype of its own only changes its device.
        fixed = {key: self._buffers[key] for key in self.kept_dtypes}
        super()._apply(fn, recurse)
        for key, before in fixed.items():
            after = self._buffers[key]
            if before is not None and after is not None and after.dtype != before.dtype:
                self._buffers[key] = before.to(after.device)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self


# How a quantized weight lies in memory and in the file: one class per family of formats, mixed into the layers.
#
# PackedWeight   pack-quantized                                integers of 2 to 8 bits, dense in int32 words
# PlainWeight    int-quantized, float-quantized, mxfp8-quantized   one byte per code
# Fp4Weight      nvfp4-pack-quantized, mxfp4-pack-quantized    two codes per byte


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
