"""Without a batch size, rows of one length go together and nothing is padded."""

from __future__ import annotations

import pytest
import torch

from compressor.data.collate import batch_to, collate, tokens_at_once
from compressor.errors import DatasetError


def rows(*lengths: int) -> list[torch.Tensor]:
    return [torch.full((length,), number) for number, length in enumerate(lengths)]


def test_equally_long_rows_share_a_batch_in_their_order() -> None:
    batches, masks = collate(rows(4, 4, 4, 7, 4, 4), None, pad_id=0)
    assert [tuple(batch["input_ids"].shape) for batch in batches if isinstance(batch, dict)] == [(3, 4), (1, 7), (2, 4)]
    assert masks == [None, None, None]
    assert torch.equal(torch.cat([batch["input_ids"][:, 0] for batch in batches if isinstance(batch, dict)]), torch.arange(6))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_batch_stays_below_the_limit_and_holds_at_least_one_row(device: str) -> None:
    limit = tokens_at_once(torch.device(device))
    batches, _ = collate(rows(*[limit // 4] * 9), None, pad_id=0, device=torch.device(device))
    assert [len(batch["input_ids"]) for batch in batches if isinstance(batch, dict)] == [4, 4, 1]
    batches, _ = collate(rows(limit * 2, limit * 2), None, pad_id=0, device=torch.device(device))
    assert len(batches) == 2


def test_what_a_modifier_has_put_into_a_batch_is_refused() -> None:
    for batch, name in (((torch.ones(1), 1), "1"), ({"input_ids": torch.ones(1), "seen": 1}, "'seen'")):
        with pytest.raises(DatasetError, match=rf"^batch\[{name}\]: int is no tensor; leave batches as they are"):
            batch_to(batch, torch.device("cpu"))
