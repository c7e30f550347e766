"""From any source of a recipe to plain data, with the line where each entry stands.

The data and the lines are two readings of one text: the data as a safe YAML or JSON loader gives it, and a table from the path of an
entry (keys and positions) to its line, taken from the YAML node tree. What comes later works on plain data and asks the table only to
say where an error is. Nothing in a recipe is ever evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from compressor.errors import RecipeError
from compressor.spelling import suggest

Key = str | int
EntryPath = tuple[Key, ...]

RECIPE_SUFFIXES = (".yaml", ".yml", ".json", ".md")
MAX_ENTRIES = 100_000  # YAML aliases can make a small text expand to any size

_FENCES = ("---", "+++")
_FLOAT_TAG, _MERGE_TAG = "tag:yaml.org,2002:float", "tag:yaml.org,2002:merge"
_EXPONENT_FLOAT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+\Z")


class RecipeLoader(yaml.SafeLoader):
    """The safe loader, reading `1e-3` as the number that it is in YAML 1.2 and JSON."""


class RecipeDumper(yaml.SafeDumper):
    """The safe dumper, quoting what RecipeLoader would read as a number."""


for _resolver in (RecipeLoader, RecipeDumper):
    _resolver.add_implicit_resolver(_FLOAT_TAG, _EXPONENT_FLOAT, list("-+.0123456789"))


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
    if _is_file(source):
        return _read_file(Path(source))
    if "\n" not in source and source.lower().endswith(RECIPE_SUFFIXES):
        raise RecipeError(f"{source}: there is no such recipe file; {_similar_files(Path(source))}")
    document = _parse(source, "recipe", _looks_like(source))
    if isinstance(document.data, str):
        raise RecipeError(f"recipe: {document.data[:60]!r} is neither an existing file nor the text of a recipe; give the path of a file")
    return document


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # longer than a file name can be: a text
        return False


def _similar_files(path: Path) -> str:
    siblings = sorted(found.name for found in path.parent.glob("*") if found.suffix in RECIPE_SUFFIXES)
    return suggest(path.name, siblings) if siblings else "give the path of a .yaml, .yml, .json or .md file"


def _read_file(path: Path) -> Document:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise RecipeError(f"{path}: there is no such recipe file; {_similar_files(path)}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: byte {error.start} is not UTF-8 text; save the recipe as UTF-8") from error
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}); give a readable file") from error
    kind = path.suffix.lower()
    return _parse(text, path.name, kind if kind in RECIPE_SUFFIXES else _looks_like(text))


def _looks_like(text: str) -> str:
    """The kind of a text without a file name: JSON if it is JSON, Markdown if a fenced front matter is followed by more, else YAML."""
    try:
        json.loads(text)
    except ValueError:
        return ".md" if _front_matter(text) is not None else ".yaml"
    except RecursionError:
        return ".yaml"
    return ".json"


def _parse(text: str, name: str, kind: str) -> Document:
    try:
        if kind == ".json":
            return _parse_json(text, name)
        if kind == ".md":
            front = _front_matter(text)
            if front is None:
                raise RecipeError(f"{name}: no front matter was found; put the recipe between two lines '---' at the top of the file")
            return _parse_yaml(front, text, name)
        return _parse_yaml(text, text, name)
    except RecursionError as error:
        raise RecipeError(f"{name}: its entries are nested too deeply to be read; flatten it") from error


def _front_matter(text: str) -> str | None:
    """The text between the first two fences, line numbers kept; None where it does not start with a fence that is closed later."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.strip()), None)
    if start is None or lines[start].strip() not in _FENCES:
        return None
    for end in range(start + 1, len(lines)):
        if lines[end].strip() == lines[start].strip():
            return "\n" * (start + 1) + "\n".join(lines[start + 1 : end])
    return None


def _parse_yaml(recipe_text: str, text: str, name: str) -> Document:
    try:
        loader = RecipeLoader(recipe_text)
        node = loader.get_single_node()
        lines = _lines(node, name)
        data = None if node is None else loader.construct_document(node)
    except RecipeError:
        raise
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise RecipeError(f"{name}{line}: this is not safe YAML ({error.problem}); correct the text") from error
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"{name}: this is not safe YAML ({str(error).splitlines()[0]}); correct the text") from error
    return Document(data, text, name, lines)


def _parse_json(text: str, name: str) -> Document:
    try:
        data = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, name))
    except json.JSONDecodeError as error:
        raise RecipeError(f"{name}:{error.lineno}: this is not JSON ({error.msg}); correct the text") from error
    try:
        # Tabs may stand between the entries of JSON, not of YAML.
        lines = _lines(yaml.compose(text.replace("\t", " "), Loader=RecipeLoader), name)
    except yaml.YAMLError:
        lines = {}  # JSON that is no YAML: still right, only its errors do not name a line
    return Document(data, text, name, lines)


def _unique(pairs: list[tuple[str, Any]], name: str) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RecipeError(f"{name}: {_twice(twice)}")
    return data


def _twice(key: str) -> str:
    return f"{key!r} stands twice in one mapping; rename one, or write a list (- {key}: ...) for two modifiers of one type"


def _lines(node: yaml.Node | None, name: str) -> dict[EntryPath, int]:
    """Line of every entry below a node; refuses keys that stand twice and texts that expand without bounds."""
    lines: dict[EntryPath, int] = {}
    _walk(node, (), lines, name, open_nodes=())
    return lines


def _walk(node: yaml.Node | None, path: EntryPath, lines: dict[EntryPath, int], name: str, open_nodes: tuple[int, ...]) -> None:
    if node is not None and (id(node) in open_nodes or len(lines) > MAX_ENTRIES):
        raise RecipeError(f"{name}:{node.start_mark.line + 1}: the aliases in this text expand without bounds; write the entries out")
    seen: set[Key] = set()
    for key, mark_node, child in _children(node):
        if key in seen:
            raise RecipeError(f"{name}:{mark_node.start_mark.line + 1}: {_twice(str(key))}")
        seen.add(key)
        lines[(*path, key)] = mark_node.start_mark.line + 1
        _walk(child, (*path, key), lines, name, (*open_nodes, id(node)))


def _children(node: yaml.Node | None) -> list[tuple[Key, yaml.Node, yaml.Node]]:
    """Key, the node that has its line, and the value of each entry."""
    if isinstance(node, yaml.MappingNode):
        pairs = [(key, value) for key, value in node.value if key.tag != _MERGE_TAG]
        return [(str(key.value), key, value) for key, value in pairs]
    if isinstance(node, yaml.SequenceNode):
        return [(number, item, item) for number, item in enumerate(node.value)]
    return []
