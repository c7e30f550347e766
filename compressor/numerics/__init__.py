"""Number formats, scales, quantization and packing: tensors in, tensors out, no model in sight.

scheme.py     what a tensor is to become (QuantizationArgs, QuantizationScheme, presets)
formats.py    the codes of a format: ranges, rounding, saturation
qparams.py    range -> scale and zero point
quantize.py   real values -> codes -> real values
observers.py  tensors -> range
packing.py    codes -> int32 words
"""

from __future__ import annotations

from compressor.numerics.observers import MinMaxObserver, MSEObserver, Observer, make_observer, weight_qparams
from compressor.numerics.packing import pack_int32, unpack_int32
from compressor.numerics.qparams import QParams, calculate_qparams, check_qparams
from compressor.numerics.quantize import check_groups, dequantize, dynamic_qparams, fake_quantize, quantize
from compressor.numerics.scheme import PRESETS, QuantizationArgs, QuantizationScheme, preset_scheme

__all__ = [
    "PRESETS",
    "MSEObserver",
    "MinMaxObserver",
    "Observer",
    "QParams",
    "QuantizationArgs",
    "QuantizationScheme",
    "calculate_qparams",
    "check_groups",
    "check_qparams",
    "dequantize",
    "dynamic_qparams",
    "fake_quantize",
    "make_observer",
    "pack_int32",
    "preset_scheme",
    "quantize",
    "unpack_int32",
    "weight_qparams",
]
