"""YAML that others wrote, as plain data with the line of every entry; nothing in it is ever evaluated.

The data and the lines are two readings of one text: the data as a safe loader gives it, and a table from the path of an entry (keys and
positions) to its line, taken from the node tree. What comes later works on plain data and asks the table only to say where an error is.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from compressor.errors import UserInputError, reason

Key = str | int
EntryPath = tuple[Key, ...]

_SHOWN = 40  # characters of a value that cannot be read
MAX_ENTRIES = 100_000  # YAML aliases can make a small text expand to any size

_TAG = "tag:yaml.org,2002:"
_FLOAT_TAG, _MERGE_TAG, _TEXT_TAG = f"{_TAG}float", f"{_TAG}merge", f"{_TAG}str"
_NUMBER_TAGS = (_FLOAT_TAG, f"{_TAG}int")
_OLD_NUMBER = re.compile(r"[-+]?(?:0[0-7_]+|.*:.*)")
_EXPONENT_FLOAT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+\Z")


class YamlLoader(yaml.SafeLoader):
    """The safe loader, reading `1e-3` as the number that it is in YAML 1.2 and JSON."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Say where a value is none, such as the 31st of February."""
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, f"{node.value[:_SHOWN]!r}: {error}", node.start_mark) from error


class YamlDumper(yaml.SafeDumper):
    """The safe dumper, quoting what YamlLoader would read as a number."""


for _resolver in (YamlLoader, YamlDumper):
    _resolver.add_implicit_resolver(_FLOAT_TAG, _EXPONENT_FLOAT, list("-+.0123456789"))


def from_yaml(text: str, name: str, *, text_keys: bool = False) -> tuple[Any, dict[EntryPath, int]]:
    """Read YAML that somebody else wrote.

    Args:
        text: one document.
        name: what messages call it.
        text_keys: a key that YAML reads as something else (`no` as a truth value) is an error.

    Returns:
        The data, None for an empty text; and the line of each entry by its path.

    Raises:
        UserInputError: whatever is wrong with it: no YAML, a tag that makes objects, a key that stands twice, nested too deeply.
    """
    try:
        loader = YamlLoader(text)
        node = loader.get_single_node()
        lines = _lines(node, name)
        if text_keys:
            _check_keys(node, name)
        return None if node is None else loader.construct_document(node), lines
    except RecursionError as error:
        raise UserInputError(f"{name}: its entries are nested too deeply to be read; flatten it") from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserInputError(f"{name}{line}: this is not safe YAML ({error.problem}); correct the text") from error
    except UserInputError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise UserInputError(f"{name}: this is not safe YAML ({reason(error)}); correct the text") from error


def _lines(node: yaml.Node | None, name: str) -> dict[EntryPath, int]:
    """Line of every entry below a node; refuses keys that stand twice and texts that expand without bounds."""
    lines: dict[EntryPath, int] = {}
    _walk(node, (), lines, name, open_nodes=())
    return lines


def _check_keys(node: yaml.Node | None, name: str) -> None:
    """Refuse keys that are written without quotes and read as truth values, numbers, days or nothing."""
    for _, mark_node, child in _children(node):
        kind = mark_node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.MappingNode) and isinstance(mark_node, yaml.ScalarNode) and mark_node.tag != _TEXT_TAG:
            key = mark_node.value
            raise UserInputError(f'{name}:{mark_node.start_mark.line + 1}: {key}: is no text, YAML reads it as {kind}; write "{key}"')
        _check_keys(child, name)


def _walk(node: yaml.Node | None, path: EntryPath, lines: dict[EntryPath, int], name: str, open_nodes: tuple[int, ...]) -> None:
    if node is not None and (id(node) in open_nodes or len(lines) > MAX_ENTRIES):
        raise UserInputError(f"{name}:{node.start_mark.line + 1}: the aliases in this text expand without bounds; write the entries out")
    seen: set[Key] = set()
    for key, mark_node, child in _children(node):
        _check_number(child, name)
        if key in seen:
            raise UserInputError(f"{name}:{mark_node.start_mark.line + 1}: {key!r} stands twice in one mapping; {_remedy(str(key))}")
        seen.add(key)
        lines[(*path, key)] = mark_node.start_mark.line + 1
        _walk(child, (*path, key), lines, name, (*open_nodes, id(node)))


def _check_number(node: yaml.Node, name: str) -> None:
    """Refuse numbers that mean something else in YAML 1.1 than to whoever writes them: 1:30 is 90 there, and 010 is 8."""
    if isinstance(node, yaml.ScalarNode) and node.tag in _NUMBER_TAGS and _OLD_NUMBER.fullmatch(node.value):
        line = node.start_mark.line + 1
        raise UserInputError(f'{name}:{line}: YAML reads {node.value} as another number; write that number, or a text ("{node.value}")')


def _children(node: yaml.Node | None) -> list[tuple[Key, yaml.Node, yaml.Node]]:
    """Key, the node that has its line, and the value of each entry."""
    if isinstance(node, yaml.MappingNode):
        pairs = [(key, value) for key, value in node.value if key.tag != _MERGE_TAG]
        return [(str(key.value), key, value) for key, value in pairs]
    if isinstance(node, yaml.SequenceNode):
        return [(number, item, item) for number, item in enumerate(node.value)]
    return []


def _remedy(key: str) -> str:
    return f"rename one, or write a list (- {key}: ...) for two modifiers of one type" if key.endswith("Modifier") else "keep one"
