"""Rows out of every source of calibration data, one at a time and in a fixed order: files, datasets, lists, token arrays.

A row is text, token ids or a conversation, and knows where it came from. Sources are read lazily, so the first 512 rows of a large file
cost 512 rows; only a shuffled choice needs to know them all.
"""

from __future__ import annotations

import difflib
import inspect
import json
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from compressor.data.collate import check_strided
from compressor.data.presets import TEMPLATE_COLUMNS
from compressor.data.user_code import errors_named, read_through
from compressor.errors import DatasetError
from compressor.json_text import from_json

T = TypeVar("T")

TEXT_COLUMN = "text"  # unless the user names another
CONVERSATIONS = ("messages", "conversations")  # columns of lists of {role, content} or {from, value}
MASKS = ("attention_mask", "loss_mask")  # columns beside input_ids: what is padding, and which tokens statistics may count (0: not)


class Row(NamedTuple):
    """One sample before tokenization: where it stands, what it is, its value, the masks that came with token ids, and other columns."""

    where: str
    kind: Literal["text", "input_ids", "messages"]
    value: Any
    mask: Any = None
    loss_mask: Any = None
    beside: Mapping[str, Any] = MappingProxyType({})


def read_rows(source: Any, *, text_column: str, shuffle_seed: int | None, inputs: Collection[str] = (), others: str = "") -> Iterator[Row]:
    """Open a source and yield its rows.

    Args:
        source: path of a .jsonl, .txt, .parquet or .safetensors file; a Hugging Face dataset (anything with `column_names` that can be
            iterated); a list of texts, of token rows or of mappings; or a [N, T] tensor of token ids.
        text_column: column of the text.
        shuffle_seed: yield the rows in an order drawn with this seed; None keeps their own order.
        inputs: columns that a parquet file is to give as well, in `beside`, as it gives masks of any name; other sources give all.
        others: what else the caller takes, for the error.

    Returns:
        An iterator; it raises DatasetError at the first row that cannot be used.

    Raises:
        DatasetError: the source is missing or of an unknown kind, or has no columns, though one was named.
    """
    if text_column != TEXT_COLUMN and not _has_columns(source):
        raise DatasetError(f"text_column: {text_column!r} was given, but this data has no columns that are named; leave it out")
    if isinstance(source, str | Path):
        return _read_file(Path(source), text_column, shuffle_seed, inputs)
    if isinstance(source, Tensor) and source.is_nested:
        return _list_rows(list(source.unbind()), text_column, shuffle_seed)
    if isinstance(source, Tensor):
        return _tensor_rows({"input_ids": source}, "dataset", shuffle_seed)
    if hasattr(source, "column_names"):
        return _dataset_rows(source, text_column, shuffle_seed)
    if isinstance(source, list | tuple) and not hasattr(source, "_fields"):  # the parts of a PackedSequence are no rows
        return _list_rows(source, text_column, shuffle_seed)
    raise DatasetError(
        f"dataset: a {type(source).__name__} is no source of calibration data; give a file (.jsonl, .txt, .parquet, .safetensors, .json, "
        f".csv), a Hugging Face Dataset, a list of texts, token tensors or mappings{others}"
    )


def _has_columns(source: Any) -> bool:
    if isinstance(source, str | Path):
        return Path(source).suffix.lower() not in (".txt", ".safetensors")
    return not isinstance(source, Tensor | list | tuple) or any(isinstance(item, Mapping) for item in source)


def holds_texts(source: Any) -> bool:
    """Tell whether a tokenizer is needed, as far as that shows without reading.

    Args:
        source: as `read_rows` takes it, or the name of a dataset.

    Returns:
        False for token ids and batches, and for what shows its columns when it is read alone.
    """
    if isinstance(source, str | Path):
        return Path(source).suffix.lower() != ".safetensors"
    columns = getattr(source, "column_names", None)
    if isinstance(columns, Mapping):
        columns = next(iter(columns.values()), None)
    if isinstance(columns, list):
        return "input_ids" not in columns
    first = source[0] if isinstance(source, list | tuple) and source else None
    return isinstance(first, str) or (isinstance(first, Mapping) and "input_ids" not in first)


