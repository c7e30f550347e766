"""One row becomes one line of token ids: texts and conversations through the tokenizer, token ids and their masks after a check.

Whether a model knows the ids, and the names of a batch, is checked here, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from compressor.data.collate import Batch, check_mask, check_strided
from compressor.data.presets import as_messages, template_arguments
from compressor.data.rows import MASKS, Row, misspelt
from compressor.errors import DatasetError

NO_LIMIT = 2**31 - 1  # of a single sample, where samples are joined and cut later


class Tokens(NamedTuple):
    """The tokens of one sample, int64 [T], and which of them statistics may count, bool [T]; None where all count."""

    ids: Tensor
    counted: Tensor | None = None

    @property
    def num_counted(self) -> int:
        """How many tokens count."""
        return len(self.ids) if self.counted is None else int(self.counted.sum())


def encode_row(row: Row, tokenizer: Any, max_length: int) -> Tokens:
    """Turn a row into token ids.

    Args:
        row: text, a conversation or token ids; padding at either end of token ids is cut off where a mask names it.
        tokenizer: of transformers, or None where no text comes; its settings are as before afterwards.
        max_length: tokens to keep.

    Returns:
        T <= max_length tokens; none for an empty row.

    Raises:
        DatasetError: the row is not what its kind says, or there is no tokenizer for it.
    """
    if row.kind == "input_ids":
        return _checked_tokens(row, max_length)
    if tokenizer is None:
        raise DatasetError(f"{row.where}: text needs a tokenizer, and the model has none; pass tokenizer= or give token ids")
    if row.kind == "messages":
        text, add_special_tokens = _render(row, tokenizer), False  # the template writes them itself
    else:
        text, add_special_tokens = row.value, True
    if not isinstance(text, str):
        raise DatasetError(f"{row.where}: a {type(text).__name__} stands where text should; repair or remove this row")
    if not text.strip():
        return Tokens(torch.empty(0, dtype=torch.int64))
    try:
        with _settings_kept(tokenizer):
            encoded = tokenizer(text, truncation=True, max_length=max_length, add_special_tokens=add_special_tokens)
    except (TypeError, UnicodeError) as error:  # such as halves of surrogate pairs, which are no characters
        problem = " ".join(str(error).split())[:100]
        raise DatasetError(f"{row.where}: the tokenizer cannot read this text ({problem}); repair or remove this row") from error
    return Tokens(torch.tensor(encoded["input_ids"], dtype=torch.int64))


def _checked_tokens(row: Row, max_length: int) -> Tokens:
    ids = _as_tensor(row.value, row.where)
    if ids.numel() == 0:
        return Tokens(torch.empty(0, dtype=torch.int64))
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise DatasetError(f"{row.where}: {ids.dtype} of shape {tuple(ids.shape)} are no token ids; give integers")
    if ids.dim() != 1:
        raise DatasetError(f"{row.where}: token ids of shape {tuple(ids.shape)} are not one sample; give each sample a row of its own")
    ids = ids.to("cpu", torch.int64)
    if int(ids.min()) < 0:
        raise DatasetError(f"{row.where}: the token id {int(ids.min())} is negative; remove such ids (they often mark ignored labels)")
    real, counted = (_checked_mask(mask, name, ids, row.where) for name, mask in zip(MASKS, (row.mask, row.loss_mask), strict=True))
    places = real.nonzero().flatten()
    if len(places) and int(places[-1] - places[0]) + 1 != len(places):
        raise DatasetError(f"{row.where}: attention_mask has holes between real tokens; only padding at the ends can be cut off")
    ids, counted = ids[real][:max_length], counted[real][:max_length]
    return Tokens(ids, None if bool(counted.all()) else counted)


def _checked_mask(mask: Any, name: str, ids: Tensor, where: str) -> Tensor:
    """A mask as bool, all True where there is none."""
    if mask is None:
        return torch.ones_like(ids, dtype=torch.bool)
    checked = _as_tensor(mask, where, f"the numbers of {name}").to("cpu")
    if checked.shape != ids.shape:
        raise DatasetError(f"{where}: {name} {tuple(checked.shape)} and input_ids {tuple(ids.shape)} differ; make them equal")
    check_mask(checked, name, where)
    return checked.bool()


def _as_tensor(value: Any, where: str, what: str = "token ids") -> Tensor:
    try:
        tensor = check_strided(torch.as_tensor(value), where)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DatasetError(
            f"{where}: a {type(value).__name__} that is no flat list of integers stands where {what} should; repair this row"
        ) from error
    return tensor[0] if tensor.dim() == 2 and len(tensor) == 1 else tensor  # a tokenizer's return_tensors="pt" of one text


def _render(row: Row, tokenizer: Any) -> str:
    """Write a conversation out through the tokenizer's chat template."""
    messages = as_messages(row.value)
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) and "role" in message for message in messages):
        raise DatasetError(f"{row.where}: a conversation is no list of {{'role': ..., 'content': ...}}; repair or remove this row")
    if not messages:
        return ""
    if getattr(tokenizer, "chat_template", None) is None:
        raise DatasetError(
            f"{row.where}: a conversation was given, but the tokenizer has no chat template; set tokenizer.chat_template or render the "
            "conversations into a text column"
        )
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **template_arguments(row.beside, row.where)))
    except (TemplateError, TypeError, ValueError) as error:  # the latter of tools that are none
        raise DatasetError(f"{row.where}: the chat template refuses these messages ({error}); repair or remove this row") from error


