"""Read a compressed checkpoint back without compressed-tensors: every quantized layer becomes the runtime layer that it was written from.

transformers cannot load every checkpoint that its format allows (see experts_format.py), and where it can it may dequantize. This reader
takes the files as they are: experts one by one, packed weights packed, quantized inputs quantized. What is missing, left over or of another
shape is an error, never random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import safe_open
from torch import Tensor, nn

from compressor.errors import ModelError
from compressor.model.experts import UnfusedModel, unfuse_into
from compressor.model.folder import check_weight_files, one_line, read_config, some, weight_files
from compressor.model.format import stored_names
from compressor.model.load import LOAD_ERRORS, quiet_transformers, resolve_class, resolve_device
from compressor.model.targets import matches
from compressor.nn import QuantizedLinear
from compressor.nn.expert_layout import split_weights
from compressor.nn.experts import UnfusedExperts
from compressor.numerics.scheme import QuantizationScheme

_SCHEME_FIELDS = ("weights", "input_activations", "format")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_compressed(
    folder: str | Path, *, device: str | torch.device = "auto", model_class: str | type | None = None, trust_remote_code: bool = False
) -> nn.Module:
    """Load a checkpoint in the compressed-tensors format with this project's own layers.

    Args:
        folder: the checkpoint, with config.json and safetensors files.
        device: "auto" (the first GPU, else the CPU) or a device of torch.
        model_class: class of transformers, or its name; None for AutoModelForCausalLM.
        trust_remote_code: run Python files of the folder, where its config asks for them.

    Returns:
        The model in eval mode; quantized layers are QuantizedLinear, also those of single experts.

    Raises:
        ModelError: the folder holds no compressed checkpoint, or config and tensors do not fit each other.
    """
    folder = Path(folder)
    config = read_config(folder)
    check_weight_files(folder)
    schemes = _group_schemes(config, folder)
    model = _empty_model(folder, config, model_class, trust_remote_code)
    unfuse_into(UnfusedModel(model), prove=False)  # there is nothing to run yet
    tensors = _read(folder)
    split = _split_fused(model, tensors)
    _place_layers(model, tensors, schemes, folder)
    _fill(model, tensors, split, folder)
    return model.to(resolve_device(device)).eval()


def _read(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name in weight_files(folder):
        with safe_open(folder / name, framework="pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    return tensors


def _group_schemes(config: Mapping[str, Any], folder: Path) -> list[QuantizationScheme]:
    found = config.get("quantization_config") or {}
    groups = found.get("config_groups") if isinstance(found, Mapping) else None
    if not isinstance(groups, Mapping) or not groups or found.get("quant_method") != "compressed-tensors":
        raise ModelError(f"{folder}: config.json names no compressed-tensors groups; give a compressed checkpoint, or use load_model")
    try:
        return [
            QuantizationScheme(targets=group["targets"], **{key: group.get(key) for key in _SCHEME_FIELDS}) for group in groups.values()
        ]
    except (ValidationError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder}: its quantization_config cannot be used here ({one_line(error)}); restore config.json") from error


def _empty_model(folder: Path, config: Mapping[str, Any], model_class: str | type | None, trust_remote_code: bool) -> nn.Module:
    """The float model with uninitialized weights, but with its computed buffers."""
    from transformers import AutoConfig
    from transformers.initialization import no_init_weights

    loader = resolve_class(model_class)
    try:
        with quiet_transformers(), no_init_weights():
            parsed = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
            del parsed.quantization_config
            dtype = _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.float32)
            model: nn.Module = loader.from_config(parsed, trust_remote_code=trust_remote_code, dtype=dtype)
    except LOAD_ERRORS as error:
        raise ModelError(f"{folder}: its config gives no model ({one_line(error)}); check config.json or name model_class") from error
    return model


def _split_fused(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take the fused floats of experts out of `tensors`; give them expert by expert, under names of the model."""
    split: dict[str, Tensor] = {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, UnfusedExperts)}
    stored = stored_names(model, list(layers))
    for name, experts in layers.items():
        on_disk = stored.get(name, name)
        for fused in [key for key in experts.layout.fused_names() if f"{on_disk}.{key}" in tensors]:
            parts = split_weights(experts.layout, fused, tensors.pop(f"{on_disk}.{fused}"))
            split |= {f"{name}.{key}": value for key, value in parts.items()}
    return split


def _place_layers(model: nn.Module, tensors: Mapping[str, Tensor], schemes: list[QuantizationScheme], folder: Path) -> None:
    """Put an empty quantized layer wherever the files hold a scale."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    stored = stored_names(model, list(linears))
    scaled = {key.rpartition(".")[0] for key in tensors if key.endswith(".weight_scale")}
    for name, linear in linears.items():
        on_disk = stored.get(name, name)
        if on_disk not in scaled:
            continue
        scheme = next((one for one in schemes if any(matches(alias, linear, t) for t in one.targets for alias in (name, on_disk))), None)
        if scheme is None:
            raise ModelError(f"{folder}: {on_disk} has a scale, but no group of the quantization_config targets it; restore config.json")
        layer = QuantizedLinear.class_of(scheme)(
            linear.in_features, linear.out_features, scheme, linear.bias, linear.weight.dtype, name=name
        )
        layer.register_empty("cpu")
        model.set_submodule(name, layer)


def _fill(model: nn.Module, tensors: dict[str, Tensor], split: Mapping[str, Tensor], folder: Path) -> None:
    """Give the model its tensors; all of them, each of the right shape. Changes the model and empties `tensors`."""
    state = model.state_dict()
    found = {key: tensors.pop(stored) for key, stored in _stored_keys(model, state).items() if stored in tensors}
    found |= split
    wrong = [key for key, value in found.items() if value.shape != state[key].shape or value.dtype != state[key].dtype]
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    missing = [key for key in state if key not in found and ties.get(key) not in found]
    for fault, names in (("missing", missing), ("of another shape or dtype than config.json says", wrong), ("left over", list(tensors))):
        if names:
            raise ModelError(f"{folder}: {len(names)} tensors are {fault} ({some(names)}); restore the folder")
    model.load_state_dict(found, strict=False, assign=True)
    if any(key not in found for key in ties):
        model.tie_weights()  # type: ignore[operator]


def _stored_keys(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, str]:
    """Name in the model to name in the files; a tensor that transformers converts, not only renames, is not among them."""
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return {key: key for key in state}
    stored = {id(value): key for key, value in revert_weight_conversion(model, dict(state)).items()}
    return {key: stored[id(value)] for key, value in state.items() if id(value) in stored}
