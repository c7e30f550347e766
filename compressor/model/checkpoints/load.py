"""Read a compressed checkpoint back without compressed-tensors: every quantized layer becomes the runtime layer that it was written from.

transformers cannot load every checkpoint that its format allows (see experts/format.py), and where it can it may dequantize. This reader
takes the files as they are: experts one by one, packed weights packed, quantized inputs quantized, scales of keys and values where they
belong. What is missing, left over or of another shape is an error, never random numbers. The float weights are never there: the model is
built without them, and memory is that of the files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import ValidationError
from safetensors import safe_open
from torch import Tensor, nn

from compressor.errors import ModelError
from compressor.model.checkpoints.format import stored_keys, stored_names
from compressor.model.checkpoints.online import read_rotations
from compressor.model.checkpoints.save import RECORD_FILE
from compressor.model.experts.format import plain_names
from compressor.model.experts.unfuse import UnfusedModel, unfuse_into
from compressor.model.folder import check_weight_files, one_line, read_config, read_json, resolve_folder, some, weight_files
from compressor.model.loading.casts import parameters_on_meta, recompute_buffers
from compressor.model.loading.load import (
    DTYPES,
    LOAD_ERRORS,
    check_class,
    quiet_transformers,
    read_generation_config,
    resolve_class,
    resolve_device,
)
from compressor.model.saving import attach_save
from compressor.model.targets import matches, other_names, put_module
from compressor.nn import Matmul, QuantizedLayer, QuantizedLinear, empty_layer, is_quantizable, set_matmul
from compressor.nn.attention.kv_cache import attach_kv_quantizer, attention_modules
from compressor.nn.experts import UnfusedExperts, split_weights, tokens_are_rows
from compressor.nn.quantized_linear import is_conv1d
from compressor.numerics.scheme import OBSERVER_KINDS, QuantizationArgs, QuantizationScheme
from compressor.settings.kinds import DEVICE, FLAG, MODEL_CLASS, PATH, TEXT
from compressor.settings.options import checked

_SCHEME_PARTS = ("weights", "input_activations")
_NOT_READ = ("observer", "observer_kwargs", "zp_dtype")
_QUANTIZED_PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_global_scale", "weight_g_idx")
_NO_FORMAT = (None, "mixed-precision", "dense")
# One remedy for Python and the command line, where these words arrive as well.
_ELSEWHERE = "give a checkpoint that is compressed in this format, or load this one with from_pretrained of transformers"


@checked(folder=PATH, device=DEVICE, model_class=MODEL_CLASS, trust_remote_code=FLAG, **dict.fromkeys(("matmul", "revision"), TEXT))
def load_compressed(
    folder: str | Path,
    *,
    device: str | torch.device = "auto",
    model_class: str | type | None = None,
    trust_remote_code: bool = False,
    matmul: Matmul = "reference",
    revision: str | None = None,
) -> nn.Module:
    """Load a checkpoint in the compressed-tensors format with this project's own layers.

    Files must fit their config; that each value is the one that was written is for `harness validate`, which looks at the digests.

    Args:
        folder: the checkpoint, with config.json and safetensors files; or its name on the hub (`owner/name`).
        device: "auto" (the first GPU, else the CPU) or a device of torch.
        model_class: class of transformers, or its name; None for AutoModelForCausalLM, which must be what config.json names.
        trust_remote_code: run Python files of the folder, where its config asks for them.
        matmul: "reference" (the logits of transformers, bit for bit), or "native" (codes times codes where input and weight are both int8
            or both fp8).
        revision: branch, tag or commit on the hub; None is main.

    Returns:
        The model in eval mode; quantized layers are QuantizedLinear and QuantizedEmbedding, also those of single experts.

    Raises:
        UserInputError: an argument is of the wrong kind.
        ModelError: the folder holds no compressed checkpoint, config and tensors do not fit each other, or the hub does not give it.
        SchemeError: a layer cannot have the scheme that the config gives it.
    """
    folder = resolve_folder(folder, revision, code=trust_remote_code).path
    config = read_config(folder)
    check_weight_files(folder)
    check_scheme_kept(folder, config)
    generation_config = read_generation_config(folder)
    schemes, kv_cache_scheme = _quantization(config, folder)
    model = _empty_model(folder, config, model_class, trust_remote_code)
    unfuse_into(UnfusedModel(model), prove=False)  # there is nothing to run yet
    tensors = _read(folder)
    split = _split_fused(model, tensors)
    _attach_kv(model, [one for one in schemes if one.weights is None], kv_cache_scheme, folder)
    rotations = read_rotations(model, config["quantization_config"], tensors, folder)
    ignored = config["quantization_config"].get("ignore") or []
    _place_layers(model, tensors, schemes, ignored, folder)
    _check_no_float(model, tensors.keys(), schemes, ignored, folder)
    for name, rotation in rotations:
        rotation.attach(model.get_submodule(name))
    _fill(model, tensors, split, folder, config)
    _check_parts(model, folder)
    if model_class is None:
        check_class(folder, model, config)
    if generation_config is not None and hasattr(model, "generation_config"):
        model.generation_config = generation_config
    set_matmul(model, matmul)
    _set_tokens(model)
    attach_save(model, _record(folder))
    return model.to(resolve_device(device)).eval()


def _set_tokens(model: nn.Module) -> None:
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    by_row = tokens_are_rows(model, layers)
    for layer in layers.values():
        layer.tokens_are_rows = by_row


def _attach_kv(model: nn.Module, groups: Sequence[QuantizationScheme], kv_cache_scheme: QuantizationArgs | None, folder: Path) -> None:
    """Give attention modules empty scales: of keys and values by kv_cache_scheme, of queries as well by a group for inputs alone."""
    found = attention_modules(model)
    for group in groups:
        if not any(matches(name, module, target) for target in group.targets for name, module in found.items()):
            raise ModelError(
                f"{folder}: a group quantizes the inputs of {group.targets} and no weights, which only attention has here; {_ELSEWHERE}"
            )
    for name, attention in found.items():
        meant = (group.input_activations for group in groups if any(matches(name, attention, one) for one in group.targets))
        own = next(meant, None)
        args = own or kv_cache_scheme
        if args is not None:
            attach_kv_quantizer(attention, args, name=name, empty=True, queries=own is not None)


def check_scheme_kept(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a folder whose config.json has lost what its weights are: a reader would fill in random numbers.

    Args:
        folder: with safetensors files.
        config: content of its config.json.

    Raises:
        ModelError: the files hold parts of quantized weights, and the config names no quantization at all.
    """
    if config.get("quantization_config"):
        return
    names = [name for file in weight_files(folder) for name in safe_open(folder / file, framework="pt").keys()]  # noqa: SIM118
    parts = [name for name in names if name.rpartition(".")[2] in _QUANTIZED_PARTS]
    if parts:
        raise ModelError(
            f"{folder}: {len(parts)} tensors are parts of quantized weights ({some(parts)}), and config.json has no quantization_config "
            "that says how to read them; restore config.json"
        )


