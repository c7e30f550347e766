"""One class of settings a verb: from its fields follow the parser, its help, the keyword arguments of the function and the defaults."""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, Self, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from compressor.errors import UserInputError
from compressor.settings.kinds import MODEL, Kind
from compressor.spelling import suggest

P = ParamSpec("P")
M = TypeVar("M")
R = TypeVar("R")


@dataclass(frozen=True)
class Option:
    """How a field is given on the command line; a field without one is an argument in Python alone.

    Attributes:
        flag: its name; by default that of the field. One that begins with `--no-` or means the contrary `negates`.
        metavar: of its value in the help.
        read: from the text to the value; by default a text stays one, and a path becomes a Path.
        choices: of the value, where its type does not say them.
        positional: it is told by its place; `nargs` says how many there are.
        nargs: as argparse takes it, of one that is told by its place.
        action: an action of argparse of one's own.
        many: it is followed by several values.
        repeats: it may be given several times.
        negates: given, it makes a field False that is True otherwise.
        required: on the command line; in Python it has a default.
        help: where the text under the field does not fit the flag.
        group: options of one group exclude each other.
    """

    flag: str | None = None
    metavar: str | None = None
    read: Callable[[str], Any] | None = None
    choices: tuple[Any, ...] | None = None
    positional: bool = False
    nargs: str | None = None
    action: type[argparse.Action] | None = None
    many: bool = False
    repeats: bool = False
    negates: bool = False
    required: bool = False
    help: str | None = None
    group: str | None = None


