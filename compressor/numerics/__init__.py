"""Number formats, scales, quantization and packing: tensors in, tensors out, no model in sight.

scheme.py      what a tensor is to become (QuantizationArgs, QuantizationScheme), and the schemes that have a name
formats.py     the codes of a format: ranges, rounding, saturation, scales that are powers of two
qparams.py     range -> scale and zero point
quantize.py    real values -> codes -> real values
observers.py   tensors -> range
packing.py     codes -> int32 words and bytes, and how many
products.py    codes times codes, summed exactly
precision.py   how products are summed: settings of float32, and half precision on a CPU that is slow at it
part_sums.py  sums over samples in one order, however many processes share these
"""

from __future__ import annotations

from compressor.numerics.formats import decode_mx_scale, encode_mx_scale, mx_scale
from compressor.numerics.observers import MinMaxObserver, MSEObserver, Observer, make_observer, weight_qparams
from compressor.numerics.packing import pack_fp4, pack_int32, quantized_bytes, scale_shape, unpack_fp4, unpack_int32
from compressor.numerics.products import ProductPath, code_product, product_path, run_width, scaled_product
from compressor.numerics.qparams import QParams, calculate_global_scale, calculate_qparams, check_qparams, range_qparams
from compressor.numerics.quantize import check_groups, dequantize, dynamic_qparams, fake_quantize, inside_range, quantize
from compressor.numerics.scheme import PRESETS, QuantizationArgs, QuantizationScheme, preset_scheme

__all__ = [
    "PRESETS",
    "MSEObserver",
    "MinMaxObserver",
    "Observer",
    "ProductPath",
    "QParams",
    "QuantizationArgs",
    "QuantizationScheme",
    "calculate_global_scale",
    "calculate_qparams",
    "check_groups",
    "check_qparams",
    "code_product",
    "decode_mx_scale",
    "dequantize",
    "dynamic_qparams",
    "encode_mx_scale",
    "fake_quantize",
    "inside_range",
    "make_observer",
    "mx_scale",
    "pack_fp4",
    "pack_int32",
    "preset_scheme",
    "product_path",
    "quantize",
    "quantized_bytes",
    "range_qparams",
    "run_width",
    "scale_shape",
    "scaled_product",
    "unpack_fp4",
    "unpack_int32",
    "weight_qparams",
]
