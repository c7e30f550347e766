"""Linear layers that hold their weight in the format of the file.

The buffers carry the names and bytes of the compressed-tensors formats, so `model.state_dict()` already is the checkpoint, memory falls
as soon as a module is compressed, and what is measured in memory is what a loader will read: the forward does the same operations, in
the same dtypes, as the compressed-tensors package does in transformers.

Shapes: R out_features, C in_features, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor, nn

from compressor.errors import SchemeError
from compressor.numerics.packing import pack_int32, unpack_int32
from compressor.numerics.qparams import QParams
from compressor.numerics.quantize import dequantize, dynamic_qparams, fake_quantize
from compressor.numerics.scheme import QuantizationArgs, QuantizationScheme


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight and, where the scheme says so, quantized inputs.

    Build one with `from_linear`; the subclass follows from the scheme's compression format.
    """

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, scheme: QuantizationScheme, bias: nn.Parameter | None) -> None:
        """Set the shape and the scheme; subclasses register the buffers of their format."""
        super().__init__()
        if scheme.weights is None:
            raise SchemeError(f"{type(self).__name__}: a scheme without weights was given; it needs weight arguments")
        self.in_features, self.out_features = in_features, out_features
        self.scheme = scheme
        self.register_parameter("bias", bias)
        self._materialized: Tensor | None = None

    @staticmethod
    def from_linear(
        linear: nn.Linear,
        scheme: QuantizationScheme,
        codes_RC: Tensor,
        qparams: QParams,
        *,
        g_idx_C: Tensor | None = None,
        input_qparams: QParams | None = None,
    ) -> QuantizedLinear:
        """Put codes in the place of a float weight.

        Args:
            linear: the layer that is replaced; its bias parameter is shared, its weight is not kept.
            scheme: formats of weight and input.
            codes_RC: [R, C] int8 or float8_e4m3fn.
            qparams: scale and zero point of the weight.
            g_idx_C: [C] int32 group of each column, for activation-ordered groups; None for groups in order.
            input_qparams: scale and zero point of a statically quantized input.

        Returns:
            A layer of the class that stores the scheme's format, in the training mode of `linear`.

        Raises:
            SchemeError: no layer stores this format, or a static input has no scale.
        """
        layer = _layer_class(scheme)(linear.in_features, linear.out_features, scheme, linear.bias)
        layer._store(codes_RC, qparams, g_idx_C)
        layer._store_input(input_qparams)
        for name, buffer in layer.named_buffers():  # what is loaded later is contiguous, and strides may change the bits of a product
            setattr(layer, name, buffer.contiguous())
        return layer.train(linear.training)

    @staticmethod
    def from_buffers(linear: nn.Linear, scheme: QuantizationScheme, buffers: Mapping[str, Tensor]) -> QuantizedLinear:
        """Put the buffers of an equal layer in the place of a float weight.

        Args:
            linear: the layer that is replaced; its bias parameter is shared, its weight is not kept.
            scheme: formats of weight and input.
            buffers: what `named_buffers` gave; moved to the layer's device, else taken as they are, in this order.

        Returns:
            A layer of the class that stores the scheme's format, in the training mode of `linear`.

        Raises:
            SchemeError: no layer stores this format.
        """
        layer = _layer_class(scheme)(linear.in_features, linear.out_features, scheme, linear.bias)
        for name, buffer in buffers.items():
            layer.register_buffer(name, buffer.to(linear.weight.device))
        return layer.train(linear.training)

    @property
    def weight_args(self) -> QuantizationArgs:
        """Number format of the weight."""
        assert self.scheme.weights is not None
        return self.scheme.weights

    def codes(self) -> Tensor:
        """Return the weight's codes, [R, C] int8 or float8_e4m3fn."""
        raise NotImplementedError

    def weight_qparams(self) -> QParams:
        """Return scale and (unpacked, int8) zero point of the weight."""
        raise NotImplementedError

    def dequantized_weight(self) -> Tensor:
        """Return the weight that the forward multiplies with, [R, C] in the dtype of the scale."""
        if self._materialized is not None:
            return self._materialized
        return dequantize(self.codes(), self.weight_qparams(), self.weight_args, g_idx=getattr(self, "weight_g_idx", None))

    @contextmanager
    def materialize(self) -> Iterator[None]:
        """Keep the dequantized weight for the duration: for many forwards in a row."""
        self._materialized = self.dequantized_weight()
        try:
            yield
        finally:
            self._materialized = None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [..., C] with the dequantized weight; the input is fake-quantized first where the scheme says so."""
        args = self.scheme.input_activations
        if args is not None and x.numel() > 0:
            x = fake_quantize(x, self._input_qparams(x, args), args)
        return nn.functional.linear(x, self.dequantized_weight(), self.bias)

    def extra_repr(self) -> str:
        """Shape, format and bits, as nn.Linear shows its own."""
        weights = self.weight_args
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        text += f", format={self.scheme.compression_format}, bits={weights.num_bits}, strategy={weights.strategy}"
        return text + (f", group_size={weights.group_size}" if weights.group_size else "")

    def _store(self, codes_RC: Tensor, qparams: QParams, g_idx_C: Tensor | None) -> None:
        raise NotImplementedError

    def _store_input(self, qparams: QParams | None) -> None:
        args = self.scheme.input_activations
        if args is None or args.dynamic:
            return
        if qparams is None:
            raise SchemeError("QuantizedLinear: a static input without a scale was given; calibrate the input first")
        self.register_buffer("input_scale", qparams.scale.clone())
        if qparams.zero_point is not None:
            self.register_buffer("input_zero_point", qparams.zero_point.clone())

    def _input_qparams(self, x: Tensor, args: QuantizationArgs) -> QParams:
        if args.dynamic:
            return dynamic_qparams(x, args)
        return QParams(self.get_buffer("input_scale"), getattr(self, "input_zero_point", None))


class PackQuantizedLinear(QuantizedLinear):
    """Integer codes of 2 to 8 bits, packed densely into int32 (format `pack-quantized`)."""

    weight_packed: Tensor
    weight_scale: Tensor
    weight_shape: Tensor

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, for code that reads `layer.weight`; computed at each access."""
        return self.dequantized_weight()

    def codes(self) -> Tensor:
        """Unpack the codes, [R, C] int8."""
        return unpack_int32(self.weight_packed, self.weight_args.num_bits, (self.out_features, self.in_features))

    def weight_qparams(self) -> QParams:
        """Return scale [R, G] and unpacked zero point [R, G]; [1] each where the whole tensor has one scale."""
        packed = getattr(self, "weight_zero_point", None)
        if packed is None or self.weight_args.strategy == "tensor":  # a single zero point is stored as it is
            return QParams(self.weight_scale, packed)
        shape = (self.out_features, self.weight_scale.shape[-1])
        return QParams(self.weight_scale, unpack_int32(packed, self.weight_args.num_bits, shape, dim=0))

    def _store(self, codes_RC: Tensor, qparams: QParams, g_idx_C: Tensor | None) -> None:
        bits = self.weight_args.num_bits
        self.register_buffer("weight_packed", pack_int32(codes_RC, bits))
        self.register_buffer("weight_scale", qparams.scale.clone())
        self.register_buffer("weight_shape", torch.tensor([self.out_features, self.in_features], device=codes_RC.device))
        if qparams.zero_point is not None:
            single = self.weight_args.strategy == "tensor"
            self.register_buffer("weight_zero_point", qparams.zero_point.clone() if single else pack_int32(qparams.zero_point, bits, dim=0))
        if g_idx_C is not None:
            self.register_buffer("weight_g_idx", g_idx_C.to(torch.int32))


