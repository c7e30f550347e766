"""From plain data to modifiers: stages, groups and settings, strictly.

    default_stage:            name_stage; may also hold run_type and args; several stages are run as one list, in order
      quant_modifiers:        name_modifiers (a group), or modifiers (no group); also directly at the top, for a single stage
        GPTQModifier:         a mapping of modifiers, or a list of one-entry mappings, where one type may stand twice
          scheme: W4A16
    args:                     values for ${name}
      size: 128

A list at the top is the list of modifiers itself. `version` and `metadata` at the top are what their writer notes for himself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from compressor.errors import RecipeError
from compressor.lifecycle import Modifier
from compressor.lifecycle.settings_errors import describe
from compressor.modifiers.registry import find_modifier, known_modifiers
from compressor.recipe.source import Document
from compressor.settings.kinds import RECIPE_ARGS
from compressor.settings.options import check_kind
from compressor.spelling import suggest
from compressor.yaml_text import EntryPath

DEFAULT_STAGE = "default"
RUN_TYPES = ("oneshot", "train")
UNREAD = ("version", "metadata")  # llm-compressor allows them at the top, and reads nothing out of them
STAGE_PATTERN = r"^(.+)_stage(_\d+)?$"
GROUP_PATTERN = r"^(.+)_modifiers$"

_ANCHOR = re.compile(r"(?:^|[\s:,{\[])&[\w-]", re.M)
_STAGE, _GROUP = re.compile(STAGE_PATTERN, re.S), re.compile(GROUP_PATTERN, re.S)


@dataclass(frozen=True)
class Stage:
    """A named part of a recipe; all stages of a recipe act in one run.

    Attributes:
        name: without `_stage`.
        modifiers: in order.
        run_type: `oneshot` or `train`, as the file says; None where it does not.
    """

    name: str
    modifiers: tuple[Modifier, ...]
    run_type: str | None = None


class Builder:
    """Turns one document into stages; holds what is counted on the way: positions of modifiers and names of used arguments."""

    def __init__(self, document: Document, args: Mapping[str, Any]) -> None:
        """Take a document and the arguments that the caller gives in place of the recipe's own."""
        self._document = document
        self._given = dict(args)
        self._own: dict[str, EntryPath] = {}  # where arguments of the recipe's own stand
        self._used: set[str] = set()
        self._num_modifiers = 0
        self.places: dict[int, str] = {}  # where each modifier stands, by its position

    def build(self) -> tuple[Stage, ...]:
        """Return the stages in order.

        Raises:
            RecipeError: anything in the document that means nothing, or no modifier at all.
        """
        data = self._document.data
        if isinstance(data, list | tuple):
            stages = [Stage(DEFAULT_STAGE, tuple(self._group(data, (), DEFAULT_STAGE, self._given)))]
        elif isinstance(data, Mapping):
            stages = list(self._stages(data))
        else:
            raise self._error((), f"{_show(data)} is no recipe; give a mapping of stages or a list of modifiers")
        self._check_used()
        if not self._num_modifiers:
            raise self._error((), "it holds no modifier, so nothing would be done; add one below name_stage: name_modifiers:")
        return tuple(stages)

    def _check_used(self) -> None:
        """Refuse arguments, given or the recipe's own, that stand for nothing: a slip in the name would leave a setting as it is."""
        own = {} if _ANCHOR.search(self._document.text) else self._own  # an alias of YAML may read what no ${name} does
        unused = sorted((self._given.keys() - self._own.keys() | own.keys()) - self._used)
        if unused:
            none, path = "" if self._used else ", which holds no ${name}", self._own.get(unused[0], ())
            advice = suggest(unused[0], sorted(self._used))
            raise self._error(path, f"the argument {unused[0]!r} is not used by the recipe{none}; {advice}")

    def _stages(self, data: Mapping[Any, Any]) -> Iterator[Stage]:
        args = self._arguments(data, (), self._given)
        names = {self._plain(key, ()): self._stage_name(key) for key in data if key not in ("args", *UNREAD)}
        flat = [key for key, name in names.items() if name is None]
        if not any(names.values()):
            yield self._stage(DEFAULT_STAGE, {key: data[key] for key in flat}, (), args)
            return
        if flat:
            words = self._words(flat[0], "args")
            advice = "" if flat[0] in words else f"{suggest(str(flat[0]), words)}, or "
            raise self._error((flat[0],), f"{flat[0]!r} stands beside stages; {advice}move it into a stage")
        for key, name in names.items():
            if not isinstance(data[key], Mapping):
                raise self._error((key,), f"the stage {key} holds {_show(data[key])}; give it a mapping, such as quant_modifiers: ...")
            yield self._stage(str(name), data[key], (key,), self._arguments(data[key], (key,), args))

    def _stage_name(self, key: Any) -> str | None:
        match = _STAGE.match(key) if isinstance(key, str) else None
        return match.group(1) + (match.group(2) or "") if match else None

    def _stage(self, name: str, content: Mapping[Any, Any], path: EntryPath, args: Mapping[str, Any]) -> Stage:
        modifiers: list[Modifier] = []
        for key, value in content.items():
            here = (*path, self._plain(key, path))
            group = _GROUP.match(key) if isinstance(key, str) else None
            if group or key == "modifiers":
                modifiers += self._group(value, here, group.group(1) if group else name, args)
            elif isinstance(key, str) and (":" in key or key in known_modifiers()):
                modifiers.append(self._modifier(key, value, here, name, args))
            elif path and self._stage_name(key):
                raise self._error(here, f"{key!r} stands inside of a stage; write all stages at the top, one below the other")
            elif key not in ("args", "run_type"):
                advice = suggest(str(key), self._words(key, "args", "run_type"))
                raise self._error(here, f"{key!r} means nothing in a recipe; {advice}")
        run_type = content.get("run_type")
        if run_type is not None and run_type not in RUN_TYPES:
            raise self._error((*path, "run_type"), f"run_type: {run_type!r} is unknown; {suggest(str(run_type), RUN_TYPES)}")
        return Stage(name, tuple(modifiers), run_type)

    def _group(self, value: Any, path: EntryPath, group: str, args: Mapping[str, Any]) -> Iterator[Modifier]:
        for number, item in enumerate(value if isinstance(value, list | tuple) else [value]):
            here = (*path, number) if isinstance(value, list | tuple) else path
            if isinstance(item, str):
                item = {item: None}
            if not isinstance(item, Mapping) or not item:
                raise self._error(here, f"{_show(item)} stands where modifiers should; write ModifierName: and its settings below")
            for name, settings in item.items():
                yield self._modifier(name, settings, (*here, name), group, args)

    def _modifier(self, name: Any, settings: Any, path: EntryPath, group: str, args: Mapping[str, Any]) -> Modifier:
        self._plain(name, path[:-1])
        try:
            cls = find_modifier(str(name))
        except RecipeError as error:
            raise self._error(path, str(error)) from error
        if settings is not None and not isinstance(settings, Mapping):
            raise self._error(path, f"{name} holds {_show(settings)}; give its settings as a mapping")
        position = self._num_modifiers
        values = dict(self._substitute(settings or {}, args, path))
        if values.get("group") in (None, ""):
            values["group"] = group
        if values.setdefault("index", position) != position:
            raise self._error((*path, "index"), f"{name}.index: {values['index']!r} is not its position {position}; leave it out")
        try:
            modifier = cls.model_validate(values)
        except ValidationError as error:
            raise RecipeError(describe(error, cls, values, str(name), lambda below: self._document.where((*path, *below)))) from error
        self.places[position] = self._document.where(path)
        self._num_modifiers += 1
        return modifier

    def _arguments(self, content: Mapping[Any, Any], path: EntryPath, outer: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments inside `content`: its own, which may refer to those before them, below what the caller gives."""
        own = content.get("args")
        if own is not None and not isinstance(own, Mapping):
            raise self._error((*path, "args"), f"args holds {_show(own)}; give a mapping of names to values")
        args, later = dict(outer), dict.fromkeys(own or {}, _LATER)
        for name, value in (own or {}).items():
            if not isinstance(name, str):
                raise self._error((*path, "args", name), f"{name!r} is no name of an argument; write one that ${{name}} can refer to")
            self._own.setdefault(name, (*path, "args", name))
            known = {**later, **args}
            args[name] = self._given[name] if name in self._given else self._substitute(value, known, (*path, "args", name))
        return args

    def _substitute(self, value: Any, args: Mapping[str, Any], path: EntryPath) -> Any:
        return substitute(value, args, self._used, self._document.where, path)

    def _plain(self, key: Any, path: EntryPath) -> Any:
        if isinstance(key, str) and "${" in key:
            raise self._error((*path, key), f"{key!r} stands for no argument here, only below a modifier; write the name out")
        return key

    def _words(self, key: Any, *others: str) -> list[str]:
        prefix = str(key).rpartition("_")[0] or "quant"
        return [f"{prefix}_modifiers", f"{prefix}_stage", "modifiers", *others, *known_modifiers()]

    def _error(self, path: EntryPath, message: str) -> RecipeError:
        return RecipeError(f"{self._document.where(path)}: {message}")


def _show(value: Any) -> str:
    text = "an empty entry" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# `${name}` in a recipe: replaced by the value of an argument, never evaluated.
#
# A string that is nothing but `${name}` becomes the value itself, with its type; inside a longer string, text and numbers are written out.
# `$${` stands for a literal `${`. Keys of settings are such strings, too, those above them are not.

_LATER = object()  # in the place of an argument's value until it is known
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
        RecipeError: a reference to a name that is not among the arguments, or `${` without a name; a value that is no text where only
            text can stand; or two keys of one text.
    """
    if isinstance(value, str):
        return _replace(value, args, used, where, path)
    if isinstance(value, Mapping):
        found: dict[Any, Any] = {}
        for key, item in value.items():
            here = (*path, key)
            new = _replace(key, args, used, where, here) if isinstance(key, str) else key
            if isinstance(key, str) and not isinstance(new, str):
                raise RecipeError(f"{where(here)}: {key!r} stands for {_show(new)}, and a key is text; give the argument a text")
            if new in found:
                raise RecipeError(f"{where(here)}: {key!r} gives {new!r}, which stands twice in one mapping; keep one")
            found[new] = substitute(item, args, used, where, here)
        return found
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
        UserInputError: they are of another kind, such as a mapping with a key that is no text.
        RecipeError: a name stands twice.
    """
    if args is None:
        return {}
    check_kind("recipe_args", args, RECIPE_ARGS)
    if isinstance(args, Mapping):
        return dict(args)
    found: dict[str, Any] = {}
    for text in [args] if isinstance(args, str) else args:
        name, _, value = text.partition("=")
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
        return {escape(key): escape(item) for key, item in value.items()}
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
        if args[name] is _LATER:
            raise RecipeError(f"{where(path)}: {text!r} refers to the argument {name!r}, which does not stand above it; move it there")
        used.add(name)
        return args[name]

    def written(match: re.Match[str]) -> str:
        value = look_up(match)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise RecipeError(
                f"{where(path)}: {text!r} holds {match.group()} beside other text, and it stands for {_show(value)}, neither text nor a "
                "number; let it stand alone, or write the text out"
            )
        return str(value)

    whole = _REFERENCE.fullmatch(text)
    return look_up(whole) if whole else _REFERENCE.sub(written, text)
