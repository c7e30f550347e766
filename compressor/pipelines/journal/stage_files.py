"""One stage on disk: what it changed of the model, in a safetensors file, and what it reported.

Kept are the tensors of every module that a modifier has claimed, as they stand in the model (packed codes, scales), those of other modules
where a stage has changed their bytes, and the state of the random generators.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compressor.atomic import whole_file
from compressor.errors import LifecycleError, ResumeError
from compressor.lifecycle import Fallback, ModuleRecord, Report, State
from compressor.lifecycle.state import StageValue
from compressor.nn import QuantizedLayer
from compressor.pages import equal_bytes, raw_bytes
from compressor.pipelines.journal.run_folder import of_another_version
from compressor.random_state import RandomState

_TENSOR, _RANDOM, _MEMORY = "model:", "random:", "modifier:"
# What the report holds: each field, and what its items are made of.
_REPORT_ITEMS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"modules": ModuleRecord, "fallbacks": Fallback, "notes": str, "transforms": dict}
)


class StageTensors(NamedTuple):
    """What a file holds: tensors by module and name, generator states by device, what modifiers remember by their number."""

    modules: dict[str, dict[str, Tensor]]
    random: RandomState
    memories: dict[int, dict[str, Tensor]]


class Before(NamedTuple):
    """What the stage found: hashes of the tensors that no modifier has claimed, and what had been reported."""

    hashes: dict[str, str]
    report: dict[str, dict[str, Any]]


def look_before(state: State, names: Sequence[str]) -> Before:
    """Note what a stage must be compared with after it.

    Args:
        state: of the session.
        names: dotted names of the stage's modules.

    Returns:
        Hashes and report.
    """
    hashes = {key: _hash(tensor) for key, tensor in _tensors(state, names, claimed=False)}
    return Before(hashes, _items(state.report))


def stage_content(
    state: State, names: Sequence[str], before: Before, memories: Sequence[Mapping[str, StageValue]]
) -> tuple[dict[str, Tensor], list[str]]:
    """Gather what a stage changed.

    Args:
        state: of the session, after the stage.
        names: dotted names of the stage's modules, as before it.
        before: what `look_before` gave.
        memories: what each modifier remembers of the stage; tensors go into the file.

    Returns:
        What goes into its file, in main memory; and the keys of the model's tensors, in the order of the model.
    """
    kept = dict(_tensors(state, names, claimed=True))
    kept |= {key: tensor for key, tensor in _tensors(state, names, claimed=False) if before.hashes.get(key) != _hash(tensor)}
    content = {_TENSOR + key: tensor for key, tensor in kept.items()}
    content |= {_RANDOM + device: tensor for device, tensor in RandomState.current(foreign=False).by_device.items()}
    for number, memory in enumerate(memories):
        content |= {f"{_MEMORY}{number}:{key}": value for key, value in memory.items() if isinstance(value, Tensor)}
    return _apart(content, alone=state.device.type != "cpu"), list(kept)


def write_content(path: Path, content: Mapping[str, Tensor]) -> None:
    """Write the file of a stage: all of it, or nothing.

    Args:
        path: of the file.
        content: what `stage_content` gave.

    Raises:
        CheckpointError: it cannot be written.
    """
    with whole_file(path) as partial:
        save_file(dict(content), partial)


def read_tensors(path: Path, keys: Sequence[str]) -> StageTensors:
    """Read what `write_content` wrote; the bytes have been compared with their hash before.

    Args:
        path: of the file.
        keys: what `stage_content` gave.

    Returns:
        The tensors, in memory of their own and in the order of `keys`.
    """
    content = load_file(path)
    modules: dict[str, dict[str, Tensor]] = {}
    for key in keys:
        module, _, name = key.rpartition(".")
        modules.setdefault(module, {})[name] = content[_TENSOR + key].clone()
    random = {key.removeprefix(_RANDOM): tensor.clone() for key, tensor in content.items() if key.startswith(_RANDOM)}
    memories: dict[int, dict[str, Tensor]] = {}
    for key, tensor in content.items():
        if key.startswith(_MEMORY):
            number, _, name = key.removeprefix(_MEMORY).partition(":")
            memories.setdefault(int(number), {})[name] = tensor.clone()
    return StageTensors(modules, RandomState(random), memories)


def copy_tensors(model: nn.Module, modules: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Put bytes into tensors of the model that differ. Changes the model.

    Args:
        model: the model, with replaced modules in place.
        modules: tensors by module and name.

    Raises:
        ResumeError: the model has no such tensor, or one of another shape or dtype.
    """
    for module_name, tensors in modules.items():
        module = model.get_submodule(module_name)
        for name, stored in tensors.items():
            own = module._buffers[name] if name in module._buffers else getattr(module, name, None)
            if not isinstance(own, Tensor) or own.shape != stored.shape or own.dtype != stored.dtype:
                raise ResumeError(
                    f"{module_name}.{name}: the run folder holds it as {stored.dtype} {tuple(stored.shape)}, which the model does not; "
                    "remove the run folder to start over"
                )
            with torch.no_grad():
                # Bytes and not values, for NaN is not equal to itself; and no write without need, for writes are watched.
                if not equal_bytes(raw_bytes(own.cpu()), raw_bytes(stored)):
                    own.copy_(stored)


