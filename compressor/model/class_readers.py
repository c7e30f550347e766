"""Models whose class in transformers cannot read a checkpoint of theirs, whatever its scheme: known before the run."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from compressor.errors import ModelError, SchemeError
from compressor.model.checkpoints.format import check_schemes, hides_weight, unpacked_at_once, unpacked_to_bfloat16, unpacks_as_it_reads
from compressor.model.experts.format import reader_notes, reader_problems
from compressor.model.experts.unfuse import weight_converters
from compressor.model.folder import some
from compressor.model.loading.load import quiet_transformers
from compressor.model.targets import ends_of, other_names, outward, text_config
from compressor.nn import QuantizedLayer
from compressor.nn.attention.kv_cache import KV_SCALES, attention_modules, cache_argument, kv_args
from compressor.nn.experts import UnfusedExperts, tokens_are_rows
from compressor.numerics.scheme import QuantizationArgs, QuantizationScheme
from compressor.random_state import random_numbers_kept

# Settings of modules that say nothing of what a forward computes, or that shapes of weights say better: a layer's number, a size.
_NO_MATTER = ("training", "gradient_checkpointing", "layer_idx", "vocab_size", "padding_idx")
_HEADS = ("num_attention_heads", "num_key_value_heads")


def check_readable(
    schemes: Mapping[str, QuantizationScheme],
    model: nn.Module | None = None,
    kv_cache_scheme: QuantizationArgs | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Refuse schemes that could be written but that transformers with compressed-tensors 0.20 would not read back.

    Args:
        schemes: dotted name of every module that is to be quantized, to its scheme.
        model: the model, compressed or not yet; None judges the schemes alone, for a model in bfloat16.
        kv_cache_scheme: format of keys and values, None where they are not to be quantized.
        dtype: that the model will be saved in, where its weights have another one for now.

    Raises:
        SchemeError: columns regrouped by activation, asymmetric packed weights beside another scheme or of few rows, fp4 or MX formats in a
            model that does not compute in bfloat16 and that cannot be unpacked at once, layers that it has no quantized form for, or a tied
            head that is not equal to its embedding.
        ModelError: the model is built otherwise than its config says.
    """
    if model is not None:
        check_class_builds(model)
        check_tied_config(model, schemes)
    check_schemes(schemes, model, kv_cache_scheme, dtype)


# `compute_dynamic_scales_and_zp` of compressed-tensors (quantization/utils/helpers.py, 0.20) keeps the first two dimensions of any tensor.
_BY_TOKEN = (
    "keys and values with the strategy 'token' get one scale for each sequence and head, of all tokens of a forward, as compressed-tensors "
    "reads it: later tokens change what earlier ones give; take 'attn_head' or 'tensor' where that matters"
)


def reading_notes(
    model: nn.Module,
    schemes: Mapping[str, QuantizationScheme],
    kv_cache_scheme: QuantizationArgs | None = None,
    *,
    queries: bool = False,
) -> list[str]:
    """Say what a user must know about who reads a checkpoint of this model, before the run.

    Args:
        model: compressed or not, with its experts taken apart; not changed.
        schemes: dotted name of every module that is or will be quantized to its scheme.
        kv_cache_scheme: format of keys and values, None where they are not quantized.
        queries: they are or will be quantized as well.

    Returns:
        Sentences; none where transformers runs it as it is.
    """
    kv = [] if kv_cache_scheme is None else _kv_notes(model, schemes)
    kv += [_BY_TOKEN] if kv_cache_scheme is not None and kv_cache_scheme.strategy == "token" else []
    kv += _query_notes(model) if queries else []
    experts = [*reader_notes(model, schemes, has_kv=kv_cache_scheme is not None), *_notes_of_bfloat16(model, schemes)]
    return [*experts, *_class_notes(model, schemes), *kv]


