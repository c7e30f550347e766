"""Readings as CSV: what `harness nightly export` writes, and `import` reads."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

from compressor.errors import UserInputError
from compressor.json_text import from_json
from harness.nightly.environment import Environment
from harness.nightly.measurement import Measurement, check_measurement

_COLUMNS = ("night", "environment", "revision", "metric", "better", "kind", "made", "place", "value")
T = TypeVar("T")


def to_csv(rows: Iterable[tuple[Any, ...]]) -> str:
    """Return readings as text.

    Args:
        rows: in the order of the columns; an environment is the JSON of its facts.

    Returns:
        A line a reading, behind one of names; numbers with all their digits.
    """
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows((*row[:-1], repr(row[-1])) for row in rows)
    return text.getvalue()


def from_csv(source: Path) -> dict[tuple[Measurement, str, str], list[float]]:
    """Read what `to_csv` wrote.

    Args:
        source: the file.

    Returns:
        Measurement without values, facts of its environment and the moment, to the values.

    Raises:
        UserInputError: it is no such file, or a row is wrong; it is named.
    """
    try:
        rows = list(csv.reader(StringIO(source.read_text("utf-8-sig"), newline="")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserInputError(f"{source}: cannot be read ({error}); give a file that harness nightly export wrote") from error
    if not rows or tuple(rows[0]) != _COLUMNS:
        raise UserInputError(f"{source}: its first line is not {','.join(_COLUMNS)}; give a file that harness nightly export wrote")
    measured: dict[tuple[Measurement, str, str], list[float]] = {}
    for number, row in enumerate(rows[1:], 2):
        try:
            if len(row) != len(_COLUMNS):
                raise ValueError(f"it has {len(row)} fields, and there are {len(_COLUMNS)}")
            night, facts, revision, metric, better, kind, made, place, text = row
            held, value = _read("environment", facts, from_json), _read("value", text, float)
            _read("made", made, datetime.fromisoformat)
            if not isinstance(held, dict):
                raise ValueError("environment is no object of facts")
            environment = Environment({str(name): str(fact) for name, fact in held.items()})
            one = Measurement(night, environment.digest, revision, metric, better, (), kind)  # type: ignore[arg-type]
            check_measurement(replace(one, values=(value,)))
        except ValueError as error:
            raise UserInputError(f"{source}:{number}: is no reading ({error}); nothing was added") from error
        values = measured.setdefault((one, environment.to_json(), made), [])
        if place != str(len(values)):
            raise UserInputError(f"{source}:{number}: is reading {place} where {len(values)} should be; nothing was added")
        values.append(value)
    return measured


def _read(name: str, text: str, read: Callable[[str], T]) -> T:
    try:
        return read(text)
    except ValueError:
        raise ValueError(f"{name} {text!r} is not what export writes there") from None
