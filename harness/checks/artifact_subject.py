"""What a checkpoint has to offer: two folders, and the model in memory that was saved, where there still is one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class Artifact(Protocol):
    """A compressed checkpoint.

    Attributes:
        kind: "artifact".
        name: for reports.
        tags: "trained", if the values of the base say nothing of its own.
        base: folder of the base.
        folder: of the checkpoint.
        model: what was saved, with quantized layers of ours or weights that are dequantized; None where it is gone.
        num_shards: for how many devices it is meant to be cut, 1 or more.
    """

    kind: str
    name: str
    tags: frozenset[str]
    base: Path
    folder: Path
    model: nn.Module | None
    num_shards: int

    def uncuttable(self) -> Mapping[str, str]:
        """Return the modules, by their names in the base, that the run says cannot be cut for `num_shards`, with the reason."""
