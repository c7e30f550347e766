"""The base with fewer experts: those that compression.json says were kept, under their new numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.tolerance.bits import to_bytes
from harness.validation.format.container import Checkpoint, TensorEntry, whole


@dataclass(frozen=True)
class KeptExperts:
    """Which experts of one layer were kept.

    Attributes:
        prefix: dotted name of the layer, as in the base's files.
        kept: numbers of the experts, in their new order.
        tensors: further tensors with a place for each expert, and the axis of those places.
        refit: last parts of the names of projections that were moved to make good for those that went, one by one or fused.
    """

    prefix: str
    kept: tuple[int, ...]
    tensors: Mapping[str, int]
    refit: frozenset[str] = frozenset()

    def was_moved(self, name: str) -> bool:
        """Say whether a weight may have other values than the base's."""
        numbered = _numbered(self.prefix, name)
        part = numbered[2] if numbered else name.removeprefix(f"{self.prefix}.") if name.startswith(f"{self.prefix}.") else ""
        return part.removesuffix(".weight") in self.refit and (numbered is None or part.endswith(".weight"))


@dataclass(frozen=True)
class PrunedExperts:
    """Experts that were taken out of every layer.

    Attributes:
        modifier: class that did it.
        setting: names of attributes from the config to what counts experts.
        num_experts: in the base.
        layers: what was kept of each.
    """

    modifier: str
    setting: tuple[str, ...]
    num_experts: int
    layers: tuple[KeptExperts, ...]

    @property
    def settings(self) -> dict[tuple[str, ...], int]:
        """What the config says otherwise than the base's."""
        return {self.setting: len(self.layers[0].kept)}


@dataclass(frozen=True)
class _Part:
    """A tensor of the base, or places of it along an axis."""

    name: str
    axis: int | None = None
    places: tuple[int, ...] = ()


@dataclass
class FewerExperts(Checkpoint):
    """A base of which some experts are gone; `entries` have the shapes of what is left, and the places of the files."""

    source: Checkpoint = field(default_factory=lambda: Checkpoint(Path()))
    taken: Mapping[str, _Part] = field(default_factory=dict)

    def raw(self, name: str) -> np.ndarray:
        """Return the bytes of what is left of one tensor."""
        part = self.taken[name]
        if part.axis is None:
            return self.source.raw(part.name)
        left = self.source.tensor(part.name).index_select(part.axis, torch.tensor(part.places))
        return to_bytes(left).reshape(-1).numpy()


def read_experts(entry: Mapping[str, Any]) -> PrunedExperts:
    """Read one entry of compression.json.

    Args:
        entry: of kind `experts`.
    Returns:
        It.
    Raises:
        Exception: one of `MISSHAPEN`, where it cannot be read.
    """
    layers = tuple(
        KeptExperts(
            str(one["experts"]),
            tuple(whole(place) for place in one["kept"]),
            {str(name): whole(axis) for name, axis in one["tensors"].items()},
            frozenset(str(name) for name in one["refit"]),
        )
        for one in entry["layers"]
    )
    found = PrunedExperts(str(entry["modifier"]), tuple(str(name) for name in entry["setting"]), whole(entry["num_experts"]), layers)
    if len({len(layer.kept) for layer in layers}) != 1 or not found.setting:
        raise ValueError("layers keep different numbers of experts, or none")
    return found


def misfits(pruned: PrunedExperts, base: Checkpoint) -> Iterator[str]:
    """Say what of an entry does not fit the base.

    Args:
        pruned: as read.
        base: whose experts are named.
    Yields:
        A sentence each.
    """
    for layer in pruned.layers:
        if not layer.kept or len(set(layer.kept)) != len(layer.kept) or not all(0 <= place < pruned.num_experts for place in layer.kept):
            yield f"{layer.prefix} keeps {list(layer.kept)}, which are no experts of {pruned.num_experts}"
        inside = [name for name in base.entries if name.startswith(f"{layer.prefix}.")]
        if not inside:
            yield f"the base holds no {layer.prefix}"
        numbers = {int(found[1]) for name in inside if (found := _numbered(layer.prefix, name))}
        if numbers and (len(numbers), max(numbers)) != (pruned.num_experts, pruned.num_experts - 1):
            yield f"{layer.prefix} has {len(numbers)} experts in the base, not {pruned.num_experts}"
        axes = {**dict.fromkeys((name for name in inside if not _numbered(layer.prefix, name)), 0), **layer.tensors}
        for name, axis in axes.items():
            shape = base.entries[name].shape if name in base.entries else ()
            if not 0 <= axis < len(shape) or shape[axis] != pruned.num_experts:
                yield f"{name} {list(shape)} has no {pruned.num_experts} places along axis {axis}"


def with_fewer_experts(base: Checkpoint, pruned: PrunedExperts) -> FewerExperts:
    """Return the base with the experts that were kept.

    Args:
        base: as it lies on disk, to which the entry fits.
        pruned: what was kept.
    Returns:
        A checkpoint that reads the files of the base.
    """
    parts: dict[str, _Part] = {}
    for name in base.entries:
        layer = next((one for one in pruned.layers if name.startswith(f"{one.prefix}.") or name in one.tensors), None)
        if layer is None:
            parts[name] = _Part(name)
        elif name in layer.tensors:
            parts[name] = _Part(name, layer.tensors[name], layer.kept)
        elif numbered := _numbered(layer.prefix, name):
            if int(numbered[1]) in layer.kept:
                parts[f"{layer.prefix}.{layer.kept.index(int(numbered[1]))}.{numbered[2]}"] = _Part(name)
        else:
            parts[name] = _Part(name, 0, layer.kept)
    entries = {name: _entry(base.entries[part.name], part) for name, part in parts.items()}
    return FewerExperts(base.folder, entries, base.problems, base.num_files, base, parts)


def _entry(entry: TensorEntry, part: _Part) -> TensorEntry:
    if part.axis is None:
        return entry
    shape = list(entry.shape)
    shape[part.axis] = len(part.places)
    return replace(entry, shape=tuple(shape))


def _numbered(prefix: str, name: str) -> re.Match[str] | None:
    """Number of the expert and the rest of the name, where files keep experts one by one."""
    return re.fullmatch(rf"{re.escape(prefix)}\.([0-9]+)\.(.+)", name)
