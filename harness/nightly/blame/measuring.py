"""What a commit measures: a cell of the matrix, or a command that writes into a history, run in the tree of that commit."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from compressor.errors import UserInputError
from compressor.spelling import suggest
from harness.nightly.blame.repository import Repository, files_of
from harness.nightly.cells import Cell, CellOutcome, all_cells, parts_of
from harness.nightly.config import Limits, NightlyConfig
from harness.nightly.history import History
from harness.nightly.measurement import Measurement
from harness.nightly.process import run_limited
from harness.nightly.runner import Runner, last_line
from harness.settings_file import check_command

_READINGS = "readings.sqlite"


@dataclass(frozen=True)
class Reading:
    """What one run gave.

    Attributes:
        measurement: of the metric; None where there is none, or where the cell's outcome is asked for.
        outcome: of the cell, or command.
        note: in a line.
    """

    measurement: Measurement | None
    outcome: CellOutcome
    note: str


class Measure(Protocol):
    """Something that can be run in the tree of a commit."""

    metric: str
    """Its name, or that of the cell."""
    is_outcome: bool
    """Whether the outcome is what is searched for, not a number."""

    def run(self, revision: str, tree: Path, name: str) -> Reading:
        """Run it, or read what an earlier run of that name left.

        Args:
            revision: the commit.
            tree: its working tree.
            name: of the run, for this commit.

        Returns:
            What it gave.
        """


def config_at(config: NightlyConfig, repository: Repository, tree: Path) -> NightlyConfig:
    """Return a matrix that runs the code, recipes, models and data of a commit; what the commit does not hold stays what it is.

    Args:
        config: the matrix.
        repository: of the commit.
        tree: its working tree.

    Returns:
        The matrix; its folder and history are those of before.

    Raises:
        UserInputError: the commit lacks what other commits hold.
    """

    def text(source: str) -> str:
        return str(repository.at(Path(source), tree)) if Path(source).is_absolute() else source

    data = config.data and config.data.model_copy(
        update={"calibration": text(config.data.calibration), "held_out": text(config.data.held_out)}
    )
    return config.model_copy(
        update={
            "models": {name: text(model) for name, model in config.models.items()},
            "recipes": {name: repository.at(recipe, tree) for name, recipe in config.recipes.items()},
            "data": data,
            "root": repository.at(config.root, tree),
        }
    )


class CellMeasure:
    """A cell of a nightly matrix, and the one before it that makes the checkpoint it looks at."""

    def __init__(self, config: NightlyConfig, metric: str, repository: Repository, folder: Path) -> None:
        """Find the cell.

        Args:
            config: the matrix, as it is now; what it names is taken from the commit where the commit has it.
            metric: name of a metric, or of a cell.
            repository: of the commits.
            folder: for logs, checkpoints and readings.

        Raises:
            UserInputError: no cell measures it.
        """
        cells = {cell.name: cell for cell in all_cells(config)}
        found = [cell for name, cell in cells.items() if metric == name or metric.startswith(f"{name}/")]
        if not found:
            raise UserInputError(f"{metric}: is no metric or cell of this matrix; {suggest(metric, list(cells))}")
        self._cell = max(found, key=lambda cell: len(cell.name))
        self._needed = cells.get(self._cell.needs or "")
        self.metric, self._repository, self._folder = metric, repository, folder
        # Checkpoints are timed where that is asked for, not where they are only needed.
        self._config = config if self._needed is None or self._cell.check == "speed" else config.model_copy(update={"repetitions": 1})
        self.is_outcome = metric == self._cell.name

    def checkpoint(self, revision: str) -> Path:
        """Return where the checkpoint of a commit lies, if the cell looks at one."""
        return self._cell.checkpoint(self._folder / revision[:12])

    @property
    def judged_on(self) -> tuple[str, str] | None:
        """Held-out data and device, where the metric is how good a checkpoint is."""
        data = self._config.data if self._cell.check == "validate" else None
        return (data.held_out, self._cell.device or "auto") if data is not None else None

    def run(self, revision: str, tree: Path, name: str) -> Reading:
        """Run the cell (`Measure.run`)."""
        try:
            config = self._at(revision, tree, name)
        except UserInputError as error:
            return Reading(None, CellOutcome.SKIPPED, str(error))
        needed = [self._needed] if self._needed is not None and not self.checkpoint(revision).exists() else []
        variables, lacks = variables_of(self._repository, tree), partial(lacking, self._repository, self._config.root, config.root)
        night = Runner(config, name, cells=[*needed, self._cell], revision=revision, variables=variables, lacks=lacks).run()
        row = night.rows[-1]
        return Reading(_found(config.history, self.metric)[0], CellOutcome(row.outcome), row.summary)

    def _at(self, revision: str, tree: Path, name: str) -> NightlyConfig:
        folder = self._folder / revision[:12]
        placed = config_at(self._config, self._repository, tree)
        return placed.model_copy(update={"folder": folder, "history": folder / name / _READINGS})


class CommandMeasure:
    """A command that writes the metric into the history that `{history}` stands for."""

    is_outcome = False

    def __init__(self, command: str, metric: str, repository: Repository, folder: Path) -> None:
        """Look at the command.

        Args:
            command: words for one program.
            metric: that it writes.
            repository: of the commits; the command runs in the folder that stands for this one.
            folder: for logs and readings.

        Raises:
            UserInputError: it has no place for the history, or needs a shell.
        """
        _words(command)
        self._cell, self.metric, self._repository, self._folder = Cell("command", command=command), metric, repository, folder

    def run(self, revision: str, tree: Path, name: str) -> Reading:
        """Run the command (`Measure.run`)."""
        folder = self._folder / revision[:12] / name
        history, log = folder / _READINGS, folder / "command.log"
        measured, _ = _found(history, self.metric)
        if measured is not None:
            return Reading(measured, CellOutcome.PASS, "measured before")
        folder.mkdir(parents=True, exist_ok=True)
        words, cwd = self._cell.arguments({"history": str(history)}), self._repository.folder_at(Path.cwd(), tree)
        ended = run_limited(
            words,
            log,
            seconds=Limits().minutes * 60,
            memory=None,
            cwd=cwd,
            environment=variables_of(self._repository, tree),
        )
        measured, missing = _found(history, self.metric)  # a test that fails has measured, too
        outcome = CellOutcome.ERROR if measured is None else CellOutcome.PASS
        lack = lacking(self._repository, Path.cwd(), cwd, words) if measured is None else ""
        return Reading(measured, outcome, f"{lack}{missing}exit code {ended.code}; {last_line(log)}")


def _found(history: Path, metric: str) -> tuple[Measurement | None, str]:
    """The measurement of a run; where there is none, or more than one, why, in words."""
    series = History(history).series(metric)
    if len(series) == 1:
        return series[0], ""
    return None, f"{metric} was written for {len(series)} nights, environments or revisions; " if series else f"{metric} was not written; "


def _words(command: str) -> list[str]:
    try:
        check_command("command", command, ("history",))
    except ValueError as error:
        raise UserInputError(f"command: {error}") from error
    if "{history}" not in command:
        raise UserInputError(f"command: {command!r} has no {{history}} to write into; add --history {{history}}")
    return shlex.split(command)


def outside_of_commits(measured_by: NightlyConfig | str, repository: Repository) -> list[tuple[str, int, str]]:
    """Look at the files that a matrix or a command names and no commit holds: readings from before one changed are of another measure.

    Args:
        measured_by: the matrix, or the command.
        repository: of the commits.

    Returns:
        As `files_of`.

    Raises:
        UserInputError: a command that cannot be one; see `CommandMeasure`.
    """
    if isinstance(measured_by, str):
        folder, words = Path.cwd(), _words(measured_by)
    else:
        data, commands = measured_by.data, measured_by.commands.values()
        named = [
            *measured_by.models.values(),
            *map(str, measured_by.recipes.values()),
            *((data.calibration, data.held_out) if data else ()),
        ]
        folder, words = measured_by.root, [*named, *(word for command in commands for word in shlex.split(command))]
    paths = {folder / part for part in parts_of(words)}
    return files_of(path for path in paths if os.access(path, os.R_OK) and not repository.holds(path))


def lacking(repository: Repository, folder: Path, cwd: Path, words: Sequence[str]) -> str:
    """Say what a command that has failed in the tree of a commit names and does not find there, since no commit holds it.

    Args:
        repository: of the commit.
        folder: where the command runs in the user's tree.
        cwd: where it ran.
        words: the command.

    Returns:
        Words with a semicolon behind them; empty where it lacks nothing.
    """
    named = [part for part in sorted(parts_of(words)) if not Path(part).is_absolute() and not os.access(cwd / part, os.F_OK)]
    lacks = [part for part in named if os.access(folder / part, os.R_OK) and not repository.holds(folder / part)]
    return (
        f"the command names {lacks[0]}, which is here and in no commit, and so not where it ran: give its absolute path; " if lacks else ""
    )


def variables_of(repository: Repository, tree: Path) -> Mapping[str, str]:
    """Return the environment of a process that must import the code of a commit, not what is installed from the user's tree.

    Args:
        repository: of the commit.
        tree: its working tree.

    Returns:
        Variables.
    """
    here = [Path(entry).resolve() for entry in sys.path if entry]
    inside = [tree / entry.relative_to(repository.top) for entry in here if entry.is_relative_to(repository.top)]
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    outside = [entry for entry in given if not Path(entry).resolve().is_relative_to(repository.top)]
    paths = [str(tree), *(str(entry) for entry in inside if entry.is_dir()), *outside]
    # The good commit runs more often in its tree: with compiled files it would start faster than the one beside it.
    return os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONDONTWRITEBYTECODE": "1"}
