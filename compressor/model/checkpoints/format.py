"""The names and the config of the compressed-tensors format, as transformers (with the compressed-tensors package) and vLLM read them.

The tensors need no translation: `QuantizedLinear` keeps them under their names on disk. What is left is the `quantization_config` in
config.json: which modules have which scheme, and which stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from compressor.errors import SchemeError
from compressor.model.experts.format import fused_modules, plain_names
from compressor.model.folder import some
from compressor.model.targets import all_names, matches
from compressor.nn import QuantizedEmbedding, QuantizedLayer, QuantizedLinear, weight_of
from compressor.nn.attention.kv_cache import attention_modules, kv_scheme_of, quantized_parts
from compressor.nn.experts import UnfusedExperts
from compressor.nn.quantized_linear import is_conv1d
from compressor.numerics.packing import WORD_BITS
from compressor.numerics.scheme import QuantizationArgs, QuantizationScheme

# The version of compressed-tensors whose format this is; readers take it as information only.
FORMAT_VERSION = "0.20.0"
_LINEAR = "Linear"
_HEADS = ("lm_head", "embed_out")  # no `Linear` to vLLM and SGLang, which quantize a head that is named and no other
_UNPACKED_TO_BFLOAT16 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized")
# vLLM makes a linear layer of what transformers calls a router or a gate, so it has to be told that those are not quantized.
_ROUTER = re.compile(r"Router|Gating|Gate(?![a-z])")


def quantization_config(
    modules: Mapping[str, QuantizationScheme],
    ignore: Sequence[str],
    *,
    others: Collection[str] = (),
    kv_cache_scheme: QuantizationArgs | None = None,
    attention: Sequence[str] = (),
    dtype: torch.dtype = torch.bfloat16,
    transforms: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Describe a quantized model for config.json.

    One scheme for all is written as the head and the class `Linear` less `ignore`, the form every reader knows. Several schemes name their
    modules one by one: readers that fuse layers look a class up before they look at names.

    Args:
        modules: dotted name of every quantized module, as in the model, to its scheme; equal schemes make one group.
        ignore: linear layers that stay as they are.
        others: names among `modules` of what is no linear layer (embeddings), for which the class would not stand.
        kv_cache_scheme: format of keys and values, None where they are not quantized.
        attention: classes of attention modules that quantize queries as well, in the format of keys and values.
        dtype: in which the model computes.
        transforms: the value of `transform_config`: rotations that are computed in every forward.

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
        groups.setdefault(_as_read(scheme), {**content, "targets": []})["targets"].append(name)
    if len(groups) == 1 and not others:
        (only,) = groups.values()
        heads = [name for name in only["targets"] if name.rpartition(".")[2] in _HEADS]
        only["targets"] = heads + [_LINEAR] * (len(only["targets"]) > len(heads))
    formats = sorted({group["format"] for group in groups.values()}) or ["dense"]
    queries = {"format": "dense", "input_activations": _args(kv_cache_scheme), "output_activations": None, "weights": None}
    described = [*groups.values(), *([{**queries, "targets": list(attention)}] if attention else [])]
    # vLLM asks for a kv_cache_scheme; beside a group, compressed-tensors 0.20 confuses the dtypes of scales and zero points.
    is_said = bool(attention) and kv_cache_scheme is not None and not kv_cache_scheme.symmetric
    config = {
        "config_groups": {f"group_{index}": group for index, group in enumerate(described)},
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "global_compression_ratio": None,
        "ignore": list(ignore),
        "kv_cache_scheme": None if is_said else _args(kv_cache_scheme),
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": dict(transforms or {}),
        "version": FORMAT_VERSION,
    }
    return config | {"dequantize": True} if _needs_dequantize(modules, dtype, others) else config


def config_of(
    model: nn.Module,
    schemes: Mapping[str, QuantizationScheme],
    renamed: Mapping[str, str] | None = None,
    transforms: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Describe a compressed model for config.json.

    Args:
        model: the model, with its quantized layers and its quantizers of keys and values in place.
        schemes: dotted name of every quantized layer to its scheme.
        renamed: name in the model to name in the files, where the two differ. Readers that build the model's own modules look for their
            names, others for the names in the files, so the config holds both.
        transforms: the value of `transform_config`.

    Returns:
        The value of `quantization_config`; None where nothing is quantized or turned in every forward.
    """
    kv = kv_scheme_of(model)
    if not schemes and kv is None and not transforms:
        return None
    renamed, places = renamed or {}, all_names(model)
    ignore = [place for name in unquantized_linears(model) for place in places[name]]
    embeddings = [name for name in schemes if isinstance(model.get_submodule(name), QuantizedEmbedding)]

    def aliases(name: str) -> list[str]:
        return [alias for place in places[name] for alias in (place, renamed.get(place, place))]

    queries = {type(module).__name__ for module in attention_modules(model).values() if "q" in quantized_parts(module)}
    ignore += [renamed[name] for name in ignore if name in renamed]
    experts = {alias for name in _whole_experts(model) for alias in aliases(name)}
    singles = [f"re:{re.escape(name)}[.][0-9]+[.]" for name in ignore if name in experts]  # as servers ask, which build them one by one
    return quantization_config(
        {alias: scheme for name, scheme in schemes.items() for alias in aliases(name)},
        ignore + singles,
        others=[alias for name in embeddings for alias in aliases(name)],
        kv_cache_scheme=kv,
        attention=sorted(queries),
        dtype=_dtype_of(model),
        transforms=transforms,
    )