def _notes_of_bfloat16(model: nn.Module, schemes: Mapping[str, QuantizationScheme]) -> list[str]:
    """Say that experts which transformers keeps fused stay in the dtype to which they were unpacked; other layers it casts."""
    odd = [name for name in unpacked_to_bfloat16(schemes, model) if tokens_are_rows(model, [name])]
    if not odd or not unpacks_as_it_reads() or reader_problems(model, schemes):
        return []
    return [
        f"transformers 5.23 keeps quantized experts ({some(odd)}) in bfloat16, whatever the model computes in, and its outputs differ; "
        "compressor.load_compressed computes in the dtype of the model"
    ]


def _kv_notes(model: nn.Module, schemes: Mapping[str, QuantizationScheme]) -> list[str]:
    """Say why transformers stops at keys and values, or passes over them: compressed-tensors counts heads, and looks for one argument."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return []
    config = model.config.get_text_config(decoder=True)
    uncounted = [name for name in _HEADS if not hasattr(config, name)]
    merged = [] if schemes else [target for one in weight_converters(model) if _collects(one) for target in one.target_patterns]
    reasons = [
        *(f"its config has no {name}, of which compressed-tensors asks for the scales" for name in uncounted),
        *(f"it merges weights into {name} while it loads, and looks for a scheme of weights there" for name in merged[:1]),
    ]
    unseen = [name for name, module in attention_modules(model).items() if cache_argument(module) == "cache"]
    return [
        *(
            f"transformers does not load {type(model).__name__} with quantized keys and values ({one}); compressor.load_compressed reads "
            "the checkpoint"
            for one in reasons
        ),
        *(
            f"transformers leaves keys and values as they are ({name} and the others are handed their cache as `cache`, from 5.24 on, and "
            "compressed-tensors 0.20 looks for past_key_values); compressor.load_compressed quantizes them"
            for name in unseen[:1]
        ),
    ]


def _query_notes(model: nn.Module) -> list[str]:
    """Say that compressed-tensors looks a function up for attention, and eager attention has none."""
    eager = [name for name, module in attention_modules(model).items() if getattr(module.config, "_attn_implementation", "") == "eager"]
    return [
        f"transformers does not run {type(model).__name__} with quantized queries where attention is eager, as it is here ({some(eager)}: "
        "compressed-tensors finds no function of that name); compressor.load_compressed reads the checkpoint, and so does transformers "
        "with attn_implementation='sdpa', where the class has it"
        for _ in eager[:1]
    ]


def _collects(converter: Any) -> bool:
    """Whether transformers would unpack what this converter merges."""
    return all(source.endswith(".weight") for source in converter.source_patterns)


def _class_notes(model: nn.Module, schemes: Mapping[str, QuantizationScheme]) -> list[str]:
    """Say why transformers stops at a checkpoint of this model, though its schemes could be read.

    transformers calls `_init_weights` for modules whose weights it has not found under the name `weight`. Most classes ask whether there
    is one; those that do not raise. It stops at some rules for files, too. Both are tried on a model of the same class without bytes.
    compressed-tensors stops where a module stands in several places.

    Args:
        model: compressed or not; not changed.
        schemes: dotted name of every module that will be quantized to its scheme.

    Returns:
        A sentence, or none. Of what is no model of transformers, or cannot be built from its config, nothing is known.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return []
    twice = other_names(model) if schemes else {}
    if twice:
        name, others = next(iter(twice.items()))
        return [
            f"transformers does not run this checkpoint of {type(model).__name__} ({name} stands in it as {others[0]}, too, and "
            "compressed-tensors moves no module twice); compressor.load_compressed reads the checkpoint"
        ]
    unpacks = unpacked_at_once(schemes, model)
    if unpacks and not unpacks_as_it_reads() and (odd := unpacked_to_bfloat16(schemes, model)):
        return [
            f"transformers does not run this checkpoint of {type(model).__name__} (before 5.21, as here, it unpacks {some(odd)} to "
            "bfloat16, whatever the model computes in); compressor.load_compressed reads the checkpoint"
        ]
    twin = class_twin(model) if schemes else None
    if twin is None:
        return []
    packed = {} if unpacks and unpacks_as_it_reads() else schemes
    stopped = _stopped_rules(twin, packed) or (_stopped_filling(twin, packed) if packed else None)
    return [
        f"transformers does not load quantized layers of {type(model).__name__} ({reason}); compressor.load_compressed reads the checkpoint"
        for reason in [stopped]
        if reason is not None
    ]


