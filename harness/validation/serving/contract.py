"""What vLLM 0.33.0 and SGLang 0.5.23 ask of a checkpoint, as data; which kernels there are stands in `harness.validation.serving.servers`.

Facts, read on 2026-11-25 from the files that each table names, `ct/` for vllm/model_executor/layers/quantization/compressed_tensors/ in the
first and sglang/srt/layers/quantization/compressed_tensors/ in the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from harness.validation.serving.servers import Arguments, ServerName

Size = tuple[int, ...]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# The tensors of a layer: `create_weights` of the classes in ct/schemes/. Whatever else lies beside them has no parameter and is refused
# ("There is no module or parameter named", vllm/model_executor/models/utils.py): `weight_g_idx`, for one, since 0.33.


def _always(weights: Arguments, inputs: Arguments | None) -> bool:
    """Say yes: the tensor belongs to every layer of its kind."""
    del weights, inputs
    return True


@dataclass(frozen=True)
class Part:
    """A tensor of a layer.

    Attributes:
        name: last part of its name.
        dtypes: that are copied without a loss.
        shape: from the weight's rows and columns and the arguments of its scheme.
        needed: says by the arguments of weights and inputs whether it belongs to the layer.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    shape: Callable[[int, int, Arguments], Size]
    needed: Callable[[Arguments, Arguments | None], bool] = _always


def groups_of(columns: int, weights: Arguments) -> int:
    """Return how many scales a row of a weight has."""
    size = weights.get("group_size") or -1
    return columns // size if size > 0 else 1


def _scale(rows: int, columns: int, weights: Arguments) -> Size:
    block = weights.get("block_structure")
    if block:
        return math.ceil(rows / block[0]), math.ceil(columns / block[1])
    per_tensor = (weights.get("strategy") or "tensor") == "tensor" and not weights.get("group_size")
    return (1,) if per_tensor else (rows, groups_of(columns, weights))


def _words(values: int, weights: Arguments) -> int:
    return math.ceil(values * weights.get("num_bits", 8) / 32)


def _is_static(weights: Arguments, inputs: Arguments | None) -> bool:
    return inputs is not None and not inputs.get("dynamic")


def _is_shifted(weights: Arguments, inputs: Arguments | None) -> bool:
    return inputs is not None and not inputs.get("dynamic") and inputs.get("symmetric") is False


_ONE: Callable[[int, int, Arguments], Size] = lambda rows, columns, weights: (1,)  # noqa: E731
_WHOLE: Callable[[int, int, Arguments], Size] = lambda rows, columns, weights: (rows, columns)  # noqa: E731
_HALVED: Callable[[int, int, Arguments], Size] = lambda rows, columns, weights: (rows, columns // 2)  # noqa: E731

LAYOUTS: Mapping[str, tuple[Part, ...]] = MappingProxyType(
    {
        "packed": (  # compressed_tensors_wNa16.py, _wNa8.py, _wNa4.py, _w4a8_fp8.py
            Part("weight_packed", (torch.int32,), lambda rows, columns, weights: (rows, _words(columns, weights))),
            Part("weight_scale", FLOATS, _scale),
            Part("weight_shape", (torch.int64, torch.int32), lambda rows, columns, weights: (2,)),
            Part(
                "weight_zero_point",
                (torch.int32,),
                lambda rows, columns, weights: (_words(rows, weights), groups_of(columns, weights)),
                lambda weights, inputs: weights.get("symmetric") is False,
            ),
        ),
        "int8": (  # compressed_tensors_w8a8_int8.py, _w4a8_int.py
            Part("weight", (torch.int8,), _WHOLE),
            Part("weight_scale", FLOATS, _scale),
            Part("input_scale", FLOATS, _ONE, _is_static),
            Part("input_zero_point", (torch.int8,), _ONE, _is_shifted),
        ),
        "float8": (  # compressed_tensors_w8a8_fp8.py, _w8a16_fp8.py
            Part("weight", (torch.float8_e4m3fn,), _WHOLE),
            Part("weight_scale", FLOATS, _scale),
            Part("input_scale", FLOATS, _ONE, _is_static),
        ),
        "nvfp4": (  # compressed_tensors_w4a4_nvfp4.py
            Part("weight_packed", (torch.uint8,), _HALVED),
            Part("weight_scale", (torch.float8_e4m3fn,), _scale),
            Part("weight_global_scale", (torch.float32,), _ONE),
            Part("input_global_scale", (torch.float32,), _ONE, lambda weights, inputs: inputs is not None),
        ),
        "mxfp4": (  # compressed_tensors_w4a4_mxfp4.py
            Part("weight_packed", (torch.uint8,), _HALVED),
            Part("weight_scale", (torch.uint8,), _scale),
        ),
        "mxfp8": (  # compressed_tensors_w8a8_mxfp8.py
            Part("weight", (torch.float8_e4m3fn,), _WHOLE),
            Part("weight_scale", (torch.uint8,), _scale),
        ),
    }
)  # fmt: skip

QUANTIZED_PARTS = frozenset(part.name for parts in LAYOUTS.values() for part in parts) - {"weight"} | {"weight_g_idx"}
"""Last names that only quantized layers have."""

# Fields of quantization_config: compressed-tensors 0.17.0, which vLLM 0.33.0 pins, refuses what it does not know (`extra="forbid"` in
# quantization/quant_args.py and quant_scheme.py), and so do both loaders, which hand it the arguments.

ARGUMENT_VALUES: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "num_bits": lambda value: type(value) is int and 0 < value <= 32,
        "type": lambda value: value in ("int", "float"),
        "symmetric": lambda value: isinstance(value, bool),
        "group_size": lambda value: type(value) is int and value >= -1,
        "strategy": lambda value: isinstance(value, str),
        "block_structure": lambda value: (
            isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)
        ),
        "dynamic": lambda value: isinstance(value, bool) or value == "local",
        "actorder": lambda value: isinstance(value, str | bool),
    }
)
"""What a value may be at all; null always."""

