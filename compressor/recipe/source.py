"""From any source of a recipe to plain data, with the line where each entry stands.

Nothing in a recipe is ever evaluated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from compressor.errors import RecipeError, UserInputError
from compressor.json_text import from_json
from compressor.spelling import suggest
from compressor.yaml_text import EntryPath, from_yaml

RECIPE_SUFFIXES = (".yaml", ".yml", ".json", ".md")

_FENCES = ("---", "+++")


@dataclass(frozen=True)
class Document:
    """A recipe as plain data.

    Attributes:
        data: what the text says, or the data that was given.
        text: the text; empty where data was given.
        name: what messages call it: the file's name, or `recipe`.
        lines: line of each entry by its path.
    """

    data: Any
    text: str = ""
    name: str = "recipe"
    lines: Mapping[EntryPath, int] = field(default_factory=lambda: MappingProxyType({}))

    def where(self, path: EntryPath) -> str:
        """Say where an entry stands.

        Args:
            path: keys and positions from the top.

        Returns:
            `name:line`, with the line of the nearest entry around it that has one, or the name alone.
        """
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return f"{self.name}:{self.lines[path[:length]]}"
        return self.name


def read_document(source: str | Path | Mapping[str, Any] | Sequence[Any]) -> Document:
    """Read a recipe from a file, a text or data.

    Args:
        source: path of a file; text of a recipe; or the mapping or list that such a text would give.

    Returns:
        The document.

    Raises:
        RecipeError: there is no such file, or the text is not what its kind promises.
    """
    if isinstance(source, Path):
        return _read_file(source)
    if not isinstance(source, str):
        return Document(source)
    if source and _exists(source):  # of no text the path is the folder here
        return _read_file(Path(source))
    if "\n" not in source and source.lower().endswith(RECIPE_SUFFIXES):
        raise RecipeError(f"{source}: there is no such recipe file; {_similar_files(Path(source))}")
    document = _parse(source, "recipe", _looks_like(source, "recipe"))
    if isinstance(document.data, str):
        raise RecipeError(f"recipe: {document.data[:60]!r} is neither an existing file nor the text of a recipe; give the path of a file")
    return document


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except OSError:  # longer than a file name can be: a text
        return False


def _similar_files(path: Path) -> str:
    """Advice from what lies beside it: any file of a like name; else those that are surely recipes, as a model's .json and .md are not."""
    siblings = sorted(found.name for found in path.parent.glob("*") if found.suffix in RECIPE_SUFFIXES and found.stem.lower() != "readme")
    sure = [name for name in siblings if name.endswith((".yaml", ".yml"))]
    otherwise = suggest(path.name, sure) if sure else "give the path of a .yaml, .yml, .json or .md file"
    return suggest(path.name, siblings, otherwise)


def _read_file(path: Path) -> Document:
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a pipe or device, which gives its text once, and a recipe is read more than once"
        raise RecipeError(f"{path}: is {what}; give the path of a file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise RecipeError(f"{path}: there is no such recipe file; {_similar_files(path)}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: byte {error.start} is not UTF-8 text; save the recipe as UTF-8") from error
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}); give a readable file") from error
    kind = path.suffix.lower()
    return _parse(text, path.name, kind if kind in RECIPE_SUFFIXES else _looks_like(text, path.name))


def _looks_like(text: str, name: str) -> str:
    """The kind of a text without a suffix: JSON if it is JSON, Markdown if a fenced front matter is followed by prose, else YAML.

    Raises:
        RecipeError: a second document may follow the first: of both, one would be read without a word.
    """
    try:
        from_json(text)
    except ValueError:
        _, *behind = _fenced(text) or [""]
        if any(isinstance(_data_of(part), Mapping | list) for part in behind):
            raise RecipeError(
                f"{name}: several YAML documents stand in it, and a recipe is one; give one, or the path of a .md file where prose follows"
            ) from None
        return ".md" if _fenced(text) else ".yaml"
    return ".json"


def _data_of(text: str) -> Any:
    try:
        return from_yaml(text, "")[0]
    except UserInputError:  # prose
        return None


def _parse(text: str, name: str, kind: str) -> Document:
    if kind == ".json":
        return _parse_json(text, name)
    if kind != ".md":
        return _parse_yaml(text, text, name)
    parts = _fenced(text)
    if parts is None:
        raise RecipeError(f"{name}: no front matter was found; put the recipe between two lines '---' at the top of the file")
    return _parse_yaml(parts[0], text, name)


def _fenced(text: str) -> list[str] | None:
    """The parts between fences and behind the last, the first with its line numbers; None where no fence at the top is closed later."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.strip()), None)
    if start is None or lines[start].strip() not in _FENCES:
        return None
    fences = [number for number, line in enumerate(lines) if line.strip() == lines[start].strip()]
    parts = ["\n".join(lines[begin + 1 : end]) for begin, end in pairwise([*fences, len(lines)])]
    return ["\n" * (start + 1) + parts[0], *parts[1:]] if parts[1:] else None


def _parse_yaml(recipe_text: str, text: str, name: str) -> Document:
    try:
        data, lines = from_yaml(recipe_text, name)
    except UserInputError as error:
        raise RecipeError(str(error)) from error
    return Document(data, text, name, lines)


def _parse_json(text: str, name: str) -> Document:
    try:
        data = from_json(text, once=True)
    except json.JSONDecodeError as error:
        raise RecipeError(f"{name}:{error.lineno}: this is not JSON ({error.msg}); correct the text") from error
    except ValueError as error:
        raise RecipeError(f"{name}: {error}; correct the text") from error
    try:
        # Tabs may stand between the entries of JSON, not of YAML.
        _, lines = from_yaml(text.replace("\t", " "), name)
    except UserInputError:
        lines = {}  # JSON that is no YAML: still right, only its errors do not name a line
    return Document(data, text, name, lines)
