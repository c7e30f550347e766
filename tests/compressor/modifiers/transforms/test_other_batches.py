"""What a model gives on batches of other kinds is compared before and after a transform, and leaves no trace in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor.errors import TargetError
from compressor.modifiers.transforms.other_batches import OtherBatches

IDS = torch.randint(1, 64, (4, 12), generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """Notes its calls, and reads a weight where a short batch has tokens that count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.noted = nn.Embedding(64, 8), nn.Linear(8, 8), list[int]()
        self.factor = nn.Parameter(torch.ones(8, dtype=torch.float32))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.noted.append(len(input_ids))
        logits: Tensor = self.head(self.embed(input_ids))
        return logits * self.factor if input_ids.shape[1] < 6 and bool(attention_mask.any()) else logits


def compared(factor: float, mask: Tensor) -> list[int]:
    """Change the weight between two looks; return the calls that the model has noted."""
    model = Model()
    batches = [{"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}, {"input_ids": IDS[:, :4], "attention_mask": mask}]
    state: Any = SimpleNamespace(model=model, data=SimpleNamespace(batches=batches), device=torch.device("cpu"))
    others = OtherBatches(state, "own")
    with torch.no_grad():
        model.factor.mul_(factor)
    others.check(state)
    return model.noted


def test_the_forwards_leave_no_trace() -> None:
    assert compared(1.0, torch.ones(4, 4, dtype=torch.int64)) == []


@pytest.mark.parametrize("factor", [1.5, torch.nan])
@pytest.mark.parametrize("row", [0, 2])
def test_the_row_with_the_most_tokens_is_looked_at_and_nan_is_another_output(factor: float, row: int) -> None:
    mask = torch.zeros(4, 4, dtype=torch.int64)
    mask[row] = 1
    with pytest.raises(TargetError, match=r"own: on batch 1 \(4, 4\) the model gives other outputs than before"):
        compared(factor, mask)
