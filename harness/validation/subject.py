"""What is validated: a base folder, a compressed folder, and which of the base's weights the compressed config says are quantized.

Bad input is the caller's mistake and raises (no such folder, a base that cannot be read or is quantized itself). A compressed folder
that is broken is not: it is what the checks are there to find, so its faults are kept as data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compressor.errors import ModelError
from compressor.json_text import from_json
from compressor.model.folder import check_sizes
from harness.validation.config_shape import misshapen
from harness.validation.format.container import Checkpoint, read_checkpoint
from harness.validation.format.experts import PrunedExperts
from harness.validation.format.fused import with_single_experts
from harness.validation.format.record import read_record
from harness.validation.format.scheme import ConfigGroup, attention_scheme, read_config_groups
from harness.validation.format.transforms import Transform, read_transforms, transformed, transposed_modules
from harness.validation.loading import fused_layouts, module_classes


@dataclass(frozen=True)
class Subject:
    """Both folders as read from disk.

    Attributes:
        base: tensors of the base.
        compressed: tensors of the compressed checkpoint.
        base_config: config.json of the base.
        config: config.json of the compressed checkpoint, None where it cannot be read.
        modules: the quantized modules by name, with their config group, in the order of the base's tensors.
        problems: why quantization_config or config.json cannot be used; empty if they can.
        trained: the model was trained as well, so values are no longer the base's.
        moved: scales that were moved in the base before it was compressed; `base` has them moved.
        pruned: modules that compression.json says were pruned, and whether the weights that were kept were changed as well.
        unreadable: what is wrong with that part of compression.json.
        transposed: modules whose weight lies as [in, out] where it is not quantized.
        trust_remote_code: Python files of the folders may run.
    """

    base: Checkpoint
    compressed: Checkpoint
    base_config: Mapping[str, Any]
    config: Mapping[str, Any] | None
    modules: Mapping[str, ConfigGroup] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    trained: bool = False
    moved: tuple[Transform, ...] = ()
    pruned: Mapping[str, bool] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()
    transposed: frozenset[str] = frozenset()
    trust_remote_code: bool = False

    @property
    def quantization_config(self) -> Mapping[str, Any] | None:
        """The quantization_config of the compressed checkpoint, None where there is none or it is not what its readers take it for."""
        return None if self.config is None or misshapen(self.config) else self.config.get("quantization_config")

    @property
    def quantizes_weights(self) -> bool:
        """False where no weight has to be: only keys and values are, or the model was changed otherwise and stays dense."""
        config, is_dense = self.quantization_config, "quantization_config" not in (self.config or {})
        return not (is_dense and (self.trained or self.pruned or self.moved)) and not (config and _no_weights(config))

    @property
    def readable_modules(self) -> dict[str, ConfigGroup]:
        """The quantized modules whose format the decoder reads."""
        return {name: group for name, group in self.modules.items() if group.scheme is not None}


def check_folders(base_dir: Path, compressed_dir: Path) -> None:
    """Refuse what are no two folders, before either is read.

    Args:
        base_dir: of the base model.
        compressed_dir: of the compressed checkpoint.

    Raises:
        ModelError: a folder is missing, or both are the same.
    """
    for folder, role in ((base_dir, "base"), (compressed_dir, "compressed")):
        if not folder.is_dir():
            raise ModelError(f"{folder}: no such folder for the {role} model; give the folder that holds its config.json")
    if base_dir.resolve() == compressed_dir.resolve():
        raise ModelError(f"{base_dir}: is given as base and as compressed model; give two folders")


def read_subject(base_dir: Path, compressed_dir: Path, *, trained: bool = False, trust_remote_code: bool = False) -> Subject:
    """Read both folders; tensors stay on disk.

    Args:
        base_dir: folder of the base model, safetensors and config.json.
        compressed_dir: folder of the compressed checkpoint.
        trained: the model was trained as well.
        trust_remote_code: run Python files of the folders, where their configs ask for them.
    Returns:
        The subject.
    Raises:
        ModelError: a folder is missing, both are the same, or the base cannot be read or is quantized.
    """
    check_folders(base_dir, compressed_dir)
    base_config, problem = _read_config(base_dir)
    if base_config is None:
        raise ModelError(f"{problem}; the base must be a Hugging Face model folder")
    if fault := misshapen(base_config):
        raise ModelError(f"{base_dir}: config.json: {fault}; restore the file")
    if "quantization_config" in base_config:
        raise ModelError(f"{base_dir}: the base is quantized itself; give the model that was compressed")
    base = read_checkpoint(base_dir, finished=False)
    if base.problems:
        raise ModelError(f"{base_dir}: the base cannot be read: {base.problems[0]}; save it again as safetensors")
    config, problem = _read_config(compressed_dir, once=True)  # of a key that stands twice readers take the first or the last
    classes = module_classes(base_dir, trust_remote_code=trust_remote_code)
    record = read_record(compressed_dir)
    compressed = read_checkpoint(compressed_dir)
    layouts = fused_layouts(base_dir, trust_remote_code=trust_remote_code)
    base, compressed = with_single_experts(base, compressed, layouts), with_single_experts(compressed, base, layouts)
    moved, unreadable = read_transforms(record, base, classes)
    shown = transformed(base, moved, classes)
    subject = Subject(
        shown,
        compressed,
        base_config,
        config,
        problems=(problem,) if problem else (),
        trained=trained,
        moved=moved,
        pruned=_pruned(record or {}) | {name.removesuffix(".weight"): True for name in _refitted(moved, shown)},
        unreadable=tuple(unreadable),
        transposed=transposed_modules(classes),
        trust_remote_code=trust_remote_code,
    )
    return _with_modules(subject, classes)


def _read_config(folder: Path, *, once: bool = False) -> tuple[dict[str, Any] | None, str | None]:
    path = folder / "config.json"
    if not path.is_file():
        return None, f"{folder}: holds no config.json"
    try:
        config = from_json(path.read_text(encoding="utf-8"), once=once)
    except ValueError as error:
        return None, f"{path}: is not JSON: {error}"
    if not isinstance(config, dict):
        return None, f"{path}: is no JSON object"
    try:
        check_sizes(path, config)
    except ModelError as error:
        return None, str(error)
    return config, None


def _pruned(record: Mapping[str, Any]) -> dict[str, bool]:
    """Read which modules were pruned, and whether their other weights were moved to make good for it."""
    modules = record.get("modules")
    details = {
        str(name): entry["details"]
        for name, entry in (modules if isinstance(modules, Mapping) else {}).items()
        if isinstance(entry, Mapping) and isinstance(entry.get("details"), Mapping)
    }
    shares = {name: own.get("sparsity") for name, own in details.items()}
    return {name: details[name].get("kept") == "moved" for name, share in shares.items() if isinstance(share, int | float) and share > 0}


def _refitted(moved: Sequence[Transform], base: Checkpoint) -> list[str]:
    """Weights of experts that were moved to make good for others that are gone."""
    layers = [layer for move in moved if isinstance(move, PrunedExperts) for layer in move.layers]
    return [name for name in base.entries if any(layer.was_moved(name) for layer in layers)]


def _with_modules(subject: Subject, classes: Mapping[str, Sequence[str]]) -> Subject:
    """Resolve targets and ignore patterns of the config groups to the base's weights."""
    if subject.config is None or not subject.quantizes_weights:
        return subject
    config = subject.quantization_config
    if config is None:
        none = "config.json holds no quantization_config: not a compressed checkpoint (--trained: a dense one)"
        return _with_problem(subject, f"config.json: {fault}" if (fault := misshapen(subject.config)) else none)
    try:
        groups = read_config_groups(config)
        ignore = tuple(config.get("ignore") or ())
        modules = {}
        for key, entry in subject.base.entries.items():
            module, _, last = key.rpartition(".")
            # a module that the meta model does not have (experts that newer versions fuse) is taken for a Linear
            names = classes.get(module, ("Linear",))
            if last != "weight" or len(entry.shape) != 2 or is_ignored(module, classes, ignore):
                continue
            group = _group_of(module, names, groups)
            if group is not None:
                modules[module] = group
    except (ValueError, TypeError, AttributeError, re.error) as error:
        return _with_problem(subject, f"quantization_config cannot be read: {error}")
    if not modules:
        return _with_problem(subject, "quantization_config targets no weight of the base: nothing is quantized")
    return replace(subject, modules=modules)


