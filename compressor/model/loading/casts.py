"""From the tensors of files to those of a model: which becomes which, and what is lost where a file has another dtype than the model.

transformers casts whatever it finds to the dtype that config.json or `dtype=` names: norms or routers in float32, values that float16 has
no room for, and codes that mean nothing without the scales which lie elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from compressor.errors import ModelError
from compressor.model.folder import read_json, some, weight_files
from compressor.model.headers import StoredTensor, read_header, read_parts

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_WITH_ROOM = {torch.float16: "bfloat16 or float32", torch.bfloat16: "float32", torch.float32: "float64"}


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Say where the tensors of a model lie.

    Args:
        folder: of a model in the layout of transformers.

    Returns:
        By name, file by file.

    Raises:
        ModelError: a file is missing or damaged, a name stands in two, or the index does not tell where the tensors are.
    """
    names = weight_files(folder)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{folder}: {len(missing)} of {len(names)} weight files are missing ({some(missing)}); fetch the folder again")
    tensors: dict[str, StoredTensor] = {}
    for file in names:
        for name, stored in read_header(folder / file).items():
            if name in tensors:
                raise ModelError(f"{folder}: {name} stands in {tensors[name].file} and in {file}; keep one of them")
            tensors[name] = stored
    if names != [_SINGLE]:
        _check_index(folder, tensors)
    return tensors