def _record(folder: Path) -> dict[str, Any] | None:
    """What compression.json says, which goes along when the model is saved again; None for a checkpoint of others."""
    path = folder / RECORD_FILE
    return read_json(path) if path.is_file() else None


def _read(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name in weight_files(folder):
        with safe_open(folder / name, framework="pt") as file:
            found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
        other = next((key for key in found.keys() & tensors.keys() if not _is_same(found[key], tensors[key])), None)
        if other is not None:
            raise ModelError(f"{folder}: {other} lies in {name} and in another file, with other values; fetch the folder again")
        tensors |= found
    return tensors


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def _quantization(config: Mapping[str, Any], folder: Path) -> tuple[list[QuantizationScheme], QuantizationArgs | None]:
    """The schemes of the config groups, and that of keys and values."""
    found = config.get("quantization_config")
    if not isinstance(found, Mapping) or found.get("quant_method") != "compressed-tensors":
        method = found.get("quant_method") if isinstance(found, Mapping) else None
        raise ModelError(f"{folder}: config.json names no compressed-tensors groups{f' but {method!r}' if method else ''}; {_ELSEWHERE}")
    try:
        groups = (found.get("config_groups") or {}).values()
        kv = found.get("kv_cache_scheme")
        schemes = [_scheme(group, found.get("format")) for group in groups]
        kv_cache_scheme = None if kv is None else _args(kv)
        for pattern in (*(one for scheme in schemes for one in scheme.targets), *(found.get("ignore") or ())):
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
    except (ValidationError, LookupError, TypeError, AttributeError, re.error) as error:
        raise ModelError(f"{folder}: its quantization_config cannot be used here ({one_line(error)}); restore config.json") from error
    status = found.get("quantization_status", "compressed")
    if status != "compressed":
        raise ModelError(f"{folder}: quantization_status is {status!r}, which says that weights lie there as floats; {_ELSEWHERE}")
    if not isinstance(found.get("ignore") or [], list):
        raise ModelError(f"{folder}: its quantization_config cannot be used here (ignore is no list); restore config.json")
    transforms = found.get("transform_config")
    if not isinstance(transforms or {}, Mapping):
        raise ModelError(f"{folder}: its quantization_config cannot be used here (transform_config is no table); restore config.json")
    if not schemes and kv_cache_scheme is None and not transforms:
        raise ModelError(f"{folder}: config.json names no compressed-tensors groups; {_ELSEWHERE}")
    return schemes, kv_cache_scheme


def _scheme(group: Mapping[str, Any], model_format: str | None) -> QuantizationScheme:
    parts = {key: None if group.get(key) is None else _args(group[key]) for key in _SCHEME_PARTS}
    # A group without a format of its own has the model's, unless that only says that groups differ; one without weights stores none.
    weights = parts["weights"]
    stored_as = None if weights is None else group.get("format") or (None if model_format in _NO_FORMAT else model_format)
    if stored_as == "naive-quantized" and weights is not None:  # the same bytes under a name of their own
        stored_as = f"{weights.type}-quantized"
    return QuantizationScheme(targets=group["targets"], output_activations=group.get("output_activations"), format=stored_as, **parts)


def _args(given: Mapping[str, Any]) -> QuantizationArgs:
    """A number format, without the dtype that zero points had before they were packed; how its scales were found decides nothing any more.

    So an observer that means something here is kept as it was written, for whoever saves again, and held against no rule.
    """
    args = QuantizationArgs(**{key: value for key, value in given.items() if key not in _NOT_READ})
    observer, settings = given.get("observer"), given.get("observer_kwargs")
    if not isinstance(observer, str) or observer not in OBSERVER_KINDS:
        return args
    return args.model_copy(update={"observer": observer, "observer_kwargs": settings if isinstance(settings, dict) else {}})


def _empty_model(folder: Path, config: Mapping[str, Any], model_class: str | type | None, trust_remote_code: bool) -> nn.Module:
    """The float model without weights (they are on the meta device), but with its computed buffers."""
    from transformers import AutoConfig
    from transformers.initialization import no_init_weights

    loader = resolve_class(model_class)
    try:
        with quiet_transformers(), no_init_weights(), parameters_on_meta():
            parsed = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
            del parsed.quantization_config
            dtype = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.float32)
            if hasattr(loader, "from_config"):
                model: nn.Module = loader.from_config(parsed, trust_remote_code=trust_remote_code, dtype=dtype)
            else:
                model = loader._from_config(parsed, dtype=dtype)
        recompute_buffers(model)
    except LOAD_ERRORS as error:
        raise ModelError(
            f"{folder}: its config gives no model ({one_line(error)}); check config.json, or name model_class{_said_class(config)}"
        ) from error
    _keep_in_float32(model, dtype)
    return model


