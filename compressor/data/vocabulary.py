"""Token ids and positions that the model cannot look up: found before any forward; torch would only say that an index is out of range."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from compressor.data.collate import Batch
from compressor.errors import DatasetError


class HasBatches(Protocol):
    """Data that shows its tokens: for calibration, or for training."""

    @property
    def batches(self) -> list[Batch]:
        """Batches with `input_ids`, or others, which are not looked at."""


def max_positions(model: nn.Module) -> int | None:
    """Say how many tokens of a sequence a model takes.

    Args:
        model: not modified.

    Returns:
        What its config says; None where there is no limit, which some configs write as -1.
    """
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def check_vocabulary(data: HasBatches, model: nn.Module) -> None:
    """Refuse token ids beyond the model's embedding table.

    Args:
        data: the data; batches without `input_ids` are not looked at.
        model: a model of transformers, whose input embeddings are the table; any other module has none and takes all.

    Raises:
        DatasetError: an id lies outside the table; the first one is named.
    """
    try:
        find: Any = getattr(model, "get_input_embeddings", None)
        table = None if find is None else find()
    except NotImplementedError:  # of a model with several, or none, transformers does not say which
        return
    if not isinstance(table, nn.Embedding):
        return
    for number, batch in enumerate(data.batches):
        ids = batch.get("input_ids") if isinstance(batch, dict) else None
        if ids is None or ids.numel() == 0:
            continue
        outside = ids[(ids < 0) | (ids >= table.num_embeddings)]
        if outside.numel():
            raise DatasetError(
                f"dataset: batch {number} holds token id {int(outside[0])}, and the model knows 0 to {table.num_embeddings - 1}; "
                "tokenize with the model's own tokenizer"
            )
