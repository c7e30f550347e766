"""A checkpoint with its experts one by one, where its files hold them fused and those of the other checkpoint do not.

transformers keeps the experts of a layer in one tensor, `experts.gate_up_proj` and so on, and so do the files of some architectures. Their
quantized experts are stored one by one, `experts.0.gate_proj`; floats beside them may be fused though the base's files are not. What lies
where in the fused tensors is what the class in transformers says of itself: `is_transposed`, `is_concatenated`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from harness.tolerance.bits import to_bytes
from harness.validation.format.container import Checkpoint, TensorEntry


@dataclass(frozen=True)
class FusedLayout:
    """How a class keeps its experts.

    Attributes:
        is_transposed: weights lie as [in, out].
        is_concatenated: gate and up lie one after the other; else they alternate.
        names: of the projections that each fused tensor is made of, in the files that keep them apart.
    """

    is_transposed: bool
    is_concatenated: bool
    names: Mapping[str, Sequence[str]]


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
    """A checkpoint whose fused experts are shown one by one; `entries` have their shapes, and the places of the whole in the files."""

    whole: Mapping[str, TensorEntry] = field(default_factory=dict)
    places: Mapping[str, _Place] = field(default_factory=dict)

    @property
    def stored(self) -> Checkpoint:
        """The checkpoint as it lies on disk."""
        return Checkpoint(self.folder, dict(self.whole), self.problems, self.num_files)

    def raw(self, name: str) -> np.ndarray:
        """Return the bytes of one tensor."""
        found = super().raw(name)
        if name not in self.places:
            return found
        entry = self.whole[self.places[name].fused]
        value = torch.from_numpy(found).view(entry.dtype).reshape(entry.shape)
        return to_bytes(self.places[name].taken(value)).reshape(-1).numpy()


def with_single_experts(shown: Checkpoint, other: Checkpoint, layouts: Mapping[str, FusedLayout]) -> Checkpoint:
    """Show those experts of a checkpoint one by one that the other stores so.

    Args:
        shown: as it lies on disk.
        other: whose names are followed.
        layouts: of the layers of experts, by dotted name in the files.
    Returns:
        The checkpoint itself where nothing is stored otherwise.
    """
    entries, places = dict(shown.entries), {}
    for layer, layout in layouts.items():
        for fused, names in _split(shown, other, layer, layout):
            entry = entries.pop(fused)
            is_bias = fused.endswith("_bias")
            for expert in range(entry.shape[0]):
                for which, name in enumerate(names):
                    place = _Place(fused, expert, which, len(names), layout, is_bias)
                    key = f"{layer}.{expert}.{name}.{'bias' if is_bias else 'weight'}"
                    shape = place.taken(torch.empty(entry.shape, dtype=torch.uint8, device="meta")).shape
                    entries[key], places[key] = replace(entry, shape=tuple(shape)), place
    return SingleExperts(shown.folder, entries, shown.problems, shown.num_files, shown.entries, places) if places else shown


def _split(shown: Checkpoint, other: Checkpoint, layer: str, layout: FusedLayout) -> Iterator[tuple[str, Sequence[str]]]:
    """The fused tensors of a layer that the other checkpoint does not have, where it has single experts, with their projections."""
    singles = re.compile(rf"{re.escape(layer)}\.[0-9]+\.([a-z_0-9]+)\.")
    there = {found[1] for name in other.entries if (found := singles.match(name))}
    for fused, names in layout.names.items():
        for key in (f"{layer}.{fused}", f"{layer}.{fused}_bias"):
            if key in shown.entries and key not in other.entries and there.issuperset(names):
                yield key, names


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
