"""A model as its folder gives it, on the meta device: its modules, names and dtypes, and from which tensors of the files its own come.

transformers loads it as it loads any other, but of tensors without bytes. So all that it does on the way (renaming, merging experts, tying,
the dtypes that it keeps) has been done, and what the files lack or have too much is known, in the time of reading headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compressor.errors import ModelError
from compressor.model.folder import check_no_adapter, check_not_quantized, folder_of_code, one_line, read_config, resolve_folder, some
from compressor.model.headers import StoredTensor, read_parts
from compressor.model.loading.casts import are_equal, check_casts, check_codes, check_places, names_in_model, read_headers, tie_notes
from compressor.model.loading.load import (
    LOAD_ERRORS,
    LoadedModel,
    check_class,
    check_loading_info,
    load_tokenizer,
    quiet_transformers,
    read_generation_config,
    remedy,
    resolve_class,
    resolve_dtype,
)
from compressor.model.side_files import side_notes

_SCALE = "_scale_inv"  # of fp8 weights in blocks, as DeepSeek has called it
_MERGE = ("MergeModulelist",)
_JOIN = ("Concatenate",)
_MERGE_AND_JOIN = ("MergeModulelist", "Concatenate")


@dataclass(frozen=True)
class EmptyModel:
    """A model without bytes.

    Attributes:
        loaded: the model, on the meta device, with its tokenizer and folder.
        tensors: name in the files to where the tensor lies; scales of fp8 blocks are not among them.
        scales: name of an fp8 weight in the files to where its scales lie.
        scale_block: rows and columns that have one such scale; fewer where a weight ends. None where there are no scales.
        sources: name in the model to the names in the files of which it consists, in the order of its elements.
        made: name in the model of what transformers makes of others in another way, to what it does.
    """

    loaded: LoadedModel
    tensors: Mapping[str, StoredTensor]
    scales: Mapping[str, StoredTensor]
    scale_block: tuple[int, int] | None
    sources: Mapping[str, tuple[str, ...]]
    made: Mapping[str, str]


def load_empty(
    source: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    model_class: str | type | None = None,
    revision: str | None = None,
    reads_values: bool = True,
) -> EmptyModel:
    """Load a model without its weights.

    Args:
        source: folder in the layout of transformers, or its name on the hub, of which the weights are fetched, too.
        dtype: "auto" (the files' own), or one of bfloat16, float16, float32, float64.
        trust_remote_code: run Python files of the folder, where its config asks for them.
        model_class: class of transformers, or its name; None for AutoModelForCausalLM, which must be what config.json names.
        revision: branch, tag or commit on the hub; None is main.
        reads_values: see what a cast takes from values; without it values are read only where two tensors have one place.

    Returns:
        The model, and where its tensors lie.

    Raises:
        ModelError: the folder is missing, incomplete or damaged, lacks weights that the class needs, or is quantized otherwise than by fp8
            in blocks; or the hub does not give it.
    """
    found = resolve_folder(source, revision, code=trust_remote_code)
    folder, config = found.path, read_config(found.path)
    block = _fp8_block(folder, config)
    if block is None:
        check_not_quantized(config, str(folder))
    check_no_adapter(folder)
    read_generation_config(folder)
    tensors, scales = _split_scales(folder, read_headers(folder), block)
    if block is not None and reads_values:
        _check_scales(folder, tensors, scales, block)
    wanted = resolve_dtype(dtype)
    with quiet_transformers():
        model, info, sources, made = _build(folder, resolve_class(model_class), tensors, wanted, trust_remote_code)
        check_loading_info(folder, info, config, may_leave_weights=model_class is not None)
        if model_class is None:
            check_class(folder, model, config)
        tokenizer = load_tokenizer(folder, trust_remote_code)
        unscaled = {name: stored for name, stored in tensors.items() if name not in scales}
        check_places(model, folder, unscaled)
        check_codes(model, folder, unscaled)
        cast = check_casts(model, folder, unscaled, is_asked=wanted != "auto") if reads_values else ()
        code = folder_of_code(folder, model, tokenizer)
        notes = (*cast, *tie_notes(model), *(() if code is None else side_notes(code)))
    unexpected = tuple(sorted(info["unexpected_keys"]))
    return EmptyModel(LoadedModel(model, tokenizer, folder, False, unexpected, notes, found.origin), tensors, scales, block, sources, made)


def _fp8_block(folder: Path, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the blocks of an fp8 base; None of any other."""
    found = config.get("quantization_config")
    if not isinstance(found, Mapping) or found.get("quant_method") != "fp8" or found.get("weight_block_size") is None:
        return None
    sizes = found["weight_block_size"]
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise ModelError(f"{folder / 'config.json'}: weight_block_size={sizes!r} is not [rows, columns] of a block; restore the file")
    return sizes[0], sizes[1]


def _split_scales(
    folder: Path, tensors: Mapping[str, StoredTensor], block: tuple[int, int] | None
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Weights by themselves, and the scales of those in fp8."""
    if block is None:
        return dict(tensors), {}
    scales = {name.removesuffix(_SCALE): stored for name, stored in tensors.items() if name.endswith(_SCALE)}
    rest = {name: stored for name, stored in tensors.items() if not name.endswith(_SCALE)}
    narrow = {name for name, stored in rest.items() if stored.dtype.is_floating_point and stored.dtype.itemsize < 2}
    odd = sorted(narrow ^ scales.keys())
    if odd:
        raise ModelError(f"{folder}: {some(odd)}: fp8 weights and their scales (weight{_SCALE}) do not match; restore the files")
    for name, scale in scales.items():
        shape = rest[name].shape
        wanted = tuple(-(-size // step) for size, step in zip(shape, block, strict=False))  # the last block may not be full
        if len(shape) != 2 or scale.shape != wanted or not scale.dtype.is_floating_point:
            raise ModelError(
                f"{folder}: {name}: its scales are {_label(scale)}, and blocks of {list(block)} (weight_block_size) of its shape "
                f"{list(shape)} need floats of {list(wanted)}; restore the files"
            )
    return rest, scales


def _check_scales(folder: Path, tensors: Mapping[str, StoredTensor], scales: Mapping[str, StoredTensor], block: tuple[int, int]) -> None:
    """Refuse scales that turn values into others of the wrong sign, or into none."""
    for name, stored in scales.items():
        scale_GG = torch.cat(list(read_parts(folder, stored))).float().view(stored.shape)
        damaged_GG = ~(scale_GG > 0) | scale_GG.isinf()
        if (scale_GG[damaged_GG] == 0).all() and damaged_GG.any():  # a block of zeros needs no scale
            codes_RC = torch.cat(list(read_parts(folder, tensors[name]))).view(tensors[name].shape)
            each_RC = damaged_GG.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: codes_RC.shape[0], : codes_RC.shape[1]]
            damaged_GG = damaged_GG & bool(codes_RC.float()[each_RC].any())
        if damaged_GG.any():
            raise ModelError(
                f"{folder}: {name}: {int(damaged_GG.sum())} of its {damaged_GG.numel()} scales are not finite and above zero "
                f"({float(scale_GG[damaged_GG][0])}), and their blocks hold values; restore the files"
            )


def _label(stored: StoredTensor) -> str:
    return f"{str(stored.dtype).removeprefix('torch.')} {list(stored.shape)}"


def _build(
    folder: Path, loader: Any, tensors: Mapping[str, StoredTensor], dtype: str | torch.dtype, trust_remote_code: bool
) -> tuple[nn.Module, dict[str, Any], dict[str, tuple[str, ...]], dict[str, str]]:
    from transformers import AutoConfig
    from transformers.conversion_mapping import get_model_conversion_mapping

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        floats = (stored.dtype for stored in tensors.values() if stored.dtype.is_floating_point)
        own = getattr(config, "dtype", None) or next(floats, torch.float32)
        chosen: Any = own if dtype == "auto" else dtype
        with torch.device("meta"):
            if hasattr(loader, "from_config"):
                model = loader.from_config(config, trust_remote_code=trust_remote_code, dtype=chosen)
            else:
                model = loader._from_config(config, dtype=chosen)
        rules = get_model_conversion_mapping(model)
        sources, made = _sources(model, rules, tensors)
        info = _fill(model, rules, tensors, chosen, folder, trust_remote_code, sources)
    except LOAD_ERRORS as error:
        raise ModelError(f"{folder}: {loader.__name__} cannot load it ({one_line(error)}); {remedy(error)}") from error
    return model.eval(), info, sources, made


def _fill(
    model: Any,
    rules: list[Any],
    tensors: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    folder: Path,
    trust_remote_code: bool,
    sources: Mapping[str, tuple[str, ...]],
) -> dict[str, Any]:
    """Do what `from_pretrained` does once it has a model and files. Changes the model; returns what it says of that."""
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    empty = {name: torch.empty(stored.shape, dtype=_as_float(stored.dtype), device="meta") for name, stored in tensors.items()}
    settings = LoadStateDictConfig(
        device_map={"": torch.device("meta")},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=rules,
        ignore_mismatched_sizes=True,
    )
    info, _ = convert_and_load_state_dict_in_model(model, empty, settings)
    model.mark_tied_weights_as_initialized(info)
    _settle_ties(model, info.missing_keys, sources, tensors, folder)
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    model.config.name_or_path = str(folder)
    if model.can_generate() and hasattr(model, "adjust_generation_fn"):
        hub = {"cache_dir": None, "force_download": False, "proxies": None, "local_files_only": True, "token": None, "revision": None}
        model.adjust_generation_fn(None, True, None, folder, subfolder="", trust_remote_code=trust_remote_code, **hub)
    return {name: getattr(info, name) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}


def _settle_ties(
    model: Any, missing: set[str], sources: Mapping[str, tuple[str, ...]], tensors: Mapping[str, StoredTensor], folder: Path
) -> None:
    """Do what transformers does where the files hold both tensors of a tie: it ties them if they are equal, and else forgets the tie."""
    state = model.state_dict()
    for target, source in list(model.all_tied_weights_keys.items()):
        if target in missing or source in missing:
            continue
        names = (*sources.get(target, ()), *sources.get(source, ()))
        if len(names) == 2 and are_equal(folder, tensors[names[0]], tensors[names[1]], state[target].dtype):
            missing.add(target)  # so that it becomes the other
        else:
            del model.all_tied_weights_keys[target]


def _as_float(dtype: torch.dtype) -> torch.dtype:
    """What fp8 is read as."""
    return torch.bfloat16 if dtype.is_floating_point and dtype.itemsize < 2 else dtype


def _sources(model: Any, rules: list[Any], tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """From which tensors of the files each of the model comes: by the names that transformers gives them while it loads."""
    from transformers.core_model_loading import WeightConverter

    of_pattern = {pattern: rule for rule in rules if isinstance(rule, WeightConverter) for pattern in rule.source_patterns}
    direct: dict[str, tuple[str, ...]] = {}
    merged: dict[str, dict[str, list[str]]] = {}
    for name, key, pattern in names_in_model(model, rules, tensors):
        if pattern is None:
            direct[key] = (name,)
        else:
            merged.setdefault(key, {}).setdefault(pattern, []).append(name)
    made: dict[str, str] = {}
    for key, parts in merged.items():
        converter = of_pattern[next(iter(parts))]
        done = tuple(type(operation).__name__ for operation in converter.operations)
        lists = [parts.get(pattern, []) for pattern in converter.source_patterns]
        if done == _MERGE or (done == _MERGE_AND_JOIN and converter.operations[1].dim == 1):
            direct[key] = tuple(name for row in zip(*lists, strict=False) for name in row)
        elif done == _JOIN and converter.operations[0].dim == 0 and all(len(one) == 1 for one in lists):  # rows behind rows
            direct[key], made[key] = tuple(name for one in lists for name in one), done[0]
        else:
            made[key] = ", ".join(done)
    return direct, made