class Settings(BaseModel):
    """What a user chooses of one verb; the text under a field is its help."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, use_attribute_docstrings=True)

    def __init__(self, **given: Any) -> None:
        """Check every argument by its kind, then what they mean together.

        Args:
            **given: the fields by name.

        Raises:
            UserInputError: one is of the wrong kind, missing or unknown, or two contradict each other.
        """
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise _said(type(self), error) from None

    @classmethod
    def of(cls, other: Settings) -> Self:
        """Return the part of other settings that this class has.

        Args:
            other: with all fields of this class.

        Returns:
            An object of this class.
        """
        return cls(**{name: getattr(other, name) for name in cls.model_fields})


S = TypeVar("S", bound=Settings)


def _said(settings: type[Settings], error: ValidationError) -> UserInputError:
    """The first thing that is wrong, in our words."""
    first = error.errors()[0]
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, UserInputError):
        return inner
    name = str(first["loc"][0])
    if first["type"] == "missing":
        return UserInputError(f"{name}: it was not given; pass {name}=")
    if first["type"] == "extra_forbidden":
        return UserInputError(f"{name}: there is no such argument; {suggest(name, settings.model_fields)}")
    if first["type"] == "choice":
        return UserInputError(f"{name}: {first['input']!r} does not exist; {first['msg']}")
    return wrong_kind(name, first["input"], first["msg"])


def wrong_kind(name: str, value: object, words: str) -> UserInputError:
    """Return the error for an argument of the wrong kind.

    Args:
        name: of the argument.
        value: as given.
        words: what belongs there.

    Returns:
        The error.
    """
    text = repr(str(value) if isinstance(value, Path) else value)
    return UserInputError(f"{name}: {text if len(text) <= 60 else text[:57] + '...'} was given, where {words} belongs; correct it")


def check_kind(name: str, value: object, kind: Kind) -> None:
    """Refuse an argument of the wrong kind.

    Args:
        name: of the argument.
        value: as given.
        kind: that it must be of.

    Raises:
        UserInputError: it is of another kind.
    """
    if not kind.holds(value):
        raise wrong_kind(name, value, kind.words)


def checked(**kinds: Kind) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a public function, or a method, look at its arguments before it begins.

    Args:
        **kinds: that arguments must be of, by their names; None is taken where it is the default.

    Returns:
        The decorator; what it makes raises UserInputError.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters

        @functools.wraps(function)
        def call(*args: P.args, **given: P.kwargs) -> R:
            for name, value in (*zip(parameters, args, strict=False), *given.items()):
                if name in kinds and not (value is None and parameters[name].default is None):
                    check_kind(name, value, kinds[name])
            return function(*args, **given)

        return call

    return decorate


def add_options(parser: argparse.ArgumentParser, settings: type[Settings]) -> None:
    """Declare the options of a verb. Defaults stay where they are: in the class.

    Args:
        parser: of the verb; changed.
        settings: of the verb.
    """
    groups: dict[str, Any] = {}
    found = [(name, field, option) for name, field in settings.model_fields.items() if (option := _option(field)) is not None]
    for name, field, option in sorted(found, key=lambda one: (not _is_required(one[1], one[2]), _depth(settings, one[0]))):
        if option.positional:
            _add_positional(parser, name, field, option)
            continue
        if option.group is not None and option.group not in groups:
            groups[option.group] = parser.add_mutually_exclusive_group()
        flag = option.flag or "--" + name.replace("_", "-")
        groups.get(option.group or "", parser).add_argument(flag, dest=name, help=_help(field, option), **_how(field, option))


def _add_positional(parser: argparse.ArgumentParser, name: str, field: FieldInfo, option: Option) -> None:
    how: dict[str, Any] = {"metavar": option.metavar, "nargs": option.nargs, "type": _read(field, option), "choices": option.choices}
    parser.add_argument(name, help=_help(field, option), **{key: value for key, value in how.items() if value is not None})


def _depth(settings: type[Settings], name: str) -> int:
    """How far up the field is declared: what a verb has for itself comes first in its help."""
    return next(depth for depth, base in enumerate(settings.__mro__) if name in inspect.get_annotations(base))


def _option(field: FieldInfo) -> Option | None:
    return next((part for part in field.metadata if isinstance(part, Option)), None)


def _is_required(field: FieldInfo, option: Option) -> bool:
    return option.required or field.is_required()


def _how(field: FieldInfo, option: Option) -> dict[str, Any]:
    """The rest of what argparse wants to know."""
    if option.negates or field.default is False:
        return {"action": "store_true"}
    common: dict[str, Any] = {"default": None, "required": _is_required(field, option)}
    if (read := _read(field, option)) is not None:
        common["type"] = read
    if option.metavar is not None:
        common["metavar"] = option.metavar
    if (choices := option.choices or _literals(field.annotation)) is not None:
        common["choices"] = choices
    if option.many:
        common["nargs"] = "+"
    if option.repeats:
        common["action"] = "append"
    if option.action is not None:
        common["action"] = option.action
    return common


def _types(annotation: Any) -> list[Any]:
    """A type and, of a union, its members."""
    parts = (annotation, *get_args(annotation))
    return [get_args(part)[0] if get_origin(part) is Annotated else part for part in parts]


def _read(field: FieldInfo, option: Option) -> Callable[[str], Any] | None:
    types = _types(field.annotation)
    return option.read or (Path if Path in types and str not in types else None)


def _literals(annotation: Any) -> tuple[str, ...] | None:
    return next((get_args(part) for part in _types(annotation) if get_origin(part) is Literal), None)


_SPELLED = (bool, int, float, str, Path)
"""Defaults that the help spells out; of others its text speaks."""


def _help(field: FieldInfo, option: Option) -> str:
    said = " ".join((option.help or field.description or "").split()).removesuffix(".").replace("%", "%%")
    if (
        option.negates
        or field.is_required()
        or field.default in ("", None)
        or field.default is False
        or not isinstance(field.default, _SPELLED)
    ):
        return said
    return f"{said} (default: {field.default})"


def chosen(args: argparse.Namespace, settings: type[Settings]) -> dict[str, Any]:
    """Return what was given on a command line, as keyword arguments.

    Args:
        args: as `add_options` declared them.
        settings: of the verb.

    Returns:
        Name to value of what was given.
    """
    given = {}
    for name, field in settings.model_fields.items():
        value, option = getattr(args, name, None), _option(field)
        if option is not None and option.negates:
            given[name] = not value
        elif option is not None and value is not None and value is not False:
            given[name] = value
    return given


def settings_of(args: argparse.Namespace, settings: type[S]) -> S:
    """Return what was given on a command line, and the defaults of the rest.

    Args:
        args: as `add_options` declared them.
        settings: of the verb.

    Returns:
        The settings.
    """
    return settings(**chosen(args, settings))


def from_settings(
    settings: Callable[P, S], translate: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> Callable[[Callable[[M, S], R]], Callable[Concatenate[M, P], R]]:
    """Make `function(model, settings)` take the fields of the settings as keyword arguments: signature, defaults, docstring and checks.

    Args:
        settings: a class of settings.
        translate: from the keyword arguments as given to those of the fields.

    Returns:
        The decorator.
    """
    made: Any = settings  # a class, which the types call a function, so that its fields become those of the result
    fields: dict[str, FieldInfo] = made.model_fields

    def decorate(function: Callable[[M, S], R]) -> Callable[Concatenate[M, P], R]:
        @functools.wraps(function)
        def call(model: M, *args: P.args, **given: P.kwargs) -> R:
            check_kind("model", model, MODEL)
            if args:
                raise UserInputError(f"{function.__name__}: {len(args) + 1} arguments without a name were given; name all but the model")
            return function(model, made(**translate(given)))

        model, _ = inspect.signature(function).parameters.values()
        keywords = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.is_required() else field.default,
                annotation=field.annotation,
            )
            for name, field in fields.items()
        ]
        call.__signature__ = inspect.Signature([model, *keywords])  # type: ignore[attr-defined]
        call.__doc__ = _documented(function.__doc__ or "", fields)
        return call

    return decorate


def _documented(doc: str, fields: dict[str, FieldInfo]) -> str:
    """The docstring with the fields in place of the settings."""
    lines = []
    for line in doc.splitlines():
        if line.strip().startswith("settings: "):
            indent = line[: len(line) - len(line.lstrip())]
            lines += [f"{indent}{name}: {' '.join((field.description or '').split())}" for name, field in fields.items()]
        else:
            lines.append(line)
    return "\n".join(lines)
