"""The cells of the matrix: one check, or command, for one model, recipe and device, as far as it looks at them."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from pathlib import Path

from harness.nightly.config import NightlyConfig
from harness.reporting.verdict import Verdict

PROGRAMS = {"harness": "harness.cli", "compressor": "compressor.cli.main", "pytest": "pytest", "python": None}
"""First words of commands that stand for modules of the interpreter that runs us."""


class CellOutcome(StrEnum):
    """What became of a cell."""

    PASS = "pass"
    REGRESSION = "regression"
    INCONCLUSIVE = "inconclusive"
    ERROR = "error"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    KILLED = "killed"
    SKIPPED = "skipped"

    @property
    def verdict(self) -> Verdict:
        """What it means for the night: a cell that ended without a verdict does not pass."""
        return _VERDICTS.get(self, Verdict.REGRESSION)

    @property
    def is_final(self) -> bool:
        """Whether another attempt could tell nothing else: it came to a verdict."""
        return self in (CellOutcome.PASS, CellOutcome.REGRESSION, CellOutcome.INCONCLUSIVE)


_VERDICTS = {
    CellOutcome.PASS: Verdict.PASS,
    CellOutcome.INCONCLUSIVE: Verdict.INCONCLUSIVE,
    CellOutcome.SKIPPED: Verdict.INCONCLUSIVE,
}


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        check: name of the check or command.
        model: name of the model; None where the cell looks at none, likewise `recipe` and `device`.
        recipe: of the recipe.
        device: where it runs.
        command: of a command, with its places; empty for a check of ours.
    """

    check: str
    model: str | None = None
    recipe: str | None = None
    device: str | None = None
    command: str = ""

    @property
    def name(self) -> str:
        """Model, recipe, device and check, as far as there are, with slashes between."""
        return "/".join(part for part in (self.model, self.recipe, self.device, self.check) if part is not None)

    @property
    def needs(self) -> str | None:
        """Name of the cell that makes the checkpoint which this one looks at."""
        looks = "{compressed}" in self.command if self.command else self.check != "compress"
        return "/".join((self.model or "", self.recipe or "", self.device or "", "compress")) if looks else None

    def checkpoint(self, folder: Path) -> Path:
        """Return where its checkpoint lies: the one that it makes, or looks at.

        Args:
            folder: of the nights.

        Returns:
            The folder.
        """
        return folder / "checkpoints" / "-".join(filter(None, (self.model, self.recipe, self.device)))

    def arguments(self, values: Mapping[str, str]) -> list[str]:
        """Return the command with its places filled.

        Args:
            values: place to text.

        Returns:
            Program and arguments; `harness`, `compressor`, `pytest` and `python` are those of the running interpreter.
        """
        words = [re.sub(r"\{(\w+)\}", lambda place: values[place[1]], word) for word in shlex.split(self.command)]
        if words[0] in PROGRAMS:
            module = PROGRAMS[words[0]]
            words[:1] = [sys.executable, *(["-m", module] if module else [])]
        return words


def parts_of(words: Iterable[str]) -> set[str]:
    """Return what may be paths in a command.

    Args:
        words: of it.

    Returns:
        The words, and what stands behind an equals sign in them.
    """
    return {part for word in words for part in (word, word.partition("=")[2])} - {""}


def all_cells(config: NightlyConfig) -> list[Cell]:
    """Return the cells of a config, each behind the one whose checkpoint it needs."""
    cells = [Cell(check, *place) for place in product(config.models, config.recipes, config.devices) for check in _ordered(config.checks)]
    return cells + [cell for name, command in config.commands.items() for cell in _of_command(config, name, command)]


def _ordered(checks: tuple[str, ...]) -> list[str]:
    return sorted(set(checks), key=("compress", "validate", "speed").index)


def _of_command(config: NightlyConfig, name: str, command: str) -> Iterator[Cell]:
    whole = "{compressed}" in command
    models = list(config.models) if whole or "{model}" in command else [None]
    recipes = list(config.recipes) if whole or "{recipe}" in command else [None]
    devices = list(config.devices) if whole or "{device}" in command else [None]
    for model, recipe, device in product(models, recipes, devices):
        yield Cell(name, model, recipe, device, command)
