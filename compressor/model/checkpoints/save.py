"""A compressed model on disk, whole or not at all.

The folder is an ordinary transformers folder with a `quantization_config`, plus `compression.json` that says how it was made. Equal models
and records give equal bytes. The model in memory is the same after saving as before.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from torch import Tensor, nn

from compressor.atomic import check_output_dir, whole_or_nothing
from compressor.data.layouts import has_memory, kind_of
from compressor.errors import CheckpointError, OutputError
from compressor.json_text import from_json
from compressor.model.checkpoints.audit import audit_qparams, tensor_digests
from compressor.model.checkpoints.format import config_of, stored_keys, stored_names, unquantized_linears
from compressor.model.checkpoints.online import rotation_tensors, transform_config
from compressor.model.experts.format import kept_fused, plain_names, with_expert_settings, with_fused_floats
from compressor.model.folder import folder_of_code, one_line, read_json, some
from compressor.model.headers import NAMES, write_header, write_tensors
from compressor.model.loading.load import quiet_transformers
from compressor.model.side_files import OTHER_PATTERNS, TOKENIZER_PATTERNS, copy_side_files
from compressor.model.targets import all_names, text_config
from compressor.nn.layer import QuantizedLayer
from compressor.nn.online_rotation import rotated_modules
from compressor.numerics.scheme import QuantizationScheme
from compressor.settings.kinds import parse_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


__all__ = ["MAX_SHARD_BYTES", "RECORD_FILE", "as_pretrained", "check_output_dir", "save_checkpoint", "save_empty", "write_record"]

MAX_SHARD_BYTES = 5_000_000_000

_Write = Callable[[Mapping[str, Tensor], Path, Mapping[str, str]], None]

RECORD_FILE = "compression.json"


def save_checkpoint(
    model: nn.Module,
    output_dir: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    source_dir: str | Path | None = None,
    schemes: Mapping[str, QuantizationScheme],
    record: Mapping[str, Any] | None,
    max_shard_bytes: int | str = MAX_SHARD_BYTES,
    token: str | None = None,
    beside_others: bool = False,
) -> Path:
    """Write a compressed model: all of its folder, or nothing.

    Args:
        model: the compressed model. A model of transformers gives a folder for `from_pretrained`; any other module gives its state_dict in
            model.safetensors, and the schemes in compression.json.
        output_dir: folder to write; must not exist, or be empty.
        tokenizer: saved if `source_dir` holds no tokenizer.
        source_dir: folder the model came from; its tokenizer files are copied byte for byte.
        schemes: name of every quantized layer in the model to its scheme; may be empty.
        record: what compression.json is to say, beside the `quantization_config` and a digest of every tensor (`tensors`); JSON types. None
            writes none, where config.json says the schemes.
        max_shard_bytes: above this the weights are split over several files with an index; a number, or text such as "5GB".
        token: part of the name of the temporary folder; None for a random one.
        beside_others: the folder may hold other files, such as a tokenizer, but none that are written.

    Returns:
        The absolute path of the folder.

    Raises:
        OutputError: the output folder cannot be used.
        UserInputError: `max_shard_bytes` is no size, or none at all.
        CheckpointError: a scale, zero point or code is not fit to be written, the record is no JSON, the disk is full or fails, or what was
            written does not read back; nothing is left behind.
    """
    target = check_output_dir(output_dir, source=source_dir, beside_others=beside_others)
    max_shard_bytes = _shard_bytes(max_shard_bytes)
    state = saved_state(model)
    audit_qparams(model, schemes)
    transformers_model = as_pretrained(model)
    described = config_of(model, schemes) if transformers_model is None else None
    _to_json({**(record or {}), "quantization_config": described})  # refused before anything is written
    with whole_or_nothing(target, num_bytes=_num_bytes(state), token=token, beside_others=beside_others) as folder:
        if transformers_model is None:
            _write_module(folder, state, max_shard_bytes)
        else:
            _write_pretrained(folder, transformers_model, with_fused_floats(model, state), schemes, max_shard_bytes, write_tensors)
            _write_tokenizer(folder, transformers_model, tokenizer, None if source_dir is None else Path(source_dir), target)
            described = read_json(folder / "config.json").get("quantization_config")
        if record is not None or (transformers_model is None and described is not None):
            write_record(folder, record or {}, described, tensor_digests(folder))
    return target


def write_record(folder: Path, record: Mapping[str, Any], described: Any, digests: Mapping[str, str]) -> None:
    """Write compression.json.

    Args:
        folder: of the checkpoint.
        record: what made it.
        described: the value of `quantization_config`.
        digests: of its tensors, as `tensor_digests` gives them.
    """
    written = {**record, "quantization_config": described, "tensors": dict(digests)}
    written.pop("sha256", None)  # of the record that was read, where a checkpoint is saved again
    as_read = from_json(_to_json(written))  # whose keys are texts
    written["sha256"] = hashlib.sha256(_to_json(as_read).encode()).hexdigest()  # of all else in it, so that no edit goes unseen
    (folder / RECORD_FILE).write_text(_to_json(written), encoding="utf-8")


def save_empty(
    folder: Path,
    model: PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    source_dir: Path,
    schemes: Mapping[str, QuantizationScheme],
    max_shard_bytes: int | str = MAX_SHARD_BYTES,
) -> None:
    """Write what `save_checkpoint` writes, but for the values: the weight files have headers, and holes in the place of tensors.

    Args:
        folder: is there, and empty.
        model: the compressed model, on the meta device.
        tokenizer: as for `save_checkpoint`.
        source_dir: as for `save_checkpoint`.
        schemes: name of every quantized layer in the model to its scheme.
        max_shard_bytes: above this the weights are split over several files with an index; a number, or text such as "5GB".

    Raises:
        UserInputError: `max_shard_bytes` is no size, or none at all.
        CheckpointError: transformers cannot save the model.
        OSError: the disk is full or fails.
    """
    max_shard_bytes = _shard_bytes(max_shard_bytes)
    state = with_fused_floats(model, model.state_dict())
    with _lent_objects(model, state):
        _write_pretrained(folder, model, state, schemes, max_shard_bytes, write_header)
    _write_tokenizer(folder, model, tokenizer, source_dir)


@contextmanager
def _lent_objects(model: PreTrainedModel, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Give transformers what it asks the model for of a tensor on the meta device: the object, to see which are tied.

    Changes the model, and back.
    """
    first: dict[tuple[object, ...], Tensor] = {}
    objects = {name: first.setdefault((*_place(value), value.shape), value) for name, value in state.items()}
    vars(model)["get_parameter_or_buffer"] = objects.__getitem__
    try:
        yield
    finally:
        del vars(model)["get_parameter_or_buffer"]


