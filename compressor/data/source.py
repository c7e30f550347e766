"""From what a user names as data to what rows are read from: datasets by name or folder, splits, functions on rows, collators."""

from __future__ import annotations

import csv
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from torch.utils.data import DataLoader, Dataset, IterableDataset

from compressor.data.media import Media
from compressor.data.presets import Preset, find_preset, unknown_preset
from compressor.data.rows import CONVERSATIONS, TEXT_COLUMN, check_names
from compressor.data.user_code import errors_named, function_label, read_through
from compressor.errors import DatasetError
from compressor.json_text import from_json
from compressor.model.folder import is_there
from compressor.model.hub import CLIENT_ERRORS
from compressor.object_reference import resolve
from compressor.settings.verbs import DataSettings
from compressor.spelling import suggest

_READ_HERE = (".jsonl", ".txt", ".parquet", ".safetensors")
# Builders of `datasets` for what is not read here, or has to be read whole for a function on rows.
# Else pandas takes what stands before the last commas of a row for its name, and drops it; and texts such as "NA" for nothing.
_CSV = {"index_col": False, "keep_default_na": False}
_SURPLUS = "Length of header or names does not match length of data"  # how pandas warns of rows with more cells than columns
_WHOLE = "a row has more cells than there are columns: put texts that hold commas in quotation marks"
_BUILDERS = {".json": "json", ".csv": "csv", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
_LOADING = ("dataset_config_name", "streaming", "raw_kwargs")
_COLUMNS = {"input_ids", "text", *CONVERSATIONS}  # of a mapping that is one batch, and no mapping of splits
_SAVED = ("dataset_dict.json", "dataset_info.json")  # what `save_to_disk` leaves
RowFunction = Callable[[Mapping[str, Any]], Mapping[str, Any]]
NamedFunction = tuple[str, RowFunction]  # what messages call it, and the function
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")


def open_source(
    source: Any,
    settings: DataSettings,
    *,
    batch_size: int | None,
    shuffle_seed: int | None,
    tokenizer: Any = None,
    media: Media | None = None,
    text_column: str = TEXT_COLUMN,
) -> Any:
    """Find what rows are read from.

    Args:
        source: anything that `load_dataset_source` takes; a mapping of splits; a .json or .csv file; the folder of a dataset; its name
            (`owner/name`) on the Hugging Face hub; or the name of a calibration set (`PRESETS`).
        settings: which part of it, and what is done to its rows.
        batch_size: of a collator; None for one.
        shuffle_seed: for the order of rows before a collator; None keeps it.
        tokenizer: that will read the texts, if there is one; decides how a calibration set of conversations is written out.
        media: turns rows with images, videos or audio into batches; None reads their texts alone.
        text_column: which of a .csv are texts, whatever they look like.

    Returns:
        What `load_dataset_source` takes; a DataLoader where there is a collator, or a processor goes over the rows.

    Raises:
        DatasetError: there is no such dataset or split, or settings were given that have no use for this source.
    """
    if isinstance(source, DataLoader):
        _refuse(settings, "a DataLoader gives batches as they are")
        return source
    if isinstance(source, str) and not source.strip():
        raise DatasetError(f"dataset: {source!r} names no data; give a file, a folder or the name of a dataset")
    preset = find_preset(source) if isinstance(source, str) and not is_there(Path(source)) else None
    if preset is not None:
        settings = _usual(preset, settings)
    words = media.find() if media is not None and preset is not None and preset.media is not None else None
    is_ours = settings.data_collator is None or words is not None  # a collator gets rows as they are, but what processors make of a set
    functions = _functions(settings, preset.row_function(words or tokenizer) if preset is not None and is_ours else None)
    opened = source if preset is None else _loaded(preset.repo, settings, str(source))
    if preset is None and isinstance(source, str | Path):
        sees_rows = settings.data_collator is not None or (media is not None and media.is_taken)
        opened = _opened(source, settings, needs_rows=bool(functions) or sees_rows, text_column=text_column)
    if opened is source and not (isinstance(source, str | Path) and not is_there(Path(source))):
        _refuse(settings, "this data is not loaded by datasets.load_dataset", _LOADING)
    rows = _chosen_split(opened, settings.split)
    if len(functions) == 1:  # else another makes the columns, row by row
        _check_removed(rows, settings.remove_columns)
    if functions:
        rows = _mapped(rows, functions)
    processor = media.processor_of(rows) if media is not None and is_ours else None
    collate = _collate(settings, media, processor)
    if collate is None:
        return rows
    if shuffle_seed is not None and not hasattr(rows, "__len__"):
        raise DatasetError("dataset: a stream without a length cannot be shuffled here; shuffle it before it is passed")
    generator = None if shuffle_seed is None else torch.Generator().manual_seed(shuffle_seed)
    return DataLoader(_numbered(rows), batch_size or 1, shuffle=shuffle_seed is not None, generator=generator, collate_fn=collate)


def _collate(settings: DataSettings, media: Media | None, processor: Any) -> _Collate | None:
    """What makes batches of rows: a processor, a collator, or a collator of what a processor makes of each row; None for neither."""
    made = None if media is None or processor is None else partial(media.inputs, processor)
    if settings.data_collator is None:
        return None if made is None else _Collate(made, f"the processor {type(processor).__name__}")
    function, label = _function("data_collator", settings.data_collator), function_label("data_collator", settings.data_collator)
    if made is None:
        return _Collate(function, label)
    return _Collate(lambda rows: function([{name: value.tolist() for name, value in made([row]).items()} for row in rows]), label)


def _refuse(settings: DataSettings, why: str, names: Iterable[str] = tuple(DataSettings.model_fields)) -> None:
    for name in names:
        if getattr(settings, name) != DataSettings.model_fields[name].default:
            raise DatasetError(f"{name}: {_short(getattr(settings, name))} was given, but {why}; leave it out")


def _short(value: Any) -> str:
    return repr(value if isinstance(value, str) else getattr(value, "__name__", value))[:60]


def _usual(preset: Preset, settings: DataSettings) -> DataSettings:
    """What was chosen of a calibration set, and for the rest what is usual."""
    given = dict(settings)
    own_files = "data_files" in (settings.raw_kwargs or {})
    if preset.files is not None and not own_files and settings.dataset_config_name in (None, preset.config):
        given |= {"raw_kwargs": {"data_files": dict(preset.files), **(settings.raw_kwargs or {})}, "dataset_config_name": None}
    elif settings.dataset_config_name is None and not own_files:
        given["dataset_config_name"] = preset.config
    return DataSettings(**{**given, "split": settings.split or preset.split})


def _functions(settings: DataSettings, usual: RowFunction | None) -> list[NamedFunction]:
    """What is done to each row, in order: the function of the user, or what is usual for the calibration set."""
    dropped = {*settings.remove_columns, *(() if settings.use_loss_mask else ("loss_mask",))}
    made: list[NamedFunction] = []
    if settings.preprocessing_func is not None:
        name, given = "preprocessing_func", settings.preprocessing_func
        made.append((function_label(name, given), _function(name, given)))
    elif usual is not None:
        made.append(("the usual text of this calibration set (preprocessing_func gives another)", usual))
    if dropped:
        made.append(("remove_columns", lambda row: {name: value for name, value in row.items() if name not in dropped}))
    return made


def _check_removed(rows: Any, removed: Iterable[str]) -> None:
    """Refuse columns to remove that no row has, of rows whose columns are known before they are read."""
    columns: Any = getattr(rows, "column_names", None)
    if columns is None and isinstance(rows, list | tuple) and all(isinstance(row, Mapping) for row in rows):
        columns = list(dict.fromkeys(name for row in rows for name in row))
    absent = next((name for name in removed if columns is not None and name not in columns), None)
    if absent is not None:
        raise DatasetError(f"remove_columns: no row has a column {absent!r}; {suggest(absent, map(str, columns))}")


def _function(name: str, given: Any) -> Callable[..., Any]:
    found = resolve(given, "function", where=f"{name}: {given}", error=DatasetError, files=True).value if isinstance(given, str) else given
    if not callable(found):
        raise DatasetError(f"{name}: {given!r} is no function; name one")
    return found


@dataclass(frozen=True)
class _MappedRows(Dataset[Any]):
    """Rows after the functions of a user, made as they are read."""

    rows: Any
    functions: list[NamedFunction]
    column_names = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        with errors_named(f"dataset row {index}", "the dataset"):
            row = self.rows[index]
        return _applied(row, self.functions, index)


@dataclass(frozen=True)
class _MappedStream:
    """The same of a dataset without a length."""

    rows: Any
    functions: list[NamedFunction]
    column_names = None

    def __iter__(self) -> Iterator[Any]:
        return (_applied(row, self.functions, index) for index, row in enumerate(read_through(self.rows, "dataset row", "the dataset")))


@dataclass(frozen=True)
class _CsvStream:
    """Rows of .csv files, which are parsed only while they are taken."""

    rows: Any
    label: str
    column_names = None

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.rows)
        while True:
            try:
                with _no_cell_lost():
                    row = next(iterator)
            except StopIteration:
                return
            except Warning as error:
                if _SURPLUS not in str(error):
                    raise
                raise DatasetError(f"{self.label}: {_WHOLE}; repair the file") from error
            yield row


