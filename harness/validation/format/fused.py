"""The base with its experts one by one, where its files hold them fused and those of the compressed checkpoint do not.

transformers keeps the experts of a layer in one tensor, `experts.gate_up_proj` and so on, and so do the files of some architectures. Their
quantized experts are stored one by one, `experts.0.gate_proj`. What lies where in the fused tensors is what the class in transformers says
of itself: `is_transposed`, `is_concatenated`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from harness.tolerance.bits import to_bytes
from harness.validation.format.container import Checkpoint, TensorEntry

_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class FusedLayout:
    """How a class keeps its experts.

    Attributes:
        is_transposed: weights lie as [in, out].
        is_concatenated: gate and up lie one after the other; else they alternate.
    """

    is_transposed: bool
    is_concatenated: bool


@dataclass(frozen=True)
class _Place:
    """Where a tensor of one expert lies: in which fused tensor, of which expert, and as which of its projections."""

    fused: str
    expert: int
    which: int
    of: int
    layout: FusedLayout
    is_bias: bool

    def taken(self, whole: Tensor) -> Tensor:
        """Take it out of the fused tensor."""
        rows = whole[self.expert]
        rows = rows.T if self.layout.is_transposed and not self.is_bias else rows
        return rows.chunk(self.of)[self.which] if self.layout.is_concatenated else rows[self.which :: self.of]


@dataclass
class SingleExperts(Checkpoint):
    """A base whose fused experts are shown one by one; `entries` have their shapes, and the places of the whole in the files."""

    whole: Mapping[str, TensorEntry] = field(default_factory=dict)
    places: Mapping[str, _Place] = field(default_factory=dict)

    def raw(self, name: str) -> np.ndarray:
        """Return the bytes of one tensor."""
        found = super().raw(name)
        if name not in self.places:
            return found
        entry = self.whole[self.places[name].fused]
        value = torch.from_numpy(found).view(entry.dtype).reshape(entry.shape)
        return to_bytes(self.places[name].taken(value)).reshape(-1).numpy()


def with_single_experts(base: Checkpoint, compressed: Checkpoint, layouts: Mapping[str, FusedLayout]) -> Checkpoint:
    """Show those experts of the base one by one that the compressed checkpoint stores so.

    Args:
        base: as it lies on disk.
        compressed: whose names are followed.
        layouts: of the layers of experts, by dotted name.
    Returns:
        The base itself where nothing is stored otherwise.
    """
    entries, places = dict(base.entries), {}
    for layer, layout in layouts.items():
        for fused, _ in _split(base, compressed, layer):
            entry = entries.pop(fused)
            is_bias = fused.endswith("_bias")
            names = _FUSED[fused.removeprefix(f"{layer}.").removesuffix("_bias")]
            for expert in range(entry.shape[0]):
                for which, name in enumerate(names):
                    place = _Place(fused, expert, which, len(names), layout, is_bias)
                    key = f"{layer}.{expert}.{name}.{'bias' if is_bias else 'weight'}"
                    shape = place.taken(torch.empty(entry.shape, dtype=torch.uint8, device="meta")).shape
                    entries[key], places[key] = replace(entry, shape=tuple(shape)), place
    return SingleExperts(base.folder, entries, base.problems, base.num_files, base.entries, places) if places else base


def _split(base: Checkpoint, compressed: Checkpoint, layer: str) -> Iterator[tuple[str, TensorEntry]]:
    """The fused tensors of a layer that the compressed checkpoint does not have, where it has single experts."""
    singles = re.compile(rf"{re.escape(layer)}\.[0-9]+\.([a-z_]+)\.")
    there = {found[1] for name in compressed.entries if (found := singles.match(name))}
    for fused, names in _FUSED.items():
        for key in (f"{layer}.{fused}", f"{layer}.{fused}_bias"):
            entry = base.entries.get(key)
            if entry is not None and key not in compressed.entries and there.issuperset(names):
                yield key, entry


def fused_again(tensors: Mapping[str, Tensor], base: Checkpoint) -> dict[str, Tensor]:
    """Put single experts back into the tensors that the class loads.

    Args:
        tensors: by the names of a base whose experts are one by one.
        base: it, or a base made of it.
    Returns:
        Tensors by the names of the files; of fewer experts where some are gone.
    """
    while not isinstance(base, SingleExperts):
        source = getattr(base, "source", None)
        if source is None:
            return dict(tensors)
        base = source
    found = {name: value for name, value in tensors.items() if name not in base.places}
    groups: dict[str, dict[tuple[int, int], str]] = {}
    for name in tensors.keys() - found.keys():
        place = base.places[name]
        groups.setdefault(place.fused, {})[place.expert, place.which] = name
    for fused, names in groups.items():
        first = base.places[next(iter(names.values()))]
        rows = []
        for expert in sorted({number for number, _ in names}):
            parts = [tensors[names[expert, which]] for which in range(first.of)]
            joined = torch.cat(parts) if first.layout.is_concatenated else torch.stack(parts, dim=1).flatten(0, 1)
            rows.append(joined.T if first.layout.is_transposed and not first.is_bias else joined)
        found[fused] = torch.stack(rows)
    return found
