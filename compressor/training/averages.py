"""Exponential moving averages of weights, updated inside the step so that a replay updates them too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from compressor.errors import UserInputError


class WeightAverages:
    """Averages of all floating-point parameters of a model: average = decay * average + (1 - decay) * weight.

    Args:
        model: the model; its weights are copied.
        decay: share of the old average that stays after a step, in (0, 1).

    Raises:
        UserInputError: a decay out of range.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise UserInputError(f"WeightAverages: decay={decay} is not between 0 and 1; give for example 0.999")
        self.decay = decay
        self._weights = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
        self.tensors: dict[str, Tensor] = {name: p.detach().clone() for name, p in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move every average towards its weight, in place."""
        for name, average in self.tensors.items():
            average.lerp_(self._weights[name].detach(), 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the averages into the model while the block runs; storages stay where they are.

        Yields:
            Nothing.
        """
        with torch.no_grad():
            kept = {name: weight.detach().clone() for name, weight in self._weights.items()}
            for name, weight in self._weights.items():
                weight.copy_(self.tensors[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weight in self._weights.items():
                    weight.copy_(kept[name])
