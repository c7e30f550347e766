"""Modules with a fixed weight, their quantized layers, and the same layers as compressed-tensors computes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from compressor.nn import QuantizedLayer, quantized
from compressor.numerics import QParams, QuantizationArgs, QuantizationScheme, make_observer


def _rand(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1).to(dtype)


@pytest.fixture(scope="session")
def rand() -> Callable[..., Tensor]:
    """Draw uniformly from -1 to 1, by seed: rand and not randn, which differs between instruction sets."""
    return _rand


@pytest.fixture(scope="session")
def make_linear() -> Callable[..., nn.Linear]:
    """Build a linear layer with a fixed weight; the first row and, from 64 columns on, the first 32 columns are zero."""

    def make(rows: int, columns: int, dtype: torch.dtype, *, bias: bool = True) -> nn.Linear:
        linear = nn.Linear(columns, rows, bias=bias, dtype=dtype)
        with torch.no_grad():
            linear.weight.copy_(_rand(rows, columns, dtype=dtype, seed=rows * columns))
            if rows > 1:
                linear.weight[0] = 0
            if columns >= 64:
                linear.weight[:, :32] = 0
            if bias:
                linear.bias.copy_(_rand(rows, dtype=dtype, seed=rows))
        return linear.eval()

    return make


@pytest.fixture(scope="session")
def input_qparams() -> Callable[[QuantizationArgs | None, Tensor], QParams | None]:
    """Calibrate a static input on a tensor; None where nothing is static."""

    def calibrate(args: QuantizationArgs | None, x: Tensor) -> QParams | None:
        if args is None or args.dynamic is True:
            return None
        observer = make_observer(args)
        observer.update(x)
        return observer.qparams()

    return calibrate


@pytest.fixture(scope="session")
def make_layer(make_linear, input_qparams) -> Callable[..., QuantizedLayer]:
    """Quantize a fixed linear layer."""

    def make(scheme: QuantizationScheme, rows: int, columns: int, dtype: torch.dtype, *, bias: bool = True) -> QuantizedLayer:
        inputs = input_qparams(scheme.input_activations, _rand(3, columns, dtype=dtype, seed=7))
        return quantized(make_linear(rows, columns, dtype, bias=bias), scheme, input_qparams=inputs)

    return make


@pytest.fixture(scope="session")
def their_weight() -> Callable[[QuantizedLayer], Tensor]:
    """Unpack a layer's state dict with compressed-tensors."""

    def unpack(layer: QuantizedLayer) -> Tensor:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationScheme as TheirScheme

        described = layer.scheme.model_dump(mode="json", exclude={"format"})
        compressor = BaseCompressor.get_value_from_registry(layer.scheme.compression_format)
        return compressor.decompress(dict(layer.state_dict()), TheirScheme(**described))["weight"].to(layer.dtype)

    return unpack


@pytest.fixture(scope="session")
def their_input() -> Callable[[QuantizedLayer, Tensor], Tensor]:
    """Quantize and dequantize an input as compressed-tensors' forward does."""

    def see(layer: QuantizedLayer, x: Tensor) -> Tensor:
        from compressed_tensors.quantization import QuantizationArgs as TheirArgs
        from compressed_tensors.quantization import QuantizationStatus
        from compressed_tensors.quantization.lifecycle.forward import forward_quantize

        args = layer.scheme.input_activations
        if args is None:
            return x
        module = nn.Module()
        module.quantization_status = QuantizationStatus.COMPRESSED
        for key in ("input_scale", "input_zero_point", "input_global_scale"):
            if key in layer._buffers:
                module.register_buffer(key, layer.get_buffer(key))
        return forward_quantize(module, x, "input", TheirArgs(**args.model_dump(mode="json")))

    return see
