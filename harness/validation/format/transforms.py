"""The base as a checkpoint says that it was compressed: with scales moved, or hidden states turned, as compression.json has it.

The base's own tensors are transformed here by formulas of this file alone. Whether that leaves the base's function as it is, which is the
whole claim of such a transform, is not taken on trust: `harness.validation.behaviour.transformed` runs both.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.tolerance.bits import to_bytes
from harness.validation.format.container import MISSHAPEN, Checkpoint, TensorEntry, whole
from harness.validation.format.experts import PrunedExperts, read_experts, with_fewer_experts
from harness.validation.format.experts import misfits as misfits_of_experts
from harness.validation.format.rotations import Rotations, misfits, read_rotations

_LARGEST = 2.0**40  # of a factor, either way: far beyond what leaves a model alive


@dataclass(frozen=True)
class MovedScale:
    """One factor per output channel of a module, taken back in the columns of those that read it.

    Attributes:
        modifier: class that did it.
        source: dotted name, as in the base's files.
        readers: the same.
        factors_C: float32 [C], by which the source's channels were multiplied.
        head_dim: None, or the size of heads that each appear `repeats` times in a row among the readers' columns.
        repeats: see head_dim.
        offset: what the norm adds to its weight.
    """

    modifier: str
    source: str
    readers: tuple[str, ...]
    factors_C: Tensor
    head_dim: int | None
    repeats: int
    offset: float

    @property
    def modules(self) -> frozenset[str]:
        """Whatever has other weights now."""
        return frozenset((self.source, *self.readers))

    @property
    def columns_K(self) -> Tensor:
        """The factors as they lie over the columns of the readers."""
        if self.head_dim is None:
            return self.factors_C
        heads = self.factors_C.reshape(-1, self.head_dim)
        return heads.repeat_interleave(self.repeats, dim=0).flatten()


Transform = MovedScale | Rotations | PrunedExperts
Move = MovedScale | Rotations  # what leaves the base's function as it is


@dataclass
class TransformedCheckpoint(Checkpoint):
    """A base whose tensors come out as the transforms make them."""

    moved: tuple[Move, ...] = ()
    source: Checkpoint = field(default_factory=lambda: Checkpoint(Path()))
    transposed: frozenset[str] = field(default_factory=frozenset)
    embeddings: frozenset[str] = field(default_factory=frozenset)

    @property
    def names(self) -> frozenset[str]:
        """The tensors that a transform changes."""
        return self._tensors_of(self.moved)

    @property
    def turned(self) -> frozenset[str]:
        """Those of them that a matrix multiplies, so that the order of sums decides the last bit."""
        return self._tensors_of(move for move in self.moved if isinstance(move, Rotations))

    @property
    def untied(self) -> Mapping[str, str]:
        """Heads that got a weight of their own, each with the embedding whose weight it had."""
        return {head: source for move in self.moved if isinstance(move, Rotations) for head, source in move.untied.items()}

    def _tensors_of(self, moved: Iterable[Move]) -> frozenset[str]:
        modules = {name for move in moved for name in move.modules}
        return frozenset(f"{name}.{part}" for name in modules for part in ("weight", "bias")) & self.entries.keys()

    def raw(self, name: str) -> np.ndarray:
        """Return the bytes of one tensor, transformed."""
        if name not in self.names:
            return self._raw(name)
        return to_bytes(self.tensor(name)).reshape(-1).numpy()

    def _raw(self, name: str) -> np.ndarray:
        """The bytes before any transform; a head that was tied has those of the embedding."""
        if name in self.source.entries:
            return self.source.raw(name)
        module, _, part = name.rpartition(".")
        return self.source.raw(f"{self.untied[module]}.{part}")

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, transformed; rounded to its dtype after each factor, as the compressor does."""
        return self._transformed(name, self.entries[name].dtype)

    def exact(self, name: str) -> Tensor:
        """Return one tensor, transformed and not rounded; in float32, at least, where it is one of floats."""
        dtype = self.entries[name].dtype
        return self._transformed(name, torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype)

    def _transformed(self, name: str, dtype: torch.dtype, until: int | None = None) -> Tensor:
        """A tensor after so many of the transforms; all for None."""
        entry = self.entries[name]
        value = torch.from_numpy(self._raw(name)).view(entry.dtype).reshape(entry.shape).to(dtype)
        module, _, part = name.rpartition(".")
        for index, move in enumerate(self.moved[:until]):
            if isinstance(move, Rotations):
                value = self._rotated(move, index, value, name).to(dtype)
                continue
            if module == move.source:
                value = self._multiplied(move, value, module, part).to(dtype)
            if module in move.readers and part == "weight":
                value = self._divided(move, value, module).to(dtype)
        return value

    def _rotated(self, move: Rotations, index: int, value: Tensor, name: str) -> Tensor:
        module, _, part = name.rpartition(".")
        if module not in move.modules:
            return value
        is_norm = self.entries[f"{module}.weight"].dtype.is_floating_point and len(self.entries[f"{module}.weight"].shape) == 1
        kind = "norm" if is_norm else "embedding" if module in self.embeddings else "layer"
        turned_over = part == "weight" and module in self.transposed

        def before(other: str) -> Tensor | None:
            if other not in self.entries:
                return None
            found = self._transformed(other, value.dtype, index)
            return found.T if other.rpartition(".")[0] in self.transposed and found.dim() == 2 else found

        found = move.changed(value.T if turned_over else value, name, kind, before)
        return (found.T if turned_over else found).contiguous()

    def _multiplied(self, move: MovedScale, value: Tensor, module: str, part: str) -> Tensor:
        wide, factors_C = value.to(torch.promote_types(value.dtype, torch.float32)), move.factors_C
        if part == "bias":
            return wide * factors_C
        if wide.dim() == 1:
            return (wide + move.offset) * factors_C - move.offset
        return wide * (factors_C if module in self.transposed else factors_C[:, None])

    def _divided(self, move: MovedScale, value: Tensor, module: str) -> Tensor:
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        return wide / (move.columns_K[:, None] if module in self.transposed else move.columns_K)


