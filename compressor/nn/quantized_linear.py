"""Linear layers that hold their weight in the format of the file, and their two ways to multiply.

`matmul="reference"`, the default, does the same operations in the same dtypes as the compressed-tensors package does in transformers: the
input is quantized and dequantized, the weight dequantized, and both multiplied in the model's dtype. Its logits are those of transformers,
bit for bit. `matmul="native"` multiplies codes with codes where weight and input are both int8 or both fp8, see numerics/products.py:
faster where the hardware has such products, and closer to the exact result, but not the same bits. `matmul_path` says which one runs.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from compressor.errors import NumericsError, SchemeError
from compressor.nn.layer import SCHEME, STORED, BufferSpecs, Fp4Weight, PackedWeight, PlainWeight, QuantizedLayer
from compressor.nn.straight_through import through_product, through_rounding
from compressor.numerics.products import ProductPath, product_path, run_width, scaled_product
from compressor.numerics.qparams import QParams
from compressor.numerics.quantize import check_groups, dynamic_qparams, inside_range, quantize
from compressor.numerics.scheme import QuantizationArgs, QuantizationScheme
from compressor.settings.kinds import TENSOR, Kind
from compressor.settings.options import check_kind, checked

Matmul = Literal["reference", "native"]
MatmulPath = ProductPath | Literal["dequantized"]


class QuantizedLinear(QuantizedLayer):
    """A linear layer with a quantized weight and, where the scheme says so, quantized inputs.

    Build one with `from_linear`; the subclass follows from the scheme's compression format.

    Attributes:
        in_features: columns of the weight.
        out_features: rows of the weight.
        bias: in the dtype of the model, or None.
        matmul: "reference" (as transformers computes) or "native" (codes times codes where both are int8 or fp8).
        is_transposed: it stands for a Conv1D of transformers, whose float weight lies as [in, out].
        tokens_are_rows: with scales by token each row [C] has its own; else what the first two dimensions name, as in compressed-tensors.
    """

    tokens_are_rows: bool = False

    bias: nn.Parameter | None
    is_transposed: bool = False

    def __init__(
        self, in_features: int, out_features: int, scheme: QuantizationScheme, bias: nn.Parameter | None, dtype: torch.dtype, name: str = ""
    ) -> None:
        """Set the shape and the scheme; the buffers come with `store` or `register_empty`."""
        super().__init__(out_features, in_features, scheme, dtype, name)
        self.in_features, self.out_features = in_features, out_features
        self.matmul: Matmul = "reference"
        self.register_parameter("bias", bias)
        if scheme.input_activations is not None:
            try:
                check_groups(in_features, scheme.input_activations)
            except SchemeError as error:
                raise SchemeError(f"{self.where} input: {error}") from None

    @staticmethod
    @checked(linear=Kind(lambda value: isinstance(value, nn.Linear) or is_conv1d(value), "a Linear or Conv1D"), **STORED)
    def from_linear(
        linear: nn.Module,
        scheme: QuantizationScheme,
        codes_RC: Tensor,
        qparams: QParams,
        *,
        g_idx_C: Tensor | None = None,
        input_qparams: QParams | None = None,
        name: str = "",
    ) -> QuantizedLinear:
        """Put codes in the place of a float weight.

        Args:
            linear: the nn.Linear (or Conv1D of transformers, whose weight is the transpose) that is replaced; its bias parameter is shared,
                its weight is not kept.
            scheme: formats of weight and input.
            codes_RC: [R, C] int8 or float8_e4m3fn.
            qparams: scale, zero point and global scale of the weight.
            g_idx_C: [C] int32 group of each column, for activation-ordered groups; None for groups in order.
            input_qparams: scale and zero point of a statically quantized input, or the global scale of a locally dynamic one.
            name: dotted name of the layer, for errors.

        Returns:
            A layer of the class that stores the scheme's format, in the training mode of `linear`.

        Raises:
            SchemeError: no layer stores this format, codes or scales do not fit, or a static input has no scale.
        """
        layer = QuantizedLinear.class_of(scheme)(*linear_shape(linear), scheme, linear.bias, linear.weight.dtype, name)  # type: ignore[arg-type]
        layer.store(codes_RC, qparams, g_idx_C)
        layer._store_input(input_qparams)
        layer.is_transposed = is_conv1d(linear)
        return layer.train(linear.training)

    @staticmethod
    @checked(scheme=SCHEME)
    def class_of(scheme: QuantizationScheme) -> type[QuantizedLinear]:
        """Return the class that stores the format of a scheme."""
        return _LAYERS[scheme.compression_format]

    def input_specs(self) -> BufferSpecs:
        """Return shape and dtype of the input's static scales."""
        args = self.scheme.input_activations
        if args is None or args.dynamic is True:
            return {}
        if args.has_global_scale:
            return {"input_global_scale": ((1,), torch.float32)}
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"input_scale": ((1,), self.dtype)}
        return specs if args.symmetric else specs | {"input_zero_point": ((1,), torch.int8)}

    @checked(x=TENSOR)
    def matmul_path(self, x: Tensor) -> MatmulPath:
        """Say how the forward would multiply this input.

        Args:
            x: [..., C]; only shape and device are looked at.

        Returns:
            "dequantized" (values in the model's dtype), or the product of codes that runs: "int_mm", "int_exact", "scaled_mm", "fp8_exact".
        """
        inputs, weights = self.scheme.input_activations, self.weight_args
        if self.matmul == "reference" or inputs is None or inputs.type != weights.type:
            return "dequantized"
        if inputs.has_global_scale or isinstance(self, Fp4Weight) or "weight_g_idx" in self._buffers:
            return "dequantized"
        num_tokens = x.numel() // max(1, self.in_features)
        return product_path(inputs.storage_dtype, x.device, num_tokens, run_width(self.in_features, inputs, weights), self.out_features)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply [..., C] with the weight; the input is quantized first where the scheme says so.

        Args:
            input: floating point, [..., C].

        Returns:
            [..., R].

        Raises:
            SchemeError: input is not floating point, or has other columns or another dtype than the layer.
            NumericsError: it holds NaN or infinity, for which there is no code ("native" only; "reference" passes NaN on, as transformers).
        """
        check_kind("input", input, TENSOR)
        if input.is_nested and input.layout is torch.strided:  # has no shape, and few operators
            return torch.nested.as_nested_tensor([self.forward(row) for row in input.unbind()])
        if input.layout not in (torch.strided, torch.jagged):  # nn.Linear takes sparse inputs, too, and no codes have holes
            return self.forward(input.to_dense())
        self._check_input(input)
        if input.numel() > 0 and self.matmul_path(input) != "dequantized":
            product = through_product(input, self._multiply_codes, self._gradient)  # float32: the bias, which may train, joins in it
            return (product if self.bias is None else product + self.bias.float()).to(input.dtype)
        args = self.scheme.input_activations
        x = input if args is None or input.numel() == 0 else through_rounding(input, self._input_qparams(input, args), args)
        if x.dtype != self.dtype and not torch.is_autocast_enabled(x.device.type):
            raise SchemeError(f"{self.where}: an input of {x.dtype} meets a layer that computes in {self.dtype}; move one with .to(dtype)")
        return nn.functional.linear(x, self.dequantized_weight(), self.bias)

    def extra_repr(self) -> str:
        """Shape, format and bits, as nn.Linear shows its own."""
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, {super().extra_repr()}"
        return text + (", matmul=native" if self.matmul == "native" else "")

    def _multiply_codes(self, x: Tensor) -> Tensor:
        args = self.scheme.input_activations
        assert args is not None
        if not bool(torch.isfinite(x).all()):
            raise NumericsError(f"{self.where}: its input holds NaN or infinity, for which there is no code; look at what came before")
        x_qparams = self._input_qparams(x, args)
        codes = quantize(x, x_qparams, args)
        return scaled_product(codes, x_qparams, args, self.codes(), self.weight_qparams(), self.weight_args)

    def _gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Gradient by the input: that of the dequantized weight, zero where the input was cut off."""
        args = self.scheme.input_activations
        assert args is not None
        passes = inside_range(x, self._input_qparams(x, args), args)
        return (gradient @ self.dequantized_weight().to(gradient.dtype)).masked_fill(~passes, 0.0).to(x.dtype)

    def _check_input(self, x: Tensor) -> None:
        if x.ndim == 0 or x.shape[-1] != self.in_features or not x.is_floating_point():
            raise SchemeError(
                f"{self.where}: an input {x.dtype} {tuple(x.shape)} was given to a layer of in_features={self.in_features}; "
                "give floating point with that many columns"
            )

    def _store_input(self, qparams: QParams | None) -> None:
        specs = self.input_specs()
        if not specs:
            return
        if qparams is None:
            raise SchemeError(f"{self.where}: a static input without a scale was given; calibrate the input first")
        given = {"input_scale": qparams.scale, "input_zero_point": qparams.zero_point, "input_global_scale": qparams.global_scale}
        for key, (shape, _) in specs.items():
            value = given[key]
            if value is None or value.shape != shape:
                found = None if value is None else tuple(value.shape)
                raise SchemeError(f"{self.where}.{key}: {found} was given where the format has {shape}; calibrate with this scheme")
            self.register_buffer(key, value.clone().contiguous())

    def _input_qparams(self, x: Tensor, args: QuantizationArgs) -> QParams:
        if args.dynamic:
            return dynamic_qparams(x, args, getattr(self, "input_global_scale", None), by_row=self.tokens_are_rows)
        return QParams(self.get_buffer("input_scale"), getattr(self, "input_zero_point", None))


