"""What `harness nightly export` writes and `import` reads: readings as CSV or parquet, or an archive of CSVs with acceptances and cells."""

from __future__ import annotations

import csv
import hashlib
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date, datetime
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, TypeVar

from compressor.atomic import check_output_file, whole_file
from compressor.errors import OutputError, UserInputError
from compressor.json_text import from_json
from compressor.settings.kinds import TEXT
from harness.errors import HarnessError
from harness.nightly.environment import Environment
from harness.nightly.measurement import Acceptance, CellRow, Measurement, begins_with_a_date, check_measurement

TABLES: Mapping[str, tuple[str, ...]] = {
    "readings": ("night", "environment", "revision", "metric", "better", "kind", "made", "place", "value"),
    "acceptances": ("metric", "night", "until", "reason", "made"),
    "cells": ("night", "environment", "revision", "cell", "attempt", "outcome", "seconds", "memory", "summary", "made"),
}
"""Names of the tables, and their columns; an environment is the JSON of its facts."""
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first moment that an archive can name: the same rows are the same bytes
_DIGEST = "rows_sha256"
_WROTE = "give a file that harness nightly export wrote"
T = TypeVar("T")


@dataclass(frozen=True)
class Exchanged:
    """What such a file holds.

    Attributes:
        measured: measurement without values, facts of its environment and the moment, to the values.
        accepted: acceptances, each with its moment.
        ended: attempts at cells, each with the facts of its environment and its moment.
    """

    measured: Mapping[tuple[Measurement, str, str], list[float]]
    accepted: list[tuple[Acceptance, str]]
    ended: list[tuple[CellRow, str, str]]


def check_target(path: Path) -> None:
    """Refuse a file that export would replace, and that it did not write.

    Args:
        path: to be written.

    Raises:
        OutputError: another ending than .csv, .parquet or .zip, no place for a file, or other content.
    """
    check_output_file(path, ".csv", ".parquet", ".zip")
    try:
        if path.is_file() and path.stat().st_size:
            _texts(path)
    except UserInputError as error:
        raise OutputError(f"{path}: what is there was not written by harness nightly export, and is kept; name another file") from error


def write_tables(target: Path, tables: Mapping[str, Iterable[tuple[Any, ...]]]) -> None:
    """Write rows, whole or not at all.

    Args:
        target: a .csv or .parquet takes the readings alone, a .zip all tables; replaced where it is there.
        tables: of every name, its rows in the order of the columns.

    Raises:
        CheckpointError: the disk is full or fails; what was there is as it was.
        HarnessError: `pyarrow` is not installed, and a .parquet is asked for.
    """
    with whole_file(target) as path:
        if target.suffix == ".csv":
            path.write_bytes(_csv("readings", tables["readings"]))
            return
        if target.suffix == ".parquet":
            _write_parquet(path, tables["readings"])
            return
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for name in TABLES:
                packed.writestr(zipfile.ZipInfo(f"{name}.csv", _EPOCH), _csv(name, tables[name]), zipfile.ZIP_DEFLATED)


def read_tables(source: Path) -> Exchanged:
    """Read what `write_tables` wrote.

    Args:
        source: the file.

    Returns:
        All of it; only a .zip has acceptances and cells.

    Raises:
        UserInputError: it is no such file, or a row is wrong; it is named.
    """
    texts = _texts(source)
    measured: dict[tuple[Measurement, str, str], list[float]] = {}
    for where, (key, place, value) in _parsed(source, texts, "readings", _reading):
        values = measured.setdefault(key, [])
        if place != str(len(values)):
            raise UserInputError(f"{where}: is reading {place} where {len(values)} should be; nothing was added")
        values.append(value)
    for (one, _, _), values in measured.items():
        check_measurement(replace(one, values=tuple(values)))
    accepted = [row for _, row in _parsed(source, texts, "acceptances", _acceptance)]
    return Exchanged(measured, accepted, [row for _, row in _parsed(source, texts, "cells", _cell)])


def _csv(name: str, rows: Iterable[tuple[Any, ...]]) -> bytes:
    """A line a row behind one of names; numbers with all their digits."""
    text = StringIO()
    writer = csv.writer(text)  # lines as RFC 4180 ends them: only then Python quotes a text with a carriage return, as older rows may have
    writer.writerow(TABLES[name])
    writer.writerows([repr(one) if isinstance(one, float) else one for one in row] for row in rows)
    return text.getvalue().encode()


def _parquet() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise HarnessError("harness nightly: pyarrow, which .parquet needs, is not installed; pip install pyarrow") from error
    return pyarrow, parquet


def _write_parquet(path: Path, rows: Iterable[tuple[Any, ...]]) -> None:
    """A column of texts for each name, but `place` of whole numbers and `value` of float64."""
    pyarrow, parquet = _parquet()
    kinds = {"place": pyarrow.int64(), "value": pyarrow.float64()}
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.string())) for name in TABLES["readings"]])
    listed = [dict(zip(schema.names, row, strict=True)) for row in rows]
    table = pyarrow.Table.from_pylist(listed, schema=schema)
    table = table.replace_schema_metadata({_DIGEST: _digest(table)})
    parquet.write_table(table, path, write_page_checksum=True)