def _keep_in_float32(model: nn.Module, dtype: torch.dtype) -> None:
    """Give tensors float32 that their class keeps so in a model of another dtype, as `from_pretrained` does. Changes the model."""
    from transformers import PreTrainedModel

    kept = [*model._get_dtype_plan(dtype)] if isinstance(model, PreTrainedModel) else []
    for key, value in model.state_dict().items() if kept else ():
        if value.dtype in DTYPES.values() and any(re.search(one.replace("*", ".*"), key) for one in kept):
            name, _, last = key.rpartition(".")
            owner = model.get_submodule(name)
            if last in owner._parameters:
                owner._parameters[last] = nn.Parameter(value.float(), requires_grad=owner.get_parameter(last).requires_grad)
            else:
                owner._buffers[last] = value.float()


def _said_class(config: Mapping[str, Any]) -> str:
    """Which class a folder was saved from, as words behind a remedy."""
    named = config.get("architectures")
    return f" (config.json says model_class={named[0]!r})" if isinstance(named, list) and named else ""


def _split_fused(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take the fused floats of experts out of `tensors`; give them expert by expert, under names of the model."""
    split: dict[str, Tensor] = {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, UnfusedExperts)}
    stored = stored_names(model, list(layers))
    for name, experts in layers.items():
        on_disk = {fused: f"{stored.get(name, name)}.{fused}" for fused in experts.layout.fused_names()}
        if not any(key.startswith(f"{stored.get(name, name)}.") for key in tensors):  # not below the module's own name
            keys = stored_keys(model, [f"{name}.{fused}" for fused in on_disk])
            on_disk = {fused: keys[f"{name}.{fused}"] for fused in on_disk}
        for fused in [key for key, file_key in on_disk.items() if file_key in tensors]:
            parts = split_weights(experts.layout, fused, tensors.pop(on_disk[fused]))
            split |= {f"{name}.{key}": value for key, value in parts.items()}
    return split


def _place_layers(
    model: nn.Module, tensors: Mapping[str, Tensor], schemes: list[QuantizationScheme], ignored: Sequence[str], folder: Path
) -> None:
    """Put an empty quantized layer wherever the files hold a part of a quantized weight: what else belongs to it is then found missing."""
    modules = {name: module for name, module in model.named_modules() if is_quantizable(module)}
    stored, others = stored_names(model, list(modules)), other_names(model)
    quantized = {key.rpartition(".")[0] for key, tensor in tensors.items() if _is_quantized(key.rpartition(".")[2], tensor)}
    for name, module in modules.items():
        on_disk = stored.get(name, name)
        if on_disk not in quantized:
            continue
        weighing = (one for one in schemes if one.weights is not None)
        scheme = next((one for one in weighing if any(_is_meant(module, (name, on_disk), target) for target in one.targets)), None)
        fault = "no group of the quantization_config targets it" if scheme is None else "the quantization_config ignores it"
        if scheme is None or any(_is_meant(module, (name, on_disk), pattern) for pattern in ignored):
            raise ModelError(f"{folder}: {on_disk} is stored quantized, but {fault}; restore config.json")
        put_module(model, name, empty_layer(module, scheme, name=name), others)


def _check_no_float(
    model: nn.Module, stored: Collection[str], schemes: Sequence[QuantizationScheme], ignored: Sequence[str], folder: Path
) -> None:
    """Refuse floats where the config says codes: other readers would look for scales."""
    experts = {part for module in model.modules() if isinstance(module, UnfusedExperts) for part in module.modules()}  # fused for others
    floats = {name: module for name, module in model.named_modules() if is_quantizable(module) and not isinstance(module, QuantizedLayer)}
    modules = {name: module for name, module in floats.items() if module not in experts}
    names = stored_names(model, list(modules))
    targets = [target for scheme in schemes if scheme.weights is not None for target in scheme.targets]
    meant = [
        on_disk
        for name, module in modules.items()
        if f"{(on_disk := names.get(name, name))}.weight" in stored
        and any(_is_meant(module, (name, on_disk), target) for target in targets)
        and not any(_is_meant(module, (name, on_disk), pattern) for pattern in ignored)
    ]
    if meant:
        raise ModelError(
            f"{folder}: {len(meant)} modules are targets of the quantization_config, and their weights are stored as floats "
            f"({some(meant)}); name them in its ignore, or restore config.json"
        )


def _check_parts(model: nn.Module, folder: Path) -> None:
    """Refuse scales that are no numbers, and shapes that are another weight's."""
    attention = attention_modules(model)
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantizedLayer) and name not in attention:
            continue
        for key, value in layer.named_buffers(recurse=False):
            if value.is_floating_point() and key.endswith("scale") and not bool(value.float().isfinite().all()):
                raise ModelError(f"{folder}: {name}.{key} holds NaN or infinity; fetch the folder again")
            if key == "weight_shape" and value.tolist() != list(layer.weight_size):
                raise ModelError(f"{folder}: {name}.{key} is {value.tolist()}, and the weight {list(layer.weight_size)}; fetch it again")


