"""`${name}` in a recipe: replaced by the value of an argument, never evaluated.

A string that is nothing but `${name}` becomes the value itself, with its type; inside a longer string the value is written out.
`$${` stands for a literal `${`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from compressor.errors import RecipeError
from compressor.recipe.source import EntryPath
from compressor.spelling import suggest

_REFERENCE = re.compile(r"\$\$\{|\$\{([^${}]*)\}|\$\{")
_NAME = re.compile(r"[A-Za-z_]\w*\Z")


def substitute(value: Any, args: Mapping[str, Any], used: set[str], where: Callable[[EntryPath], str], path: EntryPath) -> Any:
    """Return a value with every reference replaced.

    Args:
        value: data of a recipe; not modified.
        args: value by name.
        used: names that were referred to are added here.
        where: says where the entry with a path stands, for errors.
        path: of the value.

    Returns:
        New data.

    Raises:
        RecipeError: a reference to a name that is not among the arguments, or `${` without a name.
    """
    if isinstance(value, str):
        return _replace(value, args, used, where, path)
    if isinstance(value, Mapping):
        return {key: substitute(item, args, used, where, (*path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [substitute(item, args, used, where, (*path, number)) for number, item in enumerate(value)]
    return value


def named_values(args: Mapping[str, Any] | Sequence[str] | None) -> dict[str, Any]:
    """Take arguments as a user gives them.

    Args:
        args: a mapping; texts `name=value`, or one such text; None for none.

    Returns:
        Value by name; of texts all values are texts.

    Raises:
        RecipeError: a text without a name or without `=`, or a name that stands twice.
    """
    if args is None or isinstance(args, Mapping):
        return dict(args or {})
    found: dict[str, Any] = {}
    for text in [args] if isinstance(args, str) else args:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise RecipeError(f"recipe_args: {text!r} is not name=value; write it so")
        if name in found:
            raise RecipeError(f"recipe_args: {name!r} was given twice, as {found[name]!r} and as {value!r}; give each name once")
        found[name] = value
    return found


def escape(value: Any) -> Any:
    """Return data in which `substitute` finds nothing to replace and which it turns into the data given.

    Args:
        value: plain data; not modified.

    Returns:
        New data.
    """
    if isinstance(value, str):
        return value.replace("${", "$${")
    if isinstance(value, Mapping):
        return {key: escape(item) for key, item in value.items()}
    return [escape(item) for item in value] if isinstance(value, list) else value


def _replace(text: str, args: Mapping[str, Any], used: set[str], where: Callable[[EntryPath], str], path: EntryPath) -> Any:
    def look_up(match: re.Match[str]) -> Any:
        """Return the value of one reference; `$${` stands for itself."""
        if match.group() == "$${":
            return "${"
        name = match.group(1)
        if name is None or not _NAME.match(name):
            raise RecipeError(
                f"{where(path)}: {text!r} holds '${{' without the name of an argument; write ${{name}}, or $${{ for a literal ${{"
            )
        if name not in args:
            advice = suggest(name, args) if args else f"add it: args: {{{name}: ...}}"
            raise RecipeError(f"{where(path)}: {text!r} refers to the argument {name!r}, which is not given; {advice}")
        used.add(name)
        return args[name]

    whole = _REFERENCE.fullmatch(text)
    return look_up(whole) if whole else _REFERENCE.sub(lambda match: str(look_up(match)), text)
