"""Guards read as a person would write them, and those that cannot fail are not printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor.tracing import trace


class Glue(nn.Module):
    def __init__(self, glue: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
        self.glue = glue

    def forward(self, x: Tensor) -> Tensor:
        x = self.glue(x)
        for layer in self.layers:
            x = layer(x)
        return x


def guards_of(glue: Any) -> list[str]:
    batches = [(torch.ones(2, 4),)]
    with torch.random.fork_rng():
        model = Glue(glue).eval()
    plan = trace(model, batches, ["re:layers[.][0-9]$"], engine="graph")
    return [str(guard).partition(": ")[2] for guard in plan.guards if guard.is_value]


@pytest.mark.parametrize(
    ("glue", "told"),
    [
        (lambda x: x + 1 if x.sum() > 0 else x, ["x.sum() > 0"]),
        (lambda x: x + 1 if x.sum() < 0 else x, ["x.sum() >= 0"]),
        (lambda x: x if bool((x > -100).all()) else x + 1, ["(x > -100).all()"]),
        (lambda x: x if (x == 0).any() else x + 1, ["not (x == 0).any()"]),
        (lambda x: torch.stack([row * 2 for row in x]), ["len(x.unbind(0)) == 2"]),
        (lambda x: x if x.shape[0] % 2 == 0 else x + 1, ["x.shape[0] % 2 == 0"]),
        (lambda x: x if (x.shape[0] + 1) * 2 - 1 > 3 else x + 1, ["((x.shape[0] + 1) * 2) - 1 > 3"]),
        (lambda x: x if x.shape[0] == 3 else x + 1, ["x.shape[0] != 3"]),
        (lambda x: x if x.shape[0] < 5 else x + 1, ["x.shape[0] < 5"]),
        (lambda x: x if -x.shape[0] < 0 else x + 1, ["-x.shape[0] < 0"]),
        (lambda x: x if x[:, : x.shape[0]].sum() > 1 else x + 1, ["x[:, :x.shape[0]].sum() > 1"]),
        (lambda x: x if torch.cat([x, x]).sum() > 1 else x + 1, ["cat([x, x]).sum() > 1"]),
        (lambda x: x * int(x.max().item()), ["x.max() == 1.0"]),
        (lambda x: x if f"{x.shape[0]}" == "2" else x + 1, ["x.shape[0] == 2"]),
        (lambda x: x if x.to(torch.float64).bool().any() else x + 1, ["x.any()"]),
        (lambda x: x if 1.0 in x else x + 1, ["1.0 in x"]),
        (lambda x: x if (1.0 - x).sum(dim=0).any() else x + 1, ["not (1.0 - x).sum(dim=0).any()"]),
        (lambda x: x if x.size(0) == x.shape[0] and x.view(x.size(0), -1).ndim == 2 else x + 1, []),
        (lambda x: x if x.view(x.shape[0], -1).shape[1] + 0 - x.view(x.size()[0] + 0, -1).shape[1] <= 0 else x + 1, []),
        (lambda x: x if torch.ones(*x.shape).sum() == torch.ones(*x.shape).numel() else x + 1, []),
        (lambda x: x if x.dim() == 2 and x.ndim < 3 and len(x.shape) == 2 else x + 1, []),
        (lambda x: x if x.shape[0] >= x.shape[0] else x + 1, []),
        (lambda x: x if x.shape[0] + 0 - x.shape[0] > 0 else x + 1, []),
        (lambda x: x if x.size(0) == x.size(0) and x.size()[0] <= x.size()[0] else x + 1, []),
        (lambda x: x if torch.ones(x.shape[0], 3).ndim == 2 and torch.ones((x.shape[0], 3)).shape[1] == 3 else x + 1, []),
        (lambda x: x if torch.ones(x.shape[0], 3).shape[0] - torch.zeros((x.shape[0],)).size(0) <= 0 else x + 1, []),
        (lambda x: x if torch.ones(x.shape[0], 3, device="cpu").to(torch.bool).all() else x + 1, []),
        (lambda x: x if torch.ones(x.shape[0], 3).shape[0] > 1 else x + 1, ["x.shape[0] > 1"]),
        (lambda x: x if torch.zeros(x.shape[0], 3).all() else x + 1, ["not zeros(x.shape[0], 3).all()"]),
    ],
)
def test_a_guard_reads_as_a_person_would_write_it(glue: Callable[[Tensor], Tensor], told: list[str]) -> None:
    assert guards_of(glue) == told


def test_how_a_module_builds_its_result_is_no_condition_of_a_batch() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x * 2

    class Model(Glue):
        def __init__(self) -> None:
            super().__init__(lambda x: x)
            self.pair = Pair()

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.pair(x)
            return super().forward(first + second)

    with torch.random.fork_rng():
        model = Model().eval()
    plan = trace(model, [(torch.ones(2, 4),)], ["re:layers[.][0-9]$"], engine="graph")
    assert plan.variants[0].program.guard_nodes and [guard for guard in plan.guards if guard.is_value] == []
