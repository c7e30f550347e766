"""Rotations of hidden states that compression.json says were put into the base's weights: read, and done again from its own tensors."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.validation.format.container import Checkpoint, whole

_ORTHOGONAL = 1e-5  # largest entry of Q Q^T - I


@dataclass(frozen=True)
class Fold:
    """A norm whose weight and bias moved into the layers that read it.

    Attributes:
        norm: dotted name, as in the base's files.
        readers: the same.
        offset: what the norm adds to its weight.
    """

    norm: str
    readers: tuple[str, ...]
    offset: float


@dataclass(frozen=True)
class Turn:
    """An orthogonal matrix by which outputs of some modules, and the inputs of others, were multiplied, run of channels by run.

    Attributes:
        matrix_BB: float64.
        writers: dotted names, as in the base's files.
        readers: the same.
        online: the group of transform_config by which readers turn what they are handed, and writers turn back what they give, in every
            forward; empty where weights do both.
    """

    matrix_BB: Tensor
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    online: str = ""

    def columns(self, value_ND: Tensor) -> Tensor:
        """Multiply rows by the matrix."""
        return (value_ND.reshape(-1, len(self.matrix_BB)) @ self.matrix_BB).reshape(value_ND.shape)


@dataclass(frozen=True)
class Rotations:
    """What one modifier did, all of it computed in float64 and rounded once.

    Attributes:
        modifier: class that did it.
        folds: norms that became neutral.
        turns: in this order.
        untied: heads that got a weight of their own, each with the embedding whose weight it had.
    """

    modifier: str
    folds: tuple[Fold, ...]
    turns: tuple[Turn, ...]
    untied: Mapping[str, str]

    @property
    def modules(self) -> frozenset[str]:
        """Whatever has other weights now."""
        folded = {name for fold in self.folds for name in (fold.norm, *fold.readers)}
        return frozenset(folded | {name for turn in self.turns for name in (*turn.writers, *turn.readers)})

    @property
    def offline(self) -> Rotations:
        """What is in weights alone, so that the base computes the same with it."""
        return replace(self, turns=tuple(turn for turn in self.turns if not turn.online))

    def changed(self, value: Tensor, name: str, kind: str, before: Callable[[str], Tensor | None]) -> Tensor:
        """Return what a tensor became.

        Args:
            value: in any float dtype; [R, K] of linear layers, whatever lies in the file.
            name: `module.part`.
            kind: `embedding`, `layer` or `norm`.
            before: gives other tensors as they were, by name; None for one that is not there.
        Returns:
            The tensor in float64.
        """
        module, _, part = name.rpartition(".")
        if kind == "norm":
            return self._norm(value, module, part, before)
        fold = next((one for one in self.folds if module in one.readers), None)
        wide = value.double()
        if fold is not None:
            wide = self._folded(fold, wide, module, part, before)
        for turn in self.turns:
            if module in turn.readers and part == "weight":
                wide = turn.columns(wide)
            if module in turn.writers:
                wide = turn.columns(wide) if part == "bias" or kind == "embedding" else turn.columns(wide.T.contiguous()).T
        return wide

    def _folded(self, fold: Fold, wide: Tensor, module: str, part: str, before: Callable[[str], Tensor | None]) -> Tensor:
        weight, bias = before(f"{fold.norm}.weight"), before(f"{fold.norm}.bias")
        assert weight is not None
        if part == "weight":
            return wide * (weight.double() + fold.offset)
        rows = before(f"{module}.weight")
        if bias is None or rows is None or not self._moves_bias(fold, before):
            return wide
        return wide + rows.double() @ bias.double()

    def _norm(self, value: Tensor, module: str, part: str, before: Callable[[str], Tensor | None]) -> Tensor:
        fold = next((one for one in self.folds if one.norm == module), None)
        if fold is None:
            return value.double()
        if part == "weight":
            return torch.full_like(value.double(), 1.0 - fold.offset)
        if self._moves_bias(fold, before):
            return torch.zeros_like(value.double())
        weight = before(f"{module}.weight")
        assert weight is not None
        wide = value.double() / (weight.double() + fold.offset)
        for turn in self.turns:
            if module in turn.writers:
                wide = turn.columns(wide)
        return wide

    def _moves_bias(self, fold: Fold, before: Callable[[str], Tensor | None]) -> bool:
        return all(before(f"{reader}.bias") is not None for reader in fold.readers)


def read_rotations(entry: Mapping[str, Any]) -> Rotations:
    """Read one entry of `transforms` whose kind is `rotations`.

    Args:
        entry: as in compression.json.
    Returns:
        What it says.
    Raises:
        Exception: one of `MISSHAPEN`, where it cannot be read.
    """
    folds = tuple(Fold(str(one["norm"]), _names(one["readers"]), float(one["offset"])) for one in entry["folds"])
    turns = tuple(
        Turn(_matrix(one["matrix"]), _names(one["writers"]), _names(one["readers"]), str(one.get("online", ""))) for one in entry["turns"]
    )
    return Rotations(str(entry["modifier"]), folds, turns, {str(head): str(source) for head, source in dict(entry["untied"]).items()})


def misfits(found: Rotations, base: Checkpoint, sides: Callable[[str], tuple[int, int] | None]) -> Iterator[str]:
    """Say what of it cannot be.

    Args:
        found: as read.
        base: whose tensors are named.
        sides: channels that a module gives and takes, by its name; None where the base has no such weight.
    Yields:
        Sentences.
    """
    for number, turn in enumerate(found.turns):
        size = len(turn.matrix_BB)
        off = float((turn.matrix_BB @ turn.matrix_BB.T - torch.eye(size, dtype=torch.float64)).abs().max())
        if not off <= _ORTHOGONAL:
            yield f"matrix {number} is not orthogonal: Q Q^T is {off:.2g} off the identity"
        if turn.online and bool(turn.writers) == bool(turn.readers):
            yield f"matrix {number}, {turn.online}, is for the inputs of some modules or for the outputs of some"
        if not turn.online and not (turn.writers and turn.readers):
            yield f"matrix {number} has no {'readers' if turn.writers else 'writers'}"
        for name, side in ((name, side) for side, names in enumerate((turn.writers, turn.readers)) for name in names):
            channels = sides(found.untied.get(name, name))
            if channels is None:
                yield f"the base holds no {name}.weight"
            elif channels[side] % size:
                yield f"{name} with {channels[side]} channels does not fit a matrix of {size}"
    for name in (*(fold.norm for fold in found.folds), *found.untied.values()):
        if f"{name}.weight" not in base.entries:
            yield f"the base holds no {name}.weight"


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list of names")
    return tuple(str(name) for name in value)


def _matrix(entry: Mapping[str, Any]) -> Tensor:
    size = whole(entry["size"])
    if size < 1:
        raise ValueError(f"a matrix of {size} channels")
    if "values" in entry:
        data = np.frombuffer(base64.b64decode(entry["values"], validate=True), dtype="<f8").astype(np.float64)
        return torch.from_numpy(data).reshape(size, size)
    matrix = _signs(entry["signs"], size * size).reshape(size, size) / size**0.5
    return matrix if "diagonal" not in entry else (matrix * _signs(entry["diagonal"], size)) @ matrix.T


def _signs(text: str, count: int) -> Tensor:
    packed = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8)
    if 8 * len(packed) < count:
        raise ValueError(f"{8 * len(packed)} signs in place of {count}")
    bits = np.unpackbits(packed, count=count)
    return torch.from_numpy(bits.astype(np.float64)) * 2 - 1
