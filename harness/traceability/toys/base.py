"""What toys are built of: a layer with two linears, and a model with three such layers between an embedding and a head."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

WIDTH = 8
RIGHT, RIGHT_OR_REFUSED = "right", "right or refused"


class Layer(nn.Module):
    """Two linears with a residual."""

    def __init__(self) -> None:
        """Make the linears."""
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add to `x` what the linears make of it."""
        return x + self.down(torch.tanh(self.up(x)))


class Toy(nn.Module):
    """An embedding, three layers, a head. A toy replaces `forward`, and sometimes the layers."""

    must: ClassVar[str] = RIGHT
    layer: ClassVar[type[nn.Module]] = Layer

    def __init__(self) -> None:
        """Make the modules."""
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(self.layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        """Compute what the toy computes.

        Args:
            x: [rows, length, width].
            mask: [rows, length], 0 where padded.

        Returns:
            A tensor, or a structure of tensors.
        """
        raise NotImplementedError
