"""How quantized experts lie in a folder, and what transformers makes of them.

Quantized projections are stored one by one, `...experts.0.gate_proj.weight_packed`, as vLLM and llm-compressor name them. transformers 5.23
has no module for them: its experts are fused tensors, filled by the conversion rules of the architecture. With `dequantize: true` in the
config those rules first unpack each expert and then merge. Its limits (`CompressedTensorsDequantize` in integrations/compressed_tensors.py,
`update_weight_conversions` in quantizers/base.py) are what `reader_problems` lists; outside them experts are random or wrong, or it stops.
Projections that stay floats go back into the fused tensors, because its rules unpack whatever passes through them, floats too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from compressor.model.experts.unfuse import DiskNames, disk_names, layout_of, weight_converters
from compressor.model.folder import some
from compressor.nn.experts import SortedExperts, UnfusedExperts, fused_weights
from compressor.numerics.scheme import QuantizationScheme

_OTHERS = "harness validate and compressor.load_compressed read it"


def reader_problems(model: nn.Module, schemes: Mapping[str, QuantizationScheme]) -> list[str]:
    """Say what keeps transformers from loading the quantized experts of a model as they are.

    Args:
        model: with its experts taken apart.
        schemes: dotted name of every quantized module, or of every module that will be, to its scheme.

    Returns:
        One sentence per reason; empty where it loads them, or where no expert is quantized.
    """
    layers = _quantized_experts(model, schemes)
    if not layers:
        return []
    converters = weight_converters(model)
    found: dict[str, None] = {}
    for name, layer in layers.items():
        found |= dict.fromkeys(_layer_problems(name, layer, disk_names(converters, name), schemes))
    inside = {name: scheme for name, scheme in schemes.items() if _owner(name, layers) is not None}
    found |= dict.fromkeys(_scheme_problems(inside, {name: schemes[name] for name in schemes if name not in inside}))
    return list(found)


def reader_notes(model: nn.Module, schemes: Mapping[str, QuantizationScheme], *, has_kv: bool) -> list[str]:
    """Say what a user must know about reading a checkpoint with quantized experts, before the run.

    Args:
        model: with its experts taken apart.
        schemes: dotted name of every module that will be quantized to its scheme.
        has_kv: whether keys and values are quantized.

    Returns:
        Sentences; empty for a model without experts.
    """
    layers = _quantized_experts(model, schemes)
    if not layers:
        return [*_notes_of_sorted(model, schemes), *_notes_of_floats(model, schemes)]
    problems = reader_problems(model, schemes)
    if problems:
        return [
            f"transformers 5.23 will not load these experts, but leave them random or wrong, or stop: {one}; {_OTHERS}" for one in problems
        ]
    inputs = [scheme.input_activations for scheme in schemes.values() if scheme.input_activations is not None]
    left = [*(["inputs"] if inputs else []), *(["keys and values"] if has_kv else [])]
    if not left:
        return []
    static = "" if all(args.dynamic for args in inputs) else ", and it calls their input scales unexpected"
    return [
        "transformers 5.23 dequantizes a model with quantized experts while it loads: the weights are the same, but "
        f"{' and '.join(left)} are not quantized there{static}"
    ]


def _notes_of_sorted(model: nn.Module, schemes: Mapping[str, QuantizationScheme]) -> list[str]:
    layers = {name for name, module in model.named_modules() if isinstance(module, SortedExperts)}
    inputs = (scheme.input_activations for name, scheme in schemes.items() if name.rsplit(".", 2)[0] in layers)
    if not any(args is not None and args.strategy == "token" for args in inputs):
        return []
    return [
        "the tokens that an expert is handed share one scale of their inputs, as transformers computes them, which hands them over as "
        "[N, C]: what a token gives hangs on the others (vLLM scales each)"
    ]


def _notes_of_floats(model: nn.Module, schemes: Mapping[str, QuantizationScheme]) -> list[str]:
    converters, apart = weight_converters(model), [name for name, one in model.named_modules() if isinstance(one, UnfusedExperts)]
    kept = (
        [] if _floats_load_singly(schemes) else [one for one in (*apart, *fused_modules(model)) if disk_names(converters, one).is_converted]
    )
    if not kept:
        return []
    return [
        f"{some(kept)} stay floats and are stored fused, as transformers loads them beside these schemes; vLLM reads the experts of most "
        "architectures one by one"
    ]


def _floats_load_singly(schemes: Mapping[str, QuantizationScheme]) -> bool:
    """Where all weights are fp8, transformers leaves floats as they are while it merges experts; else it finds none that it unpacks."""
    return all(scheme.weights is None or (scheme.weights.type, scheme.weights.num_bits) == ("float", 8) for scheme in schemes.values())


def with_expert_settings(
    config: dict[str, Any], model: nn.Module, schemes: Mapping[str, QuantizationScheme], renamed: Mapping[str, str]
) -> dict[str, Any]:
    """Add to a quantization config what transformers needs to load quantized experts.

    Args:
        config: as `quantization_config` makes it; not changed.
        model: the compressed model.
        schemes: of its quantized modules.
        renamed: name in the model to name in the files, where the two differ.

    Returns:
        The config: dequantized while loading, and with patterns for the names of experts where they have a scheme of their own.
    """
    layers = _quantized_experts(model, schemes)
    if not layers or reader_problems(model, schemes):
        return config
    inside = [name for name in schemes if _owner(name, layers) is not None]
    named = {*inside, *(renamed.get(name, name) for name in inside)}
    patterns = sorted({f"re:{_any_number(name)}$" for name in named})
    groups = {
        key: {**group, "targets": patterns} if set(group["targets"]) <= named else group for key, group in config["config_groups"].items()
    }
    return {**config, "config_groups": groups, "dequantize": True}


def _any_number(name: str) -> str:
    return re.sub(r"(?<=\.)[0-9]+(?=\\\.)", "[0-9]+", re.escape(name))


def with_fused_floats(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put projections that stayed floats back under the names of the fused tensors.

    Args:
        model: the compressed model.
        state: its state_dict; not changed.

    Returns:
        The state to save.
    """
    state = dict(state)
    for name, layer in model.named_modules():
        if not isinstance(layer, UnfusedExperts):
            continue
        fused = fused_weights(layer)
        gone = tuple(f".{projection}" for key in fused for projection in layer.layout.sources.get(key, ()))
        inside = re.compile(rf"{re.escape(name)}\.[0-9]+(\.[^.]+)\.(weight|bias)")
        state = {key: value for key, value in state.items() if not ((match := inside.fullmatch(key)) and match[1] in gone)}
        state |= {key: _alone(value) for key, value in state.items() if key.startswith(f"{name}.")}
        state |= {f"{name}.{key}": value for key, value in fused.items()}
    return state