def _digest(table: Any) -> str:
    """Of the names of columns and of all values."""
    return hashlib.sha256(repr([table.column_names, table.to_pydict()]).encode("utf-8", "surrogatepass")).hexdigest()


def _read_parquet(data: bytes) -> list[list[str]]:
    """The rows behind one of names, as a CSV would have them."""
    pyarrow, parquet = _parquet()
    try:
        table = parquet.read_table(BytesIO(data), page_checksum_verification=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"it is no parquet: {error}") from error
    noted = (table.schema.metadata or {}).get(_DIGEST.encode())
    if noted is not None and noted.decode(errors="replace") != _digest(table):  # checksums of pages say nothing of what counts their rows
        raise ValueError("it is damaged: its rows have another digest than was written with them")
    columns = [[repr(one) if isinstance(one, float) else str(one) for one in column.to_pylist()] for column in table.columns]
    return [table.column_names, *(list(row) for row in zip(*columns, strict=True))]


def _texts(source: Path) -> dict[str, list[list[str]]]:
    """The rows of each table that a file holds, that of names left out."""
    try:
        data = source.read_bytes()
        if source.suffix == ".parquet":
            found = {"readings": _read_parquet(data)}
        else:
            held = _unpacked(data) if source.suffix == ".zip" else {"readings": data}
            found = {name: list(csv.reader(StringIO(one.decode("utf-8-sig"), newline=""))) for name, one in held.items()}
    except (OSError, ValueError, csv.Error, zipfile.BadZipFile, KeyError) as error:
        raise UserInputError(f"{source}: cannot be read ({error}); {_WROTE}") from error
    for name, rows in found.items():
        if not rows or tuple(rows[0]) != TABLES[name]:
            raise UserInputError(f"{_where(source, name)}: its first line is not {','.join(TABLES[name])}; {_WROTE}")
    return {name: rows[1:] for name, rows in found.items()}


def _unpacked(data: bytes) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(BytesIO(data)) as packed:
            return {name: packed.read(f"{name}.csv") for name in TABLES}
    # Of damaged bytes: what cannot be unpacked, a method that nobody knows, a password that is asked for.
    except (zlib.error, EOFError, NotImplementedError, RuntimeError, struct.error) as error:
        raise ValueError(f"the archive is damaged: {error}") from error


def _where(source: Path, name: str) -> str:
    return str(source) if source.suffix != ".zip" else f"{source}, {name}.csv"


def _parsed(
    source: Path, texts: Mapping[str, list[list[str]]], name: str, parse: Callable[[Mapping[str, str]], T]
) -> Iterator[tuple[str, T]]:
    for number, row in enumerate(texts.get(name, []), 2):
        where = f"{_where(source, name)}:{number}"
        try:
            if len(row) != len(TABLES[name]):
                raise ValueError(f"it has {len(row)} fields, and there are {len(TABLES[name])}")
            yield where, parse(dict(zip(TABLES[name], row, strict=True)))
        except ValueError as error:
            raise UserInputError(f"{where}: is no {name[:-1]} ({error}); nothing was added") from error


def _reading(row: Mapping[str, str]) -> tuple[tuple[Measurement, str, str], str, float]:
    environment, value = _environment(row), _read("value", row["value"], float)
    one = Measurement(row["night"], environment.digest, row["revision"], row["metric"], row["better"], (), row["kind"])  # type: ignore[arg-type]
    check_measurement(replace(one, values=(value,)))
    return (one, environment.to_json(), _moment(row)), row["place"], value


def _acceptance(row: Mapping[str, str]) -> tuple[Acceptance, str]:
    if row["until"]:
        _read("until", row["until"], date.fromisoformat)
    if not TEXT.holds(row["reason"]):
        raise ValueError("its reason is blank")
    return Acceptance(row["metric"], row["night"], row["until"], row["reason"]), _moment(row)


def _cell(row: Mapping[str, str]) -> tuple[CellRow, str, str]:
    from harness.nightly.cells import CellOutcome

    environment, outcome = _environment(row), _read("outcome", row["outcome"], CellOutcome)
    begins_with_a_date(row["night"])
    attempt, memory = (_read(name, row[name], int) for name in ("attempt", "memory"))
    seconds = _read("seconds", row["seconds"], float)
    if not (TEXT.holds(row["cell"]) and TEXT.holds(row["night"]) and attempt > 0 <= memory and 0 <= seconds < float("inf")):
        raise ValueError("a name is blank, or a number below what it counts from")
    one = CellRow(row["night"], environment.digest, row["revision"], row["cell"], attempt, outcome.value, seconds, memory, row["summary"])
    return one, environment.to_json(), _moment(row)


def _environment(row: Mapping[str, str]) -> Environment:
    held = _read("environment", row["environment"], from_json)
    if not isinstance(held, dict):
        raise ValueError("environment is no object of facts")
    return Environment({str(name): str(fact) for name, fact in held.items()})


def _moment(row: Mapping[str, str]) -> str:
    _read("made", row["made"], datetime.fromisoformat)
    return row["made"]


def _read(name: str, text: str, read: Callable[[str], T]) -> T:
    """Python reads more than it writes: `1_0` is 10, and so are digits of other scripts."""
    with suppress(ValueError):
        found = read(text)
        if not isinstance(found, float | int) or repr(found) == text:
            return found
    raise ValueError(f"{name} {text!r} is not what export writes there")