def read_transforms(
    record: Mapping[str, Any] | None, base: Checkpoint, classes: Mapping[str, Sequence[str]]
) -> tuple[tuple[Transform, ...], list[str]]:
    """Read what compression.json says was done to the weights before they were compressed.

    Args:
        record: what compression.json holds; None where there is none.
        base: whose tensors are named.
        classes: names of the classes of each module of the base.
    Returns:
        The transforms, and what is wrong with the record; with anything wrong no transform.
    """
    named = (record or {}).get("transforms", [])
    if not isinstance(named, list):
        return (), ["transforms is no list"]
    moved: list[Transform] = []
    problems: list[str] = []
    for index, entry in enumerate(named):
        try:
            move = _READERS.get(entry["kind"], _read)(entry)
            if isinstance(move, PrunedExperts) and index:
                raise ValueError("experts are taken out before anything else, and once")
            wrong = list(_wrong(move, base, classes))
            problems += [f"transforms[{index}]: {text}" for text in wrong]
            if isinstance(move, PrunedExperts) and not wrong:
                base = with_fewer_experts(base, move)
            moved.append(move)
        except MISSHAPEN as error:
            problems.append(f"transforms[{index}]: cannot be read ({type(error).__name__}: {error})")
    return (() if problems else tuple(moved)), problems


def _wrong(move: Transform, base: Checkpoint, classes: Mapping[str, Sequence[str]]) -> Iterable[str]:
    transposed = transposed_modules(classes)
    if isinstance(move, PrunedExperts):
        return misfits_of_experts(move, base)
    if isinstance(move, Rotations):
        return misfits(move, base, partial(_sides, base, transposed, embedding_modules(classes)))
    return _misfits(move, base, transposed)


def config_settings(moved: Iterable[Transform]) -> dict[tuple[str, ...], int]:
    """Say what the config of a compressed model says otherwise than the base's, as compression.json has it.

    Args:
        moved: of `read_transforms`.
    Returns:
        Names of attributes from the config to a setting, to its value.
    """
    return {path: value for move in moved if isinstance(move, PrunedExperts) for path, value in move.settings.items()}


