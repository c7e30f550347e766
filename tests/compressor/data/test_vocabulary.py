"""Token ids against the model's table, where the model says which that is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from compressor.data import check_vocabulary, max_positions
from compressor.errors import DatasetError


class Data:
    def __init__(self, *ids: int) -> None:
        self.batches: list[Any] = [{"input_ids": torch.tensor([[0, 1]])}, {"input_ids": torch.tensor([ids])}]


class Model(nn.Module):
    def __init__(self, table: nn.Module | None) -> None:
        super().__init__()
        self.table = table

    def get_input_embeddings(self) -> nn.Module:
        if self.table is None:
            raise NotImplementedError("not auto-handled")  # as of CLIPModel in transformers
        return self.table


@pytest.mark.parametrize("ids", [(3, 4), (-1, 0)])
def test_ids_outside_of_the_table_are_named(ids: tuple[int, ...]) -> None:
    odd = next(one for one in ids if not 0 <= one < 4)
    with pytest.raises(DatasetError, match=f"batch 1 holds token id {odd}, and the model knows 0 to 3"):
        check_vocabulary(Data(*ids), Model(nn.Embedding(4, 2)))


@pytest.mark.parametrize(
    "model", [Model(None), Model(nn.Linear(2, 2)), nn.Linear(2, 2)], ids=["several tables", "no table", "no model of transformers"]
)
def test_where_nobody_says_which_is_the_table_the_forward_will_tell(model: nn.Module) -> None:
    check_vocabulary(Data(7), model)


@pytest.mark.parametrize(("written", "limit"), [(16, 16), (-1, None), (0, None), (None, None)])
def test_a_limit_of_minus_one_is_none(written: int | None, limit: int | None) -> None:
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(max_position_embeddings=written)  # type: ignore[assignment]
    assert max_positions(model) == limit
    assert max_positions(nn.Linear(2, 2)) is None