def _stopped_filling(twin: Any, schemes: Mapping[str, QuantizationScheme]) -> str | None:
    """Say which class asks for a weight where transformers fills what it has not found under this name. Takes these out of the twin."""
    from transformers import PreTrainedModel

    there = dict(twin.named_modules())
    for name, scheme in schemes.items():
        if name in there and hides_weight(scheme) and not isinstance(there[name], QuantizedLayer):
            there[name]._parameters.pop("weight", None)
    asked = {name: module for name, module in there.items() if isinstance(module, PreTrainedModel)}  # each for what is its own
    for name, module in there.items():
        owner = next(asked[place] for place in outward(name) if place in asked)
        try:
            owner._init_weights(module)
        except AttributeError as error:
            return f"{error}, of which the _init_weights of {type(owner).__name__} asks"
        except (RuntimeError, NotImplementedError):  # asks for values, which are not here
            continue
    return None


def _stopped_rules(twin: Any, schemes: Mapping[str, QuantizationScheme]) -> str | None:
    """Say why transformers makes no rules for the files of a quantized model: before it reads one, whatever lies in them.

    A rule that cuts a joined weight shall unpack it first where its parts are no quantized layers, and none may take several tensors and
    give several. Classes have such rules for files of another form, too (Dinov2's for SwiGLU).

    Args:
        twin: without bytes; its quantized layers get a scale.
        schemes: of layers that stay packed; empty where all are unpacked as they load.
    """
    from transformers import CompressedTensorsConfig
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

    there = dict(twin.named_modules())
    if schemes.keys() <= there.keys():  # single experts are not there, and beside them all is unpacked
        for name in (name for name, scheme in schemes.items() if scheme.weights is not None):
            there[name].weight_scale = nn.Parameter(torch.empty(1, dtype=torch.float32, device="meta"))
    with quiet_transformers():  # before 5.21 it says here what only a file can answer
        quantizer = CompressedTensorsHfQuantizer(CompressedTensorsConfig(), pre_quantized=True)
    quantizer.validate_environment()  # sets what the rules ask for
    try:
        get_model_conversion_mapping(twin, hf_quantizer=quantizer)
    except ValueError as error:
        return f"it makes no rule for the files: {error}"
    return None


def check_class_builds(model: nn.Module) -> None:
    """Refuse a model in memory that is built otherwise than its class builds it from its config, for nobody could load its checkpoint.

    A layer taken out, a wrapped projection, an added bias, buffer or extra state stands in no config.json: `from_pretrained` fills what
    it misses with random numbers, leaves out what it does not know, and warns at most.

    Args:
        model: compressed or not. Of what is no model of transformers, or cannot be built from its config, nothing is known.

    Raises:
        ModelError: names the tensors that differ.
    """
    twin = class_twin(model)
    if twin is None:
        return
    ours = _own_tensors(model)
    own, built = (
        {key: shape for key, shape in _shapes(one).items() if key not in ours and not key.startswith(tuple(ours))} for one in (model, twin)
    )
    odd = sorted(key for key in own.keys() | built.keys() if own.get(key) != built.get(key))
    if odd:
        raise ModelError(
            f"{type(model).__name__}: {some(odd)}: {len(odd)} tensors are not those that the class builds from its config, and whoever "
            "loads the checkpoint would find other layers there; make config and model agree (removed layers: num_hidden_layers; adapters: "
            "merge them first; a buffer of your own: persistent=False), or keep the model in memory (no output_dir)"
        )


def _own_tensors(model: nn.Module) -> set[str]:
    """Names of what compression makes of a model; of what lies deeper, such as experts that were taken apart, how they begin."""
    found = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, UnfusedExperts):
            found.add(f"{name}.")
        if isinstance(module, QuantizedLayer):
            found |= {f"{name}.{key}" for key in ("weight", *module.specs())} | {f"{name}.{key}." for key in module._modules}
        if kv_args(module) is not None:
            found |= {f"{name}.{key}" for key in KV_SCALES}
    return found


