"""Small models and batches for the tests of the graph engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
PLAIN = {name: nn.Module.__dict__[name] for name in ("__call__", "__setattr__", "register_buffer")}
VMAP, SCRIPT = torch.vmap, torch.jit.ScriptFunction.__call__


class Block(nn.Module):
    """A layer that takes a mask and a scale by name."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        inner = torch.tanh(self.up(x if mask is None else x * mask))
        return x + self.down(inner) * (1 if scale is None else scale)


class Stacked(nn.Module):
    """Three layers, a mask that glue builds, and a scale that depends on the length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.embed(ids)
        rows, length = ids.shape
        keep = torch.ones(rows, length, 1) if mask is None else mask[:, :length, None].to(hidden.dtype)
        scale = torch.arange(length).view(1, length, 1) / length
        for layer in self.layers:
            hidden = layer(hidden, mask=keep, scale=scale)
        return {"logits": self.head(hidden), "mean": hidden.mean(1)}


def build(kind: type[nn.Module] = Stacked, seed: int = 0) -> Any:
    """Build a toy in eval mode, from a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind().eval()


def toy_batches(*sizes: tuple[int, int], padded: bool = True) -> list[Batch]:
    """Batches of these sizes with a mask; the last one is padded."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for number, (rows, length) in enumerate(sizes or ((2, 5), (1, 7), (3, 4))):
        mask = torch.ones(rows, length, dtype=torch.int64)
        if padded and number == len(sizes or (1, 1, 1)) - 1:
            mask[0, length // 2 :] = 0
        batches.append({"ids": torch.randint(0, 32, (rows, length), generator=generator), "mask": mask})
    return batches


def equal(left: Any, right: Any) -> bool:
    """Compare nested values bit for bit."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After every test torch is as it was made, and so is the random generator."""
    torch.manual_seed(7)
    before = torch.get_rng_state()
    yield
    assert {name: nn.Module.__dict__[name] for name in PLAIN} == PLAIN
    assert torch.vmap is VMAP and torch.func.vmap is VMAP and torch.jit.ScriptFunction.__call__ is SCRIPT
    assert torch.equal(torch.get_rng_state(), before), "the random generator was moved"
    assert torch.overrides._get_current_function_mode() is None
