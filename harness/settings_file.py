"""Reads a YAML file of settings into a class of pydantic; every mistake is named with its line, all at once."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, ValidationInfo, field_validator

from compressor.errors import UserInputError
from compressor.spelling import suggest
from compressor.yaml_text import EntryPath, from_yaml

T = TypeVar("T")
Settings = TypeVar("Settings", bound=BaseModel)
_SHOWN = 80  # characters of a wrong value
_BELONGS: Mapping[str, str] = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type", "mapping_type", "dataclass_type"), "a mapping belongs there"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list belongs there"),
    **dict.fromkeys(("date_type", "date_parsing", "date_from_datetime_parsing", "date_from_datetime_inexact"), "write a day as YYYY-MM-DD"),
    "string_type": "a text belongs there",
    "kind": "{words} belongs there",
    **dict.fromkeys(("literal_error", "enum"), "{expected} belongs there"),
    "too_short": "at least {min_length} must be there",
    "string_pattern_mismatch": "a text that matches {pattern} belongs there",
}
"""Kinds of errors of pydantic, whose own words speak of its classes, to ours."""


class SettingsPart(BaseModel):
    """A mapping in such a file: no key but its fields, each with a line of its own, and no `yes` where a number belongs."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic reads `yes` and true as the number 1."""
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise ValueError("a truth value stands where another value belongs")
        return value


def read_settings(path: Path, kind: type[Settings], word: str) -> Settings:
    """Read a file of settings; what it does not name keeps its default.

    Args:
        path: a YAML mapping; an empty file is one without keys.
        kind: the class of the settings.
        word: what a key is called in errors, such as `limit`.

    Returns:
        The settings.

    Raises:
        UserInputError: the file cannot be read, is no YAML mapping, or has a key or value that is not allowed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserInputError(f"{path}: cannot be read ({error.strerror}); name a YAML file") from error
    except UnicodeDecodeError as error:
        raise UserInputError(f"{path}: byte {error.start} is not UTF-8 text; save it as UTF-8") from error
    data, lines = from_yaml(text, str(path), text_keys=True)
    if not isinstance(data, dict | None):
        raise UserInputError(f"{path}:1: holds no mapping; write one `{word}: value` a line")
    try:
        return kind.model_validate(data or {})
    except ValidationError as error:
        raise UserInputError("; ".join(_explain(path, dict(item), lines, kind, word) for item in error.errors())) from error


def _explain(path: Path, error: Mapping[str, Any], lines: Mapping[EntryPath, int], kind: type[BaseModel], word: str) -> str:
    place: EntryPath = error["loc"]
    line = next((lines[place[:end]] for end in range(len(place), 0, -1) if place[:end] in lines), 1)
    where = f"{path}:{line}: {'.'.join(map(str, place))}"
    if error["type"] == "missing":
        return f"{where}: is missing; add it"
    if error["type"] != "extra_forbidden":
        return f"{where}: {not_allowed(error)}"
    known = sorted(_part_at(kind, place[:-1]).model_fields)
    remedy = suggest(str(place[-1]), known, otherwise=f"known are {', '.join(known)}", show=str)
    return f"{where}: is no {word}; {remedy}"


def not_allowed(error: Mapping[str, Any]) -> str:
    """Say what is wrong with a value.

    Args:
        error: one of pydantic's.

    Returns:
        The value, and what belongs there.
    """
    message, words = error["msg"].removeprefix("Value error, "), _BELONGS.get(error["type"])
    told = f"{message[0].lower()}{message[1:]}" if words is None else words.format(**error.get("ctx", {}))
    return f"{repr(error['input'])[:_SHOWN]} is not allowed: {told}"


def read_as(kind: TypeAdapter[T], data: Any) -> T:
    """Read data that was written as JSON.

    Args:
        kind: pydantic's view of its type.
        data: JSON types; what the type does not know is passed over.

    Returns:
        An instance, each field of its type.

    Raises:
        UserInputError: a field is missing, or of another type; it is named.
    """
    try:
        return kind.validate_python(data)
    except ValidationError as error:
        found = dict(error.errors()[0])
        place = ".".join(map(str, error.errors()[0]["loc"]))
        wrong = "is missing" if found["type"] == "missing" else not_allowed(found)
        raise UserInputError(f"{place}: {wrong}" if place else wrong) from error


def _part_at(kind: type[BaseModel], place: EntryPath) -> type[BaseModel]:
    """The part of the settings that a place lies in; keys that a user chose, and positions, lead no deeper."""
    for name in place:
        field = kind.model_fields.get(str(name))
        kind = next(_parts(field.annotation), kind) if field else kind
    return kind


def _parts(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _parts(inner)


# Command lines that a file of the user names: words for one program, which no shell reads.

_OPERATORS = "&|;<>"


def check_command(name: str, line: str, places: Collection[str]) -> None:
    """Refuse a command line that could not do what it says.

    Args:
        name: of the command in its file.
        line: words, quoted as for a shell, with `{place}` for what is filled in.
        places: that are filled in.

    Raises:
        ValueError: it is empty or not closed, names another place, or has an operator of a shell outside of quotes, which would be an
            argument of the first program and leave the exit code to that one.
    """
    unknown = sorted(set(re.findall(r"\{(\w*)\}", line)) - set(places))
    if unknown:
        raise ValueError(f"{{{unknown[0]}}} in {name} is no place; places are {', '.join(f'{{{one}}}' for one in places)}")
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ValueError(f"{name}: {line!r} does not end as a command does ({error}); close the quotes") from error
    if not words:
        raise ValueError(f"{name} is empty")
    parts = shlex.shlex(line, posix=False, punctuation_chars=_OPERATORS)
    parts.whitespace_split, parts.commenters = True, ""
    if operator := next((part for part in parts if set(part) <= set(_OPERATORS)), None):
        raise ValueError(f"{name} has {operator}, and no shell reads a command; write bash -c '...' around it")