def module_notes(model: nn.Module) -> list[str]:
    """Say what of a model in memory, beside what is saved, is not what its class builds from its config: no file would hold that.

    Args:
        model: not changed.

    Returns:
        A sentence that names modules of another class, plain settings and buffers with another value and replaced forwards, or none: also
        of what is no model of transformers, or cannot be built from its config.
    """
    twin = class_twin(model, with_buffers=True)
    if twin is None:
        return []
    own = dict(model.named_modules())
    odd = [text for name, built in twin.named_modules() if name in own for text in _differences(name, own[name], built)]
    here, there = _unsaved(model), _unsaved(twin)
    odd += [f"{name} holds other values" for name in here if name in there and not _is_close(here[name], there[name])]
    if not odd:
        return []
    return [
        f"{some(odd)}: {len(odd)} things are not what {type(model).__name__} builds from its config; no file holds them, so whoever "
        "loads the checkpoint gets what the class builds; make config and model agree"
    ]


def _differences(name: str, module: nn.Module, built: nn.Module) -> list[str]:
    if isinstance(module, QuantizedLayer | UnfusedExperts):
        return []
    own, other = type_before_parametrizations(module), type_before_parametrizations(built)  # a class is made anew for each parametrization
    if own is not other or is_parametrized(module) is not is_parametrized(built):
        return [f"{name} is a {type(module).__name__}, not a {type(built).__name__}"]
    plain = {key: value for key, value in vars(built).items() if type(value) in (bool, int, float, str) and not key.startswith("_")}
    found = {key: vars(module).get(key, value) for key, value in plain.items() if key not in _NO_MATTER}
    odd = [f"{name}.{key} is {value!r}, not {plain[key]!r}" for key, value in found.items() if value != plain[key]]
    if "forward" in vars(module) and not hasattr(module, "_hf_hook"):  # which accelerate sets to move weights
        odd.append(f"{name}.forward was replaced")
    return odd


