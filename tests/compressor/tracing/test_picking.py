"""Proofs take samples that differ in sizes and in padding, with either engine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from compressor.data.collate import Batch
from compressor.errors import TracingError
from compressor.tracing import trace
from compressor.tracing.suspend.interleaving import pick_apart

LEFT: list[Tensor] = []


def batch(rows: int, length: int, padded: bool = False, value: int = 1) -> Batch:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[:, length - padded :] = 0
    return {"x": torch.full((rows, length, 4), float(value)), "attention_mask": mask}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([batch(1, 4)], [0]),
        ([batch(1, 4), batch(1, 4)], [0, 1]),
        ([batch(1, 4), batch(1, 4), batch(1, 4, value=2)], [0, 1, 2]),
        ([batch(1, 4), batch(1, 5), batch(1, 4, padded=True)], [1, 2]),
        ([batch(1, 4), batch(1, 4, value=2), batch(1, 4, value=3), batch(2, 4, padded=True)], [0, 3]),
        ([batch(1, 4), batch(1, 5), batch(1, 8), batch(2, 8, padded=True)], [0, 3]),
    ],
)
def test_what_takes_turns_differs_in_sizes_and_padding(given: list[Batch], expected: list[int]) -> None:
    proved: dict[object, set[object]] = {}
    assert [next(place for place, one in enumerate(given) if one is picked) for picked in pick_apart(given, proved)] == expected
    assert pick_apart(given, proved) == []


def test_batches_that_come_later_are_proved_where_they_are_new() -> None:
    proved: dict[object, set[object]] = {}
    assert len(pick_apart([batch(1, 4)], proved)) == 1 and len(pick_apart([batch(1, 4), batch(1, 4, value=2)], proved)) == 2
    assert len(pick_apart([batch(1, 4, padded=True)], proved)) == 1 and not pick_apart([batch(1, 4)], proved)


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.lin = index, nn.Linear(4, 4)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        if not attention_mask.all():  # only padded batches hand something on
            LEFT[:] = [*LEFT, x] if self.index == 0 else LEFT
            x = x + LEFT[-1] if self.index == 2 else x
        return self.lin(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index) for index in range(3))

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x


def test_what_only_padded_batches_hand_on_is_found() -> None:
    given = [batch(1, 4), batch(1, 5), batch(1, 4, padded=True, value=2), batch(1, 5, padded=True, value=3)]
    with pytest.raises(TracingError, match="forwards that take turns do not give what each gives alone"):
        trace(Model().eval(), given, ["re:layers[.][0-9]$"], engine="suspend")