class NaiveQuantizedLinear(QuantizedLinear):
    """One byte per code, int8 or float8_e4m3fn (formats `int-quantized` and `float-quantized`); `weight` holds the codes."""

    weight: Tensor
    weight_scale: Tensor

    def codes(self) -> Tensor:
        """Return the codes, [R, C]; a view of the buffer."""
        return self.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `layer.to(torch.bfloat16)` would widen fp8 codes, which torch takes for ordinary floats; every code survives the way back.
        super()._apply(fn, recurse)
        self.weight = self.weight.to(self.weight_args.storage_dtype)
        return self

    def weight_qparams(self) -> QParams:
        """Return scale and zero point as stored."""
        return QParams(self.weight_scale, getattr(self, "weight_zero_point", None))

    def _store(self, codes_RC: Tensor, qparams: QParams, g_idx_C: Tensor | None) -> None:
        if g_idx_C is not None:
            raise SchemeError("NaiveQuantizedLinear: actorder=group was given, but this format stores no g_idx; use actorder=static")
        self.register_buffer("weight", codes_RC.clone())
        self.register_buffer("weight_scale", qparams.scale.clone())
        if qparams.zero_point is not None:
            self.register_buffer("weight_zero_point", qparams.zero_point.clone())


_LAYERS: dict[str, type[QuantizedLinear]] = {
    "pack-quantized": PackQuantizedLinear,
    "int-quantized": NaiveQuantizedLinear,
    "float-quantized": NaiveQuantizedLinear,
}


def _layer_class(scheme: QuantizationScheme) -> type[QuantizedLinear]:
    layer_class = _LAYERS.get(scheme.compression_format)
    if layer_class is None:
        raise SchemeError(f"QuantizedLinear: format {scheme.compression_format!r} has no layer; choose one of {sorted(_LAYERS)}")
    return layer_class