class PackQuantizedLinear(PackedWeight, QuantizedLinear):
    """Integer codes of 2 to 8 bits, packed densely into int32 (format `pack-quantized`)."""


class NaiveQuantizedLinear(PlainWeight, QuantizedLinear):
    """One byte per code, int8 or float8_e4m3fn (`int-quantized`, `float-quantized`, `mxfp8-quantized`); `weight` holds the codes."""


class Fp4QuantizedLinear(Fp4Weight, QuantizedLinear):
    """fp4 codes, two to a byte (formats `nvfp4-pack-quantized` and `mxfp4-pack-quantized`)."""


def linear_shape(module: nn.Module) -> tuple[int, int]:
    """Return in and out features of a linear layer, or of a Conv1D of transformers.

    Args:
        module: nn.Linear, or Conv1D.

    Returns:
        (in_features, out_features).
    """
    if is_conv1d(module):
        rows, columns = module.get_parameter("weight").shape
        return rows, columns
    return int(module.in_features), int(module.out_features)  # type: ignore[arg-type]


def is_conv1d(module: nn.Module) -> bool:
    """Tell whether a module is the linear layer of GPT-2, whose weight lies as [in, out].

    Args:
        module: any module.

    Returns:
        True for transformers' Conv1D.
    """
    return any((cls.__name__, cls.__module__) == ("Conv1D", "transformers.pytorch_utils") for cls in type(module).__mro__)


_LAYERS: dict[str, type[QuantizedLinear]] = {
    "pack-quantized": PackQuantizedLinear,
    "int-quantized": NaiveQuantizedLinear,
    "float-quantized": NaiveQuantizedLinear,
    "mxfp8-quantized": NaiveQuantizedLinear,
    "nvfp4-pack-quantized": Fp4QuantizedLinear,
    "mxfp4-pack-quantized": Fp4QuantizedLinear,
}
