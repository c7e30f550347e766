"""What a trainer needs of a device: run a step eagerly, and capture it into something that replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from compressor.training.capture.operators import Record
from compressor.training.capture.recorder import Recorder


class Captured(Protocol):
    """A captured step.

    Attributes:
        ran_at_capture: the capture has performed the step already; else it must be replayed once to perform it.
        loss: where a replay leaves the loss.
        generators: random generators, beside the default ones, that the step draws from.
    """

    ran_at_capture: bool
    loss: Tensor
    generators: list[torch.Generator]

    @property
    def ops(self) -> Sequence[Record]:
        """The recorded operators."""

    @property
    def lines(self) -> list[str]:
        """The signature, a line per operator."""

    @property
    def scratch_bytes(self) -> int:
        """Memory that is held beside the model, the optimizer and the inputs."""

    def replay(self) -> None:
        """Perform one step."""

    def replay_spoiled(self) -> None:
        """Perform one step where all memory that no operator has filled is spoiled."""


class Engine(Protocol):
    """A device's way to run, capture and replay.

    Attributes:
        runs_while_capturing: a capture performs the step. Else nothing of it runs, and the step may take another way than the eager one.
    """

    runs_while_capturing: bool

    def eager(self, run: Callable[[], Tensor]) -> Tensor:
        """Run a step as it is, where a later capture will run."""

    def capture(self, run: Callable[[], Tensor], recorder: Recorder, generators: Sequence[torch.Generator]) -> Captured:
        """Capture a step, watched by the recorder; the generators are those of its own that it draws from."""
