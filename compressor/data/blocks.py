"""Training data: the tokens of all samples joined and cut into blocks of one length, and an order of batches that a seed decides.

Blocks of one length need no padding, so every batch has the same metadata, and one captured step serves the whole run. A sample may lie
in two blocks, and a block may hold several samples, each ended by the tokenizer's end-of-text token where the source was text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from compressor.data.collate import Batch, hash_rows
from compressor.data.datasets import chosen_length
from compressor.data.encode import NO_LIMIT, Tokens, encode_row
from compressor.data.rows import Row, check_columns, read_rows, unread_masks
from compressor.errors import DatasetError

IGNORED = -100  # the label of a token that is no target, as cross_entropy knows it


@dataclass(frozen=True)
class TokenBlocks:
    """Blocks of one length.

    Attributes:
        input_ids: int64 [N, T].
        labels: int64 [N, T], the same tokens; IGNORED where a `loss_mask` says that the token is no target.
        sha256: of the blocks and of what counts in them, in their order.
        num_samples: samples that were joined.
        num_left_over: tokens at the end that fill no block, and tokens of blocks without a target.
        unread_masks: columns of rows that look like masks and were not read.
        num_without_target: blocks that are left out because a `loss_mask` leaves no target in them.
    """

    input_ids: Tensor
    labels: Tensor
    sha256: str
    num_samples: int
    num_left_over: int
    unread_masks: frozenset[str] = frozenset()
    num_without_target: int = 0

    @property
    def batches(self) -> list[Batch]:
        """All blocks as one batch, for checks that look at every token."""
        return [{"input_ids": self.input_ids}]

    @property
    def num_targets(self) -> Tensor:
        """How many tokens each block asks for: int64 [N]."""
        return (self.labels[:, 1:] != IGNORED).sum(1)


def load_blocks(
    source: Any,
    *,
    tokenizer: Any = None,
    max_seq_length: int | None = None,
    text_column: str = "text",
    max_positions: int | None = None,
    inputs: Collection[str] = (),
    name: str = "dataset",
) -> TokenBlocks:
    """Read training data.

    Args:
        source: what `load_dataset_source` takes, but no DataLoader.
        tokenizer: of transformers; for texts and conversations only, and left as it was.
        max_seq_length: tokens in a block; by default as many as the model takes, at most 2048.
        text_column: column of the text; a column `input_ids` goes before it, columns `messages` and `conversations` after it.
        max_positions: tokens that the model takes; None where there is no limit.
        inputs: further inputs of the model (`input_columns`); rows that hold one are refused, as are `labels` other than the tokens.
        name: what errors call the data.

    Returns:
        At least one block.

    Raises:
        DatasetError: the source is missing, of an unknown kind, too short for one block, or a row cannot be used.
    """
    if isinstance(source, DataLoader):
        raise DatasetError(
            f"{name}: a DataLoader decides its own batches, and training draws its own; give a list of its rows instead (texts, token ids "
            "or mappings)"
        )
    length = chosen_length(max_seq_length, max_positions)
    if length < 2:
        raise DatasetError(f"max_seq_length: a block of {length} token has none to predict; give at least 2")
    unread = set[str]()
    rows = list(_encoded(source, tokenizer, text_column, {*inputs, "labels"}, unread))
    num_tokens = sum(len(tokens.ids) for tokens in rows)
    if num_tokens < length:
        raise DatasetError(
            f"{name}: {num_tokens} tokens in {len(rows)} samples do not fill one block of {length}; "
            "give more data, or a smaller max_seq_length"
        )
    ids, counted = (_cut(parts, length) for parts in ([tokens.ids for tokens in rows], [_counted(tokens) for tokens in rows]))
    useful = counted[:, 1:].any(1)
    if not bool(useful.any()):
        raise DatasetError(f"{name}: its loss_mask leaves no token to predict in {len(ids)} blocks of {length}; mask less of it")
    ids, counted, num_dropped = ids[useful], counted[useful], int((~useful).sum())
    sha256 = hash_rows(list(ids), None if bool(counted.all()) else list(counted))
    labels, num_left_over = ids.masked_fill(~counted, IGNORED), num_tokens - ids.numel()
    return TokenBlocks(ids, labels, sha256, len(rows), num_left_over, frozenset(unread), num_dropped)


def _encoded(source: Any, tokenizer: Any, text_column: str, inputs: Collection[str], unread: set[str]) -> Iterator[Tokens]:
    for row in read_rows(source, text_column=text_column, shuffle_seed=None, inputs=inputs):
        check_columns(row, inputs, "remove the column (a loss_mask says which tokens are learnt)")
        unread |= unread_masks(row)
        tokens = _ended(row, encode_row(row, tokenizer, NO_LIMIT), tokenizer)
        if len(tokens.ids):
            yield tokens


class BlockOrder:
    """Gives the batch of a step by its number: every epoch in a new order, whatever was asked before.

    Args:
        blocks: the data.
        batch_size: blocks in a micro-batch.
        accumulate: micro-batches in a step.
        seed: of the order.
        shuffle: draw an order for each epoch; False keeps that of the data.
        extra: further arguments of the model, the same for every micro-batch.
        device: where batches shall be.
        name: what errors call the data.

    Attributes:
        steps_per_epoch: steps that one pass over the data makes; blocks that are left over wait for the next epoch's draw.

    Raises:
        DatasetError: there are fewer blocks than a step takes.
    """

    def __init__(
        self,
        blocks: TokenBlocks,
        *,
        batch_size: int,
        accumulate: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        extra: Mapping[str, Any] | None = None,
        device: torch.device | str = "cpu",
        name: str = "dataset",
    ) -> None:
        self._blocks, self._batch_size, self._accumulate, self._seed = blocks, batch_size, accumulate, seed
        self._shuffle, self._extra, self._device = shuffle, dict(extra or {}), torch.device(device)
        self._per_step = batch_size * accumulate
        num_blocks, length = blocks.input_ids.shape
        self.steps_per_epoch = num_blocks // self._per_step
        if not self.steps_per_epoch:
            raise DatasetError(
                f"{name}: {num_blocks} blocks of {length} tokens are fewer than the {self._per_step} of one step "
                f"(batch_size={batch_size} x accumulate={accumulate}); "
                "give more data, or a smaller batch_size, accumulate or max_seq_length"
            )
        self._drawn: tuple[int, Tensor] | None = None

    def __call__(self, step: int) -> Any:
        """Return the batch of a step.

        Args:
            step: its number, from 0.

        Returns:
            A micro-batch (dict of keyword arguments and `labels`), or a list of `accumulate` of them.
        """
        epoch, place = divmod(step, self.steps_per_epoch)
        chosen = self._order(epoch)[place * self._per_step : (place + 1) * self._per_step]
        micro_batches = [self._batch(rows) for rows in chosen.split(self._batch_size)]
        return micro_batches[0] if self._accumulate == 1 else micro_batches

    def in_order(self) -> tuple[list[Any], list[float]]:
        """Return all blocks once, in the order of the data, for evaluation.

        Returns:
            Micro-batches, the last one maybe smaller, and the number of targets in each.
        """
        groups = torch.arange(len(self._blocks.input_ids)).split(self._batch_size)
        counts = self._blocks.num_targets
        return [self._batch(rows) for rows in groups], [float(counts[rows].sum()) for rows in groups]

    def _batch(self, rows: Tensor) -> dict[str, Any]:
        blocks = self._blocks
        return {"input_ids": blocks.input_ids[rows].to(self._device), "labels": blocks.labels[rows].to(self._device), **self._extra}

    def _order(self, epoch: int) -> Tensor:
        """Draw the order of an epoch from seed and epoch alone, so that a resumed run finds it again."""
        if self._drawn is None or self._drawn[0] != epoch:
            count = len(self._blocks.input_ids)
            seed = int.from_bytes(hashlib.sha256(f"{self._seed} {epoch}".encode()).digest()[:7], "big")
            order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) if self._shuffle else torch.arange(count)
            self._drawn = epoch, order
        return self._drawn[1]


def _ended(row: Row, tokens: Tokens, tokenizer: Any) -> Tokens:
    """End a text with the end-of-text token; token ids stay as they came."""
    end = getattr(tokenizer, "eos_token_id", None)
    if row.kind == "input_ids" or not isinstance(end, int) or not len(tokens.ids) or int(tokens.ids[-1]) == end:
        return tokens
    return Tokens(torch.cat([tokens.ids, torch.tensor([end], dtype=torch.int64)]), tokens.counted)


def _counted(tokens: Tokens) -> Tensor:
    return torch.ones_like(tokens.ids, dtype=torch.bool) if tokens.counted is None else tokens.counted


def _cut(parts: list[Tensor], length: int) -> Tensor:
    joined = torch.cat(parts)
    count = len(joined) // length
    return joined[: count * length].view(count, length)