def transformed(base: Checkpoint, moved: tuple[Transform, ...], classes: Mapping[str, Sequence[str]]) -> Checkpoint:
    """Return the base as it was compressed.

    Args:
        base: as it lies on disk.
        moved: of `read_transforms`.
        classes: names of the classes of each module of the base.
    Returns:
        The base itself where nothing was moved.
    """
    for pruned in moved:
        if isinstance(pruned, PrunedExperts):
            base = with_fewer_experts(base, pruned)
    moves = tuple(move for move in moved if not isinstance(move, PrunedExperts))
    if not moves:
        return base
    untied = {head: source for move in moves if isinstance(move, Rotations) for head, source in move.untied.items()}
    entries = base.entries | {f"{head}.weight": base.entries[f"{source}.weight"] for head, source in untied.items()}
    return TransformedCheckpoint(
        base.folder, entries, base.problems, base.num_files, moves, base, transposed_modules(classes), embedding_modules(classes)
    )


def transposed_modules(classes: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Name the modules whose weight lies as [in, out]: the Conv1D of transformers.

    Args:
        classes: names of the classes of each module.
    Returns:
        Dotted names.
    """
    return frozenset(name for name, kinds in classes.items() if "Conv1D" in kinds)


def embedding_modules(classes: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Name the modules that look rows up.

    Args:
        classes: names of the classes of each module.
    Returns:
        Dotted names.
    """
    return frozenset(name for name, kinds in classes.items() if "Embedding" in kinds)


def _sides(base: Checkpoint, transposed: frozenset[str], embeddings: frozenset[str], name: str) -> tuple[int, int] | None:
    """How many channels a module gives and takes."""
    entry = base.entries.get(f"{name}.weight")
    if entry is None or len(entry.shape) not in (1, 2):
        return None
    rows, columns = entry.shape[0], entry.shape[-1]
    return (columns, columns) if name in embeddings else (columns, rows) if name in transposed else (rows, columns)


def _read(entry: Any) -> MovedScale:
    if entry["kind"] != "scales":
        raise ValueError(f"kind {entry['kind']!r} is not known; a newer harness may know it")
    data = np.frombuffer(base64.b64decode(entry["factors"], validate=True), dtype="<f4")
    factors_C = torch.from_numpy(data.astype(np.float32))
    head_dim = None if entry["head_dim"] is None else whole(entry["head_dim"])
    readers = tuple(str(name) for name in entry["readers"])
    return MovedScale(
        str(entry["modifier"]), str(entry["source"]), readers, factors_C, head_dim, whole(entry["repeats"]), float(entry["offset"])
    )


def _misfits(move: MovedScale, base: Checkpoint, transposed: frozenset[str]) -> Iterator[str]:
    factors_C = move.factors_C
    if not bool(((factors_C > 1 / _LARGEST) & (factors_C < _LARGEST)).all()):
        yield f"a factor of {move.source} is no positive number of a size that a model survives"
    if not move.readers:
        yield f"nothing takes back what {move.source} was multiplied by"
    if move.head_dim is not None and (move.head_dim < 1 or move.repeats < 1 or len(factors_C) % move.head_dim):
        yield f"heads of {move.head_dim}, {move.repeats} times, do not fit {len(factors_C)} channels of {move.source}"
        return
    columns = len(factors_C) * (1 if move.head_dim is None else move.repeats)
    for name, length in ((move.source, len(factors_C)), *((reader, columns) for reader in move.readers)):
        entry = base.entries.get(f"{name}.weight")
        if entry is None:
            yield f"the base holds no {name}.weight"
        elif _side(entry, is_source=name == move.source, transposed=name in transposed) != length:
            yield f"{name}.weight {list(entry.shape)} does not fit {length} factors"


def _side(entry: TensorEntry, *, is_source: bool, transposed: bool) -> int:
    """How many factors a weight takes: rows of a source, columns of a reader."""
    if len(entry.shape) not in (1, 2):
        return -1
    return entry.shape[0 if is_source != transposed else -1]


_READERS: Mapping[str, Callable[[Any], Transform]] = {"rotations": read_rotations, "experts": read_experts}
