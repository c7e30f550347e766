"""From what somebody wants verified to a fresh modifier, or to a reason why there is none."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, cast, get_args

from pydantic import BaseModel
from torch import nn

from compressor.errors import RecipeError, SchemeError, UserInputError
from compressor.lifecycle import Modifier
from compressor.lifecycle.interface import CalibrationNeed
from compressor.object_reference import resolve, subclass_names
from compressor.spelling import suggest
from harness.lifecycle.driving.time_limit import TimeLimitError

# What a modifier may declare, in a class attribute `contract_tags` or to `verify`; each takes a part of the contract out.
TAGS = MappingProxyType(
    {
        "annotates": "leaves attributes or buffers on modules on purpose",
        "changes_forward": "changes with its hooks what a forward computes, on purpose",
        "idempotent": "may be applied to its own result",
        "in_place": "changes weights where they are, so that a failed run cannot bring them back",
        "no_recipe": "cannot be written into a recipe",
        "random": "draws from the global random number generators on purpose",
        "session_hooks": "keeps hooks until finalize, not only for the time of a calibration",
    }
)


class UnusableError(Exception):
    """The subject cannot be made.

    Attributes:
        is_fault: it is wrong, not merely in need of arguments.
    """

    def __init__(self, message: str, is_fault: bool) -> None:
        """Say why."""
        super().__init__(message)
        self.is_fault = is_fault


def find_subject(path: str, settings: Mapping[str, Any]) -> object:
    """Return what `package.module:Name` or `file.py:Name` names, made with settings where they are given.

    Args:
        path: of a class, or of an object.
        settings: for the class.

    Returns:
        Whatever it is: that it is no modifier is for the report to say.

    Raises:
        UserInputError: there is nothing of this name, or the settings do not fit.
        UnusableError: its constructor raised something else.
    """
    found = resolve(path, "modifier", names=subclass_names(Modifier), files=True).value
    if not settings:
        return found
    if not isinstance(found, type) or not issubclass(found, Modifier):
        raise UserInputError(f"{path}: settings were given, and it is no modifier class; leave the settings out")
    try:
        return found(**settings)
    except ValueError as error:
        raise UserInputError(f"{path}: these settings do not fit ({error}); correct them") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UnusableError(f"{found.__qualname__}() raised {type(error).__name__}: {error}", is_fault=True) from error


def make_template(modifier: object) -> Modifier:
    """Return a fresh modifier from what somebody wants verified.

    Args:
        modifier: a modifier, or a class of modifiers that needs no arguments.

    Returns:
        The modifier.

    Raises:
        UnusableError: it is no modifier, or cannot be made.
    """
    if isinstance(modifier, Modifier):
        if any((modifier.initialized, modifier.started, modifier.ended, modifier.finalized)):
            raise UnusableError(f"{modifier.label} has been used already; give a fresh one", is_fault=True)
        return _with_known_need(_copied(modifier))
    if not isinstance(modifier, type):
        raise UnusableError(f"an object of type {type(modifier).__name__} was given, which is no modifier; give a Modifier", is_fault=True)
    if not issubclass(modifier, Modifier):
        advice = "give a module that is built" if issubclass(modifier, nn.Module) else "derive it from Modifier"
        raise UnusableError(f"{modifier.__qualname__} is no subclass of compressor.Modifier; {advice}", is_fault=True)
    if inspect.isabstract(modifier):
        missing = ", ".join(sorted(cast(Any, modifier).__abstractmethods__))
        raise UnusableError(f"{modifier.__qualname__} is abstract; define {missing}", is_fault=True)
    return _with_known_need(_make(modifier))


def _with_known_need(made: Modifier) -> Modifier:
    if made.calibration_need not in (known := get_args(CalibrationNeed)):
        what = f"{type(made).__qualname__}: its calibration is {made.calibration_need!r}, which does not exist"
        raise UnusableError(f"{what}; choose one of {', '.join(known)}", is_fault=True)
    return made


def _copied(modifier: Modifier) -> Modifier:
    """A copy: every run takes one, so an object that cannot be copied is of no use."""
    name = type(modifier).__qualname__
    try:
        twin = modifier.model_copy(deep=True)
    except (TimeLimitError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the modifier is its author's, and raises what it likes
        what = f"a {name} object cannot be copied ({type(error).__name__}: {error}), and every run needs a fresh one"
        raise UnusableError(f"{what}; give the class, or define __deepcopy__", is_fault=False) from error
    if type(twin) is not type(modifier):
        raise UnusableError(
            f"a copy of a {name} object is of type {type(twin).__name__}, and every run takes one; mend __deepcopy__", is_fault=True
        )
    plain = (bool, int, float, str, list, tuple, dict, set, BaseModel, Enum)
    settings = {key: value for key in type(modifier).model_fields if isinstance(value := getattr(modifier, key), plain)}
    if lost := [key for key, value in settings.items() if _is_other(value, getattr(twin, key, None))]:
        raise UnusableError(f"a copy of a {name} object has another {lost[0]}, and every run takes one; mend __deepcopy__", is_fault=True)
    return twin


def _is_other(value: object, copied: object) -> bool:
    """Whether a setting that was copied is another one; what knows no equality, as tensors, is not asked."""
    try:
        return bool(copied != value) and repr(copied) != repr(value)
    except (RuntimeError, ValueError, TypeError):
        return False


def _make(cls: type[Modifier]) -> Modifier:
    name = cls.__qualname__
    try:
        made = cls()
        made.check_settings()
        return made
    except (RecipeError, SchemeError) as error:
        advice = f"give an object, such as {name}(...), or settings"
        raise UnusableError(f"{name}() cannot be made without arguments: {error}; {advice}", is_fault=False) from error
    except TimeLimitError:
        raise
    except BaseException as error:
        if isinstance(error, TypeError) and "required" in str(error):
            raise UnusableError(f"{error}; give an object, such as {name}(...)", is_fault=False) from error
        raise UnusableError(f"{name}() raised {type(error).__name__}: {error}", is_fault=True) from error


def read_tags(modifier: Modifier, given: Iterable[str]) -> frozenset[str]:
    """Return the tags of a modifier: those of its class and those given.

    Args:
        modifier: its class may have an attribute `contract_tags`.
        given: further tags.

    Returns:
        All of them.

    Raises:
        UserInputError: a tag does not exist.
        UnusableError: the class attribute is no set of tags.
    """
    own: Any = getattr(type(modifier), "contract_tags", frozenset())
    given = frozenset(given)
    if not isinstance(own, set | frozenset | list | tuple) or not all(tag in TAGS for tag in own):
        advice = f"give a set of tags, of {', '.join(TAGS)}"
        raise UnusableError(f"{type(modifier).__qualname__}.contract_tags: {own!r} is no set of contract tags; {advice}", is_fault=True)
    unknown = sorted(given - TAGS.keys())
    if unknown:
        raise UserInputError(f"{type(modifier).__name__}: there is no contract tag {unknown[0]!r}; {suggest(unknown[0], TAGS)}")
    return frozenset(own) | given
