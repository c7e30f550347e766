"""A check of recipes: what is written reads back as it was, whatever the settings, and what is misspelt is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from compressor.errors import CompressorError
from compressor.lifecycle import Modifier
from compressor.recipe import load_recipe
from harness.lifecycle.checks.registry import register
from harness.lifecycle.driving.compare import Violation
from harness.lifecycle.oracle import Settings
from harness.lifecycle.subject import NothingToCheckError, Subject

# Names that a text might take for something else: numbers, truth values, references, keys with a meaning.
GROUPS = ("quant", "1e5", "on", "null", "a: b", "${group}", "#", "x_modifiers", "gr\u00fcn", " ", "two\nlines")


@register(
    "recipe",
    "parse(dump(recipe)) == recipe, with two modifiers of one type in a stage too",
    number=53,
    tags=("no_recipe",),
    caught=("vllm-project/llm-compressor#2805",),
)
def recipe_round_trip(subject: Subject) -> str:
    """Write recipes with one and with two of the modifier, and read them again; then misspell a setting.

    Args:
        subject: what is verified.

    Returns:
        What was seen.

    Raises:
        NothingToCheckError: a recipe could not name its class.
        Violation: what is read is not what was written, or a misspelt setting is accepted.
    """
    cls = type(subject.template)
    if not subject.can_be_named:
        raise NothingToCheckError(f"{cls.__qualname__} is defined where a recipe cannot name it; move it into a module")
    _round_trip([subject.fresh()])
    timed = _timed(subject)
    _round_trip([subject.fresh(), timed or subject.fresh()])
    for group in GROUPS:
        _round_trip([_with(subject.fresh(), group=group), _with(subject.fresh(), group="other")])
    if timed is not None and _is_taken_for(subject.fresh(), timed):
        raise Violation("unchanged", f"two recipes of {cls.__name__} with other times count as equal")
    names = [_differs(subject.fresh(), other, name) for other, name in _variants(subject)]
    _refuses_unknown(cls, _data(subject.fresh()))
    return f"recipes of one and of two, {len(GROUPS)} names of groups, and {len(names)} other settings"


def _timed(subject: Subject) -> Modifier | None:
    """Other times; None where the class takes none, as one does that works in calibrations alone."""
    other = subject.fresh(Settings(7.0, 9.0))
    try:
        type(subject.template).model_validate(_data(other))
    except (ValidationError, CompressorError):
        return None
    return other


def _round_trip(modifiers: list[Modifier]) -> None:
    written = load_recipe(modifiers)
    text = written.dump()
    read = load_recipe(text)
    # Those with their parts in their places, and with their followers: a recipe holds what will run.
    due, came = [[type(one).__name__ for one in recipe.modifiers] for recipe in (written, read)]
    if due != came:
        raise Violation("unchanged", f"{due} were written, {came} were read")
    if read != written or [_data(one) for one in read.modifiers] != [_data(one) for one in written.modifiers]:
        raise Violation("unchanged", f"a recipe reads back differently: {_first_change(written.modifiers, read.modifiers)}")
    if read.dump() != text:
        raise Violation("unchanged", "a recipe that was read is dumped differently")


def _variants(subject: Subject) -> Iterator[tuple[Modifier, str]]:
    """Modifiers in which one plain setting is another one, as far as the class takes it."""
    data = _data(subject.fresh())
    for name, value in data.items():
        if isinstance(value, bool):
            others: tuple[object, ...] = (not value,)
        elif isinstance(value, int | float) and name not in ("index", "start", "end", "update"):
            others = (value + 1, value / 2)
        else:
            continue
        for other in others:
            try:
                yield type(subject.template).model_validate({**data, name: other}), name
            except (ValidationError, CompressorError):
                continue
            break


def _differs(own: Modifier, other: Modifier, name: str) -> str:
    """A modifier with another value of one setting is written, read back, and not taken for the first."""
    if _data(own) != _data(other):
        if _is_taken_for(own, other):
            raise Violation("unchanged", f"two recipes of {type(own).__name__} with another {name} count as equal")
        _round_trip([other])
    return name


def _is_taken_for(one: Modifier, other: Modifier) -> bool:
    """Two recipes count as equal; those of modifiers that stand in none may be, where their parts do without the setting."""
    mine, its = load_recipe([one]), load_recipe([other])
    return mine == its and any(modifier is one for modifier in mine.modifiers)


def _with(modifier: Modifier, group: str) -> Modifier:
    modifier.group = group
    return modifier


def _refuses_unknown(cls: type[Any], data: dict[str, Any]) -> None:
    try:
        cls.model_validate({**data, "no_such_setting": 1})
    except (ValidationError, CompressorError):
        return
    raise Violation("accepted", f"{cls.__name__} accepts a setting that it does not have; keep extra='forbid'")


def _data(modifier: Any) -> dict[str, Any]:
    """The settings themselves, not what the modifier says of them."""
    return {name: getattr(modifier, name) for name in type(modifier).model_fields}


def _first_change(written: tuple[Any, ...], read: tuple[Any, ...]) -> str:
    for before, after in zip(written, read, strict=True):
        old, new = _data(before), _data(after)
        for key in old:
            if old[key] != new.get(key):
                return f"{type(before).__name__}.{key}: {old[key]!r} -> {new.get(key)!r}"
    return "something that its dump does not show"