@contextmanager
def _files_written_by(write: _Write) -> Iterator[None]:
    """Let transformers name and split what it saves, and write the files otherwise: it holds a whole file's tensors in memory."""
    from transformers import modeling_utils

    own = modeling_utils.safe_save_file
    modeling_utils.safe_save_file = lambda tensors, path, metadata: write(tensors, Path(path), metadata)
    try:
        yield
    finally:
        modeling_utils.safe_save_file = own


def as_pretrained(model: nn.Module) -> PreTrainedModel | None:
    """Tell whether a model is one of transformers.

    Args:
        model: any module.

    Returns:
        The model if it is one of transformers, which then has been imported already; else None.
    """
    transformers = sys.modules.get("transformers")
    return model if transformers is not None and isinstance(model, transformers.PreTrainedModel) else None


def saved_state(model: nn.Module) -> dict[str, Tensor]:
    """Return what a checkpoint holds of a model.

    Args:
        model: not changed.

    Returns:
        Name in the model to tensor.

    Raises:
        CheckpointError: an entry of its state is no tensor, has no values, or is one that no file of safetensors can hold.
    """
    state = model.state_dict()
    unfit = [name for name, value in state.items() if not isinstance(value, Tensor) or value.is_meta]
    if unfit:
        raise CheckpointError(
            f"checkpoint: {len(unfit)} entries of the state are no tensors with values ({some(unfit)}); load or drop them"
        )
    odd = {name: kind_of(value) for name, value in state.items() if not has_memory(value) or value.dtype not in NAMES}
    if odd:
        name, kind = next(iter(odd.items()))
        raise CheckpointError(
            f"checkpoint: {len(odd)} entries of the state ({some(list(odd))}) are tensors that no file of safetensors holds, {name} is "
            f"{kind}; make them dense, of another dtype, or register them with persistent=False"
        )
    return state


