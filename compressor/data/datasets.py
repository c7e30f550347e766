"""Calibration data from any common source, as one list of batches.

The choice is deterministic: the first samples, or those that a seed draws; empty ones are dropped and counted. Samples are cut, never
joined. The hash covers the token ids in order, so it is the same for any batch size and any source of the same tokens (a DataLoader
aside, whose tensors are hashed as they come).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from compressor.data.collate import (
    NO_MARKS,
    Batch,
    TextMarks,
    as_batch,
    collate,
    hash_batches,
    hash_rows,
    leading_tensor,
    take_token_mask,
    text_marks,
    token_rows,
)
from compressor.data.encode import NO_LIMIT, Tokens, encode_row
from compressor.data.rows import TEXT_COLUMN, Row, check_columns, read_rows, unread_masks
from compressor.data.user_code import read_through
from compressor.errors import DatasetError
from compressor.numerics.part_sums import MIN_TOKENS_SHARED, NUM_PARTS

DEFAULT_MAX_SEQ_LENGTH = 2048
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class CalibrationData:
    """Batches that are ready for a model.

    Attributes:
        batches: keyword arguments (dict) or positional arguments (tuple) of one forward each, on the CPU unless a loader decided otherwise.
        token_masks: for each batch, bool [batch, sequence], True for a token that statistics may count: neither padding nor taken out by a
            `loss_mask`; None where all count.
        sha256: of the token ids and loss masks, or of a loader's tensors, in their order.
        num_samples: rows in all batches.
        num_tokens: tokens that count, in all batches.
        num_dropped: samples without a token that counts, which were met and left out.
        unread_masks: columns of rows that look like masks and were not read; those of batches are in the batches.
        marks: of the text, where it is tokens.
    """

    batches: list[Batch]
    token_masks: list[Tensor | None]
    sha256: str
    num_samples: int
    num_tokens: int
    num_dropped: int = 0
    unread_masks: frozenset[str] = frozenset()
    marks: TextMarks = NO_MARKS

    @property
    def fullest(self) -> Batch:
        """Of the first sixteen batches the first with the most tokens that count: what is looked at to learn how a model is built."""
        first = [sum(_tokens_by_row(batch, mask)) for batch, mask in islice(zip(self.batches, self.token_masks, strict=True), 16)]
        return self.batches[first.index(max(first))]

    @cached_property
    def sample_parts(self) -> list[tuple[int, ...]]:
        """For each sample of each batch the part of all samples that it is in, see PartSum: about as many tokens in each.

        Parts do not depend on the batch size. Few tokens are one part, for nobody would share them out, and the sums take less memory.
        """
        rows = [_tokens_by_row(batch, mask) for batch, mask in zip(self.batches, self.token_masks, strict=True)]
        total = sum(map(sum, rows))
        before = iter(accumulate((count for batch in rows for count in batch), initial=0))
        parts = 0 if total < MIN_TOKENS_SHARED else NUM_PARTS
        return [tuple(next(before) * parts // total for _ in batch) for batch in rows]


def load_dataset_source(
    source: Any,
    *,
    tokenizer: Any = None,
    num_calibration_samples: int = 512,
    max_seq_length: int | None = None,
    batch_size: int | None = None,
    text_column: str = "text",
    shuffle: bool = False,
    seed: int = 0,
    max_positions: int | None = None,
    inputs: Collection[str] = (),
    concatenate: bool = False,
    device: torch.device = _CPU,
) -> CalibrationData:
    """Read calibration data.

    Args:
        source: Hugging Face Dataset; path of a .jsonl, .txt (a sample per line), .parquet or .safetensors (`input_ids` [N, T]) file; list
            of texts, token rows or mappings; [N, T] tensor of token ids; DataLoader, whose batches are taken as they are. Beside
            `input_ids` may stand `attention_mask` (0: padding) and `loss_mask` (0: the model reads the token, statistics do not).
        tokenizer: of transformers; for texts and conversations only, and left as it was.
        num_calibration_samples: samples to take; fewer where the source ends. Of a DataLoader whole batches are taken until there are
            so many.
        max_seq_length: tokens kept of a sample; by default as many as the model takes, at most 2048.
        batch_size: samples in a batch; a DataLoader has its own. None: equally long ones together, up to `tokens_at_once`.
        text_column: column of the text; a column `input_ids` goes before it, columns `messages` and `conversations` after it.
        shuffle: draw the samples with `seed` instead of taking the first ones.
        seed: for `shuffle`.
        max_positions: tokens that the model takes; None where there is no limit.
        inputs: further inputs of the model (`input_columns`); rows that hold one are refused, for they are fed as token ids alone.
        concatenate: join the samples and cut them into sequences of `max_seq_length` tokens, of which `num_calibration_samples` are
            taken; what is left at the end and fills none is left out.
        device: where forwards will run.

    Returns:
        At least one batch.

    Raises:
        DatasetError: the source is missing, of an unknown kind, empty or longer than the model takes, or a row cannot be used; the
            message names it.
    """
    length = chosen_length(max_seq_length, max_positions)
    check_positive(num_calibration_samples=num_calibration_samples, batch_size=batch_size)
    if isinstance(source, DataLoader):
        if shuffle:
            raise DatasetError("dataset: a DataLoader decides its own order; set shuffle in the loader, not here")
        if text_column != TEXT_COLUMN:
            raise DatasetError(f"text_column: {text_column!r} was given, but a DataLoader gives batches as they are; leave it out")
        if concatenate:
            raise DatasetError("concatenate_data: a DataLoader gives batches as they are; join the samples in it, or leave this out")
        return _from_loader(source, num_calibration_samples, length if max_seq_length is not None else max_positions)
    rows: list[Tokens] = []
    num_dropped, unread = 0, set[str]()
    drawn, others = seed if shuffle else None, ", or a DataLoader"
    read = read_rows(source, text_column=text_column, shuffle_seed=drawn, inputs=inputs, others=others)
    encoded = (_checked(row, tokenizer, NO_LIMIT if concatenate else length, inputs, unread) for row in read)
    for tokens in _joined(encoded, length) if concatenate else encoded:
        if tokens.num_counted:
            rows.append(tokens)
        else:
            num_dropped += 1
        if len(rows) == num_calibration_samples:
            break
    if not rows:
        found = f"all {num_dropped} samples are empty or masked out" if num_dropped else "there is no sample in it"
        found = f"all samples together do not fill {length} tokens of which one counts" if concatenate else found
        raise DatasetError(f"{_label(source)}: {found}; give texts or token ids")
    pad_id = getattr(tokenizer, "pad_token_id", None)
    ids, counted = [row.ids for row in rows], [row.counted for row in rows]
    batches, masks = collate(ids, batch_size, pad_id if isinstance(pad_id, int) else 0, counted, device)
    num_tokens = sum(row.num_counted for row in rows)
    digest, marks = hash_rows(ids, counted), text_marks(ids)
    return CalibrationData(batches, masks, digest, len(rows), num_tokens, num_dropped, frozenset(unread), marks)


def _checked(row: Row, tokenizer: Any, length: int, inputs: Collection[str], unread: set[str]) -> Tokens:
    check_columns(row, inputs)
    unread |= unread_masks(row)
    return encode_row(row, tokenizer, length)


def _joined(rows: Iterable[Tokens], length: int) -> Iterator[Tokens]:
    """Cut the tokens of all rows, one after another, into sequences of one length; a row without any is passed on, to be counted."""
    ids, counted = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool)
    for row in rows:
        if not len(row.ids):
            yield row
        ids = torch.cat([ids, row.ids])
        counted = torch.cat([counted, torch.ones_like(row.ids, dtype=torch.bool) if row.counted is None else row.counted])
        whole = len(ids) // length * length
        for start in range(0, whole, length):
            part = counted[start : start + length]
            yield Tokens(ids[start : start + length], None if bool(part.all()) else part)
        ids, counted = ids[whole:], counted[whole:]


def _from_loader(loader: Iterable[Any], num_samples: int, longest: int | None) -> CalibrationData:
    batches: list[Batch] = []
    raw_batches: list[Batch] = []
    digests: list[str] = []
    masks: list[Tensor | None] = []
    taken = 0
    for index, raw in enumerate(read_through(loader, "dataset batch", "the DataLoader")):
        batch = as_batch(raw, f"dataset batch {index}")
        lead = leading_tensor(batch)
        if lead.dim() == 0 or lead.shape[0] == 0:
            raise DatasetError(
                f"dataset batch {index}: a tensor of shape {tuple(lead.shape)} holds no sample; drop such batches in the loader"
            )
        if _is_tokens(lead) and longest is not None and lead.shape[-1] > longest:
            raise DatasetError(
                f"dataset batch {index}: sequences of {lead.shape[-1]} tokens are longer than the {longest} that the model or "
                "max_seq_length allows; cut them in the loader"
            )
        rest, mask = take_token_mask(batch, f"dataset batch {index}")
        batches.append(rest)
        raw_batches.append(batch)
        digests.append(hash_batches([batch]))
        masks.append(mask)
        taken += lead.shape[0]
        if taken >= num_samples:
            break
    if not batches:
        raise DatasetError("dataset: the DataLoader gave no batch; give data to calibrate with")
    for index, (batch, digest) in enumerate(zip(raw_batches, digests, strict=True)):
        if hash_batches([batch]) != digest:
            raise DatasetError(
                f"dataset batch {index}: the loader has written to it after it had given it, as one does that fills one tensor for all; "
                "give each batch tensors of its own (clone them)"
            )
    num_tokens = sum(_count_tokens(batch, mask) for batch, mask in zip(batches, masks, strict=True))
    if not num_tokens:
        raise DatasetError(
            f"dataset: all {taken} samples of the DataLoader are empty or masked out (attention_mask, loss_mask); give batches with tokens "
            "that count"
        )
    return CalibrationData(batches, masks, hash_batches(raw_batches), taken, num_tokens, marks=text_marks(token_rows(batches)))


def _is_tokens(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point()


def _count_tokens(batch: Batch, mask: Tensor | None) -> int:
    """Count tokens; in a batch of vectors each vector counts as one token."""
    lead = leading_tensor(batch)
    if mask is not None:
        return int(mask.sum())
    return lead.numel() if _is_tokens(lead) or lead.dim() == 1 else lead.numel() // max(lead.shape[-1], 1)


def _tokens_by_row(batch: Batch, mask: Tensor | None) -> list[int]:
    if mask is not None:
        return [int(count) for count in mask.sum(-1)]
    lead = leading_tensor(batch)
    rows = max(1, lead.shape[0] if lead.dim() else 1)
    return [_count_tokens(batch, None) // rows] * rows


def chosen_length(max_seq_length: int | None, max_positions: int | None) -> int:
    """Decide how many tokens of a sequence a model gets.

    Args:
        max_seq_length: what the user asked for; None: as many as the model takes, at most 2048.
        max_positions: tokens that the model takes; None where there is no limit.

    Returns:
        The number.

    Raises:
        DatasetError: it is not positive, or more than the model takes.
    """
    if max_seq_length is None:
        return min(DEFAULT_MAX_SEQ_LENGTH, max_positions or DEFAULT_MAX_SEQ_LENGTH)
    check_positive(max_seq_length=max_seq_length)
    if max_positions is not None and max_seq_length > max_positions:
        raise DatasetError(f"max_seq_length: {max_seq_length} is more than the model takes; give at most {max_positions}")
    return max_seq_length


def check_positive(**counts: int | None) -> None:
    """Refuse numbers of samples, tokens or sequences below one.

    Args:
        **counts: by the names of the settings; None where one is left to the run.

    Raises:
        DatasetError: names the setting.
    """
    for name, count in counts.items():
        if count is not None and count < 1:
            raise DatasetError(f"{name}: {count} is not positive; give at least 1")


def _label(source: Any) -> str:
    return str(source) if not hasattr(source, "column_names") and not isinstance(source, list | tuple | Tensor) else "dataset"