@dataclass(frozen=True)
class _NumberedRows(Dataset[Any]):
    """Rows with their numbers, by which a collator's errors name them."""

    rows: Any

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        with errors_named(f"dataset row {index}", "the dataset"):
            return index, self.rows[index]


@dataclass(frozen=True)
class _NumberedStream(IterableDataset[Any]):
    """The same of a dataset without a length."""

    rows: Any

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return enumerate(read_through(self.rows, "dataset row", "the dataset"))


def _numbered(rows: Any) -> Dataset[Any]:
    return _NumberedRows(rows) if hasattr(rows, "__len__") else _NumberedStream(rows)


@dataclass(frozen=True)
class _Collate:
    """The collator of a user, on numbered rows."""

    function: Callable[[list[Any]], Any]
    label: str

    def __call__(self, numbered: list[tuple[int, Any]]) -> Any:
        first, last = numbered[0][0], numbered[-1][0]
        where = f"dataset row {first}" if len(numbered) == 1 else f"dataset rows {first} to {last}"
        with errors_named(where, self.label):
            return self.function([row for _, row in numbered])


def _mapped(rows: Any, functions: list[NamedFunction]) -> Any:
    is_rows = hasattr(rows, "column_names") or (isinstance(rows, list | tuple) and all(isinstance(row, Mapping) for row in rows))
    if not is_rows:
        raise DatasetError(
            "preprocessing_func, remove_columns, use_loss_mask: they were given for data without columns that are named; leave them out"
        )
    return _MappedRows(rows, functions) if hasattr(rows, "__len__") else _MappedStream(rows, functions)