def lay_on_file(path: Path, model: nn.Module, keys: Sequence[str]) -> None:
    """Let what compressed layers hold be looks at the file that has the same bytes: memory does not grow from stage to stage.

    The bytes are the model's as long as it holds them, also when the file's name is gone.

    Args:
        path: of the file.
        model: its compressed layers change; such as lie on a device do not.
        keys: of the model's tensors in the file.
    """
    with safe_open(path, framework="pt") as file:
        for key in keys:
            module_name, _, name = key.rpartition(".")
            module = model.get_submodule(module_name)
            own = module._buffers.get(name) if isinstance(module, QuantizedLayer) else None
            if own is not None and own.device.type == "cpu":
                module._buffers[name] = file.get_tensor(_TENSOR + key)  # not `own.data`: a view would keep its base


def report_since(report: Report, before: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return what was reported since, as JSON types.

    Args:
        report: as it is now.
        before: the items of an earlier moment.

    Returns:
        For `add_report`.
    """
    return {
        field: [_plain(item) for key, item in items.items() if before[field].get(key) != item] for field, items in _items(report).items()
    }


def add_report(report: Report, kept: Mapping[str, Sequence[Any]]) -> None:
    """Add what an earlier run reported. Changes the report.

    Args:
        report: of this run.
        kept: what `report_since` gave.

    Raises:
        ResumeError: another version of this package gave it.
    """
    if kept.keys() != _REPORT_ITEMS.keys():
        raise of_another_version("what a stage reported")
    for field, items in kept.items():
        target = getattr(report, field)
        for item in items:
            made = _made(_REPORT_ITEMS[field], item) if isinstance(item, dict) else item
            if isinstance(target, dict):
                target[made.name] = made
            else:
                target.append(made)


def _made(kind: Callable[..., Any], item: Mapping[str, Any]) -> Any:
    """A default would stand for what an older layout does not tell."""
    if is_dataclass(kind) and item.keys() != {field.name for field in fields(kind)}:
        raise of_another_version(f"what a stage reported of {item.get('name', item.get('module'))}")
    return kind(**item)


def _items(report: Report) -> dict[str, dict[Any, Any]]:
    """The items of every field by name or position."""
    names = [field.name for field in fields(report)]
    unknown = [name for name in names if name not in _REPORT_ITEMS]
    if unknown:
        raise LifecycleError(f"{type(report).__name__}: the journal would lose {unknown} of the report; add them to _REPORT_ITEMS")
    values = {name: getattr(report, name) for name in names}
    return {name: dict(value) if isinstance(value, dict) else dict(enumerate(value)) for name, value in values.items()}


def _plain(item: Any) -> Any:
    if not is_dataclass(item):
        return item
    return {field.name: dict(value) if isinstance(value := getattr(item, field.name), Mapping) else value for field in fields(item)}


def _tensors(state: State, names: Sequence[str], *, claimed: bool) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors of modules that a modifier has claimed (and of what is new below them), or of all others."""
    known = set(names)
    for name in names:
        if (name in state.claims) != claimed:
            continue
        try:
            module = state.model.get_submodule(name)
        except AttributeError:  # what was below a module that has been replaced
            continue
        if not claimed:
            yield from _own_tensors(name, module)
            continue
        for below, part in module.named_modules(prefix=name):
            if below == name or below not in known:
                yield from _own_tensors(below, part)


def _own_tensors(name: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for key, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and key not in module._non_persistent_buffers_set:
            yield (f"{name}.{key}" if name else key), tensor


def _apart(tensors: Mapping[str, Tensor], *, alone: bool) -> dict[str, Tensor]:
    """Contiguous on the CPU, and none sharing memory with another, which safetensors refuses; `alone`: nor with what is given."""
    seen: set[int] = set()
    result = {}
    for key, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous()
        pointer = flat.untyped_storage().data_ptr()
        is_given = alone and pointer == tensor.untyped_storage().data_ptr()
        result[key] = flat.clone() if is_given or pointer in seen else flat
        seen.add(pointer)
    return result


def _hash(tensor: Tensor) -> str:
    data = raw_bytes(tensor.cpu()).numpy().data
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(data).hexdigest()}"