def _dtype_of(model: nn.Module) -> torch.dtype:
    """In which the quantized layers compute, or the model where it has none."""
    layer = next((module for module in model.modules() if isinstance(module, QuantizedLayer)), None)
    found: Any = layer.dtype if layer is not None else getattr(model, "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


def unquantized_linears(model: nn.Module) -> list[str]:
    """Name what a reader would take for a quantized linear layer if the config did not say otherwise.

    Args:
        model: the model, with its quantized layers in place.

    Returns:
        Names of the modules that are still nn.Linear, of routers and gates that hold a matrix, and of experts that are fused or of which
        none is quantized, in the order of the model.
    """
    named, experts = dict(model.named_modules()), _whole_experts(model)
    within = tuple(f"{name}." for name in experts)
    linears = [name for name, module in named.items() if matches(name, module, _LINEAR) or _is_router(module) or name in experts]
    return [name for name in linears if not name.startswith(within)]


def _whole_experts(model: nn.Module) -> set[str]:
    """Layers of experts that are fused, or of which none is quantized."""
    apart = {name for name, module in model.named_modules() if isinstance(module, UnfusedExperts) and not _holds_quantized(module)}
    return {*fused_modules(model), *apart}


def _holds_quantized(module: nn.Module) -> bool:
    return any(isinstance(one, QuantizedLayer) for one in module.modules())


def _is_router(module: nn.Module) -> bool:
    if _ROUTER.search(type(module).__name__) is None:
        return False  # before the weight is asked for, which a quantized layer would unpack, and a whole model with it
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 2


def stored_names(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Find under which names a transformers model is stored: for some architectures they are not those of its modules.

    Args:
        model: a model of transformers.
        names: dotted names of modules.

    Returns:
        Name in the model to name in the files; only where the two differ.
    """
    stored = stored_keys(model, [f"{name}.weight" for name in names])
    found = {name: stored[f"{name}.weight"].removesuffix(".weight") for name in names}
    return {name: on_disk for name, on_disk in found.items() if on_disk != name}


def stored_keys(model: nn.Module, keys: Sequence[str]) -> dict[str, str]:
    """Find under which names the tensors of a transformers model are stored; rules may rename a weight and not what stands for it.

    Args:
        model: a model of transformers.
        keys: of its state.

    Returns:
        Each key to its name in the files; one that is merged with others to itself.
    """
    from transformers.core_model_loading import revert_weight_conversion

    markers = {key: torch.empty(0, dtype=torch.float32) for key in keys}
    key_of = {id(marker): key for key, marker in markers.items()}
    with plain_names(model):
        reverted = revert_weight_conversion(model, markers)
    stored = {key_of[id(marker)]: on_disk for on_disk, marker in reverted.items() if id(marker) in key_of}
    return {key: stored.get(key, key) for key in keys}


def _needs_dequantize(modules: Mapping[str, QuantizationScheme], dtype: torch.dtype, embeddings: Collection[str]) -> bool:
    """Whether transformers must unpack while it loads.

    By default it first builds empty layers with compressed-tensors, which (0.20) forgets that packed zero points are packed: it then
    refuses its own files; which unpacks fp4 and the MX formats to bfloat16, whatever the model computes in; and which leaves an embedding
    without the `weight` that transformers initializes. Unpacking at once gives the same weights in the model's dtype, but knows one scheme
    only, and leaves the inputs as they are; vLLM does not read the flag.
    """
    schemes = list({_as_read(scheme): scheme for scheme in modules.values()}.values())
    if len(schemes) != 1:
        return False
    if _has_packed_zero_points(schemes[0]):
        return True
    odd = _unpacks_to_bfloat16(schemes[0], dtype) or any(hides_weight(modules[name]) for name in embeddings)
    return odd and schemes[0].input_activations is None


def hides_weight(scheme: QuantizationScheme) -> bool:
    """Whether the format has no tensor of the name `weight`."""
    return scheme.compression_format.endswith("pack-quantized")


def _unpacks_to_bfloat16(scheme: QuantizationScheme, dtype: torch.dtype) -> bool:
    """Whether compressed-tensors would hand this model a weight of another dtype than its own."""
    return dtype != torch.bfloat16 and scheme.compression_format in _UNPACKED_TO_BFLOAT16


def _has_packed_zero_points(scheme: QuantizationScheme) -> bool:
    weights = scheme.weights
    packed = weights is not None and scheme.compression_format == "pack-quantized"
    return packed and weights is not None and not weights.symmetric and weights.strategy != "tensor"


def _has_one_word(scheme: QuantizationScheme, module: nn.Module) -> bool:
    """Whether the zero points of a group fit into one word: a tensor of one row, contiguous however it lies, whose bytes are then not."""
    weights = scheme.weights
    if weights is None or weights.num_bits != 4 or not weights.group_size or not _has_packed_zero_points(scheme):
        return False
    rows, columns = module.weight_size if isinstance(module, QuantizedLayer) else weight_of(module).shape
    return rows * weights.num_bits <= WORD_BITS and columns > weights.group_size


def _as_read(scheme: QuantizationScheme) -> str:
    """What a scheme means to readers: neither for whom it was given, nor in which order the columns were solved, unless that is stored."""
    weights = scheme.weights
    if weights is not None and weights.actorder != "group":
        weights = weights.model_copy(update={"actorder": None})
    return repr((scheme.compression_format, _args(scheme.input_activations), _args(weights)))


def _args(args: QuantizationArgs | None) -> dict[str, Any] | None:
    """Arguments as compressed-tensors writes them: what was not set is left out, except for the six fields that are always there."""
    if args is None:
        return None
    always = {"num_bits", "type", "symmetric", "group_size", "strategy", "dynamic"}
    return {key: value for key, value in args.model_dump(mode="json").items() if key in always or value}


def check_schemes(
    schemes: Mapping[str, QuantizationScheme],
    model: nn.Module | None = None,
    kv_cache_scheme: QuantizationArgs | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Refuse schemes that transformers would not read back; arguments and errors are those of `check_readable`, which asks here."""
    dtype = dtype or (torch.bfloat16 if model is None else _float_dtype(model, schemes))
    embeddings = [] if model is None else _of_kind(model, schemes, nn.Embedding | QuantizedEmbedding)
    at_once = _needs_dequantize(schemes, dtype, embeddings)
    faults = {
        "actorder='group' was given for a checkpoint, and compressed-tensors no longer reads such files; use actorder='static', or keep "
        "the model in memory (no output_dir)": [n for n, s in schemes.items() if s.weights is not None and s.weights.actorder == "group"],
        "asymmetric packed weights stand beside another scheme, and transformers reads them only alone; give all modules one scheme, or "
        "make these symmetric": [] if at_once else [n for n, s in schemes.items() if _has_packed_zero_points(s)],
        f"transformers unpacks this format to bfloat16, and the model computes in {dtype}; load it with dtype='bfloat16', or quantize all "
        "modules by one such scheme without inputs": [] if at_once else [n for n, s in schemes.items() if _unpacks_to_bfloat16(s, dtype)],
        "transformers reads packed embeddings only where all modules have one scheme without inputs; give all one scheme, or ignore "
        "these": [] if at_once else [name for name in embeddings if hides_weight(schemes[name])],
        "compressed-tensors 0.20 does not unpack zero points of 4 bits for at most 8 rows in several groups; ignore these, or make all "
        "modules symmetric": [] if model is None else [n for n, s in schemes.items() if _has_one_word(s, model.get_submodule(n))],
        "transformers has no quantized form of Conv1D; ignore these, or compress the model in memory (oneshot in Python, without "
        "output_dir), from where save_checkpoint of compressor.model.checkpoints.save writes it for load_compressed": _conv1ds(
            model, schemes
        ),
        "transformers unpacks these weights while it loads, and then leaves keys and values as they are; leave kv_cache_scheme out, or use "
        "another scheme": list(schemes) if at_once and kv_cache_scheme is not None else [],
    }
    for reason, names in faults.items():
        if names:
            raise SchemeError(f"{some(names)}: {reason}")


def unpacked_at_once(schemes: Mapping[str, QuantizationScheme], model: nn.Module) -> bool:
    """Tell whether transformers unpacks all weights while it loads a checkpoint.

    Args:
        schemes: dotted name of every module that is to be quantized, to its scheme.
        model: the model, compressed or not yet.

    Returns:
        Whether config.json will ask for that.
    """
    return _needs_dequantize(schemes, _float_dtype(model, schemes), _of_kind(model, schemes, nn.Embedding | QuantizedEmbedding))


def unpacks_as_it_reads() -> bool:
    """Whether transformers unpacks a weight when it reads it, as from 5.21 on, or builds packed layers and unpacks them at the end."""
    from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

    return hasattr(CompressedTensorsHfQuantizer, "get_load_operations")


def unpacked_to_bfloat16(schemes: Mapping[str, QuantizationScheme], model: nn.Module) -> list[str]:
    """Name the modules whose weights compressed-tensors unpacks to bfloat16, which is not what the model computes in.

    Args:
        schemes: dotted name of every module that is to be quantized, to its scheme.
        model: the model, compressed or not yet.

    Returns:
        Their names.
    """
    dtype = _float_dtype(model, schemes)
    return [name for name, scheme in schemes.items() if _unpacks_to_bfloat16(scheme, dtype)]


def _float_dtype(model: nn.Module, schemes: Mapping[str, QuantizationScheme]) -> torch.dtype:
    modules = (model.get_submodule(name) for name in schemes)
    found = next((module.dtype if isinstance(module, QuantizedLayer) else module.weight.dtype for module in modules), None)
    return found if isinstance(found, torch.dtype) else torch.bfloat16


def _of_kind(model: nn.Module, schemes: Mapping[str, QuantizationScheme], kind: Any) -> list[str]:
    return [name for name in schemes if isinstance(model.get_submodule(name), kind)]


def _conv1ds(model: nn.Module | None, schemes: Mapping[str, QuantizationScheme]) -> list[str]:
    modules = {} if model is None else {name: model.get_submodule(name) for name in schemes}
    return [name for name, module in modules.items() if is_conv1d(module) or (isinstance(module, QuantizedLinear) and module.is_transposed)]