def _is_quantized(key: str, tensor: Tensor) -> bool:
    return key in _QUANTIZED_PARTS or (key == "weight" and tensor.dtype not in DTYPES.values())


def _is_meant(module: nn.Module, names: tuple[str, ...], target: str) -> bool:
    """Whether a target of the config names a module; a quantized Conv1D is written as the linear layer that it is."""
    return any(matches(name, module, target) for name in names) or (target == "Linear" and is_conv1d(module))


def _fill(model: nn.Module, tensors: dict[str, Tensor], split: Mapping[str, Tensor], folder: Path, config: Mapping[str, Any]) -> None:
    """Give the model its tensors; all of them, each of the right shape. Changes the model and empties `tensors`."""
    state = model.state_dict()
    found = {key: tensors.pop(stored) for key, stored in _stored_keys(model, state).items() if stored in tensors}
    found |= {**split, **_never_saved(model, [key for key in state if key not in found])}
    found = {key: _as_wanted(value, state[key].dtype) for key, value in found.items()}
    wrong = [key for key, value in found.items() if value.shape != state[key].shape or value.dtype != state[key].dtype]
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    missing = [key for key in state if key not in found and ties.get(key) not in found]
    for fault, names in (("missing", missing), ("of another shape or dtype than config.json says", wrong), ("left over", list(tensors))):
        if names:
            raise ModelError(
                f"{folder}: {len(names)} tensors are {fault} ({some(names)}); restore the folder, "
                f"or name the class they belong to from Python{_said_class(config)}"
            )
    model.load_state_dict(found, strict=False, assign=True)
    if any(key not in found for key in ties):
        model.tie_weights()  # type: ignore[operator]
        own = {key: found[key] for key, _ in model.named_buffers(remove_duplicate=False) if key in found}
        model.load_state_dict(own, strict=False, assign=True)  # it ties scales of blocks whose weights are one, too