def left_out(model: nn.Module) -> dict[str, Tensor]:
    """Find what of a model's state its files leave out: transformers writes tied weights once, any other module every name.

    Args:
        model: with or without values; not modified.

    Returns:
        Name in the model to tensor, for what is tied and is stored by another name.
    """
    ties: Mapping[str, str] = {} if as_pretrained(model) is None else getattr(model, "all_tied_weights_keys", None) or {}
    state = model.state_dict(keep_vars=True) if ties else {}
    return {name: state[name] for name, source in ties.items() if name in state and state[name] is state.get(source)}


def _num_bytes(state: Mapping[str, Tensor]) -> int:
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in state.values()}
    return sum(storages.values())


def _to_json(content: Mapping[str, Any]) -> str:
    try:
        return json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{RECORD_FILE}: the record is no JSON ({one_line(error)}); use text, finite numbers, lists and dicts"
        ) from error


def _shard_bytes(size: int | str) -> int:
    found = parse_bytes(size, "max_shard_size")
    if not found:
        raise OutputError(f"max_shard_size: {size!r} has room for nothing; give a size such as 5GB")
    return found


def _write_module(folder: Path, state: dict[str, Tensor], max_shard_bytes: int) -> None:
    """Write every name, tied or not, so that `load_state_dict(load_file(...))` works as it stands."""
    whole = _unshare(state, set(state))
    split = split_torch_state_dict_into_shards(whole, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_bytes)
    for filename, names in split.filename_to_tensors.items():
        write_tensors({name: whole[name] for name in names}, folder / filename, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(_to_json(index), encoding="utf-8")
    _read_back(folder, {name: value.shape for name, value in whole.items()})


def _unshare(state: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    """Give each of `names` that shares memory with an earlier one a copy of its own."""
    seen: set[int] = set()
    result = {}
    for name, value in state.items():
        pointer = _storage(value)
        result[name] = value.clone() if name in names and pointer in seen else value
        seen.add(pointer)
    return result


def _write_pretrained(
    folder: Path,
    model: PreTrainedModel,
    state: dict[str, Tensor],
    schemes: Mapping[str, QuantizationScheme],
    max_shard_bytes: int,
    write: _Write,
) -> None:
    config = copy.deepcopy(model.config)
    rotated = rotated_modules(model)
    matrices = rotation_tensors(model) if rotated else {}
    places = all_names(model)
    said = [place for name in (*schemes, *unquantized_linears(model), *rotated) for place in places[name]]
    renamed = stored_names(model, said) if schemes or rotated else {}
    state = _untie(model, config, state) | _as_in_model(model, matrices, renamed)
    described = config_of(model, schemes, renamed, transform_config(model, renamed) if rotated else None)
    if described is not None:
        config.quantization_config = with_expert_settings(described, model, schemes, renamed)
    shapes = {key: value.shape for key, value in state.items()}
    names = nullcontext() if described is None else plain_names(model)
    lent = _lent_config(model, config), _lent_dtype(model), names, kept_fused(model, state, schemes), _files_written_by(write)
    with ExitStack() as stack, quiet_transformers():
        for one in lent:
            stack.enter_context(one)
        try:
            # That of the class: a compressed model may have one of its own, which ends here.
            type(model).save_pretrained(model, folder, state_dict=state, max_shard_size=max_shard_bytes)
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(f"{type(model).__name__}: transformers cannot save it ({one_line(error)}); nothing was kept") from error
    if model.can_generate():
        model.generation_config.to_json_file(folder / "generation_config.json")
    _read_back(folder, _quantized_keys(model, shapes, schemes) | {key: matrix.shape for key, matrix in matrices.items()})


def _as_in_model(model: PreTrainedModel, matrices: Mapping[str, Tensor], renamed: Mapping[str, str]) -> dict[str, Tensor]:
    """Matrices of rotations under the names of the model's own modules, which transformers renames as it saves, once and not twice."""
    owners = {on_disk: name for name, on_disk in renamed.items()}
    own = {key: ".".join((owners.get(place, place), *rest)) for key in matrices for place, *rest in [key.rsplit(".", 2)]}
    stored = stored_keys(model, list(own.values()))
    return {own[key] if stored[own[key]] == key else key: matrix for key, matrix in matrices.items()}


def _untie(model: PreTrainedModel, config: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Where a tied weight was quantized, the tie is gone: say so in `config` (changed) and store what had been tied twice.

    So it is where the files of the base held two different tensors under a tie. What the model's author has tied and its config does not
    say is stored twice, too: transformers would leave one of them out.
    """
    asked: Mapping[str, str] = (getattr(config, "tie_word_embeddings", False) and model._tied_weights_keys) or {}
    untied = {name: source for name, source in asked.items() if name in state and source in state}
    ties: Mapping[str, str] = untied | (getattr(model, "all_tied_weights_keys", None) or {})
    state = _unshare(state, _aliases(state) - set(ties) - set(ties.values()))
    if all(name in state and source in state and _place(state[name]) == _place(state[source]) for name, source in ties.items()):
        return state
    for part in {id(part): part for part in (config, text_config(config))}.values():
        part.tie_word_embeddings = False
    return _unshare(state, set(ties))


def _aliases(state: Mapping[str, Tensor]) -> set[str]:
    """Names of tensors that an earlier name has as well; parts of one tensor are none."""
    seen: set[tuple[tuple[int, int], torch.Size]] = set()
    found = set()
    for name, value in state.items():
        place = _place(value), value.shape
        if value.numel() and place in seen:
            found.add(name)
        seen.add(place)
    return found


def _storage(value: Tensor) -> int:
    """What tells the memory of one tensor from that of another; on the meta device all have the address 0."""
    storage = value.untyped_storage()
    return storage._cdata if value.is_meta else storage.data_ptr()


def _place(value: Tensor) -> tuple[int, int]:
    """The same, with where in it the tensor begins."""
    return (_storage(value), int(value.storage_offset())) if value.is_meta else (value.data_ptr(), 0)


@contextmanager
def _lent_dtype(model: PreTrainedModel) -> Iterator[None]:
    """Give a model of which no parameter is a float any more one without elements: transformers asks the first one for the dtype."""
    layer = next((module for module in model.modules() if isinstance(module, QuantizedLayer)), None)
    if layer is None or any(parameter.is_floating_point() for parameter in model.parameters()):
        yield
        return
    model.register_parameter("of_this_dtype", nn.Parameter(torch.empty(0, dtype=layer.dtype)))
    try:
        yield
    finally:
        del model.of_this_dtype


@contextmanager
def _lent_config(model: PreTrainedModel, config: Any) -> Iterator[None]:
    """Let `save_pretrained` write and change another config: it notes dtype and class, and refuses generation settings it finds odd."""
    own_config, own_generation_config = model.config, getattr(model, "generation_config", None)
    model.config = config
    if own_generation_config is not None:
        model.generation_config = type(own_generation_config)()
    try:
        yield
    finally:
        model.config = own_config
        if own_generation_config is not None:
            model.generation_config = own_generation_config


def _quantized_keys(model: PreTrainedModel, shapes: Mapping[str, Any], schemes: Mapping[str, QuantizationScheme]) -> dict[str, Any]:
    """Names in the files and shapes of what the quantized layers hold."""
    keys = [key for key in shapes if key.rpartition(".")[0] in schemes]
    stored = stored_keys(model, keys)
    return {stored[key]: shapes[key] for key in keys}


def _read_back(folder: Path, wanted: Mapping[str, Any]) -> None:
    found: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118 (no mapping)
    wrong = [key for key, shape in wanted.items() if found.get(key) != list(shape)]
    if wrong:
        raise CheckpointError(f"checkpoint: {len(wrong)} tensors do not read back as they were written ({some(wrong)}); nothing was kept")


def _write_tokenizer(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, source_dir: Path | None, target: Path | None = None
) -> None:
    """Write what lies beside the weights: the tokenizer, and what the model's own code may read, but for what `target` holds of that."""
    paths, others = (
        [] if source_dir is None else sorted({path for pattern in patterns for path in source_dir.glob(pattern)})
        for patterns in (TOKENIZER_PATTERNS, OTHER_PATTERNS)
    )
    for path in (*paths, *others):
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        elif path.suffix != ".py":
            shutil.copyfile(path, folder / path.name)
    if not paths and tokenizer is not None:
        with quiet_transformers():
            tokenizer.save_pretrained(folder)
    code = folder_of_code(source_dir, model, tokenizer)
    if code is not None:
        copy_side_files(code, folder, without=target)