ARGUMENT_FIELDS = ARGUMENT_VALUES.keys() | {"scale_dtype", "zp_dtype", "observer", "observer_kwargs"}
FORMATS = frozenset(
    {"dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision", "nvfp4-pack-quantized"}
    | {"mxfp4-pack-quantized", "mxfp8-quantized"}
)
STRATEGIES = frozenset({"tensor", "channel", "group", "block", "token", "tensor_group", "attn_head"})


@dataclass(frozen=True)
class Rules:
    """What a loader asks for beside kernels and tensors.

    Attributes:
        orders: values of `actorder` that it takes.
        takes_sparsity: a `sparsity_config` with targets is read.
        kv_strategies: of keys and values, which must be symmetric fp8; others are refused.
        refuses_kv: others are an error, and not passed over.
        takes_queries: scales of queries have a place where attention itself is quantized.
        embeddings: layouts that an embedding may have; its weights alone.
        routers: architectures whose routers may be quantized; those of all others are built as floats.
        transforms: places where a transform may act in the forward.
    """

    orders: frozenset[object]
    takes_sparsity: bool
    kv_strategies: frozenset[str]
    refuses_kv: bool
    takes_queries: bool
    embeddings: frozenset[str]
    routers: frozenset[str]
    transforms: frozenset[str]


RULES: Mapping[ServerName, Rules] = MappingProxyType(
    {
        "vllm": Rules(
            # ct/compressed_tensors.py: `_quantization_scheme_map_from_config`, `_parse_sparsity_config`, `get_quant_method`,
            # `CompressedTensorsKVCacheMethod`; ct/transform/linear.py; `quant_config=` of the gates in vllm/model_executor/models/
            orders=frozenset({None, False, "weight", "static"}),
            takes_sparsity=False,
            kv_strategies=frozenset({"tensor", "attn_head"}),
            refuses_kv=True,
            takes_queries=True,
            embeddings=frozenset({"packed"}),
            routers=frozenset({"JambaForCausalLM", "Lfm2MoeForCausalLM", "Qwen3MoeForCausalLM"}),
            transforms=frozenset({"input", "output", "weight_input", "weight_output"}),
        ),
        "sglang": Rules(
            # ct/compressed_tensors.py: `get_linear_scheme`, `get_lm_head_scheme`, `get_quant_method`; sglang/srt/models/
            orders=frozenset({None, False, "weight", "static", "group"}),
            takes_sparsity=True,
            kv_strategies=frozenset({"tensor"}),
            refuses_kv=False,
            takes_queries=False,
            embeddings=frozenset(),
            routers=frozenset({"Qwen3MoeForCausalLM"}),
            transforms=frozenset({"weight_input", "weight_output"}),
        ),
    }
)

# Layers that become one: `packed_modules_mapping` of the classes in vllm/model_executor/models/ and sglang/srt/models/, where nearly all
# agree. All shards of one parent must be there, or none is fused.

FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
        "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
        "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
        "in_proj_ba": ("in_proj_b", "in_proj_a"),
    }
)

EXPERT_FUSED = (("gate_proj", "up_proj"), ("w1", "w3"))  # `w13_weight` of fused_moe/layer.py

# Modules by the last part of their name, where the classes in the servers are not `...Linear`.

HEADS = ("lm_head", "embed_out")  # ParallelLMHead; as embeddings divided by rows, with a scale for each (vocab_parallel_embedding.py)
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")  # VocabParallelEmbedding
POSITIONS = ("wpe", "embed_positions", "position_embeddings")  # torch's own Embedding, always floats
ROUTERS = ("gate", "router", "shared_expert_gate")
ROW_PARALLEL = ("o_proj", "down_proj", "out_proj", "fc2", "c_proj", "dense", "dense_4h_to_h", "w2", "wo")
"""Layers whose columns are divided among the GPUs of tensor parallelism (`RowParallelLinear`); of all others the rows are."""