def _never_saved(model: nn.Module, missing: Sequence[str]) -> dict[str, Tensor]:
    """Tensors that no file of the class holds, such as sinusoids of positions, as the class makes them; none that it draws."""
    made: dict[str, Tensor] = {}
    for key in sorted(set(getattr(model, "_keys_to_ignore_on_save", None) or ()) & set(missing)):
        owner, name = model.get_submodule(key.rpartition(".")[0]), key.rpartition(".")[2]
        fresh = []
        for start in (0.0, 1.0):  # what is drawn, or not set, differs
            setattr(owner, name, nn.Parameter(torch.full(owner.get_parameter(name).shape, start, dtype=owner.get_parameter(name).dtype)))
            cast("Any", model)._init_weights(owner)
            fresh.append(owner.get_parameter(name).detach().clone())
        if torch.equal(*fresh):
            made[key] = fresh[0]
    return made


def _as_wanted(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Ordinary floats take the dtype of the model, as in transformers; codes and fp8 scales are what they are."""
    return value.to(dtype) if {value.dtype, dtype} <= set(DTYPES.values()) else value


def _stored_keys(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, str]:
    """Name in the model to name in the files; a tensor that transformers converts, not only renames, is not among them."""
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return {key: key for key in state}
    with plain_names(model):
        stored = {id(value): key for key, value in revert_weight_conversion(model, dict(state)).items()}
    return {key: stored[id(value)] for key, value in state.items() if id(value) in stored}
