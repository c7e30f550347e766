"""What one night measured of one metric, what became of a cell, what was accepted; and what may be written of a measurement."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, fields
from datetime import date
from typing import Any, Literal, get_args

from compressor.errors import UserInputError

Better = Literal["lower", "higher"]
Kind = Literal["series", "paired"]
"""How a metric is judged. `series`: its repetitions are one level a night; `paired`: a value a sequence, the same ones every night."""
_LEAST, _MOST = 1e-60, 1e60
"""Of readings. Far beyond every unit, and the square of the ratio of any two is a number, so that every statistic of them is one."""
_MAY_BE_EMPTY = ("revision", "summary", "until")


@dataclass(frozen=True)
class Measurement:
    """What one night measured of one metric.

    Attributes:
        night: label that sorts by time: a date, or a date with a number.
        environment: digest of it.
        revision: of the code; empty where it is unknown.
        metric: its name.
        better: which way is better.
        values: the repetitions, in order.
        kind: how it is judged.
    """

    night: str
    environment: str
    revision: str
    metric: str
    better: Better
    values: tuple[float, ...]
    kind: Kind = "series"


@dataclass(frozen=True)
class CellRow:
    """What became of one attempt at a cell of the nightly matrix.

    Attributes:
        night: its label.
        environment: digest of it.
        revision: of the code; empty where it is unknown.
        cell: its name, such as `reference/w4a16/cpu/compress`.
        attempt: from 1.
        outcome: word of `cells.CellOutcome`.
        seconds: wall time.
        memory: peak of its processes, bytes; 0 where it was not measured.
        summary: in a line.
    """

    night: str
    environment: str
    revision: str
    cell: str
    attempt: int
    outcome: str
    seconds: float
    memory: int
    summary: str


@dataclass(frozen=True)
class Acceptance:
    """Somebody's word that a change is meant.

    Attributes:
        metric: its name.
        night: the first night of the new level.
        until: the last day on which the word counts, as YYYY-MM-DD; empty where it counts for good.
        reason: in words.
    """

    metric: str
    night: str
    until: str
    reason: str


def readings(metric: str, values: object) -> tuple[float, ...]:
    """Return repetitions as numbers of Python; texts and truth values are none, though Python makes numbers of them.

    Args:
        metric: its name.
        values: a list of numbers, or an array of one dimension.

    Returns:
        The numbers, in order.

    Raises:
        UserInputError: they are something else.
    """
    is_list = isinstance(values, Iterable) and not isinstance(values, str | bytes | bytearray | Mapping | Set)
    given: list[Any] = list(values) if is_list else [None]  # type: ignore[call-overload]
    if not all(_is_number(one) for one in given):
        raise UserInputError(f"{metric}: {values!r} was given, where a list of numbers belongs; give the repetitions, such as [1.2, 1.3]")
    try:
        return tuple(float(one) for one in given)
    except OverflowError:
        raise UserInputError(f"{metric}: a value is too large for a number of 64 bits; measure in another unit") from None


def _is_number(one: Any) -> bool:
    """Whether it is a number of Python, or of an array, of which booleans have a dtype of their own."""
    return hasattr(one, "__float__") and getattr(one, "ndim", 0) == 0 and "bool" not in str(getattr(one, "dtype", type(one).__name__))


def check_measurement(one: Measurement) -> None:
    """Refuse a measurement that could not be judged.

    Args:
        one: it.

    Raises:
        UserInputError: a text is none of one line, a name is blank, or a value is not finite, not above 0, or beyond 1e-60 to 1e60.
    """
    check_texts(one)
    for name, given, known in (("better", one.better, get_args(Better)), ("kind", one.kind, get_args(Kind))):
        if given not in known:
            raise UserInputError(f"{one.metric}: {name}={given!r} is neither {' nor '.join(map(repr, known))}; give one of them")
    if not one.values:
        raise UserInputError(f"{one.metric}: no value was given; give at least one")
    paired = one.kind == "paired"  # a KL of 0 is a perfect sequence
    wrong = next((value for value in one.values if not (math.isfinite(value) and (value > 0 or (paired and value == 0)))), None)
    if wrong is not None:
        raise UserInputError(
            f"{one.metric}: the value {wrong} is not finite and above 0, and effects are relative; measure a ratio, time or size"
        )
    if not all(_LEAST <= value <= _MOST for value in one.values if value):
        raise UserInputError(f"{one.metric}: a value is not between {_LEAST:g} and {_MOST:g}, as those of any unit are; measure in another")


def check_texts(one: Measurement | CellRow | Acceptance) -> None:
    """Refuse a row with a text that would not come back from every table as it is, or that would break a line of a report.

    Args:
        one: the row.

    Raises:
        UserInputError: a text is none of one line, or is blank where something must stand.
    """
    for name in (field.name for field in fields(one) if field.type == "str"):
        check_text(name, getattr(one, name), may_be_empty=name in _MAY_BE_EMPTY)


def check_text(name: str, value: object, *, may_be_empty: bool = False) -> None:
    """Likewise, one text.

    Args:
        name: of what it is.
        value: as given.
        may_be_empty: whether nothing may stand there.

    Raises:
        UserInputError: as `check_texts`.
    """
    if not (isinstance(value, str) and value.isprintable() and (may_be_empty or value.strip())):
        raise UserInputError(f"{name}: {value!r} is no text of one line; give printable characters")


def in_time(night: str) -> tuple[list[str | int], str]:
    """Return what a night is sorted by: its label, with numbers in it as numbers, so that the tenth run of a day follows the ninth."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", night))], night


def short(revision: str) -> str:
    """Return the first characters of a revision, with `-dirty` where files differed from it; empty where it is unknown."""
    return revision[:12] + ("-dirty" if revision.endswith("-dirty") else "")


def begins_with_a_date(night: str) -> bool:
    """Whether a label is a date, or a date with something behind it; one that tries to be a date is one."""
    if not re.match(r"\d{4}-\d", night):
        return False
    try:
        date.fromisoformat(night[:10])
    except ValueError:
        raise UserInputError(
            f"night: {night!r} is no day, and would not sort by time; write it as YYYY-MM-DD, or a number behind that"
        ) from None
    if re.search(r":\d+.*[+-]\d", night):
        raise UserInputError(f"night: {night!r} has an offset from UTC, and would not sort by time; write it in UTC")
    return True