def dtype_notes(model: nn.Module) -> list[str]:
    """Say that a model in memory holds weights in other dtypes than readers do: that which config.json names, or float32 by its class.

    Args:
        model: compressed or not; not changed.

    Returns:
        A sentence for each pair of dtypes, or none: also of what is no model of transformers.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return []
    held = {name: value.dtype for name, value in model.named_parameters() if value.is_floating_point()}
    cast: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for name in sorted(held):
        there = torch.float32 if _is_kept_wide(model, name) else model.dtype
        if held[name] != there:
            cast.setdefault((held[name], there), []).append(name)
    return [
        f"{len(names)} tensors ({some(names)}) are {str(here).removeprefix('torch.')} in this model, and "
        f"{str(there).removeprefix('torch.')}, {_WHY[there == model.dtype]}, where its checkpoint is loaded, so that it computes otherwise "
        f"than this; cast {'the model to one dtype' if there == model.dtype else 'them to it'} first"
        for (here, there), names in cast.items()
    ]


_WHY = {True: "the one dtype that config.json names", False: "in which its class keeps them"}


def _is_kept_wide(model: Any, name: str) -> bool:
    """Whether a reader has a parameter of a model in half precision in float32; the class names parts of names."""
    if model.dtype not in (torch.float16, torch.bfloat16):
        return False
    named = {*(model._keep_in_fp32_modules_strict or ()), *((model._keep_in_fp32_modules or ()) if model.dtype == torch.float16 else ())}
    return any(one in name for one in named)


def buffer_notes(model: nn.Module) -> list[str]:
    """Say that a cast has rounded buffers that no checkpoint holds, such as rotary frequencies; whoever loads it gets them unrounded.

    Args:
        model: compressed or not; not changed.

    Returns:
        A sentence, or none: also of what is no model of transformers, or cannot be built from its config.
    """
    twin = class_twin(model, with_buffers=True)
    if twin is None:
        return []
    own, built = _unsaved(model), _unsaved(twin)
    cast = sorted(name for name in own.keys() & built.keys() if own[name].dtype != built[name].dtype)
    if not cast:
        return []
    here, there = (str(buffers[cast[0]].dtype).removeprefix("torch.") for buffers in (own, built))
    return [
        f"{len(cast)} buffers that no file holds ({some(cast)}) are {here} in this model, and {there} where its checkpoint is loaded: "
        "a cast of the model has rounded them, so it computes otherwise than what is loaded; load it with dtype= in place of casting it"
    ]


def _unsaved(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{name}.{key}".lstrip("."): buffer
        for name, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if key in module._non_persistent_buffers_set and buffer is not None
    }


def _is_close(own: Tensor, built: Tensor) -> bool:
    """Say whether they are equal but for how another device rounds; those without values or of another dtype are for others to judge."""
    if own.is_meta or built.is_meta or own.dtype != built.dtype:
        return True
    if own.shape != built.shape or not (built.is_floating_point() or built.is_complex()):
        return torch.equal(own.cpu(), built)
    return torch.allclose(own.cpu(), built, rtol=1e-5, atol=0.0, equal_nan=True)


def class_twin(model: nn.Module, settings: Mapping[tuple[str, ...], Any] | None = None, *, with_buffers: bool = False) -> Any:
    """Make a model of the same class and config, its parameters without bytes.

    Args:
        model: not changed.
        settings: names of attributes, from the config to what gets another value, to that value.
        with_buffers: as if it were loaded in the model's dtype, its buffers on the CPU.

    Returns:
        It, on the meta device but for such buffers; None of what is no model of transformers, or cannot be built from such a config.
    """
    from transformers import PreTrainedModel
    from transformers.initialization import no_init_weights

    from compressor.model.loading.casts import parameters_on_meta, recompute_buffers
    from compressor.model.loading.load import quiet_transformers

    if not isinstance(model, PreTrainedModel):
        return None
    place = parameters_on_meta() if with_buffers else torch.device("meta")
    try:
        with quiet_transformers(), random_numbers_kept(), no_init_weights(), place:
            config = copy.deepcopy(model.config)
            for (*path, name), value in (settings or {}).items():
                holder = config
                for step in path:
                    holder = getattr(holder, step)
                setattr(holder, name, value)
            twin: nn.Module = type(model)._from_config(config, dtype=model.dtype) if with_buffers else type(model)(config)
        if with_buffers:
            recompute_buffers(twin)
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, ImportError):
        return None
    return twin


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Shapes of the parameters, of the buffers that are saved with them, and of what else the model saves (`get_extra_state`, hooks)."""
    found = {
        f"{name}.{key}".lstrip("."): tensor.shape
        for name, module in model.named_modules(remove_duplicate=False)
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and key not in module._non_persistent_buffers_set
    }
    return found | {key: getattr(value, "shape", torch.Size()) for key, value in model.state_dict().items() if key not in found}


def check_tied_config(model: nn.Module, names: Collection[str]) -> None:
    """Refuse to quantize a head or an embedding that config.json ties to the other, while their weights differ.

    transformers leaves such weights apart while both are floats; of a quantized one it looks for the weight that it would tie, and stops.

    Args:
        model: compressed or not.
        names: dotted names of the modules that are quantized.

    Raises:
        SchemeError: one of them is such a head or embedding.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or not getattr(text_config(model.config), "tie_word_embeddings", False):
        return
    ends = ends_of(model)
    if None in ends:  # without a head nothing is tied, whatever the config says
        return
    torn = next((name for name, module in model.named_modules() if name in names and any(module is end for end in ends)), None)
    if torn is not None:
        raise SchemeError(
            f"{torn}: config.json says that head and embedding are tied (tie_word_embeddings), but their weights differ, and transformers "
            f"would not load it quantized; set tie_word_embeddings to false in the config, or ignore {torn}"
        )
