"""What a calibration run has to offer: a small model of its own, rows of tokens in, everything that it made out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class Calibrated:
    """What one run made.

    Attributes:
        tensors: everything that a checkpoint would hold of the compressed model, by name.
        codes: codes by module.
        statistics: Hessians, or whatever is summed over tokens, by module; empty where none are kept.
        num_tokens: tokens that each target module saw, counted by hooks of the subject and not taken from the run's own report.
        fallbacks: by module, what the run says that it did in place of what was asked for.
        global_scales: by module; empty for formats without one.
    """

    tensors: Mapping[str, Tensor]
    codes: Mapping[str, Tensor]
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    num_tokens: Mapping[str, int] = field(default_factory=dict)
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    global_scales: Mapping[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class Calibration(Protocol):
    """Calibrates and compresses a small model, the same one every time.

    Attributes:
        kind: "calibration".
        name: for reports.
        tags: none are defined.
        vocabulary: token ids lie below this.
    """

    kind: str
    name: str
    tags: frozenset[str]
    vocabulary: int

    def run(self, rows: Sequence[Tensor], *, batch_size: int = 1, sequential: bool = True, num_layers: int = 2) -> Calibrated:
        """Run on rows of token ids, layer after layer or all at once; rows of unequal length in one batch are padded."""

    def run_starved(self, *, budget: int | None) -> Calibrated | None:
        """Run so that some targets see no token (experts), where so many fallbacks are allowed; None for any number.

        Returns None where the subject has no such models, and raises where the budget is exceeded.
        """

    def command(self, rows: Path, out: Path) -> Sequence[str] | None:
        """Return a command that reads `rows` (safetensors, `input_ids`), does `run(rows)`, and writes `tensors` to `out` (safetensors)."""
