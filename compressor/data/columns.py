"""Columns beside the tokens: rows are fed as token ids alone, so what else the model would read must not be lost without a word."""

from __future__ import annotations

import inspect
from collections.abc import Collection

import torch
from torch import nn

from compressor.data.rows import MASKS, Row
from compressor.errors import DatasetError

_READ = ("input_ids", *MASKS)
_REMEDY = "give batches with that input (a DataLoader, from Python), or remove the column"


def input_columns(model: nn.Module) -> frozenset[str]:
    """Find what the forward of a model takes beside token ids and their masks.

    Args:
        model: any module.

    Returns:
        Names of arguments; those of targets (`labels`, `start_positions`) change no input of a layer and are not among them.
    """
    names = inspect.signature(model.forward).parameters
    return frozenset(name for name in names if name not in _READ and "label" not in name and not name.endswith("_positions"))


def check_columns(row: Row, inputs: Collection[str], remedy: str = _REMEDY) -> None:
    """Refuse a row that holds an input of the model which would not be fed to it.

    Args:
        row: as it was read.
        inputs: `input_columns` of the model.
        remedy: what to do.

    Raises:
        DatasetError: such a column says something else than the model assumes without it.
    """
    for name in sorted(row.beside.keys() & set(inputs)):
        if row.beside[name] is not None and not _is_default(name, row):
            raise DatasetError(
                f"{row.where}: the column {name!r} is an input of the model, and of rows only token ids and their masks are fed to it; "
                f"{remedy}"
            )


def _is_default(name: str, row: Row) -> bool:
    """Whether the model takes these numbers by itself: one segment, positions from 0 on, and labels that are the tokens."""
    if name == "labels" and row.kind != "input_ids":  # the class of a text
        return True
    if name not in ("token_type_ids", "position_ids", "labels"):
        return False
    try:
        numbers = torch.as_tensor(row.beside[name]).flatten().to("cpu", torch.int64)
        ids = torch.as_tensor(row.value if name == "labels" else range(len(numbers))).flatten().to("cpu", torch.int64)
        if name == "labels" and row.mask is not None:
            real = torch.as_tensor(row.mask).flatten().to("cpu", torch.bool)
            numbers, ids = numbers[real], ids[real]
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False
    return torch.equal(numbers, torch.zeros_like(ids) if name == "token_type_ids" else ids)