def is_ignored(module: str, classes: Mapping[str, Sequence[str]], ignore: Sequence[str]) -> bool:
    """Say whether ignore patterns mean a module, or the layer that keeps it fused: experts that are one module have one name there.

    Args:
        module: dotted name.
        classes: names of the classes of each module.
        ignore: patterns.
    Returns:
        True where it is left out.
    """
    meant = {module: classes.get(module, ("Linear",))}
    if module not in classes:
        parts = module.split(".")
        meant |= {".".join(parts[:count]): () for count in range(1, len(parts))}
    return any(is_meant(name, names, pattern) for name, names in meant.items() for pattern in ignore)


def _no_weights(config: Mapping[str, Any]) -> bool:
    """Only keys and values are quantized, queries maybe, or inputs and outputs turned in every forward."""
    queries = attention_scheme(config)
    others = config.get("kv_cache_scheme"), config.get("transform_config") or None, queries
    groups = config.get("config_groups") or {}
    return any(isinstance(other, Mapping) for other in others) and len(groups) == (queries is not None)


def _with_problem(subject: Subject, problem: str) -> Subject:
    return replace(subject, modules={}, problems=(*subject.problems, problem))


def _group_of(name: str, classes: Sequence[str], groups: Sequence[ConfigGroup]) -> ConfigGroup | None:
    """Return the group of the most specific target: exact names before regexes before classes, as compressed-tensors ranks them."""
    by_target = {target: group for group in groups for target in group.targets}
    matching = [target for target in by_target if is_meant(name, classes, target)]
    if not matching:
        return None
    return by_target[min(matching, key=lambda target: (target in classes, target.startswith("re:"), target))]


def is_meant(name: str, classes: Sequence[str], pattern: str) -> bool:
    """Say whether a target or ignore pattern means a module: `re:` regex from the start, exact name, or class name.

    Args:
        name: dotted name.
        classes: names of its classes.
        pattern: of a config.
    Returns:
        Whether it does.
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return pattern == name or pattern in classes
