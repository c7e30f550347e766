"""A loss mask beside token ids says which tokens statistics count; the model reads them all. It is cut, padded, hashed and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader

from compressor.data import CalibrationData, load_dataset_source
from compressor.data.blocks import load_blocks
from compressor.errors import DatasetError

IDS = [[11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33, 34]]
LOSS = [[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 0, 1]]


def source(kind: str, folder: Path, name: str = "loss_mask") -> Any:
    rows: list[dict[str, Any]] = [{"input_ids": ids, name: mask} for ids, mask in zip(IDS, LOSS, strict=True)]
    path = folder / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif kind == "safetensors":
        save_file({"input_ids": torch.tensor(IDS), name: torch.tensor(LOSS)}, path)
    elif kind == "parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "hf":
        import datasets

        return datasets.Dataset.from_list(rows)
    elif kind == "mappings":
        return rows
    return path


def counted(data: CalibrationData) -> list[list[int]]:
    found = []
    for batch, mask in zip(data.batches, data.token_masks, strict=True):
        assert isinstance(batch, dict) and "loss_mask" not in batch
        for index, row in enumerate(batch["input_ids"]):
            found.append(row.tolist() if mask is None else row[mask[index]].tolist())
    return found


@pytest.mark.parametrize("kind", ["jsonl", "safetensors", "parquet", "hf", "mappings"])
@pytest.mark.parametrize("batch_size", [None, 1, 2])
def test_every_source_of_token_ids_carries_its_loss_mask(kind: str, batch_size: int | None, tmp_path: Path) -> None:
    data = load_dataset_source(source(kind, tmp_path), batch_size=batch_size)
    assert counted(data) == [[13, 14], [21, 22, 23, 24], [32, 34]]
    assert data.num_tokens == 8
    assert torch.cat([batch["input_ids"] for batch in data.batches if isinstance(batch, dict)]).tolist() == IDS
    assert not any("attention_mask" in batch for batch in data.batches if isinstance(batch, dict))  # nothing is padded


@pytest.mark.parametrize("kind", ["jsonl", "safetensors", "parquet", "hf", "mappings"])
def test_a_mask_of_another_name_is_told_whatever_holds_it(kind: str, tmp_path: Path) -> None:
    """As chat templates call theirs (`return_assistant_tokens_mask`); what is no mask of tokens is no matter."""
    rows = source(kind, tmp_path, "assistant_masks")
    assert load_dataset_source(rows).unread_masks == load_blocks(rows, max_seq_length=4).unread_masks == {"assistant_masks"}
    assert not load_dataset_source(source(kind, tmp_path)).unread_masks
    labels = load_dataset_source([{"input_ids": IDS[0], "labels": [-100, -100, 13, 14]}]).unread_masks
    assert labels == {"-100 among the labels"}
    others = {"labels": IDS[0], "mask_ratio": 0.3, "masks": [1, 1, 1, 1], "unmasked": [0, 1], "masked": "0101", "mask": [0, 1, 2, 3]}
    assert not load_dataset_source([{"input_ids": IDS[0], **others}]).unread_masks


def test_it_is_cut_and_padded_with_its_row() -> None:
    rows: list[dict[str, Any]] = [
        {"input_ids": [9, 1, 2, 3, 9], "attention_mask": [0, 1, 1, 1, 0], "loss_mask": [1, 0, 1, 1, 1]},
        {"input_ids": [5, 6, 7, 8, 4], "loss_mask": [1, 1, 0, 1, 1]},
    ]
    data = load_dataset_source(rows, batch_size=2, max_seq_length=4)
    assert isinstance(data.batches[0], dict)
    assert data.batches[0]["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert data.token_masks[0] is not None
    assert data.token_masks[0].tolist() == [[False, True, True, False], [True, True, False, True]]


def test_a_sample_without_a_token_that_counts_is_left_out() -> None:
    rows: list[dict[str, Any]] = [{"input_ids": [1, 2], "loss_mask": [0, 0]}, {"input_ids": [3, 4], "loss_mask": [0, 1]}]
    data = load_dataset_source(rows)
    assert (data.num_samples, data.num_dropped, counted(data)) == (1, 1, [[4]])
    with pytest.raises(DatasetError, match="all 1 samples are empty or masked out"):
        load_dataset_source(rows[:1])


def test_it_is_part_of_the_hash_and_a_mask_of_ones_is_none() -> None:
    plain = load_dataset_source([{"input_ids": ids} for ids in IDS])
    ones = load_dataset_source([{"input_ids": ids, "loss_mask": [1] * 4} for ids in IDS])
    masked = load_dataset_source([{"input_ids": ids, "loss_mask": mask} for ids, mask in zip(IDS, LOSS, strict=True)])
    assert plain.sha256 == ones.sha256 != masked.sha256
    assert ones.token_masks == [None]


def loader(**batch: Tensor) -> Any:
    return DataLoader([batch], batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [
    {"input_ids": torch.tensor(IDS), "loss_mask": torch.zeros(3, 4, dtype=torch.long)},
    {"input_ids": torch.tensor(IDS), "attention_mask": torch.zeros(3, 4, dtype=torch.long)},
    {"input_ids": torch.tensor(IDS), "attention_mask": 1 - torch.tensor(LOSS), "loss_mask": torch.tensor(LOSS)},
    {"input_ids": torch.zeros(3, 0, dtype=torch.long)},
    {"x": torch.zeros(3, 0, 8)},
])  # fmt: skip
def test_a_loader_without_a_token_that_counts_is_refused(batch: dict[str, Tensor]) -> None:
    with pytest.raises(DatasetError, match="all 3 samples of the DataLoader are empty or masked out"):
        load_dataset_source(loader(**batch))


def test_a_loader_may_give_one_with_its_batches() -> None:
    ids, mask, loss = torch.tensor(IDS), torch.tensor([[0, 1, 1, 1]] + [[1] * 4] * 2), torch.tensor(LOSS)
    data = load_dataset_source(loader(input_ids=ids, attention_mask=mask, loss_mask=loss))
    assert counted(data) == [[13, 14], [21, 22, 23, 24], [32, 34]] and data.num_tokens == 8
    assert isinstance(data.batches[0], dict) and set(data.batches[0]) == {"input_ids", "attention_mask"}
    other = load_dataset_source(loader(input_ids=ids, attention_mask=mask, loss_mask=torch.ones_like(loss)))
    assert counted(other)[0] == [12, 13, 14]
    assert other.sha256 != data.sha256


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"input_ids": [1, 2], "loss_mask": [1]}], r"row 0: loss_mask \(1,\) and input_ids \(2,\) differ"),
        (
            loader(input_ids=torch.ones(2, 3).long(), attention_mask=torch.ones(2, 2)),
            r"attention_mask \(2, 2\) and input_ids \(2, 3\) differ",
        ),
        ([{"input_ids": [1, 2], "loss_mask": "no"}], r"row 0: a str that is no flat list"),
        ([{"text": "a b", "loss_mask": [1]}], r"row 0: loss_mask was given beside 'text', but it speaks of tokens; give input_ids"),
        (loader(input_ids=torch.ones(2, 3).long(), loss_mask=torch.ones(2, 2)), r"batch 0: loss_mask \(2, 2\) is not \[batch, sequence\]"),
        (loader(input_ids=torch.ones(2, 3).long(), loss_mask=torch.ones(3)), r"batch 0: loss_mask \(3,\) is not"),
    ],
)
def test_one_that_does_not_fit_is_refused(given: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        load_dataset_source(given)


def test_a_safetensors_file_of_unequal_shapes_is_refused(tmp_path: Path) -> None:
    save_file({"input_ids": torch.tensor(IDS), "loss_mask": torch.ones(3, 3)}, tmp_path / "bad.safetensors")
    with pytest.raises(DatasetError, match=r"loss_mask \(3, 3\) and input_ids \(3, 4\) differ"):
        load_dataset_source(tmp_path / "bad.safetensors")
