"""Runtime layers that stand where a float layer stood.

layer.py    what all of them share, and how a weight lies in memory and in the file
quantized_linear.py  quantized_embedding.py         build.py    float module -> layer
fake_quant.py        the same while they are trained  straight_through.py  gradients through rounding
sharding.py where tensor parallelism may cut        lora.py     adapters of peft beside them
attention/  keys and values in 8 bits     experts.py  experts one by one
"""

from __future__ import annotations

from compressor.nn.build import (
    check_fit,
    empty_layer,
    float_layer,
    from_buffers,
    is_quantizable,
    quantized,
    replacement,
    set_matmul,
    weight_of,
)
from compressor.nn.layer import QuantizedLayer
from compressor.nn.lora import for_compressed
from compressor.nn.quantized_embedding import Fp4QuantizedEmbedding, NaiveQuantizedEmbedding, PackQuantizedEmbedding, QuantizedEmbedding
from compressor.nn.quantized_linear import (
    Fp4QuantizedLinear,
    Matmul,
    MatmulPath,
    NaiveQuantizedLinear,
    PackQuantizedLinear,
    QuantizedLinear,
)
from compressor.nn.sharding import check_shards, shard_problems

__all__ = [
    "Fp4QuantizedEmbedding",
    "Fp4QuantizedLinear",
    "Matmul",
    "MatmulPath",
    "NaiveQuantizedEmbedding",
    "NaiveQuantizedLinear",
    "PackQuantizedEmbedding",
    "PackQuantizedLinear",
    "QuantizedEmbedding",
    "QuantizedLayer",
    "QuantizedLinear",
    "check_fit",
    "check_shards",
    "empty_layer",
    "float_layer",
    "for_compressed",
    "from_buffers",
    "is_quantizable",
    "quantized",
    "replacement",
    "set_matmul",
    "shard_problems",
    "weight_of",
]