def _check_index(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    index = folder / _INDEX
    wrong = [name for name, file in read_json(index)["weight_map"].items() if name not in tensors or tensors[name].file != file]
    if wrong:
        raise ModelError(f"{index}: {len(wrong)} tensors ({some(wrong)}) are not in the files that it names; restore the files")


def names_in_model(model: Any, rules: list[Any], names: Collection[str]) -> Iterator[tuple[str, str, str | None]]:
    """Say what transformers calls tensors of files.

    Args:
        model: of transformers.
        rules: by which it renames and merges, of `get_model_conversion_mapping`.
        names: in the files.

    Yields:
        Name in the files, name in the model, and the pattern of what is merged; None where it is not.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    own = model.state_dict()
    renamings = [deepcopy(rule) for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [deepcopy(rule) for rule in rules if isinstance(rule, WeightConverter)]
    for name in sorted(names, key=dot_natural_key):
        key, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if key not in own and name in own:
            key, pattern = rename_source_key(name, [], [], model.base_model_prefix, own)
        yield name, key, pattern


def check_places(model: Any, folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse two tensors for one place, of which each loader would take another.

    Args:
        model: as it was loaded; its values are not looked at.
        folder: of the files.
        tensors: of the files, without those that have scales.

    Raises:
        ModelError: two tensors that differ have one name in the model.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    state, found = model.state_dict(), dict[str, str]()
    for name, key, pattern in names_in_model(model, get_model_conversion_mapping(model), tensors):
        first = found.setdefault(key, name) if pattern is None and key in state else name
        if first != name and not are_equal(folder, tensors[first], tensors[name], state[key].dtype):
            raise ModelError(f"{folder}: {first} and {name} differ, and both are {key} in the model; keep the one that is meant")


def check_codes(model: Any, folder: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, torch.dtype]:
    """Refuse codes that stand for a weight of floats; reads no values.

    Args:
        model: as it was loaded; its values are not looked at.
        folder: of the files.
        tensors: of the files, without those that have scales.

    Returns:
        Names of those that may be rounded, each with its dtype in the model.

    Raises:
        ModelError: there are codes without scales.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    state = model.state_dict()
    floats = {value.dtype for value in state.values() if value.is_floating_point()}
    doubtful = [name for name, one in tensors.items() if not all(_holds(dtype, one.dtype) for dtype in floats)]
    keys = names_in_model(model, get_model_conversion_mapping(model), doubtful) if doubtful else ()
    dtypes = {name: state[key].dtype for name, key, _ in keys if key in state and state[key].is_floating_point()}
    coded = sorted(name for name in dtypes if not _is_float(tensors[name].dtype))
    if coded:
        raise ModelError(
            f"{folder}: {len(coded)} weights ({some(coded)}) are {_name(tensors[coded[0]].dtype)} in the files, and no scales say which "
            "floats they stand for; give the model that they were made from"
        )
    return dtypes


def check_casts(model: Any, folder: Path, tensors: Mapping[str, StoredTensor], *, is_asked: bool) -> tuple[str, ...]:
    """Refuse what means something else in the dtype of the model, and say what is rounded there. Reads only tensors that may be.

    Args:
        model: as it was loaded; its values are not looked at.
        folder: of the files.
        tensors: of the files, without those that have scales.
        is_asked: the user has named the dtype of the model, not config.json.

    Returns:
        A sentence on what was rounded, or none.

    Raises:
        ModelError: codes without scales stand for a weight of floats, or a value is too large for its dtype in the model.
    """
    dtypes = check_codes(model, folder, tensors)
    losses = {name: _losses(folder, tensors[name], dtype) for name, dtype in dtypes.items() if not _holds(dtype, tensors[name].dtype)}
    large = sorted(name for name, loss in losses.items() if loss.is_large)
    if large:
        dtype = dtypes[large[0]]
        most, room = f"{torch.finfo(dtype).max:,.6g}", _WITH_ROOM.get(dtype, "another dtype")
        raise ModelError(f"{folder}: dtype: {_name(dtype)} ends at {most}, and {some(large)} hold more; take {room}")
    rounded = [name for name, loss in losses.items() if loss.is_rounded]
    if not rounded:
        return ()
    first = min(rounded)
    why = "as dtype= asks" if is_asked else "whose dtype config.json names"
    return (
        f"{len(rounded)} tensors ({some(rounded)}) were rounded when they were loaded: {_name(tensors[first].dtype)} in the files and "
        f"{_name(dtypes[first])} in the model, {why}; a wider dtype= keeps them",
    )


def are_equal(folder: Path, one: StoredTensor, other: StoredTensor, dtype: torch.dtype) -> bool:
    """Compare tensors of files as a model would have them.

    Args:
        folder: of the files.
        one: a tensor.
        other: another.
        dtype: of the model.

    Returns:
        True for the same values.
    """
    if one.shape != other.shape or not (_is_float(one.dtype) and _is_float(other.dtype)):
        return False
    parts = zip(read_parts(folder, one), read_parts(folder, other), strict=True)
    return all(torch.equal(values.to(dtype), others.to(dtype)) for values, others in parts)


def tie_notes(model: Any) -> tuple[str, ...]:
    """Say which tensors config.json ties, though the files hold others in each place.

    Args:
        model: as transformers has loaded it, which leaves such tensors as they are.

    Returns:
        A sentence, or none.
    """
    found = model.get_expanded_tied_weights_keys(all_submodels=True).keys() - model.all_tied_weights_keys.keys()
    if not found:
        return ()
    return (
        f"{some(found)}: config.json ties what differs in the files; both tensors are kept, and the checkpoint says "
        "tie_word_embeddings=false",
    )


class _Losses(NamedTuple):
    is_rounded: bool
    is_large: bool


def _losses(folder: Path, stored: StoredTensor, dtype: torch.dtype) -> _Losses:
    """What a cast takes from the values of a tensor: bits, or finite values altogether."""
    is_rounded = is_large = False
    for values in read_parts(folder, stored):
        cast = values.to(dtype)
        is_rounded |= bool(((cast.to(values.dtype) != values) & ~values.isnan()).any())
        is_large |= bool((cast.isinf() & values.isfinite()).any())
    return _Losses(is_rounded, is_large)


def _is_float(dtype: torch.dtype) -> bool:
    """Tell floats from codes; fp8 holds codes, for which there is a scale."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    return _is_float(other) and torch.promote_types(other, dtype) == dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Models without weights, whose computed buffers are not cast, either.


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Register parameters on the meta device, so that their memory is given back at once; buffers, which are computed, stay real."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def recompute_buffers(model: nn.Module) -> None:
    """Compute the buffers that no file holds as `from_pretrained` does: once more, in float32, whatever dtype the model was made in.

    A class whose constructor computes a table in torch's default dtype (GPT-J, CodeGen) has it rounded where it is made in half precision.

    Args:
        model: made under `parameters_on_meta`, weights and buffers of files not yet filled in; its computed buffers are changed.
    """
    with torch.no_grad():
        for owner, module in _initialized_by(model, None):
            if module._non_persistent_buffers_set:
                owner._init_weights(module)


def _initialized_by(module: nn.Module, owner: nn.Module | None) -> Iterator[tuple[Any, nn.Module]]:
    """Each module below a model of transformers, with the innermost one, which initializes it."""
    from transformers import PreTrainedModel

    owner = module if isinstance(module, PreTrainedModel) else owner
    for child in module.children():
        yield from _initialized_by(child, owner)
    if owner is not None:
        yield owner, module