def _arranged(items: Iterable[T], seed: int | None) -> Iterable[T]:
    if seed is None:
        return items
    shuffled = list(items)
    random.Random(seed).shuffle(shuffled)
    return shuffled


BY_DATASETS = (".json", ".csv")  # who asks `open_source` first gets these read, too


def _read_file(path: Path, text_column: str, seed: int | None, inputs: Collection[str]) -> Iterator[Row]:
    parquet_rows = partial(_parquet_rows, inputs=inputs)
    readers: dict[str, Callable[[Path, str, int | None], Iterator[Row]]]
    readers = {".jsonl": _jsonl_rows, ".txt": _txt_rows, ".parquet": parquet_rows, ".safetensors": _safetensors_rows}
    suffix = path.suffix.lower()
    if (found := _refusal(path)) is not None:
        raise DatasetError(f"{str(path)[:200]}: {found}; check the path (a dataset of the hub is named owner/name)")
    if suffix not in readers:
        known = ", ".join([*readers, *(() if suffix in BY_DATASETS else BY_DATASETS)])
        raise DatasetError(f"{path}: the extension {path.suffix!r} is unknown; give a file that ends in one of {known}")
    return readers[suffix](path, text_column, seed)


def _refusal(path: Path) -> str | None:
    try:
        if path.is_file():
            return None
        if path.exists() and not path.is_dir():
            return "this is no regular file but a pipe, a socket or a device"
        return "this is no file, or a link to none" if path.is_dir() or path.is_symlink() else "no such file"
    except OSError:  # a name that no disk takes
        return "no such file"


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text, without its line end, of the lines that are not blank."""
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} line {number}: these bytes are no UTF-8 text ({error.reason}); convert the file") from error


def _txt_rows(path: Path, text_column: str, seed: int | None) -> Iterator[Row]:
    """One text per line, as the `text` loader of Hugging Face datasets reads such files."""
    del text_column
    for number, line in _arranged(_lines(path), seed):
        yield Row(f"{path} line {number}", "text", line)


def _jsonl_rows(path: Path, text_column: str, seed: int | None) -> Iterator[Row]:
    for number, line in _arranged(_lines(path), seed):
        where = f"{path} line {number}"
        try:
            value = from_json(line, once=True)
        except json.JSONDecodeError as error:
            raise DatasetError(f"{where}: this is no JSON ({error.msg} at column {error.colno}); repair the line") from error
        except ValueError as error:
            raise DatasetError(f"{where}: this JSON cannot be read ({error}); repair the line") from error
        if not isinstance(value, dict):
            raise DatasetError(f'{where}: a JSON {type(value).__name__} is no row; write {{"{text_column}": "..."}}')
        yield _mapping_row(value, where, text_column)


def _parquet_rows(path: Path, text_column: str, seed: int | None, *, inputs: Collection[str]) -> Iterator[Row]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise DatasetError(f"{path}: reading parquet needs pyarrow; pip install pyarrow") from error
    try:
        columns = parquet.read_schema(path).names
        wanted = _wanted_columns(columns, str(path), text_column)
        beside = [name for name in columns if name in (*inputs, *TEMPLATE_COLUMNS) or "mask" in name or name == "labels"]
        wanted += [name for name in beside if name not in wanted]
        check_names(columns, wanted, str(path))
        table = parquet.read_table(path, columns=wanted)
    except ArrowInvalid as error:
        raise DatasetError(f"{path}: this is no readable parquet file ({error}); write it again") from error
    for index in _arranged(range(table.num_rows), seed):
        row = {name: table.column(name)[index].as_py() for name in wanted}
        yield _mapping_row(row, f"{path} row {index}", text_column)


def check_names(columns: Sequence[str], wanted: Iterable[str], where: str) -> None:
    """Refuse columns of one name, of which readers take one.

    Args:
        columns: of a file.
        wanted: those that are read.
        where: what errors call the file.

    Raises:
        DatasetError: names one that stands twice.
    """
    for name in wanted:
        if columns.count(name) > 1:
            raise DatasetError(f"{where}: {columns.count(name)} columns are called {name!r}; rename all but one")


def _safetensors_rows(path: Path, text_column: str, seed: int | None) -> Iterator[Row]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    del text_column
    try:
        arrays = load_file(path)
    except SafetensorError as error:
        raise DatasetError(f"{path}: this is no readable safetensors file ({error}); write it again") from error
    if "input_ids" not in arrays:
        raise DatasetError(f"{path}: no tensor 'input_ids' among {sorted(arrays)}; save the token ids as a [N, T] tensor of that name")
    yield from _tensor_rows(arrays, str(path), seed)


def _tensor_rows(arrays: Mapping[str, Tensor], where: str, seed: int | None) -> Iterator[Row]:
    tokens = check_strided(arrays["input_ids"], where)
    if tokens.dim() != 2:
        raise DatasetError(f"{where}: token ids of shape {tuple(tokens.shape)} are not [N, T]; reshape them to one row per sample")
    masks = {name: arrays[name] for name in MASKS if name in arrays}
    for name, mask in masks.items():
        if mask.shape != tokens.shape:
            raise DatasetError(f"{where}: {name} {tuple(mask.shape)} and input_ids {tuple(tokens.shape)} differ; save equal shapes")
    others = {name: array for name, array in arrays.items() if name != "input_ids" and name not in MASKS}
    for index in _arranged(range(len(tokens)), seed):
        beside = {name: array[index] if array.shape[:1] == tokens.shape[:1] else array for name, array in others.items()}
        real, counted = (masks[name][index] if name in masks else None for name in MASKS)
        yield Row(f"{where} row {index}", "input_ids", tokens[index], real, counted, beside)


def _dataset_rows(dataset: Any, text_column: str, seed: int | None) -> Iterator[Row]:
    """Rows of a Hugging Face dataset, known by its `column_names`; the package itself is not imported."""
    columns = dataset.column_names
    if isinstance(columns, Mapping):
        raise DatasetError(f"dataset: a dictionary of splits {sorted(columns)} is no dataset; give one of them")
    if columns is not None:
        _wanted_columns(list(columns), "dataset", text_column)
    if not hasattr(dataset, "__len__"):
        if seed is not None:
            raise DatasetError("dataset: a stream without a length cannot be shuffled here; shuffle it before it is passed")
        for index, row in enumerate(read_through(dataset, "dataset row", "the dataset")):
            yield _mapping_row(_no_table(row, f"dataset row {index}"), f"dataset row {index}", text_column)
        return
    for index in _arranged(range(len(dataset)), seed):
        where = f"dataset row {index}"
        with errors_named(where, "the dataset"):
            row = dataset[index]
        yield _mapping_row(_no_table(row, where), where, text_column)


def _no_table(row: Any, where: str) -> Mapping[str, Any]:
    """Refuse what a dataset gives for a row that formats its rows as tables (arrow, pandas, polars)."""
    if not isinstance(row, Mapping):
        raise DatasetError(f"{where}: the dataset gives it as a {type(row).__name__}; take its format off with dataset.with_format(None)")
    return row


def _list_rows(items: list[Any] | tuple[Any, ...], text_column: str, seed: int | None) -> Iterator[Row]:
    for index in _arranged(range(len(items)), seed):
        item, where = items[index], f"dataset row {index}"
        if isinstance(item, Mapping):
            yield _mapping_row(item, where, text_column)
        else:
            yield Row(where, "text" if isinstance(item, str) else "input_ids", item)


@lru_cache(maxsize=1024)  # rows have the same columns, and there may be a million
def misspelt(name: str, known: frozenset[str]) -> str | None:
    """Find the word that is meant by one that nearly is it, as `attention_maks` is: such a mask would be passed over without a word.

    Args:
        name: the word.
        known: words that exist.

    Returns:
        The word; None for another one, also for one that says more (`mm_token_type_ids`).
    """
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.9)
    return next((word for word in near if not set(word.split("_")) <= set(name.split("_"))), None)


def _wanted_columns(columns: list[str], where: str, text_column: str) -> list[str]:
    """Return the columns to read: token ids before text, text before conversations."""
    missing = frozenset(MASKS).difference(columns)
    for name in map(str, columns):
        if near := misspelt(name, missing):
            raise DatasetError(f"{where}: the column {name!r} is not read; did you mean {near!r}?")
    first = next((name for name in ("input_ids", text_column, *CONVERSATIONS) if name in columns), text_column)
    if text_column not in (TEXT_COLUMN, first):
        raise DatasetError(
            f"{where}: the column {text_column!r} was named (text_column), and {first!r} would be read in its place; "
            "leave text_column out, or correct it, or give data without the other column"
        )
    if "input_ids" in columns:
        return [name for name in ("input_ids", *MASKS) if name in columns]
    for name in (text_column, *CONVERSATIONS):
        if name in columns and "loss_mask" in columns:
            raise DatasetError(f"{where}: loss_mask was given beside {name!r}, but it speaks of tokens; give input_ids, or drop the column")
        if name in columns:
            return [name]
    raise DatasetError(
        f"{where}: none of the columns {sorted(map(str, columns))} is {text_column!r}, 'input_ids', 'messages' or 'conversations'; "
        "name the column that holds the text (text_column), or call that of token ids input_ids"
    )


def _mapping_row(row: Mapping[str, Any], where: str, text_column: str) -> Row:
    name, *masks = _wanted_columns(list(row), where, text_column)
    beside = {other: value for other, value in row.items() if other != name and other not in masks}
    if name == "input_ids":
        mask, loss_mask = (row.get(one) for one in MASKS)
        return Row(where, "input_ids", row[name], mask, loss_mask, beside)
    return Row(where, "messages" if name in CONVERSATIONS and name != text_column else "text", row[name], beside=beside)


# Columns beside the tokens: rows are fed as token ids alone, so what else the model would read must not be lost without a word.

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


def unread_masks(row: Row) -> set[str]:
    """Find columns that look like masks of tokens, and which nothing reads: of ones and zeros and named so, or labels with -100.

    Args:
        row: as it was read.

    Returns:
        Names, such as `assistant_masks`, or "-100 among the labels"; none beside what is no token ids.
    """
    if row.kind != "input_ids":
        return set()
    named = {name: value for name, value in row.beside.items() if "mask" in name or name == "labels"}
    listed = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in named.items()}
    found = {name: value for name, value in listed.items() if isinstance(value, list) and len(value) == len(row.value)}
    masks = {name for name, value in found.items() if _zeros_and_ones(value) and name != "labels"}
    return masks | {"-100 among the labels" for value in (found.get("labels", ()),) if -100 in value}


def _zeros_and_ones(values: list[Any]) -> bool:
    return all(value in (0, 1) for value in values) and 0 in values and 1 in values


def _is_default(name: str, row: Row) -> bool:
    """Whether the model takes these numbers by itself: one segment, positions from 0 on, and labels that are the tokens."""
    if name == "labels" and row.kind != "input_ids":  # the class of a text
        return True
    if name not in ("token_type_ids", "position_ids", "labels"):
        return False
    try:
        numbers = torch.as_tensor(row.beside[name]).flatten().to("cpu", torch.int64)
        if row.kind == "input_ids" and numbers.numel() != torch.as_tensor(row.value).numel():
            return False
        ids = torch.as_tensor(row.value if name == "labels" else range(len(numbers))).flatten().to("cpu", torch.int64)
        if name == "labels" and row.mask is not None:
            real = torch.as_tensor(row.mask).flatten().to("cpu", torch.bool)
            numbers, ids = numbers[real], ids[real]
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False
    return torch.equal(numbers, torch.zeros_like(ids) if name == "token_type_ids" else ids)
