"""pydantic's view of wrong settings, said in our words: the line, the setting, what is wrong, and the nearest valid name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from compressor.spelling import suggest

EntryPath = tuple[int | str, ...]

# Settings that the recipe fills in; they would only blur advice.
_FILLED_IN = ("index", "group")
_BUT = " was given, but "


def describe(
    error: ValidationError, cls: type[BaseModel], settings: Mapping[str, Any], name: str, where: Callable[[EntryPath], str] | None
) -> str:
    """Describe everything that is wrong with the settings of one modifier.

    Args:
        error: what pydantic raised.
        cls: the modifier's class.
        settings: the settings that were given.
        name: the modifier's name in the recipe.
        where: says where the setting with a path stands; None where it was given in Python.

    Returns:
        One line per setting.
    """
    entries: dict[str, list[tuple[str, str]]] = {}
    errors = error.errors(include_url=False)
    for details in (one for one in errors if not _is_of_unfit_branch(one, errors, settings)):
        path = _path_in(settings, details["loc"])
        head = "" if where is None else f"{where(path)}: "
        head += ".".join(map(str, (name, *path)))
        entries.setdefault(head, []).append(_complaint(details, cls, path, name, settings))
    return "\n".join(_line(head, complaints) for head, complaints in entries.items())


def _line(head: str, complaints: list[tuple[str, str]]) -> str:
    problems, advice = zip(*complaints, strict=True)
    first, *others = dict.fromkeys(problems)
    given, is_said, _ = first.partition(_BUT)  # once for all branches of a union
    said = [first, *(one.removeprefix(given + _BUT).removeprefix("input should be ") if is_said else one for one in others)]
    return f"{head}: {' or '.join(said)}; {advice[0]}"


def _path_in(settings: Any, loc: Sequence[int | str]) -> EntryPath:
    """The part of pydantic's location that exists in the settings; it also names the branches of unions, and what is missing."""
    path: list[int | str] = []
    for part in loc:
        in_mapping = isinstance(settings, Mapping) and part in settings
        in_list = isinstance(settings, list) and isinstance(part, int) and part < len(settings)
        if in_mapping or in_list:
            settings = settings[part]
            path.append(part)
    return tuple(path)


def _is_of_unfit_branch(details: ErrorDetails, errors: Sequence[ErrorDetails], settings: Mapping[str, Any]) -> bool:
    """Whether it finds the whole value wrong, where another branch of the same union takes its kind and finds what is wrong inside."""
    *union, branch = details["loc"] or ("",)
    path = _path_in(settings, union)
    if details["type"] == "missing" or _path_in(settings, (*union, branch)) != path:
        return False
    length = len(union)
    beside = [one["loc"] for one in errors if list(one["loc"][:length]) == union and one["loc"][length:][:1] != (branch,)]
    return any(_path_in(settings, loc[: length + 1]) == path != _path_in(settings, loc) for loc in beside)


def _complaint(details: ErrorDetails, cls: type[BaseModel], path: EntryPath, name: str, settings: Any) -> tuple[str, str]:
    """What is wrong, and what to do."""
    if details["type"] == "extra_forbidden":
        return "there is no such setting", suggest(str(path[-1]), _setting_names(cls, path))
    if details["type"] == "missing":
        return f"{details['loc'][-1]!r} is required", "add it"
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, Exception):
        said = str(cause).removeprefix(f"{name}: ")
        problem, _, advice = (said.removeprefix(f"{path[-1]}: ") if path else said).rpartition("; ")
        return (problem, advice) if problem else (advice, "correct it")
    if details["type"] in ("int_parsing_size", "int_from_float"):
        return f"{details['input']!r} was given, where a whole number belongs", "correct it"
    for part in path:
        settings = settings[part]
    given = repr(settings if isinstance(settings, str) else details["input"])  # before a validator has read it
    advice = "eval is not supported, write ${name} for an argument" if given.startswith("'eval(") else "correct it"
    message = details["msg"]
    return f"{given if len(given) <= 60 else given[:57] + '...'}{_BUT}{message[0].lower()}{message[1:]}", advice


def _setting_names(cls: type[BaseModel], path: EntryPath) -> list[str]:
    """Names that are valid beside the last part of a path: fields of the modifier, or of the models nested in it."""
    models = [cls]
    for part in path[:-1]:
        fields = [model.model_fields[str(part)] for model in models if str(part) in model.model_fields]
        models = [found for field in fields for found in _models_in(field.annotation)] or models
    return [name for model in models for name in model.model_fields if name not in _FILLED_IN]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for argument in get_args(annotation) for found in _models_in(argument)]