def _applied(row: Any, functions: list[NamedFunction], index: int) -> Any:
    for label, function in functions:
        with errors_named(f"dataset row {index}", label):
            made = function(row)
        if not isinstance(made, Mapping):
            raise DatasetError(f"dataset row {index}: preprocessing_func gave a {type(made).__name__}; give back a dict of columns")
        row = made
    return row


def _chosen_split(source: Any, split: str | None) -> Any:
    """The rows of a split, or of a part of one (`train[:5%]`)."""
    columns = getattr(source, "column_names", None)
    if not isinstance(columns, Mapping) and (not isinstance(source, Mapping) or not _COLUMNS.isdisjoint(source)):
        if split is not None and (not isinstance(source, str | Path) or is_there(Path(source))):
            raise DatasetError(f"split: {split!r} was given, but this data has no splits; take that part of it first, or leave it out")
        return source
    names = list(source)
    if split is None:
        if len(names) != 1:
            raise DatasetError(f"dataset: it has the splits {', '.join(map(str, names))}; name one (split=)")
        return source[names[0]]
    name = split.partition("[")[0]
    if name not in names:
        raise DatasetError(f"split: the dataset has none that is called {name!r}; {suggest(name, map(str, names))}")
    if name == split:
        return source[name]
    from datasets import ReadInstruction

    rows = source[name]
    if not hasattr(rows, "__len__"):
        raise DatasetError(f"split: {split!r} cuts a stream, whose length is not known; use num_calibration_samples")
    try:
        (part,) = ReadInstruction.from_spec(split).to_absolute({name: len(rows)})
    except (ValueError, AssertionError) as error:
        raise DatasetError(f"split: {split!r} is no part of a split ({error}); write it like train[:512] or train[:5%]") from error
    chosen = range(part.from_ or 0, len(rows) if part.to is None else part.to)
    return rows.select(chosen) if hasattr(rows, "select") else [rows[index] for index in chosen]


def _opened(source: str | Path, settings: DataSettings, *, needs_rows: bool, text_column: str) -> Any:
    """A dataset that has to be loaded by `datasets`; other paths as they are, to be read line by line."""
    path, suffix = Path(source), Path(source).suffix.lower()
    if not is_there(path) and source in _BUILDERS.values() and "data_files" in (settings.raw_kwargs or {}):
        return _loaded(str(source), settings, str(source), text_column)
    is_file = is_there(path) and path.is_file()
    is_folder = is_there(path) and path.is_dir() and suffix not in (*_BUILDERS, *_READ_HERE)
    special = needs_rows or settings.raw_kwargs or settings.split  # streaming alone is not: lines are read as they come
    if is_file and settings.dataset_config_name not in (None, "default"):  # as `datasets` calls what a file holds
        _refuse(settings, "this file has no configurations", ["dataset_config_name"])
    if is_file and suffix in _BUILDERS and (special or suffix not in _READ_HERE):
        _check_once(path, suffix, text_column)
        return _loaded(_BUILDERS[suffix], settings, str(source), text_column, data_files=str(path))
    if is_folder and any((path / name).is_file() for name in _SAVED):
        from datasets import load_from_disk

        _refuse(settings, "this folder holds one dataset as save_to_disk wrote it", _LOADING)
        return load_from_disk(str(path))
    is_name = isinstance(source, str) and not is_there(path) and _HUB_NAME.match(source) and suffix not in _BUILDERS
    if is_folder or is_name:
        return _loaded(str(source), settings, str(source), text_column)
    if isinstance(source, str) and not is_there(path) and not suffix and path.name == source:
        raise unknown_preset(source)
    return source


