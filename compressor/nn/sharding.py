"""Whether the quantized layers of a model can be cut for tensor parallelism: groups, blocks and packed words must not be cut through.

Runtimes cut most linear layers along their rows, and those that end a block (o_proj, down_proj) along their columns. A cut through a group
of columns leaves both halves without a scale of their own; a cut through a packed word leaves neither half with whole codes.
"""

from __future__ import annotations

import math

from torch import nn

from compressor.errors import SchemeError
from compressor.nn.layer import PackedWeight, QuantizedLayer
from compressor.nn.quantized_linear import QuantizedLinear
from compressor.numerics.packing import WORD_BITS
from compressor.settings.kinds import MODULE, WHOLE
from compressor.settings.options import checked

# Last parts of names of layers that are cut along their columns.
ROW_PARALLEL = frozenset({"o_proj", "down_proj", "out_proj", "dense", "dense_4h_to_h", "c_proj", "fc2", "w2", "wo"})


@checked(model=MODULE, num_shards=WHOLE)
def shard_problems(model: nn.Module, num_shards: int) -> dict[str, str]:
    """Say which quantized linear layers cannot be cut into equal parts.

    Args:
        model: with its quantized layers in place.
        num_shards: how many devices share each layer.

    Returns:
        Dotted name to what stands in the way; empty where all can be cut.

    Raises:
        SchemeError: num_shards is not positive.
    """
    if num_shards < 1:
        raise SchemeError(f"num_shards={num_shards} is not positive; give the number of devices")
    if num_shards == 1:
        return {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    found = {name: _problem(layer, num_shards, along_columns=name.rpartition(".")[2] in ROW_PARALLEL) for name, layer in layers.items()}
    return {name: problem for name, problem in found.items() if problem}


@checked(model=MODULE, num_shards=WHOLE)
def check_shards(model: nn.Module, num_shards: int) -> None:
    """Refuse a model that tensor parallelism would cut through groups, blocks or packed words.

    Args:
        model: with its quantized layers in place.
        num_shards: how many devices share each layer.

    Raises:
        SchemeError: some layers cannot be cut; each is named with its reason.
    """
    problems = shard_problems(model, num_shards)
    if problems:
        listed = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise SchemeError(
            f"{len(problems)} layers cannot be shared by {num_shards} devices: {listed}; use fewer devices or another group_size"
        )


def _problem(layer: QuantizedLayer, num_shards: int, *, along_columns: bool) -> str | None:
    args, (rows, columns) = layer.weight_args, layer.weight_size
    size, kind = (columns, "columns") if along_columns else (rows, "rows")
    if size % num_shards:
        return f"{size} {kind} do not divide by {num_shards}"
    part = size // num_shards
    units = {f"blocks of {args.block_structure[along_columns]} {kind}": args.block_structure[along_columns]} if args.block_structure else {}
    if along_columns and args.is_grouped and args.group_size:
        units[f"groups of {args.group_size} columns"] = args.group_size
    has_packed_zeros = not args.symmetric and args.strategy != "tensor"
    if isinstance(layer, PackedWeight) and (along_columns or has_packed_zeros):
        units[f"words of {WORD_BITS} bits"] = WORD_BITS // math.gcd(args.num_bits, WORD_BITS)
    if along_columns and "weight_g_idx" in dict(layer.named_buffers()):
        return "its columns are regrouped by activation, so a part of them belongs to all groups"
    through = [unit for unit, length in units.items() if part % length]
    return f"{part} {kind} a device cut through {' and '.join(through)}" if through else None
