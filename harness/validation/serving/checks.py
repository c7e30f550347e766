"""The checks `serving.*`: config, kernels, layers, tensors, shards, and keys and values, each against the contract of one server."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from compressor.model.folder import some
from harness.reporting.record import CheckRecord, Claim
from harness.reporting.verdict import Outcome
from harness.validation.format.scheme import attention_scheme
from harness.validation.policy import Policy
from harness.validation.serving.contract import ARGUMENT_FIELDS, FORMATS, LAYOUTS, QUANTIZED_PARTS, ROW_PARALLEL, RULES, STRATEGIES, Rules
from harness.validation.serving.resolve import Group, Layer, read_groups, read_layers
from harness.validation.serving.servers import SERVERS, Arguments, Kernel, Server, ServerName, refusal
from harness.validation.subject import Subject

CONFIG = Claim("serving.config", "the server reads every entry of quantization_config")
SCHEMES = Claim("serving.schemes", "the server has a kernel for every scheme")
LAYERS = Claim("serving.layers", "the server gives every layer the scheme that it has in the files")
TENSORS = Claim("serving.tensors", "every layer has the tensors that its kernel reads, and no others")
SHARDS = Claim("serving.shards", "layers can be fused with one global scale, and divided among GPUs")
KV_CACHE = Claim("serving.kv_cache", "the server takes the scheme of keys and values")
CLAIMS = (CONFIG, SCHEMES, LAYERS, TENSORS, SHARDS, KV_CACHE)


@dataclass(frozen=True)
class _Judged:
    """A checkpoint before a server."""

    subject: Subject
    server: Server
    rules: Rules
    groups: list[Group]
    layers: list[Layer]

    def kernel(self, layer: Layer) -> Kernel | None:
        group = layer.group
        if group is None:
            return None
        return self.server.kernel(group.weights, group.inputs, group.format, experts=layer.kind == "experts")

    def lies_quantized(self, name: str) -> bool:
        return any(f"{name}.{part}" in self.subject.compressed.entries for part in QUANTIZED_PARTS)


def check_serving(subject: Subject, serve: ServerName | None, policy: Policy) -> list[CheckRecord]:
    """Hold a checkpoint against what a server's loader asks for, without the server.

    Args:
        subject: both folders.
        serve: the server; None for none.
        policy: on how many GPUs, and whether a scheme without a kernel is a failure.

    Returns:
        One record per claim; all skipped where there is nothing to judge.
    """
    config = subject.quantization_config
    if serve is None:
        return [claim.skipped("no server was asked for") for claim in CLAIMS]
    if config is None and subject.config and "quantization_config" in subject.config:
        said = [CONFIG.found(list(subject.problems), "")]
        return said + [claim.skipped("quantization_config cannot be read") for claim in CLAIMS[1:]]
    if config is None:
        return [claim.skipped("there is no quantization_config") for claim in CLAIMS]
    server, rules = SERVERS[serve], RULES[serve]
    findings = list(_config_problems(config, server, rules))
    try:
        groups = read_groups(config)
        layers = list(read_layers(subject, groups, rules.routers))
    except (ValueError, re.error) as error:
        findings.append(f"{server.title} cannot read it: {error}")
        return [CONFIG.found(findings, ""), *(claim.skipped("quantization_config cannot be read") for claim in CLAIMS[1:])]
    judged = _Judged(subject, server, rules, groups, layers)
    return [
        CONFIG.found(findings, server.title),
        _check_schemes(judged, policy),
        LAYERS.found(list(_layer_problems(judged)), f"{sum(layer.group is not None for layer in layers)} quantized layers", noun="layer"),
        _check_tensors(judged),
        _check_shards(judged, policy),
        _check_kv(judged),
    ]


def _config_problems(config: Mapping[str, Any], server: Server, rules: Rules) -> Iterator[str]:
    if config.get("quant_method") != "compressed-tensors":
        yield f"quant_method is {config.get('quant_method')!r}, and {server.title} reads 'compressed-tensors'"
    if (config.get("sparsity_config") or {}).get("targets") and not rules.takes_sparsity:
        yield f"sparsity_config has targets, which {server.title} refuses: sparsity was taken out of compressed-tensors"
    for name, group in (config.get("config_groups") or {}).items():
        yield from (f"config_groups.{name}: {problem}" for problem in _group_problems(group, config.get("format"), server, rules))
    schemes = (config.get("transform_config") or {}).get("config_groups") or {}
    for name, scheme in schemes.items():
        for place in {str(one.get("location")) for one in scheme.get("apply") or ()} - rules.transforms:
            yield f"transform_config.{name}: {server.title} applies no transform at {place!r}"


def _group_problems(group: Mapping[str, Any], whole: Any, server: Server, rules: Rules) -> Iterator[str]:
    format_name = group.get("format") or whole
    if format_name not in tuple(FORMATS):
        yield f"format {format_name!r} is none of compressed-tensors 0.17"
    weights = group.get("weights")
    if isinstance(weights, Mapping) and weights.get("actorder") not in tuple(rules.orders):
        yield f"actorder {weights.get('actorder')!r} is refused by {server.title}, which reads no weight_g_idx; use 'static'"
    if format_name == "int-quantized" and isinstance(weights, Mapping) and not group.get("input_activations"):
        yield f"{server.title} wants quantized inputs beside 'int-quantized' weights; store weights alone as 'pack-quantized'"
    if group.get("output_activations"):
        yield f"output_activations are given, and {server.title} leaves outputs as they are"
    for kind in ("weights", "input_activations", "output_activations"):
        arguments = group.get(kind)
        if not isinstance(arguments, Mapping):
            continue
        unknown = sorted(arguments.keys() - ARGUMENT_FIELDS)
        if unknown:
            yield f"{kind} has {some(unknown)}, which compressed-tensors 0.17 in {server.title} refuses"
        if arguments.get("strategy") not in (None, *STRATEGIES):
            yield f"{kind} has the strategy {arguments['strategy']!r}, which compressed-tensors 0.17 does not know"


def _check_schemes(judged: _Judged, policy: Policy) -> CheckRecord:
    used = {(layer.group.name, layer.kind == "experts"): layer.group for layer in judged.layers if layer.group is not None}
    findings, kernels = list[str](), set[str]()
    for (name, experts), group in used.items():
        scheme = (group.weights, group.inputs, group.format)
        kernel = judged.server.kernel(*scheme, experts=experts)
        if kernel is None:
            findings.append(f"config_groups.{name}: {refusal(judged.server, *scheme, experts=experts)}")
        else:
            kernels.add(kernel.name + (f" (only on {kernel.only_on})" if kernel.only_on else ""))
    if findings and policy.allow_unserved_schemes:
        return SCHEMES.record(Outcome.PASS, f"allowed by the policy: {findings[0]}", findings=findings)
    return SCHEMES.found(findings, f"{judged.server.title}: {', '.join(sorted(kernels)) or 'no layer is quantized'}", noun="scheme")


def _layer_problems(judged: _Judged) -> Iterator[str]:
    title = judged.server.title
    fused = judged.subject.compressed.entries.keys() - judged.subject.compressed.stored.entries.keys()
    for experts in sorted({name.rsplit(".", 3)[0] for name in fused}):
        yield f"{experts}: lies fused in the file, and {title} reads the experts of most architectures one by one"
    for layer in (layer for layer in judged.layers if f"{layer.name}.weight" not in fused):
        name, meant = layer.name, judged.subject.modules.get(layer.name)
        if layer.is_split:
            if name == layer.shards[0]:
                yield f"{' and '.join(layer.shards)}: are one layer in {title}, and the ignore patterns mean some of them only"
        elif layer.group is None and judged.lies_quantized(name):
            yield f"{name}: lies quantized in the file, and {title} builds it as floats: {_why_float(layer)}"
        elif layer.group is not None and not judged.lies_quantized(name):
            yield f"{name}: lies as floats in the file, and {title} expects {layer.group.name}"
        elif layer.group is not None and meant is not None and meant.name != layer.group.name:
            yield f"{name}: is of {meant.name}, and {title} takes it for {layer.group.name}" + _of_shards(layer)
        elif not layer.is_named and layer.kind == "linear" and judged.server.wants_all_named and judged.groups:
            yield f"{name}: no target means it, which {title} refuses; add it to ignore"
    yield from _table_problems(judged)


def _why_float(layer: Layer) -> str:
    reasons = {
        "router": "routers of this architecture are not quantized there",
        "position": "embeddings of positions are not quantized there",
        "head": "name it in targets, 'Linear' does not mean a head",
        "embedding": "name it in targets",
    }
    return reasons.get(layer.kind, "its ignore patterns mean it" if layer.is_named else "no target means it")


def _of_shards(layer: Layer) -> str:
    return f", as {' and '.join(layer.shards)} are one layer there" if len(layer.shards) > 1 else ""


def _table_problems(judged: _Judged) -> Iterator[str]:
    for layer in judged.layers:
        kernel = judged.kernel(layer)
        if layer.kind == "head" and layer.group is not None and layer.group.weights.get("block_structure"):
            yield f"{layer.name}: {judged.server.title} divides a head by rows and cannot divide its blocks; give it scales per channel"
        if layer.kind != "embedding" or layer.group is None:
            continue
        if kernel is None or kernel.layout not in judged.rules.embeddings or layer.group.inputs is not None:
            yield f"{layer.name}: {judged.server.title} has no kernel for an embedding of {layer.group.name}"


def _check_tensors(judged: _Judged) -> CheckRecord:
    findings, number = list[str](), 0
    for layer in judged.layers:
        kernel = judged.kernel(layer)
        if kernel is not None and layer.group is not None and judged.lies_quantized(layer.name):
            number += 1
            findings += _tensor_problems(judged.subject, layer.name, kernel, layer.group)
    if not number:
        return TENSORS.skipped("no quantized layer has a kernel")
    return TENSORS.found(findings, f"{number} layers", noun="tensor")


def _tensor_problems(subject: Subject, name: str, kernel: Kernel, group: Group) -> Iterator[str]:
    entries = subject.compressed.entries
    rows, columns = subject.base.entries[f"{name}.weight"].shape
    wanted = {part.name: part for part in LAYOUTS[kernel.layout] if part.needed(group.weights, group.inputs)}
    for key, part in wanted.items():
        entry = entries.get(f"{name}.{key}")
        shape = part.shape(rows, columns, group.weights)
        if entry is None:
            yield f"{name}.{key}: is missing, and {kernel.name} reads it"
        elif entry.dtype not in part.dtypes:
            yield f"{name}.{key}: is {entry.dtype}, and {kernel.name} reads {part.dtypes[0]}"
        elif entry.shape != shape and not (entry.shape == () and shape == (1,)):
            yield f"{name}.{key}: has the shape {list(entry.shape)}, and {kernel.name} reads {list(shape)}"
    for part_name in sorted({*QUANTIZED_PARTS, "weight"} - wanted.keys()):
        if f"{name}.{part_name}" in entries:
            yield f"{name}.{part_name}: {kernel.name} has no such parameter"


def _check_shards(judged: _Judged, policy: Policy) -> CheckRecord:
    def problems(num_gpus: int) -> list[str]:
        return [
            text
            for layer in judged.layers
            if layer.group is not None
            for text in shard_problems(judged.subject, layer, layer.group.weights, num_gpus, is_packed=_is_packed(judged, layer))
        ]

    most = max((number for number in (1, 2, 4, 8, 16) if not problems(number)), default=0)
    findings = [*problems(policy.tensor_parallel), *_global_scale_problems(judged)]
    return SHARDS.found(
        findings, f"on 1 GPU up to {most}", limit=f"tensor_parallel {policy.tensor_parallel}", evidence={"most GPUs": most}, noun="layer"
    )


def _global_scale_problems(judged: _Judged) -> Iterator[str]:
    """Of layers that become one: it gets one global scale, and the codes of the others are read with what is not theirs."""
    compressed = judged.subject.compressed
    for layer in judged.layers:
        for part in ("weight_global_scale", "input_global_scale") if layer.group is not None else ():
            keys = [f"{name}.{part}" for name in (layer.siblings[0], layer.name)]
            if any(key not in compressed.entries or math.prod(compressed.entries[key].shape) != 1 for key in keys):
                continue
            first, own = (float(compressed.tensor(key)) for key in keys)
            if first != own:
                yield f"{keys[1]}: is {own:g}, that of {layer.siblings[0]} {first:g}, and {judged.server.title} takes one for both"


def _is_packed(judged: _Judged, layer: Layer) -> bool:
    kernel = judged.kernel(layer)
    return kernel is not None and kernel.layout == "packed"


def _check_kv(judged: _Judged) -> CheckRecord:
    config = judged.subject.quantization_config or {}
    scheme, queries = config.get("kv_cache_scheme"), attention_scheme(config)
    if not isinstance(scheme, Mapping) and queries is None:
        return KV_CACHE.skipped("keys and values are not quantized")
    problem = _kv_problem(scheme, judged.rules) if isinstance(scheme, Mapping) else "attention is quantized without a kv_cache_scheme"
    if problem is None and queries is not None and not judged.rules.takes_queries:
        problem = "queries are quantized, whose scales have no place there"
    if problem and not judged.rules.refuses_kv:
        return KV_CACHE.record(Outcome.PASS, f"{judged.server.title} passes it over: {problem}", findings=[problem])
    return KV_CACHE.found([problem] if problem else [], "fp8, as the server takes it")


def _kv_problem(scheme: Arguments, rules: Rules) -> str | None:
    if (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
        return f"kv_cache_scheme is {scheme.get('type')}{scheme.get('num_bits')}, and only fp8 is taken"
    if scheme.get("strategy") not in rules.kv_strategies:
        return f"kv_cache_scheme has the strategy {scheme.get('strategy')!r}, and taken are {', '.join(sorted(rules.kv_strategies))}"
    return None if scheme.get("symmetric") else "kv_cache_scheme is asymmetric, and only symmetric scales are taken"


# Can layers be fused, and divided among GPUs? Groups, blocks and packed words must not be cut.
#
# Facts of `verify_group_size_divides_partition` (vllm/distributed/utils.py), `validate_fp8_block_shape` (quantization/utils/fp8_utils.py)
# and the parameters in vllm/model_executor/parameter.py, vLLM 0.33.0; SGLang 0.5.23 has the same.

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