def _check_once(path: Path, suffix: str, text_column: str) -> None:
    """Refuse names that stand twice, of which readers take one: of columns, and of a list of JSON, where pyarrow does not look."""
    columns: list[str] = []
    odd: list[Any] | None = None
    try:
        if suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as stream:
                columns = next(csv.reader(stream), [])
        elif suffix == ".json":
            rows = from_json(path.read_bytes(), once=True)
            odd = next((row for row in rows if isinstance(row, list)), None) if isinstance(rows, list) else None
    except (UnicodeDecodeError, csv.Error, json.JSONDecodeError):
        return  # not for this to say; a file of lines is one, too
    except ValueError as error:
        raise DatasetError(f"{path}: this JSON cannot be read ({error}); repair the file") from error
    if odd is not None:  # which `datasets` takes for a text
        raise DatasetError(f'{path}: a JSON list is no row; write {{"{text_column}": "..."}}, or {{"input_ids": [...]}}')
    check_names(columns, [text_column], str(path))


def _loaded(what: str, settings: DataSettings, label: str, text_column: str = TEXT_COLUMN, **files: Any) -> Any:
    """`datasets.load_dataset`, its errors in one line."""
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise DatasetError(f"{label}: reading it needs the package datasets; pip install 'compressor-harness[data]'") from error
    parsing = {**_CSV, "converters": {text_column: str}} if _is_csv(what) else {}
    options = {**parsing, **files, **(settings.raw_kwargs or {})}
    try:
        with _bars_on_terminals(), _no_cell_lost():
            found = load_dataset(what, settings.dataset_config_name, streaming=settings.streaming, **options)
    except (DatasetsError, *CLIENT_ERRORS, ValueError, TypeError, KeyError, StopIteration) as error:
        is_local = is_there(Path(label)) or bool(files)
        raise DatasetError(f"{label}: no dataset can be loaded from there ({_reason(error)}); {_remedy(error, is_local)}") from error
    if not (parsing and settings.streaming):
        return found
    return {name: _CsvStream(rows, label) for name, rows in found.items()} if isinstance(found, Mapping) else _CsvStream(found, label)


@contextmanager
def _no_cell_lost() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=_SURPLUS)
        yield


def _is_csv(what: str) -> bool:
    """Tell whether `datasets` will read .csv files: one, or a folder of them."""
    folder = Path(what)
    return what == _BUILDERS[".csv"] or (is_there(folder) and folder.is_dir() and any(folder.rglob("*.csv")))


def _reason(error: BaseException) -> str:
    """What went wrong; that a dataset could not be made of the files says nothing, and hides the cause."""
    from datasets.exceptions import DatasetGenerationError

    cause = error.__cause__ or error.__context__
    known = cause if isinstance(error, DatasetGenerationError) and cause is not None else error
    if isinstance(known, StopIteration):  # how `datasets` ends on a file without rows
        return "it holds no row"
    if _SURPLUS in str(known):
        return _WHOLE
    if "corresponds to no data" in str(known):
        return "it holds no row"
    return " ".join(str(known).split())[:300].rstrip(".") or type(known).__name__


def _remedy(error: BaseException, is_local: bool) -> str:
    """What to do where `datasets` has loaded nothing."""
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    is_name = isinstance(error, ValueError) and ("Config name is missing" in str(error) or "BuilderConfig" in str(error))
    if is_local and isinstance(error, FileNotFoundError):
        return "put files of rows there, or name another place"
    if is_local and not is_name and not isinstance(error, ConnectionError):
        return "convert the file to UTF-8" if "utf-8" in _reason(error).lower() else "repair the file"
    if isinstance(error, DatasetGenerationError):
        return "choose other files of it (raw_kwargs={'data_files': ...}), or give a file"
    if isinstance(error, DatasetNotFoundError):
        return "correct its name or revision, or set HF_TOKEN to a token that may read it"
    if isinstance(error, ConnectionError):
        return "unset HF_HUB_OFFLINE, with which nothing is fetched" if constants.HF_HUB_OFFLINE else "check the network, or give a file"
    if is_name:
        return "name one (dataset_config_name=)"
    return "check the name, the network and the token, or give a file"


@contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """Keep the bars of `datasets` out of files, and its log of errors that it raises as well; what they had been set to comes back."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from datasets.utils import logging as log

    hidden, told = are_progress_bars_disabled(), log.get_verbosity()
    log.set_verbosity(log.CRITICAL)
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield
    finally:
        log.set_verbosity(told)
        if not hidden:
            enable_progress_bars()
