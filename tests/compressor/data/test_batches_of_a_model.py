"""Token ids against the model's table, where the model says which that is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from compressor.data import check_batches, load_dataset_source, max_positions
from compressor.data.rows import misspelt
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
        check_batches(Data(*ids), Model(nn.Embedding(4, 2)))


@pytest.mark.parametrize(
    "model", [Model(None), Model(nn.Linear(2, 2)), nn.Linear(2, 2)], ids=["several tables", "no table", "no model of transformers"]
)
def test_where_nobody_says_which_is_the_table_the_forward_will_tell(model: nn.Module) -> None:
    check_batches(Data(7), model)


class Named(nn.Module):
    """As those of transformers, which pass over what they do not know."""

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, token_type_ids: Any = None, **others: Any) -> torch.Tensor:
        return input_ids


@pytest.mark.parametrize(("name", "meant"), [("attention_maks", "attention_mask"), ("loss_masks", "loss_mask"), ("input_id", "input_ids")])
def test_a_misspelt_name_of_a_batch_is_told(name: str, meant: str) -> None:
    data = Data()
    data.batches = [{"input_ids": torch.tensor([[0]])}, {name: torch.tensor([[1]])}]
    with pytest.raises(DatasetError, match=f"batch 1: '{name}' is no input of the model; did you mean '{meant}'"):
        check_batches(data, Named())


def test_a_name_that_says_more_is_another_one() -> None:
    data = Data()
    data.batches = [{"input_ids": torch.tensor([[0]]), "mm_token_type_ids": torch.tensor([[1]]), "num_items_in_batch": torch.tensor(1)}]
    check_batches(data, Named())
    assert misspelt("assistant_masks", frozenset(("attention_mask", "loss_mask"))) is None


def test_a_misspelt_mask_of_a_row_is_told() -> None:
    rows = [{"input_ids": [1, 2], "attention_maks": [1, 0]}]
    with pytest.raises(DatasetError, match="row 0: the column 'attention_maks' is not read; did you mean 'attention_mask'"):
        load_dataset_source(rows)


@pytest.mark.parametrize("dtype", [torch.int16, torch.float32, torch.bool])
def test_ids_of_a_type_that_no_table_takes_are_told(dtype: torch.dtype) -> None:
    data = Data(0, 1)
    data.batches[1]["input_ids"] = data.batches[1]["input_ids"].to(dtype)
    with pytest.raises(DatasetError, match=f"batch 1: input_ids are {str(dtype)[6:]}, which no embedding takes"):
        check_batches(data, Model(nn.Embedding(4, 2)))


@pytest.mark.parametrize(("written", "limit"), [(16, 16), (-1, None), (0, None), (None, None)])
def test_a_limit_of_minus_one_is_none(written: int | None, limit: int | None) -> None:
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(max_position_embeddings=written)  # type: ignore[assignment]
    assert max_positions(model) == limit
    assert max_positions(nn.Linear(2, 2)) is None