def fused_modules(model: nn.Module) -> list[str]:
    """Name the modules whose experts are fused tensors of floats.

    Args:
        model: any model.

    Returns:
        Dotted names, in the order of the model.
    """
    return [name for name, module in model.named_modules() if layout_of(module) is not None]


def _alone(value: Tensor) -> Tensor:
    """A tensor that is a part of another's memory, as one of its own."""
    return value if value.numel() * value.element_size() == value.untyped_storage().nbytes() else value.contiguous().clone()


@contextmanager
def kept_fused(model: Any, state: Mapping[str, Tensor], schemes: Mapping[str, QuantizationScheme]) -> Iterator[bool]:
    """Let `save_pretrained` write fused floats as they are, where transformers could not load them one by one. Changes the model.

    Args:
        model: a model of transformers.
        state: what will be saved.
        schemes: of its quantized modules; where all weights are fp8 floats load one by one, too.

    Yields:
        Whether it does.
    """
    if _floats_load_singly(schemes):
        yield False
        return
    with _rules(model, [entry for entry in _own_rules(model) if not _splits(entry, state)]):
        yield True


@contextmanager
def plain_names(model: nn.Module) -> Iterator[None]:
    """Let tensors beside experts be stored one by one, as the model names them. Changes the model while the block runs.

    Some classes store a few tensors joined or cut (`conv1d` as three, `gate_proj` and `up_proj` as one) and convert them as they load. Of a
    quantized model transformers finds nothing to convert and stops; codes and scales of several layers cannot be joined at all. A tensor
    that lies there under the name that it has in the model is taken as it is.

    Args:
        model: any; only of one of transformers something is changed.

    Yields:
        Nothing.
    """
    if not hasattr(model, "save_pretrained"):
        yield
        return
    with _rules(model, [entry for entry in _own_rules(model) if not _joins(entry)]):
        yield


