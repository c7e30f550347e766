"""The invariant of every checkpoint: what no modifier has claimed is, byte for byte, what was loaded.

Whatever writes to a weight that the recipe leaves alone (a forward that rescales its layers, a hook, a bug in an engine or a modifier),
it is found here, before anything is saved, and by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compressor.errors import CheckpointError
from compressor.model.folder import some
from compressor.numerics.checksum import checksum


class Content(NamedTuple):
    """What a stored tensor is compared by."""

    dtype: torch.dtype
    shape: torch.Size
    checksum: int


def contents(model: nn.Module, known: Mapping[str, Content] | None = None, exempt: Collection[str] = frozenset()) -> dict[str, Content]:
    """Take the contents of everything that a checkpoint stores.

    Args:
        model: not modified.
        known: earlier contents, which are taken over for names that are still there.
        exempt: names of tensors that are left out.

    Returns:
        Name in the state_dict to content.
    """
    tensors = {name: tensor for name, tensor in _stored(model) if name not in exempt}
    return _contents(tensors, {name: content for name, content in (known or {}).items() if name in tensors})


def check_unclaimed(model: nn.Module, base: Mapping[str, Content], claimed: Collection[str], exempt: Collection[str] = frozenset()) -> None:
    """Refuse a model in which something has changed that nobody was to change.

    Args:
        model: not modified.
        base: `contents` of the model before anything was done to it.
        claimed: dotted names of the modules that modifiers change; what is new below them belongs to them.
        exempt: names of tensors that may change, too, such as those that are trained.

    Raises:
        CheckpointError: another tensor differs from the base's, is gone, or is new.
    """
    found, claimed = dict(_stored(model)), _by_all_names(model, claimed)
    mine = {name for name in found if _owner(name) in claimed or name in exempt}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    objects = {name: id(tensor) for name, tensor in named}
    tied = {objects.get(name) for name in mine} - {None}  # the head of a model whose embedding is pruned; memory alone ties nothing
    free = {name: tensor for name, tensor in found.items() if name not in mine and objects.get(name) not in tied}
    now = _contents(free, {})
    wrong = [name for name in free if name in base and now[name] != base[name]]
    wrong += [name for name in free if name not in base and not _lies_in(name, claimed)]
    wrong += [name for name in base if name not in found and name not in exempt and not _lies_in(name, claimed)]
    if wrong:
        raise CheckpointError(
            f"{wrong[0]}: {len(wrong)} tensors ({some(wrong)}) are no longer what was loaded, and no modifier has claimed their modules; "
            "see whether the model's forward or a hook writes to them (in memory they stay as they are now: load the model anew); a "
            "modifier that means to change them says so with state.touch()"
        )


def _by_all_names(model: nn.Module, claimed: Collection[str]) -> set[str]:
    """The same modules, and by what other names the model knows them."""
    modules = {id(module) for name, module in model.named_modules() if name in claimed}
    return {*claimed, *(name for name, module in model.named_modules(remove_duplicate=False) if id(module) in modules)}


def _contents(tensors: Mapping[str, Tensor], known: Mapping[str, Content]) -> dict[str, Content]:
    found = dict(known)
    seen: dict[tuple[object, ...], int] = {}  # tied tensors are read once
    for name, tensor in tensors.items():
        if name not in found:
            place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if place not in seen:
                seen[place] = checksum(tensor)
            found[name] = Content(tensor.dtype, tensor.shape, seen[place])
    return found


def _stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta:
            yield name, value


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _lies_in(name: str, modules: Collection[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:number]) in modules for number in range(len(parts)))
