"""Toys made to deceive a tracer. Each is a small model with a plain meaning, and says what a right tracer must do with it.

`right` means that nothing less than the plain model's numbers will do; `right or refused` that a clear refusal is an answer, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from compressor.random_state import random_numbers_kept
from harness.traceability.architectures import draw_weights
from harness.traceability.batches import Batch
from harness.traceability.toys import call_order, mutation, outside_state, python_values, scopes
from harness.traceability.toys.base import WIDTH, Toy
from harness.traceability.verdicts import Subject

_LAYERS = r"re:layers\.\d+$"


@dataclass(frozen=True)
class ToyCase:
    """One toy, as the audit takes it.

    Attributes:
        name: of the class, in snake case.
        kind: the class.
    """

    name: str
    kind: type[Toy]

    @property
    def must(self) -> str:
        """What a right tracer must do."""
        return self.kind.must

    @property
    def claim(self) -> str:
        """What is deceptive about it."""
        return " ".join((self.kind.__doc__ or "").split())

    @property
    def layers(self) -> tuple[str, ...]:
        """Patterns of its sequential targets."""
        return (_LAYERS,)

    def build(self, seed: int = 0) -> nn.Module:
        """Build the toy.

        Args:
            seed: of its weights.

        Returns:
            The toy, in eval mode.
        """
        with random_numbers_kept(foreign=False):
            torch.manual_seed(seed)
            model = self.kind().eval()
        draw_weights(model, seed)
        return model

    def batches(self, seed: int = 1) -> dict[str, Batch]:
        """Draw its batches: variant to batch, `same` first.

        Args:
            seed: of everything random.

        Returns:
            The batches: `x` [rows, length, width] and, but for `bare`, a mask [rows, length].
        """
        generator = torch.Generator().manual_seed(seed)
        sizes = {"same": (2, 5), "padded": (2, 5), "shape": (1, 7), "bare": (3, 4)}
        made: dict[str, Batch] = {}
        for name, (rows, length) in sizes.items():
            made[name] = {"x": torch.randn(rows, length, WIDTH, generator=generator)}
            if name != "bare":
                made[name]["mask"] = torch.ones(rows, length, dtype=torch.int64)
        made["padded"]["mask"][0, 3:] = 0
        return made

    def subject(self) -> Subject:
        """Return what the audit takes."""
        return Subject(self.name, self.build, self.batches(), self.layers)


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


_MODULES = (python_values, call_order, mutation, scopes, outside_state)
TOYS = MappingProxyType(
    {
        _snake(kind.__name__): ToyCase(_snake(kind.__name__), kind)
        for module in _MODULES
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Toy) and kind is not Toy and kind.__module__ == module.__name__
    }
)