@contextmanager
def _settings_kept(tokenizer: Any) -> Iterator[None]:
    """Undo what a call leaves behind: a fast tokenizer remembers the truncation of its last call and would save it with itself."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        yield
        return
    truncation, padding = backend.truncation, backend.padding
    try:
        yield
    finally:
        backend.no_truncation() if truncation is None else backend.enable_truncation(**truncation)
        backend.no_padding() if padding is None else backend.enable_padding(**padding)


# Token ids and positions that the model cannot look up: found before any forward; torch would only say that an index is out of range.


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
        What its config says; None where there is no limit, written as -1 or as frequencies that follow the length.
    """
    config = getattr(model, "config", None)
    limit, rope = getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None)
    kinds = [rope, *rope.values()] if isinstance(rope, dict) else []  # of all layers, or of each type of layer
    if any(isinstance(kind, dict) and kind.get("rope_type") == "dynamic" for kind in kinds):
        return None
    return limit if isinstance(limit, int) and limit > 0 else None


def check_batches(data: HasBatches, model: nn.Module) -> None:
    """Refuse batches that the model would take for something else than was meant, or not at all.

    Args:
        data: the data; batches that are no mappings are not looked at.
        model: of transformers, whose input embeddings are the table of token ids; any other module has none and takes all ids.

    Raises:
        DatasetError: a name is nearly that of an argument, which a forward with `**kwargs` would pass over without a word; or a token
            id is of a type that no table takes, or lies outside the table.
    """
    known, table = {*inspect.signature(model.forward).parameters, *MASKS}, _table(model)
    for number, batch in enumerate(data.batches):
        if not isinstance(batch, dict):
            continue
        for name in (one for one in batch if one not in known):
            if near := misspelt(name, frozenset(known - batch.keys())):
                raise DatasetError(f"dataset batch {number}: {name!r} is no input of the model; did you mean {near!r}?")
        if table is not None and "input_ids" in batch:
            _check_ids(batch["input_ids"], table.num_embeddings, number)


def _table(model: nn.Module) -> nn.Embedding | None:
    try:
        find: Any = getattr(model, "get_input_embeddings", None)
        table = None if find is None else find()
    except NotImplementedError:  # of a model with several, or none, transformers does not say which
        return None
    return table if isinstance(table, nn.Embedding) else None


def _check_ids(ids: Tensor, num_embeddings: int, number: int) -> None:
    if ids.dtype not in (torch.int64, torch.int32):
        raise DatasetError(f"dataset batch {number}: input_ids are {str(ids.dtype)[6:]}, which no embedding takes; give int64")
    outside = ids[(ids < 0) | (ids >= num_embeddings)]
    if outside.numel():
        raise DatasetError(
            f"dataset: batch {number} holds token id {int(outside[0])}, and the model knows 0 to {num_embeddings - 1}; "
            "tokenize with the model's own tokenizer"
        )
