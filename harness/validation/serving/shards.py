"""Can layers be fused, and divided among GPUs? Groups, blocks and packed words must not be cut.

Facts of `verify_group_size_divides_partition` (vllm/distributed/utils.py), `validate_fp8_block_shape` (quantization/utils/fp8_utils.py) and
the parameters in vllm/model_executor/parameter.py, vLLM 0.33.0; SGLang 0.5.23 has the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from harness.validation.serving.contract import ROW_PARALLEL
from harness.validation.serving.resolve import Layer
from harness.validation.serving.servers import Arguments
from harness.validation.subject import Subject

_WORD = 32  # bits


def shard_problems(subject: Subject, layer: Layer, weights: Arguments, num_gpus: int, *, is_packed: bool) -> Iterator[str]:
    """Say what of a layer would be cut.

    Args:
        subject: both folders.
        layer: a quantized one.
        weights: arguments of its weights.
        num_gpus: degree of tensor parallelism.
        is_packed: its codes lie in words of 32 bits.

    Yields:
        A sentence each.
    """
    rows, columns = subject.base.entries[f"{layer.name}.weight"].shape
    last = layer.name.rpartition(".")[2]
    by_columns = last in ROW_PARALLEL
    axis, size = ("columns", columns) if by_columns else ("rows", rows)
    if size % num_gpus:
        yield f"{layer.name}: {size} {axis} do not divide among {num_gpus} GPUs"
        return
    own = size // num_gpus
    unit = _column_unit(weights, is_packed=is_packed) if by_columns else _row_unit(layer, weights, num_gpus, is_packed=is_packed)
    if (not by_columns or num_gpus > 1) and own % unit:
        whose = "of the fused layer " if num_gpus == 1 else f"on each of {num_gpus} GPUs "
        yield f"{layer.name}: {own} {axis} {whose}are no multiple of {unit}, and what shares a scale or a word would be cut"


def _column_unit(weights: Arguments, *, is_packed: bool) -> int:
    block = weights.get("block_structure")
    size = int(block[1]) if block else max(int(weights.get("group_size") or 1), 1)
    per_word = _WORD // _common(int(weights.get("num_bits", 8))) if is_packed else 1
    return math.lcm(size, per_word)


def _row_unit(layer: Layer, weights: Arguments, num_gpus: int, *, is_packed: bool) -> int:
    """Rows that must stay together: one, but for blocks and for packed zero points of layers that are fused or divided."""
    is_cut = num_gpus > 1 or len(layer.shards) > 1
    block = weights.get("block_structure")
    if block and is_cut and (num_gpus > 1 or layer.name != layer.shards[-1]):
        return int(block[0])
    return _WORD // _common(int(weights.get("num_bits", 8))) if is_packed and is_cut and weights.get("symmetric") is False else 1


def _common(num_bits: int) -> int:
    """The greatest power of two that divides both the bits of a value and those of a word."""
    return num_bits & -num_bits
