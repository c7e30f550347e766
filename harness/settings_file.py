"""Reads a YAML file of settings into a class of pydantic; every mistake is named with its line, all at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from compressor.errors import UserInputError
from compressor.spelling import suggest

Settings = TypeVar("Settings", bound=BaseModel)


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
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserInputError(f"{path}: cannot be read ({error.strerror}); name a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserInputError(f"{path}: is not YAML: {' '.join(str(error).split())}; write one `{word}: value` a line") from error
    if node is not None and not isinstance(node, yaml.MappingNode):
        raise UserInputError(f"{path}:1: holds no mapping; write one `{word}: value` a line")
    lines: dict[tuple[str, ...], int] = {}
    if node is not None:
        _note_lines(node, (), lines, path)
    try:
        return kind.model_validate(yaml.safe_load(text) or {})
    except ValidationError as error:
        raise UserInputError("; ".join(_explain(path, dict(item), lines, kind, word) for item in error.errors())) from error


def _note_lines(node: yaml.MappingNode, prefix: tuple[str, ...], lines: dict[tuple[str, ...], int], path: Path) -> None:
    """Fill `lines` with the line of every key; a key that stands twice is an error, YAML would keep the last silently."""
    for key, value in node.value:
        place, line = (*prefix, str(key.value)), key.start_mark.line + 1
        if place in lines:
            raise UserInputError(f"{path}:{line}: {'.'.join(place)} stands on line {lines[place]} already; keep one")
        lines[place] = line
        if isinstance(value, yaml.MappingNode):
            _note_lines(value, place, lines, path)


def _explain(path: Path, error: Mapping[str, Any], lines: Mapping[tuple[str, ...], int], kind: type[BaseModel], word: str) -> str:
    place = tuple(str(part) for part in error["loc"])
    line = next((lines[place[:end]] for end in range(len(place), 0, -1) if place[:end] in lines), 1)
    where = f"{path}:{line}: {'.'.join(place)}"
    if error["type"] == "missing":
        return f"{where}: is missing; add it"
    if error["type"] != "extra_forbidden":
        message = error["msg"].removeprefix("Value error, ")
        return f"{where}: {error['input']!r} is not allowed: {message[0].lower()}{message[1:]}"
    known = sorted(_fields_at(kind, place[:-1]))
    remedy = suggest(place[-1], known, otherwise=f"known are {', '.join(known)}", show=str)
    return f"{where}: is no {word}; {remedy}"


def _fields_at(kind: type[BaseModel], place: tuple[str, ...]) -> Mapping[str, Any]:
    """The fields of the settings that stand at a place."""
    for name in place:
        kind = kind.model_fields[name].annotation  # type: ignore[assignment]
    return kind.model_fields
