"""Runtime layers that stand where a float layer stood."""

from __future__ import annotations

from compressor.nn.quantized_linear import NaiveQuantizedLinear, PackQuantizedLinear, QuantizedLinear

__all__ = ["NaiveQuantizedLinear", "PackQuantizedLinear", "QuantizedLinear"]
