"""The names and the config of the compressed-tensors format, as transformers (with the compressed-tensors package) and vLLM read them.

The tensors need no translation: `QuantizedLinear` keeps them under their names on disk. What is left is the `quantization_config` in
config.json: which modules have which scheme, and which stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from compressor.errors import SchemeError
from compressor.model.experts_format import fused_modules
from compressor.model.folder import some
from compressor.model.targets import matches
from compressor.numerics.scheme import QuantizationArgs, QuantizationScheme

# The version of compressed-tensors whose format this is; readers take it as information only.
FORMAT_VERSION = "0.20.0"
_LINEAR = "Linear"
# vLLM makes a linear layer of what transformers calls a router or a gate, so it has to be told that those are not quantized.
_ROUTER = re.compile(r"Router|Gating|Gate(?![a-z])")


def quantization_config(modules: Mapping[str, QuantizationScheme], ignore: Sequence[str]) -> dict[str, Any]:
    """Describe a quantized model for config.json.

    One scheme for all is written as the class `Linear` less `ignore`, the form every reader knows. Several schemes name their modules one
    by one: readers that fuse layers look a class up before they look at names.

    Args:
        modules: dotted name of every quantized module, as in the model, to its scheme; equal schemes make one group.
        ignore: linear layers that stay as they are.

    Returns:
        The value of `quantization_config`; only JSON types.
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, scheme in modules.items():
        content = {
            "format": scheme.compression_format,
            "input_activations": _args(scheme.input_activations),
            "output_activations": None,
            "weights": _args(scheme.weights),
        }
        groups.setdefault(repr(content), {**content, "targets": []})["targets"].append(name)
    if len(groups) == 1:
        next(iter(groups.values()))["targets"] = [_LINEAR]
    formats = sorted({group["format"] for group in groups.values()})
    config = {
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups.values())},
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "global_compression_ratio": None,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": FORMAT_VERSION,
    }
    return config | {"dequantize": True} if _needs_dequantize(list(modules.values())) else config


def unquantized_linears(model: nn.Module) -> list[str]:
    """Name what a reader would take for a quantized linear layer if the config did not say otherwise.

    Args:
        model: the model, with its quantized layers in place.

    Returns:
        Names of the modules that are still nn.Linear, of routers and gates that hold a matrix, and of experts that are still fused, in the
        order of the model.
    """
    fused = set(fused_modules(model))
    return [name for name, module in model.named_modules() if matches(name, module, _LINEAR) or _is_router(module) or name in fused]


def _is_router(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return _ROUTER.search(type(module).__name__) is not None and isinstance(weight, torch.Tensor) and weight.ndim == 2


def stored_names(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Find under which names a transformers model is stored: for some architectures they are not those of its modules.

    Args:
        model: a model of transformers.
        names: dotted names of modules.

    Returns:
        Name in the model to name in the files; only where the two differ.
    """
    from transformers.core_model_loading import revert_weight_conversion

    markers = {f"{name}.weight": torch.empty(0) for name in names}
    module_of = {id(marker): key.removesuffix(".weight") for key, marker in markers.items()}
    stored = {module_of[id(marker)]: key.removesuffix(".weight") for key, marker in revert_weight_conversion(model, markers).items()}
    return {name: stored[name] for name in names if stored[name] != name}


def _needs_dequantize(schemes: Sequence[QuantizationScheme]) -> bool:
    """Whether transformers must unpack while it loads.

    By default it first builds empty layers with compressed-tensors, which (0.20) forgets that packed zero points are packed: it then
    refuses its own files. Unpacking at once gives the same weights, but knows one scheme only; vLLM does not read the flag.
    """
    return bool(schemes) and all(scheme == schemes[0] for scheme in schemes) and _has_packed_zero_points(schemes[0])


def _has_packed_zero_points(scheme: QuantizationScheme) -> bool:
    weights = scheme.weights
    packed = weights is not None and scheme.compression_format == "pack-quantized"
    return packed and weights is not None and not weights.symmetric and weights.strategy != "tensor"


def _args(args: QuantizationArgs | None) -> dict[str, Any] | None:
    """Arguments as compressed-tensors writes them: what was not set is left out, except for the six fields that are always there."""
    if args is None:
        return None
    always = {"num_bits", "type", "symmetric", "group_size", "strategy", "dynamic"}
    return {key: value for key, value in args.model_dump(mode="json").items() if key in always or value}


def check_readable(schemes: Mapping[str, QuantizationScheme]) -> None:
    """Refuse schemes that could be written but that transformers with compressed-tensors 0.20 would not read back.

    Args:
        schemes: dotted name of every module that is to be quantized, to its scheme.

    Raises:
        SchemeError: columns regrouped by activation, or asymmetric packed weights beside another scheme.
    """
    regrouped = [name for name, scheme in schemes.items() if scheme.weights is not None and scheme.weights.actorder == "group"]
    if regrouped:
        raise SchemeError(
            f"{some(regrouped)}: actorder='group' was given for a checkpoint, and compressed-tensors no longer reads such files; "
            "use actorder='static', or keep the model in memory (no output_dir)"
        )
    asymmetric = [name for name, scheme in schemes.items() if _has_packed_zero_points(scheme)]
    if asymmetric and not _needs_dequantize(list(schemes.values())):
        raise SchemeError(
            f"{some(asymmetric)}: asymmetric packed weights stand beside another scheme, and transformers reads them only alone; "
            "give all modules one scheme, or make these symmetric"
        )