def _own_rules(model: Any) -> list[Any]:
    """Rules by which transformers would save a model, in the order of their use on loading."""
    own = getattr(model, "_weight_conversions", None)
    if own is not None:
        return list(own)
    from transformers.conversion_mapping import PrefixChange, get_model_conversion_mapping

    return [entry for entry in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(entry, PrefixChange)]


@contextmanager
def _rules(model: Any, rules: list[Any]) -> Iterator[None]:
    own = getattr(model, "_weight_conversions", None)
    model._weight_conversions = rules
    try:
        yield
    finally:
        if own is None:
            del model._weight_conversions
        else:
            model._weight_conversions = own


def _joins(entry: Any) -> bool:
    """Whether a rule makes other tensors than experts of those in the files; one that keeps a name would be applied to it again."""
    targets = list(entry.target_patterns)
    is_of_experts = any("experts" in target for target in targets)
    return hasattr(entry, "operations") and not is_of_experts and set(entry.source_patterns).isdisjoint(targets)


def _splits(entry: Any, state: Mapping[str, Tensor]) -> bool:
    """Whether saving would split a fused tensor of experts by this rule."""
    if not hasattr(entry, "operations"):
        return False
    patterns = [re.compile(f"{target}$") for target in entry.target_patterns if "experts" in target]
    return any(pattern.search(key) for pattern in patterns for key in state)


def _quantized_experts(model: nn.Module, schemes: Mapping[str, QuantizationScheme]) -> dict[str, UnfusedExperts]:
    """Layers that transformers keeps fused while it loads; in place of Llama 4's it puts single experts, which load as other layers do."""
    modules = ((name, module) for name, module in model.named_modules() if not isinstance(module, SortedExperts))
    layers = {name: module for name, module in modules if isinstance(module, UnfusedExperts)}
    used = {_owner(name, layers) for name in schemes}
    return {name: layer for name, layer in layers.items() if name in used}


def _owner(name: str, layers: Mapping[str, UnfusedExperts]) -> str | None:
    """The layer of experts that a projection lies in."""
    owner = name.rsplit(".", 2)[0]
    return owner if owner in layers else None


def _layer_problems(name: str, layer: UnfusedExperts, disk: DiskNames, schemes: Mapping[str, QuantizationScheme]) -> Iterator[str]:
    kind = layer.fused_class.__name__
    if not disk.is_converted or layer.layout.has_bias:
        yield f"it has no rule that merges single experts into {kind}, whose files keep them fused"
        return
    for fused, projections in layer.layout.sources.items():
        names = [f"{name}.{index}.{projection}" for index, _ in enumerate(layer.experts()) for projection in projections]
        floats = [one for one in names if one not in schemes]
        if floats and len(floats) < len(names):
            yield f"{some(floats)} of {kind}.{fused} stay floats while others are quantized"


def _scheme_problems(inside: Mapping[str, QuantizationScheme], outside: Mapping[str, QuantizationScheme]) -> Iterator[str]:
    first = next(iter(inside.values()))
    if any(scheme != first for scheme in inside.values()):
        yield "it knows one scheme for all experts"
    if any(scheme != next(iter(outside.values())) for scheme in outside.values()):
        yield "beside experts it knows one scheme for all other layers"
    weights = first.weights
    assert weights is not None
    packed = first.compression_format == "pack-quantized" and weights.symmetric
    fp8 = first.compression_format == "float-quantized" and weights.strategy in ("tensor", "channel")
    mxfp4 = first.compression_format == "mxfp4-pack-quantized"
    if not packed and not fp8 and not mxfp4:
        symmetry = "" if weights.symmetric else ", asymmetric"
        yield f"of experts it unpacks symmetric pack-quantized, fp8 and mxfp4 weights, not {first.compression_format}{symmetry}"
