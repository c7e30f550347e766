"""What a verb of the harness takes by default, its Python function takes too; and a line of a class is all that an option needs."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import pytest

import harness
from compressor.errors import UserInputError
from compressor.settings.kinds import Flag, Texts, Whole
from compressor.settings.options import Option, Settings, add_options, settings_of
from harness.bisect.command import BisectSettings
from harness.bisect.locate import bisect
from harness.replay.equivalence.command import EquivalenceSettings
from harness.replay.equivalence.compare import compare_modes
from harness.validation.command import ValidateSettings

PAIRS: list[tuple[Callable[..., Any], type[Settings]]] = [
    (harness.validate, ValidateSettings),
    (bisect, BisectSettings),
    (compare_modes, EquivalenceSettings),
]


@pytest.mark.parametrize(("function", "settings"), PAIRS, ids=lambda one: one.__name__)
def test_a_function_has_the_defaults_of_its_verb(function: Callable[..., Any], settings: type[Settings]) -> None:
    given = inspect.signature(function).parameters
    shared = {name for name, field in settings.model_fields.items() if name in given and not field.is_required()} - {
        "steps",
        "modes",
    }  # eager is always the one that others are held against
    assert len(shared) >= 2
    assert {name: given[name].default for name in shared} == {name: settings.model_fields[name].default for name in shared}


class Own(Settings):
    """A verb's."""

    model: Annotated[str, Option(positional=True, metavar="MODEL")]
    """Which model."""
    names: Annotated[Texts, Option(positional=True, nargs="*", metavar="NAME")] = ()
    """Which names."""
    count: Annotated[Whole, Option(metavar="N", read=int)] = 3
    """How many."""
    loud: Annotated[Flag, Option()] = False
    """Say more."""


def test_places_options_and_defaults_come_from_one_class() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, Own)
    assert "How many (default: 3)" in parser.format_help() and "MODEL" in parser.format_usage()
    plain = settings_of(parser.parse_args(["m"]), Own)
    assert (plain.model, list(plain.names), plain.count, plain.loud) == ("m", [], 3, False)
    given = settings_of(parser.parse_args(["m", "a", "b", "--count", "5", "--loud"]), Own)
    assert (list(given.names), given.count, given.loud) == (["a", "b"], 5, True)
    with pytest.raises(UserInputError, match="count: 'x' was given, where a whole number belongs"):
        Own(model="m", count="x")
